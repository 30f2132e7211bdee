"""Training: objective, training plan, data loaders, moving average of the weights, trainer and runner."""

from alphastomics.config import PlanConfig
from alphastomics.diffusion import MODES, Mode, Process
from alphastomics.train.callbacks import History
from alphastomics.train.curriculum import LengthSchedule
from alphastomics.train.datamodule import ContextDataModule
from alphastomics.train.defaults import advised_attention, advised_experts
from alphastomics.train.distributed.launch import DeadProcessError
from alphastomics.train.distributed.strategies import STRATEGIES, resolve_strategy
from alphastomics.train.ema import MovingAverage
from alphastomics.train.memory.errors import NotEnoughMemoryError
from alphastomics.train.memory.estimate import MemoryEstimate
from alphastomics.train.optimization import NonFiniteLossError
from alphastomics.train.plan import TrainingPlan
from alphastomics.train.recorder import TrainingRecorder
from alphastomics.train.runner import ContextRunner, ContextTrainer, seconds_of

__all__ = [
    "MODES",
    "STRATEGIES",
    "ContextDataModule",
    "ContextRunner",
    "ContextTrainer",
    "DeadProcessError",
    "Process",
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
