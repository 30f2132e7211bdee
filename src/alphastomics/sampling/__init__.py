"""Sampling of positions, expression and whole tissues from a trained network."""

from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._position import PositionSampler
from alphastomics.sampling._sampler import FittedStatistics, Sampler

__all__ = ["ExpressionSampler", "FittedStatistics", "PositionSampler", "Sampler"]
