"""Networks. They do not depend on the diffusion process: timesteps are numbers in [0, 1]."""

from alphastomics.nn.attention import Attention, LinearAttention, SoftmaxAttention, make_attention
from alphastomics.nn.denoiser import Denoiser, DenoiserConfig, Prediction
from alphastomics.nn.diagnostics import ParameterCount, count_parameters, matched_width
from alphastomics.nn.experts import (
    Experts,
    Routing,
    Routings,
    balance_losses,
    expert_counts,
    expert_usage,
)
from alphastomics.nn.neighbors import nearest_neighbors

__all__ = [
    "Attention",
    "Denoiser",
    "DenoiserConfig",
    "Experts",
    "LinearAttention",
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
