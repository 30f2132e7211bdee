"""Contexts: cells of one slice that the network processes together, and their random changes (augmentation).

Random draws come from generators keyed by (seed, epoch) for the division of slices into contexts and by (seed, epoch,
index) for the augmentation of one context. They do not depend on the process, the worker, or the order of access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from alphastomics._io._errors import format_names
from alphastomics.config import Augmentation, ContextKind
from alphastomics.data._batch import Context, RawContext, empty_context
from alphastomics.data._checks import check_choice
from alphastomics.data._division import DRAW, THIN, Divider, make_generator
from alphastomics.data._encode import NOT_THINNED
from alphastomics.data._local_density import RANKS, local_density

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from alphastomics.data._sources import CellSource

Kind = ContextKind

MIN_DENSITY = 0.25  # smallest share of cells that is kept as neighbors in local density


class ContextDataset(Dataset[Context]):
    """The contexts of one epoch, by number.

    Parameters
    ----------
    source
        The cells.
    context_size
        Largest number of cells in a context.
    kind
        ``"subset"``: each slice is divided at random into contexts of nearly equal size, so that every cell is in one
        context per epoch; see `composition` of :class:`Augmentation`. ``"patch"``: every cell is the center of one
        context, which holds its `context_size` nearest cells in the slice; ties are broken by their order there.
    seed
        A non-negative integer.
    augmentation
        Random changes; none when None.
    slices
        Names of the slices to use; all when None.
    shuffle
        Whether contexts differ between epochs and are in random order; otherwise they are always the same, slice by slice.
    targets
        Whether contexts hold the targets of the prediction of expression: expression without augmentation, and the local
        density around each cell, with augmentation among a random share of the other cells of its slice.

    Raises
    ------
    ValueError
        If a slice is unknown, positions that are needed are missing, or an argument is out of range.
    """

    def __init__(
        self,
        source: CellSource,
        *,
        context_size: int,
        kind: Kind = "subset",
        seed: int,
        augmentation: Augmentation | None = None,
        slices: Sequence[str] | None = None,
        shuffle: bool = True,
        targets: bool = False,
    ) -> None:
        check_choice("kind", kind, ("subset", "patch"))
        if context_size < 1 or seed < 0:
            raise ValueError(f"context_size={context_size} must be positive and seed={seed} not negative.")
        if augmentation is not None and augmentation.thinning and not source.has_counts:
            raise ValueError(NOT_THINNED)
        self.source = source
        self.kind = kind
        self.seed = seed
        self.augmentation = augmentation
        self.targets = targets
        self._slices = _choose_slices(source, slices, kind)
        self._center = {
            i: position.mean(axis=0) for i in self._slices if (position := source.slices[i].position) is not None
        }
        self._divider = Divider(
            source,
            self._slices,
            kind=kind,
            seed=seed,
            shuffle=shuffle,
            composition=augmentation.composition if augmentation else 0.0,
        )
        self.set_context_size(context_size)
        # In shared memory, because workers that are kept between epochs have a copy of everything else.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self._epoch)

    @property
    def largest_slice(self) -> int:
        """Number of cells of the largest slice."""
        return max(len(self.source.slices[i].rows) for i in self._slices)

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch, also for loader workers that are kept between epochs."""
        self._epoch.fill_(epoch)

    def set_context_size(self, context_size: int) -> None:
        """Set the largest number of cells in a context; loaders must be created afterwards."""
        self.context_size = context_size
        self._divider.set_context_size(context_size)

    def set_streams(self, n_streams: int, multiple: int = 1) -> None:
        """Set the number of processes that draw contexts, each from its own shard.

        Shards follow each other and have the same length, a multiple of `multiple`; see
        :mod:`alphastomics.data._order`.
        """
        self._divider.set_streams(n_streams, multiple)

    @property
    def in_streams(self) -> list[int]:
        """Number of contexts in the shard of each process, without padding."""
        return self._divider.in_streams

    def __len__(self) -> int:
        """Number of contexts in an epoch, the same for every epoch."""
        return self._divider.length

    def __getitem__(self, index: int) -> Context:
        """Draw a context of the current epoch."""
        raw = self.raw(index)
        context, gain, shift = raw.context, raw.gain, raw.shift
        if not len(context.rows):
            return context
        encode, target = self.source.encode, context.target
        if self.targets:
            clean = context.expression.copy() if raw.target_factor is None else target
            target = encode(clean, raw.factor if raw.target_factor is None else raw.target_factor, context.slice_index)
        expression = encode(context.expression, raw.factor, context.slice_index) * gain + shift
        return context._replace(expression=expression, target=target)

    def raw(self, index: int, *, given: Callable[[NDArray[np.int64]], bool] | None = None) -> RawContext:
        """Draw a context of the current epoch, with expression in user units; see :meth:`ContextLoader.encode`.

        Local density is 0 if ``given``, a function of the key, is false: positions are then no input of the network.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"Context {index} of {len(self)}.")
        epoch = self.epoch
        key = np.array([self.seed, epoch, index], dtype=np.int64)
        slice_index, cells = self._divider.cells(epoch, index)
        if not len(cells):
            return self._padding(key)
        augmentation = self.augmentation
        # Creating a generator takes a good part of the time of a context, so it is skipped without random changes.
        rng = make_generator(DRAW, self.seed, epoch, index) if augmentation else None
        position, center = self._position(slice_index, cells, rng if augmentation and augmentation.rotate else None)
        present = self.source.measured_in(slice_index)
        change = change_genes(present, augmentation, rng)
        rows = self.source.slices[slice_index].rows.take(cells)
        values, factor = self.source.values(rows, thinning=change.thinning, rng=rng)
        target, target_factor = np.empty((len(rows), 0), dtype=np.float32), None
        if self.targets:
            target = values
            if change.thinning:
                target, target_factor = self.source.values(rows)
        context = Context(
            expression=values,
            position=position,
            measured=change.measured,
            present=present,
            dropout=change.dropout,
            target=target,
            local_density=self._local_density(slice_index, cells, key, known=given is None or given(key)),
            sequence=self._sequence(rows),
            cell_type=self.source.cell_type(rows),
            center=center,
            slice_index=slice_index,
            rows=rows,
            key=key,
        )
        return RawContext(context, factor, target_factor, change.gain, change.shift)

    def _local_density(
        self, slice_index: int, cells: NDArray[np.int64], key: NDArray[np.int64], *, known: bool
    ) -> NDArray[np.float32]:
        """Local density of some cells, with augmentation among a random share of the cells of the slice; 0 unless ``known``."""
        position = self.source.slices[slice_index].position
        if not self.targets or position is None or not known:
            return np.zeros((len(cells), len(RANKS) if self.targets else 0), dtype=np.float32)
        rng = make_generator(THIN, *map(int, key))
        density = rng.uniform(MIN_DENSITY, 1.0) if self.augmentation else 1.0
        return local_density(position, cells, among=rng.random(len(position)) < density)

    def _sequence(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Index (k, 1) of some cells in their order, from 0 so that float32 holds it exactly; (k, 0) without an order."""
        order = self.source.sequence(rows)
        if order is None:
            return np.empty((len(rows), 0), dtype=np.float32)
        return (order - order.min()).astype(np.float32)[:, None]

    def _padding(self, key: NDArray[np.int64]) -> RawContext:
        """A context without cells."""
        schema = self.source.schema
        n_ranks, ordered = len(RANKS) if self.targets else 0, schema.sequence_key is not None
        context = empty_context(schema.n_genes, schema.n_dims, n_ranks, key, sequence=ordered)
        nothing = np.zeros(schema.n_genes, dtype=np.float32)
        return RawContext(context, np.empty(0, dtype=np.float32), None, nothing, nothing)

    def _position(
        self, slice_index: int, cells: NDArray[np.int64], rng: np.random.Generator | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Positions in model units, centered and rotated if ``frame="slice"``, and the center of the slice in that frame."""
        schema = self.source.schema
        position = self.source.slices[slice_index].position
        if position is None:
            return np.full((len(cells), schema.n_dims), np.nan, dtype=np.float32), np.zeros(schema.n_dims, np.float32)
        points, center = position.take(cells, axis=0), self._center[slice_index]
        if schema.frame == "slice":
            middle = np.full(len(cells), 1 / len(cells)) @ points  # quicker than points.mean(axis=0)
            points, center = points - middle, center - middle
            if rng is not None:
                rotation = random_rotation(schema.n_dims, rng)
                points, center = points @ rotation, center @ rotation
        return schema.encode_position(points), schema.encode_position(center)


def _choose_slices(source: CellSource, names: Sequence[str] | None, kind: str) -> list[int]:
    """Numbers of the slices, whose positions must be complete."""
    known = [cells.name for cells in source.slices]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"unknown slices {format_names(unknown)}; choose from {format_names(known)}")
    chosen = [i for i, name in enumerate(known) if names is None or name in names]
    for cells in (source.slices[i] for i in chosen):
        if cells.position is None:
            if kind == "patch":
                raise ValueError('kind="patch" requires positions; pass positions=True, or use kind="subset"')
        elif absent := int(np.isnan(cells.position).any(axis=1).sum()):
            raise ValueError(
                f"Slice {cells.name!r} has {absent} cells without a position; remove them before training, "
                "or pass positions=False."
            )
    if not chosen:
        raise ValueError("slices is empty; pass at least one, or None for all")
    return chosen


class GeneChange(NamedTuple):
    """A random change of the expression of a context.

    ``measured`` (G,) are the genes that are left, ``dropout`` is the share of the genes of the schema that is missing,
    ``thinning`` the share of counts to remove. ``gain`` and ``shift`` (G,) are the same for all cells.
    """

    measured: NDArray[np.bool_]
    dropout: float
    thinning: float
    gain: NDArray[np.float32]
    shift: NDArray[np.float32]


def change_genes(
    present: NDArray[np.bool_], augmentation: Augmentation | None, rng: np.random.Generator | None
) -> GeneChange:
    """Draw a change of the genes of a context; gain and shift contain the factor 1 / sqrt(1 - dropout), as placements do."""
    measured, thinning, noise = present.copy(), 0.0, None
    if augmentation is not None and rng is not None:
        genes = np.flatnonzero(present)
        n_dropped = int(rng.uniform(0.0, augmentation.gene_dropout) * len(genes))
        if n_dropped:
            measured[rng.choice(genes, n_dropped, replace=False)] = False
        thinning = rng.uniform(0.0, augmentation.thinning)
        if strength := np.float32(augmentation.gene_noise):
            noise = rng.standard_normal((2, len(present)), dtype=np.float32) * strength
    n_measured = int(measured.sum())
    dropout = (len(measured) - n_measured) / len(measured) if n_measured else 0.0
    gain = (measured / np.float32(np.sqrt(1 - dropout))).astype(np.float32)
    shift = np.zeros_like(gain)
    if noise is not None:
        gain, shift = (1 + noise[0]) * gain, noise[1] * gain
    return GeneChange(measured, dropout, thinning, gain, shift)


def random_rotation(n_dims: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw uniformly from the orthogonal group: QR of a Gaussian matrix, the signs of R moved to Q (Mezzadri 2007)."""
    q, r = np.linalg.qr(rng.standard_normal((n_dims, n_dims)))
    rotation: NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return rotation
