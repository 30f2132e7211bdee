"""Reading and writing of configuration files in YAML."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from alphastomics._io._errors import LONGEST, format_value
from alphastomics.config._sections import (
    KEYS,
    SETTINGS,
    AugmentationSection,
    DataSection,
    DiffusionSection,
    LossSection,
    MaskingSection,
    ModelSection,
    RunSection,
    SeedSection,
    TrainingSection,
)
from alphastomics.config._setting import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from os import PathLike

    from alphastomics.config._setting import Setting

LARGEST = 2**16  # bytes of a file, ten times the size of one with every key
LAYER_SETTING = "TransformerLayer_setting"
# Keys of this section of the earlier version, with the names of their settings.
LAYER_KEYS = {"num_layers": "n_layers", "num_heads": "n_heads"} | {
    name: name
    for name in (
        "dropout",
        "use_gated_attention",
        "gate_type",
        "use_qk_norm",
        "use_moe",
        "num_experts",
        "moe_top_k",
        "moe_load_balance_loss_weight",
    )
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run of ``alphastomics train``.

    Its sections are dataclasses with a field for every key; None leaves the default.

    Parameters
    ----------
    seed, model, diffusion, training, augmentation, masking, losses, data, run
        Sections.
    """

    seed: Any = SeedSection()
    model: Any = ModelSection()
    diffusion: Any = DiffusionSection()
    training: Any = TrainingSection()
    augmentation: Any = AugmentationSection()
    masking: Any = MaskingSection()
    losses: Any = LossSection()
    data: Any = DataSection()
    run: Any = RunSection()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Config:
        """Read a YAML file, which may have the section ``TransformerLayer_setting`` of the earlier version.

        Raises
        ------
        OSError
            If there is no such file.
        ValueError
            If the file is not YAML, has an unknown or repeated key, or a value of the wrong type.
        """
        from alphastomics._io._yaml import load

        path = Path(path)
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path} has more than {LARGEST:,} bytes and is not a configuration file")
        return cls.from_dict(load(path), source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None, *, source: str = "the configuration") -> Config:
        """Make a configuration from nested mappings, as in a file.

        Parameters
        ----------
        values
            Sections with their keys.
        source
            Origin of the values, for error messages.

        Raises
        ------
        ValueError
            If a key is unknown or a value has the wrong type.
        """
        values = _mapping(values, f"{source}:")
        settings = _mapping(values.pop(LAYER_SETTING, None), f"{source}: {LAYER_SETTING}")
        made: Config = _build(cls(), _merged(values, settings, source), source, (), (LAYER_SETTING,))
        return made

    def to_dict(self) -> dict[str, Any]:
        """All keys, nested as in a file, as plain values; None where nothing is set."""
        return asdict(self, dict_factory=lambda items: {k: str(v) if isinstance(v, Path) else v for k, v in items})

    def to_yaml(self) -> str:
        """The text of a file that :meth:`read` reads."""
        from alphastomics._io._yaml import dump

        return dump(self.to_dict())

    def write(self, path: str | PathLike[str]) -> None:
        """Write a YAML file atomically."""
        from alphastomics._io._atomic import write_text

        write_text(Path(path), self.to_yaml())

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Config:
        """Make a configuration from settings by name, such as ``lr``; other names are ignored."""
        values: dict[str, Any] = {}
        for key, entry in KEYS.items():
            *path, last = key.split(".")
            reduce(lambda section, name: section.setdefault(name, {}), path, values)[last] = options.get(entry.name)
        made: Config = _filled(cls(), values)
        return made

    def options(self) -> dict[str, Any]:
        """The values that are set, by the names of the settings."""
        return {
            entry.name: value for entry, value in self._items() if value is not None and not entry.details.file_only
        }

    def _items(self) -> Iterator[tuple[Setting, Any]]:
        """Every setting with its value or None."""
        for key, entry in KEYS.items():
            yield entry, reduce(getattr, key.split("."), self)

    def without_effect(self) -> list[str]:
        """Keys of the earlier version, with their values, that differ from what this version does."""
        preprocessing = self.data.preprocessing
        found = {
            "diffusion.num_timesteps": self.diffusion.num_timesteps,
            "data.preprocessing.normalize_position": preprocessing.normalize_position or None,
            "data.preprocessing.scale": None if preprocessing.scale else preprocessing.scale,
        }
        return [f"{key}: {_text(value)}" for key, value in found.items() if value is not None]


