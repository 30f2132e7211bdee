"""Reading and writing of files: early complaints, and nothing half written."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData


def read_tissue(path: Path) -> AnnData:
    """Read an ``.h5ad`` file.

    Raises
    ------
    ValueError
        If it is none.
    """
    import anndata as ad

    try:
        return ad.read_h5ad(path)
    except Exception as error:  # a damaged file can break the reader in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} cannot be read as .h5ad: {reason}; see that it is whole, or write it again"
        ) from error


def prepare_file(path: Path) -> None:
    """Complain before hours of work about a file that cannot be written after them; make its folder."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name in the same folder, which becomes ``path`` if all goes well and is removed if not."""
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
