"""Plan of stage 2: split of each cell, shards, dense or sparse storage, library size, schema."""

from __future__ import annotations

import logging
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._keys import SLICE, SPATIAL
from alphastomics.data._checks import MIN_CELLS
from alphastomics.data._fit_schema import fit_frame, fit_spacing, floor_scale, measure_extent
from alphastomics.data._plane import find_plane
from alphastomics.data._schema import TissueSchema
from alphastomics.data.parquet._columns import DENSE, POSITION, SIZE, read_position
from alphastomics.data.parquet._dataset import SPLITS
from alphastomics.data.parquet._files import GROUP_VALUES, ROW_GROUP
from alphastomics.data.preprocess._records import joint_kind
from alphastomics.data.preprocess._shards import ShardTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.config import Stage2Options
    from alphastomics.data._matrix import Moments
    from alphastomics.data._schema import ResolvedTransform
    from alphastomics.data._values import ValueKind
    from alphastomics.data.preprocess._shards import Piece
    from alphastomics.data.preprocess._slice import StoredSlice

logger = logging.getLogger(__name__)


def split_slices(
    names: Sequence[str], sizes: Sequence[int], animals: Sequence[str | None], options: Stage2Options
) -> list[NDArray[np.uint8]]:
    """Split (0 training, 1 validation, 2 test) of every cell of every slice; slices are sorted by name.

    Raises ``ValueError`` if ``split="animal"`` and the animal of a slice is unknown, or if only a few of its cells would be
    in the training set.
    """
    if options.split == "cell":
        return _split_cells(names, sizes, options)
    if options.split == "slice":
        units = list(names)
    else:
        unknown = [name for name, animal in zip(names, animals, strict=True) if animal is None]
        if unknown:
            raise ValueError(
                f"split='animal' requires the animal of every slice, and {unknown[0]!r} has none; pass animal_key=…"
            )
        units = [str(animal) for animal in animals]
    kinds = sorted(set(units))
    order = np.random.default_rng(options.seed).permutation(len(kinds))
    code = dict(zip((kinds[i] for i in order), _cut(len(kinds), options).tolist(), strict=True))
    return [np.full(size, code[unit], dtype=np.uint8) for unit, size in zip(units, sizes, strict=True)]


def _cut(n: int, options: Stage2Options) -> NDArray[np.uint8]:
    """Splits of n units in random order, by rounded shares; with enough units no requested split is empty."""
    ends = np.round(np.cumsum([options.train_ratio, options.val_ratio]) * n).astype(int)
    has_validation = int(options.val_ratio > 0)
    has_test = int(options.train_ratio + options.val_ratio < 1 - 1e-9)
    train = max(1, min(ends[0], n - has_validation - has_test))
    known = max(train, min(max(ends[1], train + has_validation), n - has_test))
    return np.repeat(np.arange(3, dtype=np.uint8), [train, known - train, n - known])


def _split_cells(names: Sequence[str], sizes: Sequence[int], options: Stage2Options) -> list[NDArray[np.uint8]]:
    """Random splits of the cells of every slice, with shares rounded so that the totals are exact."""
    total, codes = np.concatenate([[0], np.cumsum(sizes)]), []
    shares = np.array([options.train_ratio, options.train_ratio + options.val_ratio, 1.0])
    ends = np.round(np.outer(total, shares)).astype(np.int64)
    ends[:, 2] = total
    for name, size, before, after in zip(names, sizes, ends[:-1], ends[1:], strict=True):
        # Differences of cumulative ends, so that rounding errors do not add up over slices.
        train = int(after[0] - before[0])
        validation = int(after[1] - before[1]) - train
        if 0 < train < MIN_CELLS:
            raise ValueError(
                f"{train} of the {size} cells of slice {name!r} would be in the training set, fewer than {MIN_CELLS}; remove the "
                "slice, or pass a larger train_ratio=… or split='slice'"
            )
        code = np.repeat(np.arange(3, dtype=np.uint8), [train, validation, size - train - validation])
        rng = np.random.default_rng([options.seed, zlib.crc32(name.encode())])
        codes.append(rng.permutation(code))
    return codes


