"""The slices that stage 1 has written, as stage 2 reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics.data.preprocess._slice_files import SUFFIX, read_cells, read_column
from alphastomics.data.preprocess._slice_notes import read_note, read_overview

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from alphastomics.data.parquet._columns import Cells


@dataclass(frozen=True, kw_only=True)
class StoredSlice:
    """A slice that stage 1 has written.

    Parameters
    ----------
    path
        Its file.
    record
        What stage 1 says of it.
    options
        Of stage 1, as plain values.
    genes
        Of the folder.
    n_dims
        Coordinates that mean something.
    """

    path: Path
    record: dict[str, Any]
    options: dict[str, Any]
    genes: tuple[str, ...]
    n_dims: int

    @property
    def name(self) -> str:
        """Name of the slice."""
        return str(self.record["slice"])

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(self.record["n_cells"])

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """Which genes it measures (G,)."""
        lacking = set(self.record["unmeasured"])
        return np.array([gene not in lacking for gene in self.genes], dtype=bool)

    @property
    def is_counts(self) -> bool:
        """Whether its values are to be brought to logarithms."""
        return bool(self.options["log_normalize"])

    def column(self, name: str) -> pa.Table:
        """One column of all cells."""
        return read_column(self.path, name)

    def cells(self, rows: NDArray[np.integer]) -> Iterator[Cells]:
        """Cells of ascending rows, some at a time."""
        return read_cells(self.path, rows, len(self.genes), self.record["checksums"])


def read_slices(input_dirs: Sequence[Path]) -> list[StoredSlice]:
    """The slices of folders that stage 1 has finished, sorted by name.

    Raises
    ------
    FileNotFoundError
        If a folder holds none, or not all.
    ValueError
        If the folders differ in their genes or in what they know of positions, or two slices have one name.
    """
    found: list[StoredSlice] = []
    for folder in input_dirs:
        overview = read_overview(folder)
        common = {"options": overview["options"], "genes": tuple(overview["genes"]), "n_dims": int(overview["n_dims"])}
        for entry in overview["slices"]:
            path = folder / f"{entry['file']}{SUFFIX}"
            record = read_note(path.with_suffix(".json"))
            record["totals"] = np.asarray(record["totals"])  # as a list it takes four times as much
            found.append(StoredSlice(path=path, record=record, **common))
    _check_agreement(found)
    return sorted(found, key=lambda each: each.name)


def _check_agreement(slices: Sequence[StoredSlice]) -> None:
    first = slices[0]
    seen: dict[str, StoredSlice] = {}
    for each in slices:
        if each.genes != first.genes:
            differ = [
                f"{one!r} and {other!r}" for one, other in zip(first.genes, each.genes, strict=False) if one != other
            ]
            what = differ[0] if differ else _only_one_has(first, each)
            raise ValueError(
                f"{first.path.parent} and {each.path.parent} have different gene lists (first difference: {what}); run stage1 "
                "on both with the same --gene-list-file"
            )
        if each.n_dims != first.n_dims:
            raise ValueError(
                f"{first.path.parent} has positions in {first.n_dims}D and {each.path.parent} in {each.n_dims}D; run stage1 on "
                "both with the same --position-is-3d and --z-spacing"
            )
        if each.name in seen:
            raise ValueError(f"slice {each.name!r} is in {seen[each.name].path.parent} and in {each.path.parent}")
        seen[each.name] = each


def _only_one_has(first: StoredSlice, other: StoredSlice) -> str:
    """The first gene of the longer of two lists that begin alike."""
    longer, shorter = (first, other) if len(first.genes) > len(other.genes) else (other, first)
    return f"{longer.genes[len(shorter.genes)]!r}, which only {longer.path.parent} has"
