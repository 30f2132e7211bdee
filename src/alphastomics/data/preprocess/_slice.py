"""Slices on their way from stage 1 to stage 2: Arrow files, a batch of cells at a time, each batch with a checksum.

They are written once, read a few times and thrown away, so that they are not compressed.

What the folder of stage 1 says of its slices: a note beside each, and ``stage1.json`` of them all.

The slices that stage 1 has written, as stage 2 reads them.
"""

from __future__ import annotations

import logging
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from alphastomics._io._atomic import remove_temporary, replacing, write_json
from alphastomics.data.parquet._columns import Cells, arrow_schema, from_arrow, to_arrow
from alphastomics.data.parquet._files import check_written, make_folder, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.data.parquet._columns import Cells
    from alphastomics.data.preprocess._options import Stage1Options
    from alphastomics.data.preprocess._stage1 import SliceTask

SUFFIX = ".arrow"
BATCH = 2048  # cells; every batch of a file but the last has so many


class SliceWriter:
    """Batches of an open file.

    Parameters
    ----------
    file
        The file.
    schema
        Its columns.

    Attributes
    ----------
    checksums
        Of the batches so far.
    """

    def __init__(self, file: pa.ipc.RecordBatchFileWriter, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema
        self.checksums: list[int] = []

    def write(self, cells: Cells) -> None:
        """Write a batch."""
        self._file.write_table(to_arrow(cells, self._schema))
        self.checksums.append(_checksum(cells))


@contextmanager
def writing_slice(path: Path, n_genes: int) -> Iterator[SliceWriter]:
    """Write a file; it appears when it is whole."""
    schema = arrow_schema(n_genes, dense=False)
    with (
        replacing(path, unique=True) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as file,
    ):
        yield SliceWriter(file, schema)


def read_cells(path: Path, rows: NDArray[np.integer], n_genes: int, checksums: Sequence[int]) -> Iterator[Cells]:
    """Cells of ascending rows, by batches of the file.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    ends = np.searchsorted(rows, np.arange(len(checksums) + 1) * BATCH)
    with _damage(path), pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == end:
                continue
            batch, here = pa.Table.from_batches([file.get_batch(number)]), rows[start:end] - number * BATCH
            if here[0] > 0 and 2 * len(here) < len(batch):
                yield from_arrow(batch.take(here), n_genes)
                continue
            cells = from_arrow(batch, n_genes)
            if here[0] == 0 and _checksum(cells) != checksums[number]:  # once, of all who read some of the batch
                raise OSError(f"checksum of batch {number}")
            yield cells if len(here) == len(cells.names) else cells.take(here)


def read_column(path: Path, name: str) -> pa.Table:
    """One column of all cells.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    with _damage(path), pa.memory_map(str(path)) as source:
        number = pa.ipc.open_file(source).schema.get_field_index(name)
        options = pa.ipc.IpcReadOptions(included_fields=[number], use_threads=False)
        return pa.ipc.open_file(source, options=options).read_all()


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged ({reason}); delete it and run the same command again") from error


def _checksum(cells: Cells) -> int:
    x, sum_ = cells.expression, 0
    for part in (x.indptr, x.indices, x.data, cells.library_size, cells.position):
        sum_ = zlib.crc32(pa.py_buffer(np.ascontiguousarray(part)), sum_)
    return zlib.crc32("\n".join([*cells.names, *map(str, cells.labels)]).encode(), sum_)


logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "alphastomics-slices", 2
OVERVIEW = "stage1.json"
N_NAMES = 5
_NOTE = {
    "slice": str,
    "parameters": dict,
    "n_cells": int,
    "n_values": int,
    "counts": bool,
    "totals": list,
    "labels": list,
    "unmeasured": list,
    "checksums": list,
}
_OVERVIEW = {"options": dict, "n_dims": int}
_FINISHED = _OVERVIEW | {"genes": list, "slices": list}


def read_overview(folder: Path, *, finished: bool = True) -> dict[str, Any]:
    """What a folder says of its slices.

    Raises
    ------
    FileNotFoundError
        If it says nothing, or stage 1 has not ended where it should have.
    ValueError
        If what it says is damaged, of another version, or not ours.
    """
    path = folder / OVERVIEW
    missing = f"{folder} holds no finished slices; run alphastomics stage1 --output-dir {folder}"
    if not path.is_file():
        raise FileNotFoundError(missing)
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe slices of AlphaSTomics; move it away, or name another folder")
    if values.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} was written by another version of alphastomics; delete {folder} and run stage1 again")
    if finished and "slices" not in values:
        raise FileNotFoundError(missing)
    entries = values.get("slices", [])
    whole = isinstance(entries, list) and all(_has(entry, {"file": str, "slice": str}) for entry in entries)
    whole = whole and _has(values, _FINISHED if finished else _OVERVIEW) and bool(entries or not finished)
    if not whole or not _has(values["options"], {"log_normalize": bool}):
        raise ValueError(f"{path} is damaged; delete the folder {folder} and run stage1 again")
    return values


