"""Reading and writing of files: early complaints, and nothing half written."""

from __future__ import annotations

import json
import math
import os
import shutil
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from alphastomics._io._atomic import replacing
from alphastomics._io._errors import WRITE, os_errors_for, permission_error

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData


def prepare_file(path: Path) -> None:
    """Complain before hours of work about a file that cannot be written after them; make its folder."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    prepare_folder(path.parent)


def check_readable(folder: Path) -> None:
    """Complain about a folder that may not be listed, which else looks like one without files.

    Raises
    ------
    PermissionError
        If it may not be read.
    """
    try:
        next(folder.iterdir(), None)
    except PermissionError as error:
        raise permission_error(folder, error) from error


def check_folder(path: Path) -> None:
    """Complain about a folder that will not be there after it is made, or in which nothing can be written; make nothing.

    Raises
    ------
    NotADirectoryError
        If it would lie in a file.
    PermissionError
        If nothing can be written there.
    """
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be written ({there} is a file); {WRITE}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written ({there} is read-only); {WRITE}")


def prepare_folder(path: Path) -> None:
    """Make a folder, and complain before hours of work if nothing can be written in it.

    Raises
    ------
    OSError
        If it cannot be made, or nothing can be written in it.
    """
    with os_errors_for(path):
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass


def write_h5ad(path: Path, adata: AnnData) -> None:
    """Write an ``.h5ad`` file, which is made in memory: HDF5 ends the process when a disk is full."""
    import anndata as ad
    import h5py

    adata.strings_to_categoricals()
    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        ad.io.write_elem(file, "/", adata)
        if adata.raw is None:  # a null, which AnnData itself does not write in a file
            file.pop("raw", None)
        file.flush()
        image = file.id.get_file_image()
    with replacing(path) as temporary:
        temporary.write_bytes(image)


def write_json(path: Path, values: Any) -> None:
    """Write strict JSON; undefined scores are null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_defined(values), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _defined(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _defined(value) for name, value in values.items()}
    return values if math.isfinite(values) else None


def to_text(table: pd.DataFrame) -> str:
    """Scores as text, one column per row of the table, as many side by side as the terminal is wide."""
    width = shutil.get_terminal_size((120, 24)).columns
    return table.T.map(number).to_string(line_width=width) + "\n"


def number(value: float) -> str:
    """A score as it is printed: four digits, whole numbers whole."""
    return f"{value:.0f}" if value == round(value, 0) else f"{value:.4g}"
