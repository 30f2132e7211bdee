"""Provenance: how a model was trained (kept in its files) and how a result was computed (kept in ``uns``).

Records have plain values, without paths and names of users and machines. Torch is imported on first use.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from anndata import AnnData

PACKAGES = ("alphastomics", "torch", "lightning", "scvi-tools", "anndata", "numpy")
# Arguments that are paths, data or code.
EXCLUDED = frozenset(
    "adata callbacks checkpoint checkpoint_every ckpt_path default_root_dir logger model resume".split()
)
TIMES = ("finished", "seconds")  # only in the files of a model, so that equal seeds give equal ``uns``
WIDTH, INDENT = 100, 14  # characters
COUNTS = {"n_steps": "steps", "n_epochs": "epochs", "n_cells": "cells", "n_genes": "genes", "n_slices": "slices"}
CONDITIONS = ("seed", "precision", "device", "system")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def system() -> str:
    """Operating system and processor architecture, such as ``"Linux x86_64"``."""
    return f"{platform.system()} {platform.machine()}".strip()


def differing(recorded: Mapping[str, str]) -> dict[str, tuple[str, str | None]]:
    """Recorded and installed versions that differ; the installed one is None if the package is missing."""
    both = {name: (str(old), _installed(name)) for name, old in recorded.items()}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _installed(name: str) -> str | None:
    try:
        return platform.python_version() if name == "python" else version(name)
    except PackageNotFoundError:
        return None


def serialize_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as plain values, without None, paths, and the names in ``EXCLUDED``."""
    return {
        name: serialize(value)
        for name, value in arguments.items()
        if value is not None and name not in EXCLUDED and not _is_path(value)
    }


