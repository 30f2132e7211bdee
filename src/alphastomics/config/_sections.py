"""The sections of a configuration file, derived from the declarations of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar

from alphastomics.config._data import RunConfig, SetupConfig, SourceConfig
from alphastomics.config._model import DiffusionSettings, ModelConfig, NetworkConfig
from alphastomics.config._plan import PlanConfig
from alphastomics.config._setting import Setting, setting, settings_of
from alphastomics.config._training import Augmentation, MaskingConfig, TrainerConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class EarlierKeys:
    """Keys of the earlier version that are read and have no effect.

    Parameters
    ----------
    num_timesteps
        No effect: time is continuous, and ``alphastomics sample --n-steps`` sets the number of steps.
    normalize_position
        No effect: positions are always scaled for the network, and files and results have the units of the input.
    scale
        No effect: ``alphastomics preprocess --skip-scale`` leaves the genes of a dataset unscaled.
    """

    SECTION: ClassVar[str] = "data.preprocessing"

    num_timesteps: int | None = setting(None, key="diffusion.num_timesteps", file_only=True)
    normalize_position: bool | None = setting(None, file_only=True)
    scale: bool | None = setting(None, file_only=True)


DECLARATIONS = (
    RunConfig,
    SourceConfig,
    EarlierKeys,
    SetupConfig,
    NetworkConfig,
    ModelConfig,
    DiffusionSettings,
    TrainingConfig,
    TrainerConfig,
    Augmentation,
    PlanConfig,
    MaskingConfig,
)
SETTINGS: dict[str, Setting] = {name: entry for cls in DECLARATIONS for name, entry in settings_of(cls).items()}
KEYS: dict[str, Setting] = {entry.key: entry for entry in SETTINGS.values() if not entry.details.python_only}


def section(name: str, path: str, text: str, **nested: Any) -> Any:
    """A dataclass with the keys of one section, all None by default, and with `nested` sections."""
    prefix = f"{path}."
    keys = {key.removeprefix(prefix): entry for key, entry in KEYS.items() if key.rpartition(".")[0] == path}
    entries: list[tuple[str, Any, Any]] = [(key, entry.hint | None, field(default=None)) for key, entry in keys.items()]
    entries += [(key, cls, field(default=cls())) for key, cls in nested.items()]
    lines = [f"{key}\n    {describe(entry)}" for key, entry in keys.items()]
    lines += [f"{key}\n    {cls.__doc__.partition('.')[0]}." for key, cls in nested.items()]
    doc = f"{text}\n\nParameters\n----------\n" + "\n".join(lines)
    return make_dataclass(
        name, entries, frozen=True, kw_only=True, namespace={"__doc__": doc, "__module__": "alphastomics.config"}
    )


def describe(entry: Setting) -> str:
    """The sentence of a setting with its flag."""
    return entry.text if entry.details.file_only else f"{entry.text} (``{entry.flag}``)"


SeedSection = section("SeedSection", "seed", "Random numbers.")
ModelSection = section("ModelSection", "model", "The network.")
DiffusionSection = section("DiffusionSection", "diffusion", "The diffusion process of expression.")
TrainingSection = section("TrainingSection", "training", "Contexts, optimizer, devices.")
AugmentationSection = section("AugmentationSection", "augmentation", "Random changes to training contexts.")
MaskingSection = section("MaskingSection", "masking", "Masked training.")
LossSection = section("LossSection", "losses", "Weights and parameters of the losses.")
PreprocessingSection = section("PreprocessingSection", "data.preprocessing", "Keys of an AnnData object.")
LoadingSection = section("LoadingSection", "data.loading", "Reading of the data.")
DataSection = section("DataSection", "data", "The data.", preprocessing=PreprocessingSection, loading=LoadingSection)
RunSection = section("RunSection", "run", "Name and folder of a run.")
