"""Settings: each one is declared here, once.

The command line, configuration files, the arguments of :class:`~alphastomics.model.AlphaSTomics` and the tables of the
documentation are derived from these dataclasses. Nothing here imports PyTorch.

Examples
--------
>>> config = Config.read("config.yaml")
>>> config.training.learning_rate
0.0001
>>> Config(model=ModelSection(d_model=256), training=TrainingSection(mode="joint")).write("mine.yaml")
"""

from alphastomics.config._augmentation import Augmentation
from alphastomics.config._data import Frame as Frame
from alphastomics.config._data import RunConfig, SetupConfig, SourceConfig
from alphastomics.config._data import Transform as Transform
from alphastomics.config._masking import MaskingConfig
from alphastomics.config._masking import MaskStrategy as MaskStrategy
from alphastomics.config._model import (
    AttentionKind as AttentionKind,
)
from alphastomics.config._model import (
    DiffusionSettings,
    ModelConfig,
    NetworkConfig,
)
from alphastomics.config._model import (
    ExpertWidth as ExpertWidth,
)
from alphastomics.config._model import (
    GateType as GateType,
)
from alphastomics.config._model import (
    Mode as Mode,
)
from alphastomics.config._model import (
    PairAttention as PairAttention,
)
from alphastomics.config._model import (
    PairFeatureKind as PairFeatureKind,
)
from alphastomics.config._model import (
    PairKind as PairKind,
)
from alphastomics.config._model import (
    PairResidual as PairResidual,
)
from alphastomics.config._model import (
    PredictionType as PredictionType,
)
from alphastomics.config._model import (
    ResidualKind as ResidualKind,
)
from alphastomics.config._model import (
    ScheduleName as ScheduleName,
)
from alphastomics.config._model import (
    Sharing as Sharing,
)
from alphastomics.config._plan import DistanceKind as DistanceKind
from alphastomics.config._plan import LearningRateSchedule as LearningRateSchedule
from alphastomics.config._plan import PlanConfig
from alphastomics.config._sections import (
    AugmentationSection,
    DataSection,
    DiffusionSection,
    LoadingSection,
    LossSection,
    MaskingSection,
    ModelSection,
    PreprocessingSection,
    RunSection,
    SeedSection,
    TrainingSection,
)
from alphastomics.config._training import ContextKind as ContextKind
from alphastomics.config._training import GrowthKind as GrowthKind
from alphastomics.config._training import Recompute as Recompute
from alphastomics.config._training import Strategy as Strategy
from alphastomics.config._training import TrainerConfig, TrainingConfig
from alphastomics.config._yaml import Config

__all__ = [
    "Augmentation",
    "AugmentationSection",
    "Config",
    "DataSection",
    "DiffusionSection",
    "DiffusionSettings",
    "LoadingSection",
    "LossSection",
    "MaskingConfig",
    "MaskingSection",
    "ModelConfig",
    "ModelSection",
    "NetworkConfig",
    "PlanConfig",
    "PreprocessingSection",
    "RunConfig",
    "RunSection",
    "SeedSection",
    "SetupConfig",
    "SourceConfig",
    "TrainerConfig",
    "TrainingConfig",
    "TrainingSection",
]
