"""Diffusion process, samplers, masking, rigid geometry and losses; independent of networks and data."""

from alphastomics.config import MaskingConfig, MaskStrategy, Mode, SamplerName
from alphastomics.diffusion.process import MODES, DiffusionConfig, Process
from alphastomics.diffusion.samplers import Start, make_step, run_sampler, time_grid
from alphastomics.diffusion.schedule import MIN_TIME, CosineSchedule, smallest_time

__all__ = [
    "MODES",
    "MIN_TIME",
    "CosineSchedule",
    "DiffusionConfig",
    "MaskStrategy",
    "MaskingConfig",
    "Mode",
    "Process",
    "SamplerName",
    "Start",
    "make_step",
    "run_sampler",
    "smallest_time",
    "time_grid",
]
