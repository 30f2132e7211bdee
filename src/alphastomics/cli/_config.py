"""Configuration files on the command line: a file fills in the options that are not given as flags."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cyclopts import UNSET, Token

from alphastomics._rank import is_first
from alphastomics.cli._run import CHECKPOINTS, LAST, RunFolder, RunOptions
from alphastomics.config import Config, SetupConfig
from alphastomics.config._sections import SETTINGS
from alphastomics.config._setting import settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cyclopts import App, ArgumentCollection

    from alphastomics.cli._options import FitOptions

logger = logging.getLogger(__name__)

# First line of a printed configuration.
HEADER = "# null: not set, or chosen by the data when training starts; see docs/configuration.md\n"
# Options with the same meaning: one of them on the command line replaces the others in the file.
SYNONYMS = (
    {"attention", "use_gated_attention"},
    {"accelerator", "devices", "gpus"},
    {"precision", "fp16"},
    {"input_data", "data_dir"},
)
# Options that have an effect only beside data of one kind.
BY_DATA = {"data_dir": ("streaming",), "input_data": tuple(settings_of(SetupConfig))}


def fill(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give options that are not on the command line the values of the file.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has an unknown key or a value of the wrong type.
    """
    by_name = {argument.field_info.name: argument for argument in arguments}
    flags = {name: argument.convert() for name, argument in by_name.items() if argument.tokens}
    path = _file(flags)
    if path is None or not path.is_file():  # cyclopts checks that the file of --config exists
        return
    config = Config.read(path)
    for key in config.without_effect() if is_first() else ():
        logger.info("%s: %s has no effect; see docs/configuration.md.", path, key)
    if "config" not in flags:  # a resumed run stays in its folder
        flags = dict.fromkeys(("exp_name", "output_dir")) | flags
    for name, value in _effective(config.options(), flags).items():
        if name not in flags:
            exact = UNSET if isinstance(value, str) else value  # text is converted as on the command line
            source = f"{path}: {SETTINGS[name].key}"
            token = Token(keyword=source, value=str(value), source=str(path), implicit_value=exact)
            by_name[name].tokens.append(token)


def _file(flags: Mapping[str, Any]) -> Path | None:
    """The file of ``--config``, or that of the run that is resumed."""
    if "config" in flags:
        path: Path = flags["config"]
        return path
    resume: tuple[Path, ...] | None = flags.get("resume")
    if resume in ((), (LAST,)):
        run = RunOptions(**{name: flags[name] for name in ("exp_name", "output_dir") if name in flags})
        return run.folder().config
    folder = resume[0].absolute().parent if resume else None
    return RunFolder(folder.parent).config if folder is not None and folder.name == CHECKPOINTS else None


def _effective(values: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file, except those that have no effect because of flags or other values."""
    kept = {
        name: value
        for name, value in values.items()
        if not any(name in same and not same.isdisjoint(flags) for same in SYNONYMS)
    }

    def value_of(name: str) -> Any:
        return flags[name] if name in flags else kept.get(name, SETTINGS[name].default)

    for switch, details in BY_DATA.items():
        if not value_of(switch):
            kept = {name: value for name, value in kept.items() if name not in details}
    for name in list(kept):
        switch, *needed = SETTINGS[name].details.requires or (name, value_of(name))
        if value_of(switch) not in needed:
            del kept[name]
    return kept


def resolved(fit: FitOptions, *groups: Any) -> Config:
    """The configuration of all options; values that follow from the data or the machine are None."""
    values: dict[str, Any] = {}
    for group in (fit, *groups):
        values |= vars(group)
    attention = fit.kind_of_attention
    return Config.from_options(values | {"attention": attention, "use_gated_attention": attention != "linear"})
