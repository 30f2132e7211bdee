"""The networks. They know no diffusion: clocks are numbers in [0, 1], outputs are what the loss makes of them."""

from alphastomics.nn.attention import SoftmaxAttention
from alphastomics.nn.denoiser import Denoiser, DenoiserConfig, Prediction

__all__ = ["Denoiser", "DenoiserConfig", "Prediction", "SoftmaxAttention"]
