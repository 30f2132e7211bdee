"""How something was made, as plain values: versions, arguments. No value names a person, a machine or a place on one."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

PACKAGES = ("alphastomics", "torch", "lightning", "scvi-tools", "anndata", "numpy")
# Arguments that say where, not how, or that hold data or code.
EXCLUDED = frozenset(
    {
        "adata",
        "callbacks",
        "checkpoint",
        "checkpoint_every",
        "ckpt_path",
        "default_root_dir",
        "logger",
        "model",
        "resume",
    }
)


def versions() -> dict[str, str]:
    """Versions that a result depends on, Python's among them."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def system() -> str:
    """Operating system and kind of processor, such as ``"Linux x86_64"``."""
    return f"{platform.system()} {platform.machine()}".strip()


def differing(made_with: Mapping[str, str]) -> dict[str, tuple[str, str | None]]:
    """Versions that are others here: those it was made with, and those here, None where there is no such package."""
    found = {name: (str(there), _version_here(name)) for name, there in made_with.items()}
    return {name: both for name, both in found.items() if both[0] != both[1]}


def _version_here(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def serialize_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as plain values, without those that are None, or that say where something lies."""
    return {
        name: plain(value)
        for name, value in arguments.items()
        if value is not None and name not in EXCLUDED and not _is_place(value)
    }


def plain(value: Any) -> Any:
    """A value of JSON: configurations as mappings, times in seconds, other objects by the name of their class."""
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return serialize_arguments({str(name): each for name, each in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return serialize_arguments(asdict(value))
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value if not _is_place(each)]
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__


def _is_place(value: Any) -> bool:
    if isinstance(value, PurePath):
        return True
    if not isinstance(value, str):
        return False
    return value.startswith("~") or PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as those of ``uns`` that survive ``write_h5ad``: lists as text, nothing where there is None."""
    return {name: _stored(value) for name, value in values.items() if value is not None}


def _stored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return storable(value)
    if isinstance(value, str):
        return value.replace("\0", "")  # which HDF5 does not write
    return value if isinstance(value, (int, float, bool)) else repr(value)