class Plan:
    """Everything that is computed before a file is written; slices are sorted by name."""

    def __init__(self, slices: Sequence[StoredSlice], options: Stage2Options) -> None:
        self.slices, self.options = slices, options
        self.codes = split_slices(
            [each.name for each in slices],
            [each.n_cells for each in slices],
            [each.record["animal"] for each in slices],
            options,
        )
        n_training = len(self._training_slices())
        if n_training == 1 < len(slices):
            logger.warning(
                "Only 1 of %d slices is in the training set; pass a larger train_ratio=…, or split='cell'.", len(slices)
            )
        counts = [each.is_counts for each in slices]
        stores_counts = all(counts) and not options.scale_per_slice
        self.transform: ResolvedTransform = "log1p" if stores_counts else "none"
        self.log_transform = any(counts) and not stores_counts
        unlogged = [each.record for each in slices if not (self.log_transform and each.is_counts)]
        kinds: set[ValueKind] = {"log-normalized"} if len(unlogged) < len(slices) else set()
        kinds |= {joint_kind(unlogged)} if unlogged else set()
        self.kind: ValueKind | None = kinds.pop() if len(kinds) == 1 and not options.scale_per_slice else None
        self.counts = self.kind == "binary" or (self.kind == "counts" and stores_counts)
        n_values = sum(each.record["n_values"] for each in slices)
        n_cells = sum(each.n_cells for each in slices)
        self.dense = options.scale_per_slice or n_values > DENSE * n_cells * len(slices[0].genes)
        self.share: NDArray[np.float64] = np.empty(0)
        self.library_size: float | None = None
        if any(counts):
            self.share, self.library_size = self._depth()
        self.plane = find_plane(self._positions(), options.frame, SPATIAL) if slices[0].n_dims == 3 else None
        self.extents = {
            name: measure_extent(name, position if self.plane is None else np.delete(position, self.plane[0], axis=1))
            for name, position in self._positions()
        }

    def _depth(self) -> tuple[NDArray[np.float64], float]:
        """Share of every gene in the counts of slices with training cells, and median library size of these over all genes."""
        totals, cells = np.zeros(len(self.slices[0].genes)), np.zeros(len(self.slices[0].genes))
        for each in self._training_slices():
            if each.is_counts:
                totals += each.record["totals"]
                cells += each.n_cells * each.measured
        rate = np.divide(totals, cells, out=np.zeros_like(totals), where=cells > 0)
        if not rate.any():
            raise ValueError("all expression values are zero; check layer=…")
        share = rate / rate.sum()
        sizes, end = np.empty(sum(int((code == 0).sum()) for code in self.codes)), 0
        for each, code in zip(self.slices, self.codes, strict=True):
            if each.is_counts:
                size = each.column(SIZE).column(SIZE).to_numpy()[code == 0]
                size = size[size > 0] / (1.0 if each.measured.all() else share[each.measured].sum())
                sizes[end : end + len(size)] = size
                end += len(size)
        return share, float(np.median(sizes[:end], overwrite_input=True))

    def tasks(self, folder: Path) -> list[ShardTask]:
        """Tasks that write the shards, each of consecutive cells of one split."""
        common: dict[str, Any] = {
            "dense": self.dense,
            "library_size": self.library_size,
            "share": self.share,
            "log_transform": self.log_transform,
            "per_slice": self.options.scale_per_slice,
        }
        tasks = []
        for number, split in enumerate(SPLITS):
            shards = self._shards(number)
            for i, pieces in enumerate(shards):
                name = f"{split}.parquet" if len(shards) == 1 else f"{split}-{i:05d}.parquet"
                tasks.append(ShardTask(target=folder / name, split=split, pieces=pieces, **common))
        return tasks

    def _shards(self, number: int) -> list[tuple[Piece, ...]]:
        """Pieces of the files of a split."""
        max_cells = max(1, GROUP_VALUES // len(self.slices[0].genes))
        group_size = min(ROW_GROUP, max_cells, self.options.max_shard_size)
        shards: list[list[tuple[StoredSlice, list[NDArray[np.integer]]]]] = []
        room = 0
        for stored, code in zip(self.slices, self.codes, strict=True):
            rows = np.flatnonzero(code == number).astype(np.int32)
            for group in np.array_split(rows, -(-len(rows) // group_size)) if len(rows) else ():
                if len(group) > room:
                    shards.append([])
                    room = self.options.max_shard_size
                if not shards[-1] or shards[-1][-1][0] is not stored:
                    shards[-1].append((stored, []))
                shards[-1][-1][1].append(group)
                room -= len(group)
        return [tuple((stored, tuple(groups)) for stored, groups in shard) for shard in shards]

    def _training_slices(self) -> list[StoredSlice]:
        """The slices that have training cells."""
        return [each for each, code in zip(self.slices, self.codes, strict=True) if (code == 0).any()]

    def _positions(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Name and positions (n, D) of the training cells of each slice."""
        for each, code in zip(self.slices, self.codes, strict=True):
            if (code == 0).any():
                yield each.name, read_position(each.column(POSITION))[code == 0, : each.n_dims]

    def schema(self, moments: Moments, totals: NDArray[np.float64]) -> TissueSchema:
        """The schema, fitted to the training cells."""
        first = self.slices[0]
        n_dims = first.n_dims if self.plane is None else 2
        scale, center = fit_frame(self.extents, self.options.frame)
        if not self.options.normalize_position:
            scale, center = 1.0, (0.0,) * n_dims
        log1p = self.transform == "log1p"
        complete = all(each.measured.all() for each in self.slices)
        share = totals / totals.sum() if complete and log1p else self.share
        scaled = self.options.scale and not self.options.scale_per_slice
        labels = sorted({label for each in self._training_slices() for label in each.record["labels"]})
        return TissueSchema(
            genes=first.genes,
            transform=self.transform,
            library_size=self.library_size if log1p else None,
            gene_mean=tuple(moments.mean.tolist() if scaled else [0.0] * len(first.genes)),
            gene_scale=tuple(floor_scale(moments.sd).tolist() if scaled else [1.0] * len(first.genes)),
            gene_share=tuple(share.tolist()) if log1p else (),
            frame=self.options.frame,
            n_dims=n_dims,
            scale=scale,
            spacing=fit_spacing(self.extents),
            center=center,
            slices=tuple(self.extents),
            cell_types=tuple(labels),
            position_key=SPATIAL,
            slice_key=SLICE,
            cell_type_key="cell_type" if labels else None,
            layer=None,
            sequence_key=None,
            value_kind=self.kind,
            plane=self.plane,
        )
