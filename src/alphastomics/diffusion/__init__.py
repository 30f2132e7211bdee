"""The mathematics of the diffusion: schedule, process, samplers, geometry, losses. It knows no network and no data."""

from alphastomics.diffusion.process import Process
from alphastomics.diffusion.samplers import SamplerName, make_step, run_chain, run_joint_chain, time_grid
from alphastomics.diffusion.schedule import CosineSchedule

__all__ = ["CosineSchedule", "Process", "SamplerName", "make_step", "run_chain", "run_joint_chain", "time_grid"]
