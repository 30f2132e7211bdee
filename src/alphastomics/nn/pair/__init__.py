"""Features of pairs of cells as low-rank factors, and the networks on them. Nothing is N x N unless it says so."""

from alphastomics.nn.pair.axial import AxialAttention, AxialKind
from alphastomics.nn.pair.cross import FactorCrossAttention
from alphastomics.nn.pair.dense import DensePairs
from alphastomics.nn.pair.dense_template import DenseTemplate, factorise
from alphastomics.nn.pair.dropout import PairDropout
from alphastomics.nn.pair.embedding import PairEmbedding
from alphastomics.nn.pair.factors import PairFactors, adaptive_rank
from alphastomics.nn.pair.features import PairFeatures
from alphastomics.nn.pair.quadrature import wave_directions
from alphastomics.nn.pair.relative_position import RelativePosition
from alphastomics.nn.pair.residual import Distribute, RankMix, ResidualKind, TangentStep, make_residual
from alphastomics.nn.pair.stack import PairAttention, PairLayer, PairStack, PairTransition
from alphastomics.nn.pair.template import Template
from alphastomics.nn.pair.triangle_attention import TriangleAttention
from alphastomics.nn.pair.triangle_multiplication import TriangleMultiplication

__all__ = [
    "AxialAttention",
    "AxialKind",
    "DensePairs",
    "DenseTemplate",
    "Distribute",
    "FactorCrossAttention",
    "PairAttention",
    "PairDropout",
    "PairEmbedding",
    "PairFactors",
    "PairFeatures",
    "PairLayer",
    "PairStack",
    "PairTransition",
    "RankMix",
    "RelativePosition",
    "ResidualKind",
    "TangentStep",
    "Template",
    "TriangleAttention",
    "TriangleMultiplication",
    "adaptive_rank",
    "factorise",
    "make_residual",
    "wave_directions",
]
