"""Model folders: ``model.safetensors`` (tensors) and ``config.json`` (all other values). Nothing is unpickled."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from alphastomics._io import _json
from alphastomics._io._atomic import replacing, write_text
from alphastomics._io._errors import WRITE, describe_error, format_value, permission_error
from alphastomics._io._untrusted import check_inside, check_memory
from alphastomics.model._state import REMEDY, Kind, ModelState, check_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT, FORMAT_VERSION = "alphastomics-model", 6
WEIGHTS, CONFIG, DATA = "model.safetensors", "config.json", "adata.h5ad"
FLOATING = ("F64", "F32", "F16", "BF16")  # types of safetensors
PICKLED = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")  # suffixes of pickled models


def write_model(folder: Path, state: ModelState, *, overwrite: bool) -> None:
    """Write a model folder; each file is replaced atomically.

    Raises ``FileExistsError`` if the folder is not empty and ``overwrite`` is false, ``OSError`` if it cannot be written.
    """
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} exists and is not empty; pass overwrite=True to replace the model in it")
    folder.mkdir(parents=True, exist_ok=True)
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **state.to_json()}
    text = json.dumps(values, indent=1, allow_nan=False)
    tensors = state.to_tensors()
    with replacing(folder / WEIGHTS) as temporary:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(f"{folder / WEIGHTS} cannot be written ({describe_error(error)}); {WRITE}") from error
    write_text(folder / CONFIG, text)


def read_model(folder: Path) -> ModelState:
    """Read a model folder.

    Raises
    ------
    FileNotFoundError
        If the folder or one of its files is missing.
    ValueError
        If a file is damaged, or of another program or version.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} is not a model of AlphaSTomics: {name} is missing{_pickle_hint(folder)}; pass a folder that "
                "AlphaSTomics.save has written"
            )
        check_inside(folder, folder / name)
    config = _read_config(folder / CONFIG)
    if config.get("format_version") != FORMAT_VERSION:
        version = format_value(config.get("format_version"))
        raise ValueError(f"{folder} has format version {version}; this package reads {FORMAT_VERSION}")
    path = folder / WEIGHTS
    with _opened(path):
        check_memory(path.stat().st_size)
        found = _read_header(path)
    check_tensors(folder, config, found)
    with _opened(path):
        tensors = load_file(path)
    return ModelState.restore(folder, config, tensors)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = _json.read(path)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is truncated or not JSON: {describe_error(error)}; {REMEDY}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe a model of AlphaSTomics; pass another folder")
    return config


def _read_header(path: Path) -> dict[str, Kind]:
    """Shapes and kinds of the tensors of a safetensors file; their values are not read."""
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}
        return {name: Kind(tuple(part.get_shape()), part.get_dtype() in FLOATING) for name, part in parts.items()}


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Raise errors of safetensors again with the name of the file."""
    try:
        with path.open("rb"):  # safetensors reports a file without read permission as missing
            yield
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        reason = f"truncated or not a safetensors file: {describe_error(error)}"
        raise ValueError(f"{path} is {reason}; {REMEDY}") from error


def _pickle_hint(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED) if folder.is_dir() else []
    return f" (found {', '.join(found)}; pickled models can run code and are never opened)" if found else ""