def read_note(path: Path) -> dict[str, Any]:
    """What is said of a slice.

    Raises
    ------
    FileNotFoundError
        If nothing is.
    ValueError
        If that is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run stage1 again")
    record = read_json(path)
    if not _has(record, _NOTE) or "animal" not in record:
        raise ValueError(f"{path} is damaged; delete it and run the same command again")
    values: dict[str, Any] = record
    return values


def _has(values: Any, kinds: dict[str, type]) -> bool:
    return isinstance(values, dict) and all(isinstance(values.get(name), kind) for name, kind in kinds.items())


def check_begun(output_dir: Path, options: Stage1Options) -> None:
    """Refuse a folder that was begun with something else, or by somebody else.

    Raises
    ------
    FileExistsError
        If files of others have the names of slices.
    ValueError
        If it was begun with other parameters; the message says which.
    """
    if not (output_dir / OVERVIEW).is_file():
        if foreign := sorted(output_dir.glob("[0-9]" * 5 + ".*")):
            raise FileExistsError(f"{foreign[0]} is there, and not of stage1; move it away, or name another folder")
        return
    earlier, now = read_overview(output_dir, finished=False)["options"], options.to_dict()
    differ = [name for name in now if earlier.get(name) != now[name]]
    if differ:
        listed = "; ".join(f"{name} was {short(earlier.get(name))}, is {short(now[name])}" for name in differ)
        raise ValueError(
            f"{output_dir} holds slices made with other parameters ({listed}); name another folder, or delete it"
        )


def begin(output_dir: Path, options: Stage1Options) -> None:
    """Note what the slices of a folder are made with, unless :func:`check_begun` refuses it."""
    check_begun(output_dir, options)
    make_folder(output_dir)
    remove_temporary(output_dir)
    write_json(output_dir / OVERVIEW, _overview(options), unique=True)


def end(
    output_dir: Path, options: Stage1Options, tasks: Sequence[SliceTask], records: Sequence[dict[str, Any]]
) -> None:
    """Note which slices there are, which ends the stage."""
    genes = tasks[0].options.genes
    assert genes is not None  # plan_slices settles them
    for task in tasks:
        check_written(task.target.with_suffix(".json"))
    remove_temporary(output_dir)  # of workers that were killed
    files = [{"file": task.target.name, "slice": record["slice"]} for task, record in zip(tasks, records, strict=True)]
    write_json(output_dir / OVERVIEW, _overview(options) | {"genes": list(genes), "slices": files}, unique=True)
    for record in records:
        if names := record["unmeasured"]:
            listed = ", ".join(map(repr, names[:N_NAMES])) + (", …" if len(names) > N_NAMES else "")
            logger.warning(
                "Slice %r lacks %d genes, which count as unmeasured: %s.", record["slice"], len(names), listed
            )
    if options.log_normalize and (others := [record["slice"] for record in records if not record["counts"]]):
        logger.warning(
            "Values of %d slices, the first of them %r, are not whole numbers, and are brought to logarithms as if they were "
            "counts; pass --skip-log-normalize if they are transformed already.",
            len(others),
            others[0],
        )


def _overview(options: Stage1Options) -> dict[str, Any]:
    n_dims = 3 if options.position_is_3d or options.z_spacing else 2
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "options": options.to_dict(), "n_dims": n_dims}


def short(value: Any) -> str:
    """A value as text, cut where it is long."""
    return cut(repr(value))


def cut(text: str) -> str:
    """Text, cut where it is long."""
    return text if len(text) <= 60 else text[:57] + "…"


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
