"""Diffusion process, samplers, masking, rigid geometry and losses; independent of networks and data."""

from alphastomics.config import MaskingConfig, MaskStrategy, Mode, SamplerName
from alphastomics.diffusion.process import MODES, Process
from alphastomics.diffusion.samplers import Start, make_step, run_sampler, time_grid
from alphastomics.diffusion.schedule import MIN_TIME, CosineSchedule

__all__ = [
    "MODES",
    "MIN_TIME",
    "CosineSchedule",
    "MaskStrategy",
    "MaskingConfig",
    "Mode",
    "Process",
    "SamplerName",
    "Start",
    "make_step",
    "run_sampler",
    "time_grid",
]
