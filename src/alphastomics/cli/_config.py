"""A configuration file behind the command line: what is not said there is taken from the file, and what is nowhere by default."""

from __future__ import annotations

import logging
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from cyclopts import UNSET, Token

from alphastomics._details import DETAILS
from alphastomics._rank import is_first
from alphastomics.cli._options import MASKS, SetupOptions
from alphastomics.cli._run import LAST, RunOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cyclopts import App, ArgumentCollection

    from alphastomics.config import Config

logger = logging.getLogger(__name__)

# Above a configuration that is printed.
NULLS = "# null: not asked for, or decided by the data when training begins; see docs/configuration.md\n"
# Options that say the same thing: one of them on the command line silences the others in the file.
SYNONYMS = (
    {"attention", "use_gated_attention"},
    {"accelerator", "devices", "gpus"},
    {"precision", "fp16"},
    {"input_data", "data_dir"},
)
# Options that say how something is done, by the one that says whether: when it is not, a file may say them all the same.
SWITCHES: dict[str, tuple[str, ...]] = {
    "enable_masking": MASKS,
    "data_dir": ("streaming",),
    "streaming": ("buffer_size",),
    "input_data": tuple(field.name for field in fields(SetupOptions)),
}


def fill(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give the arguments that the command line leaves out the values of the file, if one is named.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read or says something that it cannot say.
    """
    from alphastomics._sections import leaves
    from alphastomics.config import Config

    by_name = {argument.field_info.name: argument for argument in arguments}
    told = {name: argument.convert() for name, argument in by_name.items() if argument.tokens}
    path = _file(told)
    if path is None or not path.is_file():  # that it is missing is told where --config is checked
        return
    config = Config.read(path)
    for key in config.without_effect() if is_first() else ():
        logger.info("%s: %s has no effect here; docs/configuration.md says what decides it.", path, key)
    keys = {leaf.option: leaf.key for leaf in leaves(config)}
    if "config" not in told:  # the run that is resumed lies where it was found, wherever it was made
        told = dict.fromkeys(("exp_name", "output_dir")) | told
    for name, value in _silenced(config.options(), told).items():
        if name not in told:
            exact = UNSET if isinstance(value, str) else value  # text is read as on the command line
            source = f"{path}: {keys[name]}"
            token = Token(keyword=source, value=str(value), source=str(path), implicit_value=exact)
            by_name[name].tokens.append(token)


def _file(told: Mapping[str, Any]) -> Path | None:
    """The file that is named, or that of the run that is resumed."""
    if "config" in told:
        return told["config"]
    if told.get("resume") in ((), (LAST,)):
        return RunOptions(**{name: told[name] for name in ("exp_name", "output_dir") if name in told}).folder().config
    return None


def _silenced(values: dict[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the file without those that the command line, or another value, leaves without a meaning."""
    kept = {
        name: value
        for name, value in values.items()
        if not any(name in same and not same.isdisjoint(told) for same in SYNONYMS)
    }
    for switch, details in SWITCHES.items():
        on = told[switch] if switch in told else kept.get(switch)
        if not on:
            kept = {name: value for name, value in kept.items() if name not in details}
    for (switch, value), details in DETAILS.items():
        if (told[switch] if switch in told else kept.get(switch)) != value:
            kept = {name: value for name, value in kept.items() if name not in details}
    return kept


def resolved(seed: int, *groups: Any) -> Config:
    """The configuration that all options together make, with the defaults of the library for what they leave to it.

    What the data or the machine decide stays None.
    """
    from alphastomics.config import Config

    options = {"seed": seed}
    for group in groups:
        options |= asdict(group)
    left = {name for name, value in options.items() if value is None}
    return Config.from_options(options | {name: value for name, value in _defaults(options).items() if name in left})


def _defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the library takes where an option says nothing, without a look at the data."""
    from alphastomics.data.parquet._source import BUFFER
    from alphastomics.diffusion import MaskingConfig
    from alphastomics.train import PlanConfig
    from alphastomics.train.defaults import COMPOSITION, GRADIENT_NORM

    linear = options["attention"] == "linear" or options["use_gated_attention"] is False
    known = asdict(PlanConfig()) | {
        "attention": "linear" if linear else "full",
        "use_gated_attention": not linear,
        "composition": COMPOSITION,
        "gradient_clip_val": GRADIENT_NORM,
        "accumulate_grad_batches": 1,
        "num_nodes": 1,
    }
    del known["deformation"]  # by the number of cells
    if options["enable_masking"]:
        known |= asdict(MaskingConfig())
    if options["streaming"]:
        known["buffer_size"] = BUFFER
    return known
