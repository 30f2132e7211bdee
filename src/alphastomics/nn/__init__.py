"""The networks. They know no diffusion: timesteps are numbers in [0, 1], outputs are what the loss makes of them."""

from alphastomics.nn.attention import Attention, LinearAttention, SoftmaxAttention, make_attention
from alphastomics.nn.denoiser import Denoiser, DenoiserConfig, Prediction
from alphastomics.nn.experts import (
    Experts,
    ParameterCount,
    Routing,
    Routings,
    balance_losses,
    count_parameters,
    expert_counts,
    expert_usage,
)
from alphastomics.nn.minimum_distance import MinDistanceNetwork, nearest_neighbors
from alphastomics.nn.width import matched_width

__all__ = [
    "Attention",
    "Denoiser",
    "DenoiserConfig",
    "Experts",
    "LinearAttention",
    "MinDistanceNetwork",
    "ParameterCount",
    "Prediction",
    "Routing",
    "Routings",
    "SoftmaxAttention",
    "balance_losses",
    "count_parameters",
    "expert_counts",
    "expert_usage",
    "make_attention",
    "matched_width",
    "nearest_neighbors",
]
