"""The networks. They know no diffusion: clocks are numbers in [0, 1], outputs are what the loss makes of them."""

from alphastomics.nn.attention import SoftmaxAttention
from alphastomics.nn.denoiser import Denoiser, DenoiserConfig, Prediction
from alphastomics.nn.packing import PackingNetwork, nearest_neighbours

__all__ = ["Denoiser", "DenoiserConfig", "PackingNetwork", "Prediction", "SoftmaxAttention", "nearest_neighbours"]
