"""Command-line options, derived from the declared settings.

cyclopts turns every field of these dataclasses into a flag. Type, default, range, names and help come from
:mod:`alphastomics.config`; this module only adds what is specific to the command line. Importing it imports no PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform, get_origin, get_type_hints

from cyclopts import Group, Parameter

from alphastomics.config import (
    AttentionKind,
    Augmentation,
    ClusterConfig,
    DiffusionSettings,
    EmbeddingConfig,
    MaskingConfig,
    Mode,
    ModelConfig,
    NetworkConfig,
    PlacementConfig,
    PlanConfig,
    RunConfig,
    SamplingConfig,
    SetupConfig,
    SourceConfig,
    Stage1Options,
    Stage2Options,
    TrainerConfig,
    TrainingConfig,
    UploadConfig,
)
from alphastomics.config._comparison import ComparisonConfig
from alphastomics.config._sections import DECLARATIONS, SETTINGS
from alphastomics.config._setting import descriptions, settings_of, unmet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.config._setting import Setting

# Panels of the help, in this order below the options of the command itself, among which None is.
NAMES = ("Run", "Comparison", "Data", "Model", "Training", "Losses and optimizer", "Global")
RUN, COMPARISON, DATA, MODEL, TRAINING, LOSSES, GLOBAL = (
    Group(name, sort_key=k) for k, name in enumerate(NAMES, start=1)
)
PANELS: dict[type, Group | None] = {
    RunConfig: RUN,
    ComparisonConfig: COMPARISON,
    SourceConfig: DATA,
    SetupConfig: DATA,
    Stage1Options: DATA,
    Stage2Options: DATA,
    ClusterConfig: DATA,
    UploadConfig: DATA,
    ModelConfig: MODEL,
    NetworkConfig: MODEL,
    DiffusionSettings: MODEL,
    TrainerConfig: TRAINING,
    TrainingConfig: TRAINING,
    Augmentation: TRAINING,
    MaskingConfig: TRAINING,
    PlanConfig: LOSSES,
    SamplingConfig: None,
    PlacementConfig: None,
    EmbeddingConfig: None,
}
DECLARED_BY = {name: cls for cls in DECLARATIONS for name in settings_of(cls)}
SEVERAL = Parameter(consume_multiple=True, negative=())

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """Make a subclass of declarations a group of options: a dataclass whose settings are flags with panels and checks.

    A field with the name of a setting of another declaration is an option as well. A setting that follows from the data is
    None unless it is given.
    """
    hints = get_type_hints(cls, include_extras=True)
    texts = descriptions(cls)  # type: ignore[arg-type]
    own = {name: hint for name, hint in hints.items() if name in cls.__dict__.get("__annotations__", {})}
    declared = {name: (SETTINGS[name], PANELS[DECLARED_BY[name]]) for name in own if name in SETTINGS}
    for declaration in reversed([base for base in cls.__mro__ if base in PANELS]):
        declared |= {name: (entry, PANELS[declaration]) for name, entry in settings_of(declaration).items()}
    entries = {name: entry for name, (entry, _) in declared.items()}
    annotations: dict[str, Any] = {}
    for name, (entry, panel) in declared.items():
        default = None if entry.details.from_data else getattr(cls, name)
        hint = hints[name] | None if default is None else hints[name]
        annotations[name] = Annotated[hint, _parameter(entry, panel, texts.get(name, entry.text))]
        setattr(cls, name, field(default=default))
    cls.__annotations__ = own | annotations
    if "__post_init__" not in cls.__dict__:
        cls.__post_init__ = lambda self: check_options(vars(self), entries)  # type: ignore[attr-defined]
    return Parameter(name="*")(dataclass(frozen=True, kw_only=True)(cls))


def _parameter(entry: Setting, panel: Group | None, text: str) -> Parameter:
    """How cyclopts reads a setting."""

    def check(kind: Any, value: Any) -> None:
        problem = entry.problem(value)
        if problem is not None:
            raise ValueError(f"It {problem}.")

    details = entry.details
    names: dict[str, Any] = {
        "alias": details.flags or None,
        "name": details.flag,
        "negative": details.off,
        "group": panel,
    }
    names = {name: value for name, value in names.items() if value is not None}
    if any(get_origin(kind) is tuple for kind in (entry.hint, *entry.kinds)):
        names |= {"consume_multiple": True, "negative": ()}
    return Parameter(help=text, validator=check, parse=None if not details.python_only else False, **names)


def check_options(values: Mapping[str, Any], settings: Mapping[str, Setting] = SETTINGS) -> None:
    """Check that no option is given that has no effect.

    Raises
    ------
    ValueError
        If an option lacks the one that it requires.
    """
    declared = {name: settings[name] for name in values if name in settings}
    for entry in unmet(declared, values):
        switch, *needed = entry.details.requires or ()
        switch = declared[switch].flag
        required = switch if needed == [True] else f"{switch} {' or '.join(map(str, needed))}"
        raise ValueError(f"{entry.flag} requires {required}; add that, or remove {entry.flag}")


@options
class SetupOptions(SetupConfig):
    """Arguments of ``AlphaSTomics.setup_anndata``."""


@options
class FitOptions(
    PlanConfig,
    MaskingConfig,
    Augmentation,
    TrainingConfig,
    TrainerConfig,
    DiffusionSettings,
    NetworkConfig,
    ModelConfig,
):
    """Settings of a model and its training."""

    attention: AttentionKind | None = None  # type: ignore[assignment]  # None: as use_gated_attention

    def __post_init__(self) -> None:
        if self.attention is not None and self.use_gated_attention is (self.attention == "linear"):
            no = "" if self.use_gated_attention else "no-"
            raise ValueError(f"--attention {self.attention} contradicts --{no}use-gated-attention; pass one of them")
        if self.gpus is not None and (self.accelerator, self.devices) != ("auto", "auto"):
            raise ValueError("--gpus sets --accelerator and --devices; pass --gpus, or those two")
        if self.fp16 and self.precision != "auto":
            raise ValueError("--fp16 sets --precision; pass one of them")
        check_options(vars(self))

    @property
    def kind_of_attention(self) -> AttentionKind:
        """The attention that ``--attention`` or ``--use-gated-attention`` sets."""
        return self.attention or ("linear" if self.use_gated_attention is False else "full")

    @property
    def devices_and_precision(self) -> dict[str, Any]:
        """Accelerator, devices and precision, from their own flags or from ``--gpus`` and ``--fp16``."""
        where = {"accelerator": self.accelerator, "devices": self.devices}
        if self.gpus is not None:
            where = {"accelerator": "gpu", "devices": self.gpus}
        return where | {"precision": "16-mixed" if self.fp16 else self.precision}

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``AlphaSTomics`` that differ from their defaults."""
        changed = self._changed(ModelConfig, NetworkConfig, DiffusionSettings)
        changed.pop("use_gated_attention", None)
        return changed | {"attention": self.kind_of_attention}

    def training_arguments(self, augmentation: Augmentation) -> dict[str, Any]:
        """Arguments of ``AlphaSTomics.train`` that differ from their defaults, for data that suggest that augmentation."""
        changed = self._changed(TrainerConfig, TrainingConfig)
        if changed.pop("gpus", None) or changed.pop("fp16", None):
            changed = {name: value for name, value in changed.items() if name != "fp16"} | self.devices_and_precision
        return {
            **changed,
            "augmentation": replace(augmentation, **self._changed(Augmentation)),
            "masking": MaskingConfig(**self._changed(MaskingConfig)) if self.enable_masking else None,
            "plan_kwargs": self._changed(PlanConfig),
        }

    def _changed(self, *declarations: Any) -> dict[str, Any]:
        """Values that are set and differ from the defaults, or from what the data suggest."""
        entries = [(cls, *each) for cls in declarations for each in settings_of(cls).items()]
        return {
            name: value
            for cls, name, entry in entries
            if (value := getattr(self, name)) is not None and (entry.details.from_data or value != getattr(cls, name))
        }


