"""Training: the plan (one step), the clocks it draws, the loaders, the average of the weights, and the runner."""

from alphastomics.train.clocks import MODES, Mode
from alphastomics.train.config import DiffusionConfig, PlanConfig
from alphastomics.train.datamodule import ContextDataModule
from alphastomics.train.defaults import advised_attention, advised_experts
from alphastomics.train.ema import MovingAverage
from alphastomics.train.history import History
from alphastomics.train.length_schedule import LengthSchedule
from alphastomics.train.memory import MemoryEstimate
from alphastomics.train.optimisation import NonFiniteLossError
from alphastomics.train.out_of_memory import NotEnoughMemoryError
from alphastomics.train.plan import TrainingPlan
from alphastomics.train.recorder import TrainingRecorder
from alphastomics.train.runner import ContextRunner, ContextTrainer, seconds_of
from alphastomics.train.strategies import STRATEGIES, resolve_strategy
from alphastomics.train.watch import DeadProcessError

__all__ = [
    "MODES",
    "STRATEGIES",
    "ContextDataModule",
    "ContextRunner",
    "ContextTrainer",
    "DeadProcessError",
    "DiffusionConfig",
    "History",
    "LengthSchedule",
    "MemoryEstimate",
    "Mode",
    "MovingAverage",
    "NonFiniteLossError",
    "NotEnoughMemoryError",
    "PlanConfig",
    "TrainingPlan",
    "TrainingRecorder",
    "advised_attention",
    "advised_experts",
    "resolve_strategy",
    "seconds_of",
]
