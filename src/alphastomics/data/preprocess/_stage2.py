"""Stage 2: slices of one or several folders into one dataset, divided, scaled and described.

Row groups hold cells of one slice along its Hilbert curve. What contexts need at random is drawn when they are cut: the
order of contexts, and which cells of a slice come together. A shuffle of all cells, once and for all, would scatter every
slice over all files, and a context, which is made of cells of one slice, would have to read all of them.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics.data._fit import _fit_frame, _fit_spacing, _floored
from alphastomics.data._matrix import Moments, canonical
from alphastomics.data._schema import TissueSchema
from alphastomics.data.parquet._columns import LABEL, POSITION, SIZE, Cells, arrow_schema, read_position
from alphastomics.data.parquet._dataset import FOLDER, METADATA, SPLITS, DatasetInfo, Shard
from alphastomics.data.parquet._files import ROW_GROUP, checksum, open_parquet, read_group, read_json, writing
from alphastomics.data.parquet._note import Note
from alphastomics.data.preprocess._split import split_slices
from alphastomics.data.preprocess._stage1 import FORMAT, FORMAT_VERSION, OVERVIEW, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.data._schema import Transform
    from alphastomics.data.preprocess._options import Stage2Options

logger = logging.getLogger(__name__)

DENSE = 0.2  # share of values that are not 0 from which on zeros are stored too: more room, but read twice as fast
N_NAMES = 5


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

    def column(self, name: str) -> Any:
        """One column of all cells."""
        return open_parquet(self.path).read(columns=[name])

    def cells(self, rows: NDArray[np.int64]) -> Iterator[Cells]:
        """Cells of ascending rows, by row groups of the file."""
        with open_parquet(self.path) as file:
            end = 0
            for group in range(file.num_row_groups):
                start, end = end, end + file.metadata.row_group(group).num_rows
                here = rows[(rows >= start) & (rows < end)] - start
                if len(here):
                    cells = read_group(file, group, len(self.genes), self.path)
                    yield cells if len(here) == end - start else cells.take(here)


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
        overview = read_json(folder / OVERVIEW) if (folder / OVERVIEW).is_file() else {}
        if overview.get("format") != FORMAT or "slices" not in overview:
            raise FileNotFoundError(f"{folder} holds no finished slices; run alphastomics stage1 --output-dir {folder}")
        if overview["format_version"] != FORMAT_VERSION:
            raise ValueError(f"{folder} was written by another version of alphastomics; run stage1 again")
        common = {"options": overview["options"], "genes": tuple(overview["genes"]), "n_dims": int(overview["n_dims"])}
        for entry in overview["slices"]:
            path = folder / f"{entry['file']}.parquet"
            found.append(StoredSlice(path=path, record=read_json(path.with_suffix(".json")), **common))
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
            what = differ[0] if differ else f"{len(first.genes)} and {len(each.genes)} genes"
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


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A file to be written.

    Parameters
    ----------
    target
        The file.
    split
        Of which split.
    pieces
        Slices and the rows of each that go into it, in row groups.
    dense
        Whether zeros are stored.
    transform
        Of the dataset.
    library_size
        Median library size, at which moments are taken; None under ``"none"``.
    share
        Share of every gene in the counts (G,); empty under ``"none"``.
    logarithms
        Whether slices of counts are stored as logarithms at that size, because others already are.
    """

    target: Path
    split: str
    pieces: tuple[tuple[StoredSlice, tuple[NDArray[np.int64], ...]], ...]
    dense: bool
    transform: Transform
    library_size: float | None
    share: NDArray[np.float64]
    logarithms: bool


def write_shard(task: ShardTask) -> tuple[Shard, list[Moments], NDArray[np.float64]]:
    """Write a file; give what is said of it, and moments and totals of its cells, slice by slice."""
    first = task.pieces[0][0]
    lacking = {each.name: tuple(each.record["unmeasured"]) for each, _ in task.pieces if each.record["unmeasured"]}
    note = Note(first.genes, first.n_dims, lacking)
    schema = arrow_schema(len(first.genes), dense=task.dense, labels=_has_labels(task)).with_metadata(
        note.to_metadata()
    )
    moments, groups, totals = [], [], np.zeros(len(first.genes))
    with writing(task.target, schema, mapped=True) as file:
        for stored, rows_of_groups in task.pieces:
            seen = Moments(len(stored.genes))
            for rows in rows_of_groups:
                cells = Cells.concatenate(list(stored.cells(rows)))
                logs = _logarithms(cells, stored, task)
                if task.logarithms and logs is not None:
                    cells = cells._replace(expression=logs.astype(np.float32))
                file.write(cells)
                groups.append((stored.name, len(rows)))
                if task.split == SPLITS[0]:
                    block = canonical(cells.expression)
                    totals += np.bincount(block.indices, weights=block.data, minlength=len(totals))
                    seen.add(block if logs is None else canonical(logs), stored.measured)
            moments.append(seen)
    shard = Shard(file=task.target.name, split=task.split, groups=tuple(groups), sha256=checksum(task.target))
    return shard, moments, totals