@options
class DemoOptions(FitOptions):
    """Options of a training of a few minutes: a model that only places cells, with small contexts."""

    mode: Mode = "expr_to_pos"
    max_time: float | str | None = 120.0
    batch_size: int | None = 256
    context_size: int | Literal["auto"] | None = 256


@options
class ComparisonOptions(ComparisonConfig):
    """What is compared, and settings that all configurations share."""

    d_model: int = NetworkConfig.d_model
    n_layers: int = NetworkConfig.n_layers
    n_heads: int = NetworkConfig.n_heads
    batch_size: int | None = TrainingConfig.batch_size
    context_size: int | Literal["auto"] | None = TrainingConfig.context_size
    accelerator: str = TrainerConfig.accelerator
    precision: str = TrainerConfig.precision


@options
class ReconstructOptions(PlacementConfig):
    """Training and placement.

    Parameters
    ----------
    n_samples
        Number of samples from which the uncertainty of the placement is estimated; 1 gives no uncertainty.
    adapt
        Adapt the network to the query. By default, a network that is trained is adapted to a query that differs from the reference,
        unless ``max_time`` is shorter than 3 minutes.
    mode
        What the trained model samples. By default ``expr_to_pos`` if ``max_time`` is shorter than 15 minutes, otherwise ``any``.
    """

    n_samples: int = SamplingConfig.n_samples
    adapt: bool | None = None
    mode: Mode | None = None
    use_cell_types: bool = ModelConfig.use_cell_types
    d_model: int = NetworkConfig.d_model
    n_layers: int = NetworkConfig.n_layers
    n_heads: int = NetworkConfig.n_heads
    max_time: float | str | None = TrainerConfig.max_time
    max_epochs: int | None = TrainerConfig.max_epochs
    batch_size: int | None = TrainingConfig.batch_size
    context_size: int | Literal["auto"] | None = TrainingConfig.context_size
    accelerator: str = TrainerConfig.accelerator
    precision: str = TrainerConfig.precision

    def __post_init__(self) -> None:
        """Check nothing here: ``mode`` is that of the training, and not the one that options of sampling require."""

    def changed(self) -> dict[str, Any]:
        """Arguments of :func:`alphastomics.tl.reconstruct` that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}
