"""Settings: each one is declared here, once.

The command line, configuration files, the arguments of :class:`~alphastomics.model.AlphaSTomics` and the tables of the
documentation are derived from these dataclasses. Nothing here imports PyTorch.

Examples
--------
>>> from alphastomics.config import Config, ModelSection, TrainingSection
>>> Config(model=ModelSection(d_model=256), training=TrainingSection(mode="joint")).write("config.yaml")
>>> Config.read("config.yaml").model.d_model
256
"""

from alphastomics.config._data import Frame as Frame, RunConfig, SetupConfig, SourceConfig, Transform as Transform
from alphastomics.config._model import (
    PLACING_MODES as PLACING_MODES,
    AttentionKind as AttentionKind,
    DiffusionSettings,
    ExpertWidth as ExpertWidth,
    GateType as GateType,
    Mode as Mode,
    ModelConfig,
    NetworkConfig,
    PairAttention as PairAttention,
    PairFeatureKind as PairFeatureKind,
    PairKind as PairKind,
    PairResidual as PairResidual,
    PredictionType as PredictionType,
    ResidualKind as ResidualKind,
    ScheduleName as ScheduleName,
    Sharing as Sharing,
)
from alphastomics.config._plan import (
    DistanceKind as DistanceKind,
    LearningRateSchedule as LearningRateSchedule,
    PlanConfig,
)
from alphastomics.config._preprocessing import (
    ClusterConfig as ClusterConfig,
    Stage1Options as Stage1Options,
    Stage2Options as Stage2Options,
    UploadConfig as UploadConfig,
)
from alphastomics.config._sampling import (
    DrawConfig,
    EmbeddingConfig,
    EmbeddingLayer as EmbeddingLayer,
    PlacementConfig,
    Reduction as Reduction,
    SampledMode as SampledMode,
    SamplerName as SamplerName,
    SamplingConfig,
)
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
from alphastomics.config._training import (
    CUDA_BATCH_SIZE as CUDA_BATCH_SIZE,
    DEFAULT_BATCH_SIZE as DEFAULT_BATCH_SIZE,
    DEFAULT_CONTEXT_SIZE as DEFAULT_CONTEXT_SIZE,
    DEFAULT_STEPS as DEFAULT_STEPS,
    DEFAULT_VALIDATION_SIZE as DEFAULT_VALIDATION_SIZE,
    Augmentation,
    ContextKind as ContextKind,
    GrowthKind as GrowthKind,
    MaskingConfig,
    MaskStrategy as MaskStrategy,
    Recompute as Recompute,
    Strategy as Strategy,
    TrainerConfig,
    TrainingConfig,
)
from alphastomics.config._yaml import Config

__all__ = [
    "Augmentation",
    "AugmentationSection",
    "Config",
    "DataSection",
    "DiffusionSection",
    "DiffusionSettings",
    "DrawConfig",
    "EmbeddingConfig",
    "LoadingSection",
    "LossSection",
    "MaskingConfig",
    "MaskingSection",
    "ModelConfig",
    "ModelSection",
    "NetworkConfig",
    "PlacementConfig",
    "PlanConfig",
    "PreprocessingSection",
    "RunConfig",
    "RunSection",
    "SamplingConfig",
    "SeedSection",
    "SetupConfig",
    "SourceConfig",
    "TrainerConfig",
    "TrainingConfig",
    "TrainingSection",
]