def serialize(value: Any) -> Any:
    """A value for JSON: dataclasses as mappings, durations in seconds, other objects as their class name."""
    if isinstance(value, np.generic):
        return serialize(value.item())
    if isinstance(value, Mapping):
        return serialize_arguments({str(name): each for name, each in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return serialize_arguments(asdict(value))
    if isinstance(value, (list, tuple)):
        return [serialize(each) for each in value if not _is_path(each)]
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__


def _is_path(value: Any) -> bool:
    if not isinstance(value, str):
        return isinstance(value, PurePath)
    return value.startswith("~") or PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()


def storable(value: Any) -> Any:
    """Plain values that ``write_h5ad`` keeps: None is dropped from mappings, lists become text."""
    if isinstance(value, Mapping):
        return {name: storable(each) for name, each in value.items() if each is not None}
    if isinstance(value, str):
        return value.replace("\0", "")  # HDF5 cannot store it
    return value if isinstance(value, (int, float, bool)) else repr(value)


def training_record(
    model: Any,
    plan: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    n_cells: int,
    seconds: float,
    held_out: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Record of the training that a model has just finished; ``arguments`` are those of ``train``, defaults resolved."""
    trainer = model.trainer
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "interrupted": bool(trainer.interrupted),
        "seed": model.init_params_["non_kwargs"]["random_state"],
        "n_steps": trainer.global_step,
        "n_epochs": trainer.current_epoch,
        "n_cells": n_cells,
        "n_genes": model.schema.n_genes,
        "n_slices": len(model.schema.slices),
        "precision": str(trainer.precision),
        "device": device_name(trainer.strategy.root_device),
        "n_devices": trainer.world_size,
        "system": system(),
        "arguments": serialize_arguments(arguments),
        "plan": serialize_arguments(plan),
        "versions": versions(),
    } | ({} if held_out is None else {"held_out": dict(held_out)})


def result_record(model: Any, function: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Record for ``uns`` of what a function of an :class:`~alphastomics.model.AlphaSTomics` computed."""
    trained = model.trainings_[-1] if model.trainings_ else {}
    record: dict[str, Any] = storable(
        {
            "function": function,
            "params": serialize_arguments(parameters),
            "model": {**serialize(model.init_params_["non_kwargs"]), "weights": digest(model)},
            "training": {name: value for name, value in trained.items() if name not in TIMES},
            "machine": {"device": device_name(model.module.device), "system": system()},
            "versions": versions(),
        }
    )
    return record


def digest(model: Any) -> str:
    """The first 16 digits of the SHA-256 of the weights, which saving and loading preserve."""
    import torch

    state, found = model.module.state_dict(), sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Type of a device, and the model of the GPU if CUDA is initialized."""
    import torch

    if device.type == "cuda" and torch.cuda.is_initialized():
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


class Provenance(dict[str, dict[str, Any]]):
    """Provenance records of results, by their key in ``uns``.

    A record has ``function`` and its ``params``; ``model`` (its arguments and, as ``weights``, the first 16 digits of the
    SHA-256 of the weights); ``training``; ``machine``; and ``versions``. It is displayed as a table in a notebook and as
    text elsewhere.
    """

    @property
    def differing(self) -> dict[str, tuple[str, str | None]]:
        """Recorded and installed versions of Python and packages, where these differ, by name."""
        return {name: both for record in self.values() for name, both in _record_differing(record).items()}

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(_lines(key, record)) for key, record in self.items())

    def _repr_html_(self) -> str:
        return "".join(_table(key, record) for key, record in self.items())


def provenance(adata: AnnData, key: str | None = None) -> Provenance:
    """Show how the results in an AnnData were made: model, parameters, seeds and versions.

    :func:`reconstruct` and :meth:`~alphastomics.model.AlphaSTomics.sample` write the records to ``uns``, which files
    preserve. A warning lists packages whose installed version differs: the same seed may then give slightly different
    results.

    Parameters
    ----------
    adata
        Cells with such results.
    key
        Key of the result in ``uns``, for example ``"spatial_reconstructed"``; all results when None.

    Returns
    -------
    The records, a mapping by key that prints as text or, in a notebook, as a table.

    Raises
    ------
    KeyError
        If there is no such record.

    Examples
    --------
    >>> asx.tl.reconstruct(query, model=model)
    >>> asx.tl.provenance(query)
    >>> asx.tl.provenance(query)["spatial_reconstructed"]["versions"]["torch"]
    """
    from alphastomics.data._checks import check_type

    check_type(adata)
    records = {name: record for name, record in adata.uns.items() if _is_record(record)}
    if key is not None and key not in records:
        found = ", ".join(map(repr, records)) or "none"
        raise KeyError(f'uns["{key}"] is not a provenance record (found: {found}); pass another key=…')
    if not records:
        raise KeyError("uns has no provenance record; tl.reconstruct and AlphaSTomics.sample write one")
    result = Provenance({name: dict(record) for name, record in records.items() if key in (None, name)})
    if result.differing:
        warnings.warn(
            f"Computed with {_format_differing(result.differing)}: the same seed may give other results.",
            UserWarning,
            stacklevel=2,
        )
    return result


def _is_record(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), Mapping) for name in ("params", "versions"))


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a record; empty if absent or malformed, as it may be in a file."""
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def _record_differing(record: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    return differing(_part(_part(record, "training"), "versions")) | differing(record["versions"])


def _format_differing(found: Mapping[str, tuple[str, str | None]]) -> str:
    return ", ".join(
        f"{name} {old} (installed: {new})" if new else f"{name} {old} (not installed)"
        for name, (old, new) in found.items()
    )


def _rows(record: Mapping[str, Any]) -> dict[str, str]:
    """Label and text of each row that is displayed."""
    training, machine = _part(record, "training"), _part(record, "machine")
    counts = [f"{training[name]} {what}" for name, what in COUNTS.items() if name in training]
    rows = {
        "parameters": _format(record["params"]),
        "model": _format(_part(record, "model")),
        "training": ", ".join(counts + [f"{name} {training[name]}" for name in CONDITIONS if name in training]),
        "  held out": _format({name: f"{value:.4g}" for name, value in _part(training, "held_out").items()}),
        "  arguments": _format(_part(training, "arguments")),
        "  plan": _format(_part(training, "plan")),
        "  versions": _format(_part(training, "versions"), " "),
        "machine": ", ".join(str(value) for _, value in sorted(machine.items())),
        "versions": _format(record["versions"], " "),
        "differing": _format_differing(_record_differing(record)),
    }
    return {name: printable for name, text in rows.items() if (printable := _printable(text))}


def _format(values: Mapping[str, Any], equals: str = "=", prefix: str = "") -> str:
    """Values as ``name=value``, sorted because files do not keep their order."""
    return ", ".join(
        _format(value, equals, f"{prefix}{name}.") if isinstance(value, Mapping) else f"{prefix}{name}{equals}{value}"
        for name, value in sorted(values.items())
    )


def _printable(text: str) -> str:
    """Text from a file without control characters, which a terminal would interpret."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _title(key: str, record: Mapping[str, Any]) -> str:
    function = record.get("function")
    return _printable(f"{key}, by {function}" if isinstance(function, str) else key)


def _lines(key: str, record: Mapping[str, Any]) -> Iterator[str]:
    yield _title(key, record)
    for name, text in _rows(record).items():
        yield from wrap(
            text, WIDTH, initial_indent=f"  {name:<{INDENT - 2}}", subsequent_indent=" " * INDENT,
            break_on_hyphens=False,
        )  # fmt: skip


def _table(key: str, record: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in _rows(record).items()
    )
    return f"<table><caption>{escape(_title(key, record))}</caption>{rows}</table>"
