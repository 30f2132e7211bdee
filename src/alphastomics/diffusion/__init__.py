"""The mathematics of the diffusion: process, samplers, masking, geometry, losses. It knows no network and no data."""

from alphastomics.diffusion.masking import MaskingConfig, MaskStrategy
from alphastomics.diffusion.process import Process
from alphastomics.diffusion.samplers import SamplerName, make_step, run_joint_sampler, run_sampler, time_grid
from alphastomics.diffusion.schedule import CosineSchedule

__all__ = [
    "CosineSchedule",
    "MaskStrategy",
    "MaskingConfig",
    "Process",
    "SamplerName",
    "make_step",
    "run_sampler",
    "run_joint_sampler",
    "time_grid",
]