def _merged(values: dict[str, Any], settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Values with those of ``TransformerLayer_setting`` in their sections."""
    for name, value in settings.items():
        if name not in LAYER_KEYS:
            raise ValueError(_unknown(name, LAYER_KEYS, source, (LAYER_SETTING,)))
        section, _, key = SETTINGS[LAYER_KEYS[name]].key.partition(".")
        present = _mapping(values.get(section), f"{source}: {section}")
        if key in present:
            raise ValueError(f"{source}: {LAYER_SETTING}.{name} and {section}.{key} are the same setting; keep one")
        values = values | {section: present | {key: value}}
    return values


def _build(
    empty: Any, values: Mapping[Any, Any], source: str, path: tuple[str, ...], others: tuple[str, ...] = ()
) -> Any:
    """A section with values of a file; ``others`` are names for suggestions."""
    names = [entry.name for entry in fields(empty)]
    arguments = {}
    for name, value in values.items():
        if name not in names:
            raise ValueError(_unknown(name, [*names, *others], source, path))
        default = getattr(empty, name)
        where = f"{source}: {'.'.join((*path, name))}"
        if is_dataclass(default):
            arguments[name] = _build(default, _mapping(value, where), source, (*path, name))
        else:
            arguments[name] = _converted(value, KEYS[".".join((*path, name))], where)
    return type(empty)(**arguments)


def _filled(empty: Any, values: Mapping[str, Any]) -> Any:
    """A section with values as they are."""
    return type(empty)(
        **{
            name: _filled(getattr(empty, name), value) if is_dataclass(getattr(empty, name)) else value
            for name, value in values.items()
        }
    )


def _unknown(name: Any, names: Iterable[str], source: str, path: tuple[str, ...]) -> str:
    """Error message for an unknown key with a suggestion: the key of that name elsewhere, or a similar one here."""
    meant = next((key for key, entry in KEYS.items() if name in (entry.name, key.rpartition(".")[2])), None)
    meant = meant or ".".join((*path, nearest(str(name), names)))
    return f"{source}: unknown key {'.'.join((*path, _shown(name)))}; did you mean {meant}?"


def _mapping(values: Any, where: str) -> dict[str, Any]:
    """A section as a dict; None as an empty one."""
    if values is None:
        return {}
    if not hasattr(values, "items"):
        raise ValueError(f"{where} must be a section with keys, not {_kind(values)}")
    return dict(values.items())


def _converted(value: Any, entry: Setting, where: str) -> Any:
    """A value as the type of its key."""
    if value is None:
        return None
    kinds = entry.kinds
    if float in kinds and not isinstance(value, bool) and not (str in kinds and isinstance(value, str)):
        number = _number(value)
        value = value if number is None else number
    for kind in kinds:
        if type(value) is kind or (get_origin(kind) is Literal and value in get_args(kind)):
            return value
        if kind is Path and isinstance(value, str | Path):
            return Path(os.path.expanduser(value))
    names = [_TYPES[kind] for kind in kinds if kind in _TYPES]
    names += [f"one of {', '.join(entry.choices)}"] * bool(entry.choices)
    raise ValueError(f"{where} must be {' or '.join(names)}, not {_text(value)}")


def _number(value: Any) -> float | None:
    """A finite number, also from text such as ``1e-4``, which YAML 1.1 reads as text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "a section" if hasattr(value, "items") else f"the value {_text(value)}"


def _text(value: Any) -> str:
    """A value in a message, as in a file, in at most one line."""
    if isinstance(value, list) or hasattr(value, "items"):
        return _kind(value)
    return str(value).lower() if isinstance(value, bool) else format_value(value)


def _shown(name: Any) -> str:
    """A key in a message, as in a file, in at most one line."""
    found = str(name)
    return found if found.isprintable() and len(found) <= LONGEST else format_value(found)