def _has_labels(task: ShardTask) -> bool:
    return any(LABEL in open_parquet(stored.path).schema_arrow.names for stored, _ in task.pieces)


def _logarithms(cells: Cells, stored: StoredSlice, task: ShardTask) -> Any:
    """log1p at the common library size, canonical CSR; None of values that are no counts."""
    if task.library_size is None or not stored.options["log_normalize"]:
        return None
    block = canonical(cells.expression)
    target = task.library_size
    if not stored.measured.all():
        target *= float(task.share[stored.measured].sum())
    size = cells.library_size
    factor = np.divide(target, size, out=np.ones(len(size)), where=size > 0)
    block.data = np.log1p(block.data * np.repeat(factor, np.diff(block.indptr)))
    return block


class Plan:
    """All that has to be settled before a file is written.

    Parameters
    ----------
    slices
        Sorted by name.
    options
        Of the stage.
    """

    def __init__(self, slices: Sequence[StoredSlice], options: Stage2Options) -> None:
        self.slices, self.options = slices, options
        self.codes = split_slices(
            [each.name for each in slices],
            [each.n_cells for each in slices],
            [each.record["animal"] for each in slices],
            options,
        )
        counts = [bool(each.options["log_normalize"]) for each in slices]
        self.transform: Transform = "log1p" if all(counts) else "none"
        self.logarithms = any(counts) and not all(counts)
        self.counts = all(counts) and all(each.record["counts"] for each in slices)
        n_values = sum(each.record["n_values"] for each in slices)
        n_cells = sum(each.n_cells for each in slices)
        self.dense = n_values > DENSE * n_cells * len(slices[0].genes)
        self.share: NDArray[np.float64] = np.empty(0)
        self.library_size: float | None = None
        if any(counts):
            self.share, self.library_size = self._depth()

    def _depth(self) -> tuple[NDArray[np.float64], float]:
        """Share of every gene in the counts, and the median library size of the training cells, of all genes."""
        totals, cells = np.zeros(len(self.slices[0].genes)), np.zeros(len(self.slices[0].genes))
        with_counts = [each for each in self.slices if each.options["log_normalize"]]
        for each in with_counts:
            totals += np.asarray(each.record["totals"])
            cells += each.n_cells * each.measured
        rate = np.divide(totals, cells, out=np.zeros_like(totals), where=cells > 0)
        if not rate.any():
            raise ValueError("all expression values are zero; check --layer")
        share = rate / rate.sum()
        sizes = []
        for each, code in zip(self.slices, self.codes, strict=True):
            if each.options["log_normalize"]:
                size = each.column(SIZE).column(SIZE).to_numpy()[code == 0]
                sizes.append(size if each.measured.all() else size / share[each.measured].sum())
        size = np.concatenate(sizes)
        return share, float(np.median(size[size > 0]))

    def tasks(self, folder: Path) -> list[ShardTask]:
        """The files, each a stretch of the cells of its split."""
        common = {
            "dense": self.dense,
            "transform": self.transform,
            "library_size": self.library_size,
            "share": self.share,
            "logarithms": self.logarithms,
        }
        tasks = []
        for number, split in enumerate(SPLITS):
            shards = self._shards(number)
            for i, pieces in enumerate(shards):
                name = f"{split}.parquet" if len(shards) == 1 else f"{split}-{i:05d}.parquet"
                tasks.append(ShardTask(target=folder / name, split=split, pieces=pieces, **common))
        return tasks

    def _shards(self, number: int) -> list[tuple[tuple[StoredSlice, tuple[NDArray[np.int64], ...]], ...]]:
        """Pieces of the files of a split."""
        group_size = min(ROW_GROUP, self.options.max_shard_size)
        shards: list[list[tuple[StoredSlice, list[NDArray[np.int64]]]]] = []
        room = 0
        for stored, code in zip(self.slices, self.codes, strict=True):
            rows = np.flatnonzero(code == number)
            for group in np.array_split(rows, -(-len(rows) // group_size)) if len(rows) else ():
                if len(group) > room:
                    shards.append([])
                    room = self.options.max_shard_size
                if not shards[-1] or shards[-1][-1][0] is not stored:
                    shards[-1].append((stored, []))
                shards[-1][-1][1].append(group)
                room -= len(group)
        return [tuple((stored, tuple(groups)) for stored, groups in shard) for shard in shards]

    def schema(self, moments: Moments, totals: NDArray[np.float64]) -> TissueSchema:
        """The tissue, fitted to the training cells."""
        first, n_dims = self.slices[0], self.slices[0].n_dims
        places = {}
        for each, code in zip(self.slices, self.codes, strict=True):
            position = read_position(each.column(POSITION))[code == 0, :n_dims]
            if len(position):
                places[each.name] = position
        scale, centre = _fit_frame(places, self.options.frame)
        log1p = self.transform == "log1p"
        whole = all(each.measured.all() for each in self.slices)
        share = totals / totals.sum() if whole and log1p else self.share
        scaled = self.options.scale
        labels = sorted({label for each in self.slices for label in each.record.get("labels", [])})
        return TissueSchema(
            genes=first.genes,
            transform=self.transform,
            library_size=self.library_size if log1p else None,
            gene_mean=tuple(moments.mean.tolist() if scaled else [0.0] * len(first.genes)),
            gene_scale=tuple(_floored(moments.sd).tolist() if scaled else [1.0] * len(first.genes)),
            gene_share=tuple(share.tolist()) if log1p else (),
            frame=self.options.frame,
            n_dims=n_dims,
            scale=scale,
            spacing=_fit_spacing(places),
            centre=centre,
            slices=tuple(places),
            cell_types=tuple(labels),
            position_key="spatial",
            slice_key="slice_id",
            cell_type_key="cell_type" if labels else None,
            layer=None,
            sequence_key=None,
        )


def write_dataset(input_dirs: Sequence[Path], output_dir: Path, options: Stage2Options, run: Any = map) -> DatasetInfo:
    """Write a dataset, or give the one that is there if it was made of the same with the same parameters.

    Parameters
    ----------
    input_dirs
        Folders that stage 1 has finished.
    output_dir
        Where ``data`` and ``metadata.json`` go.
    options
        Of the stage.
    run
        Applies a function to tasks, in order: ``map``, or that of a cluster.

    Raises
    ------
    FileNotFoundError, ValueError
        If the input cannot be used, or the folder holds another dataset.
    """
    slices = read_slices(input_dirs)
    made = {each.name: fingerprint(each.record["parameters"]) for each in slices}
    parameters = {"stage2": options.to_dict(), "slices": made}
    if (output_dir / METADATA).is_file():
        earlier = DatasetInfo.read(output_dir)
        if earlier.parameters == parameters:
            return earlier
        raise ValueError(_differences(output_dir, earlier.parameters, parameters))
    plan = Plan(slices, options)
    output_dir.mkdir(parents=True, exist_ok=True)
    unfinished = output_dir / f"{FOLDER}.tmp"
    for left in (unfinished, output_dir / FOLDER):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir()
    moments, totals, shards = Moments(len(slices[0].genes)), np.zeros(len(slices[0].genes)), []
    for shard, parts, sums in run(write_shard, plan.tasks(unfinished)):
        shards.append(shard)
        totals += sums
        for part in parts:
            if shard.split == SPLITS[0]:
                moments.merge(part)
    info = DatasetInfo(
        schema=plan.schema(moments, totals),
        shards=tuple(shards),
        unmeasured={each.name: tuple(each.record["unmeasured"]) for each in slices if each.record["unmeasured"]},
        counts=plan.counts,
        parameters=parameters,
    )
    unfinished.rename(output_dir / FOLDER)
    info.write(output_dir)
    return info


def _differences(folder: Path, earlier: dict[str, Any], now: dict[str, Any]) -> str:
    before, after = earlier.get("stage2", {}), now["stage2"]
    differ = [
        f"{name} was {before.get(name)!r}, is {after[name]!r}" for name in after if before.get(name) != after[name]
    ]
    if earlier.get("slices") != now["slices"]:
        differ.append("the slices are others, or were made otherwise")
    return (
        f"{folder} holds a dataset made with other parameters ({'; '.join(differ)}); name another folder, or delete it"
    )
