"""Features of pairs of cells as low-rank factors, and networks on these factors."""

from alphastomics.config import PairAttention, PairResidual
from alphastomics.nn.pair.axial import AxialAttention, FactorCrossAttention
from alphastomics.nn.pair.factors import PairFactors, adaptive_rank
from alphastomics.nn.pair.features import PairEmbedding, PairFeatures
from alphastomics.nn.pair.relative import RelativePosition, Template
from alphastomics.nn.pair.stack import PairLayer, PairStack, PairTransition
from alphastomics.nn.pair.triangle import TriangleAttention, TriangleMultiplication
from alphastomics.nn.pair.updates import Distribute, PairDropout, RankMix, TangentStep, make_residual

__all__ = [
    "AxialAttention",
    "Distribute",
    "FactorCrossAttention",
    "PairAttention",
    "PairDropout",
    "PairEmbedding",
    "PairFactors",
    "PairFeatures",
    "PairLayer",
    "PairResidual",
    "PairStack",
    "PairTransition",
    "RankMix",
    "RelativePosition",
    "TangentStep",
    "Template",
    "TriangleAttention",
    "TriangleMultiplication",
    "adaptive_rank",
    "make_residual",
]
