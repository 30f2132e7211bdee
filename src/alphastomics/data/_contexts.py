"""From slices to contexts, the cells that the network sees at once.

Every random draw comes from a generator keyed by (seed, epoch) for the division into contexts and by (seed, epoch,
index) for what happens to one context. Nothing depends on the process, the worker, or the order of access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.spatial import KDTree
from torch.utils.data import Dataset

from alphastomics.config import Augmentation, ContextKind
from alphastomics.data._batch import Context, RawContext, empty_context
from alphastomics.data._checks import check_choice
from alphastomics.data._encode import Encoder
from alphastomics.data._local_density import RANKS, local_density
from alphastomics.data._order import PADDING, Portion, shares, stretches, windowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data._sources import CellSource

Kind = ContextKind

_DIVIDE, _DRAW, _THIN = 0, 1, 2

PATCH_SIZE = 256  # cells of the neighborhood that comes with every context
N_WAVES, WAVE_NUMBERS = 3, (0.3, 2.0)  # radians per model unit; a slice spans about four units
LOWEST_DENSITY = 0.25  # share of the cells that is left in the thinnest of them


class Division(NamedTuple):
    """The contexts of an epoch.

    Attributes
    ----------
    epoch
        Its number.
    contexts
        Slice and cells of every subset, in a list; slice and center of every patch, in an array.
    sequence
        Their numbers in the order in which they are drawn, -1 for padding.
    """

    epoch: int
    contexts: list[tuple[int, NDArray[np.int64]]] | NDArray[np.int64]
    sequence: NDArray[np.int64]


class GeneChange(NamedTuple):
    """What augmentation does to the expression of a context.

    Attributes
    ----------
    measured
        Genes that are left, (G,).
    dropout
        Share of the measured genes that was dropped.
    thinning
        Share of the counts that is to be removed.
    gain, shift
        Of every gene, the same for all cells, (G,).
    """

    measured: NDArray[np.bool_]
    dropout: float
    thinning: float
    gain: NDArray[np.float32]
    shift: NDArray[np.float32]


class ContextDataset(Dataset[Context]):
    """The contexts of one epoch, by number.

    Parameters
    ----------
    source
        Where cells come from.
    context_size
        Largest number of cells in a context.
    kind
        ``"subset"``: each slice is divided at random into contexts of nearly equal size, so that every cell comes
        exactly once per epoch; see `composition` of :class:`Augmentation`. ``"patch"``: every cell is a center once,
        and a context is its `context_size` nearest cells in the slice; among equally distant cells the first in order
        are taken.
    seed
        A non-negative integer.
    augmentation
        Random changes; none when None.
    slices
        Names of the slices to use; all when None.
    patches
        Whether contexts come with the positions of a neighborhood.
    shuffle
        Whether contexts are cut anew in every epoch and come in random order; otherwise they are always the same, slice by slice.
    targets
        Whether contexts also hold what is needed where expression is to be sampled: expression without augmentation, and
        how crowded the surroundings of a cell are, after a random share of the other cells of its slice was left out.

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
        patches: bool = True,
        shuffle: bool = True,
        targets: bool = False,
    ) -> None:
        check_choice("kind", kind, ("subset", "patch"))
        if context_size < 1 or seed < 0:
            raise ValueError(f"context_size={context_size} must be positive and seed={seed} not negative.")
        if augmentation is not None and augmentation.thinning and not source.has_counts:
            raise ValueError('Only integer counts under transform="log1p" can be thinned; set thinning=0.')
        self.source = source
        self.kind = kind
        self.seed = seed
        self.augmentation = augmentation
        self.patches = patches
        self.shuffle = shuffle
        self.targets = targets
        self._slices = _choose_slices(source, slices, kind)
        self._trees = {i: KDTree(position) for i in self._slices if (position := source.slices[i].position) is not None}
        self._center = {
            i: position.mean(axis=0) for i in self._slices if (position := source.slices[i].position) is not None
        }
        self._encoders: dict[bytes, Encoder] = {}
        self.n_streams = self.multiple = 1
        self.set_context_size(context_size)
        # In shared memory, because workers that outlive an epoch hold their own copy of everything else.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that was last chosen."""
        return int(self._epoch)

    @property
    def largest_slice(self) -> int:
        """Number of cells of the largest slice."""
        return max(len(self.source.slices[i].rows) for i in self._slices)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; loader workers that are kept between epochs see it too."""
        self._epoch.fill_(epoch)

    def set_context_size(self, context_size: int) -> None:
        """Choose the largest number of cells in a context; for loaders that are made from then on."""
        self.context_size = context_size
        self._n_drawn = sum(n for i in self._slices for n in self._n_contexts(i))
        self.set_streams(self.n_streams, self.multiple)

    def set_streams(self, n_streams: int, multiple: int = 1) -> None:
        """Choose how many processes draw contexts, each a stretch of them, and of what its length is a multiple.

        Stretches follow each other, all of the same length; see :mod:`alphastomics.data._order`.
        """
        self.n_streams, self.multiple = n_streams, multiple
        per_stream = -(-self._n_drawn // n_streams)
        self._length = n_streams * multiple * -(-per_stream // multiple)
        self._division: Division | None = None

    @property
    def in_streams(self) -> list[int]:
        """Number of contexts of each process, without padding."""
        return shares(self._n_drawn, self.n_streams)

    def __len__(self) -> int:
        """Number of contexts in an epoch, the same for every epoch."""
        return self._length

    def __getitem__(self, index: int) -> Context:
        """Draw a context of the current epoch."""
        raw = self.raw(index)
        context, gain, shift = raw.context, raw.gain, raw.shift
        if not len(context.rows):
            return context
        encode = self._encoder(context.slice_index)
        target = context.target
        if self.targets:
            clean = context.expression.copy() if raw.target_factor is None else target
            target = encode(clean, raw.factor if raw.target_factor is None else raw.target_factor)
        return context._replace(expression=encode(context.expression, raw.factor) * gain + shift, target=target)

    def raw(self, index: int) -> RawContext:
        """Draw a context of the current epoch, and leave the transform to whoever has the batch."""
        if not 0 <= index < self._length:
            raise IndexError(f"Context {index} of {self._length}.")
        epoch = self.epoch
        slice_index, cells = self._cells(epoch, index)
        if not len(cells):
            return self._padding(epoch, index)
        augmentation = self.augmentation
        # Where nothing is drawn no generator is made: a good part of the time that such a context takes.
        rng = _generator(_DRAW, self.seed, epoch, index) if augmentation or self.patches else None
        position, center = self._position(slice_index, cells, rng if augmentation and augmentation.rotate else None)
        present = self.source.measured_in(slice_index)
        change = _change_genes(present, augmentation, rng)
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
            patch=self._patch(slice_index, rng),
            measured=change.measured,
            present=present,
            dropout=change.dropout,
            target=target,
            local_density=self._local_density(slice_index, cells, epoch, index),
            sequence=self._sequence(rows),
            center=center,
            slice_index=slice_index,
            rows=rows,
            key=np.array([self.seed, epoch, index], dtype=np.int64),
        )
        return RawContext(context, factor, target_factor, change.gain, change.shift)

    def _encoder(self, slice_index: int) -> Encoder:
        present = self.source.measured_in(slice_index)
        key = present.tobytes()
        if key not in self._encoders:
            self._encoders[key] = Encoder(self.source.schema, present)
        return self._encoders[key]

    def _local_density(self, slice_index: int, cells: NDArray[np.int64], epoch: int, index: int) -> NDArray[np.float32]:
        """Give the local density of cells among a random share of the cells of the slice."""
        position = self.source.slices[slice_index].position
        if not self.targets or position is None:
            return np.zeros((len(cells), len(RANKS) if self.targets else 0), dtype=np.float32)
        rng = _generator(_THIN, self.seed, epoch, index)
        density = rng.uniform(LOWEST_DENSITY, 1.0) if self.augmentation else 1.0
        return local_density(position, cells, among=rng.random(len(position)) < density)

    def _sequence(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Index of some cells in their order, from 0, which keeps it exact in single precision; no column without one."""
        order = self.source.sequence(rows)
        if order is None:
            return np.empty((len(rows), 0), dtype=np.float32)
        return (order - order.min()).astype(np.float32)[:, None]

    def _patch(self, slice_index: int, rng: np.random.Generator | None) -> NDArray[np.float32]:
        """Cells around a random one: the nearest at full density, or a random share of more of them."""
        schema = self.source.schema
        if rng is None or slice_index not in self._trees or not self.patches:
            return np.empty((0, schema.n_dims), dtype=np.float32)
        points = self._trees[slice_index].data
        density = rng.uniform(LOWEST_DENSITY, 1.0)
        center = points[rng.integers(len(points))]
        n_near = min(round(PATCH_SIZE / density), len(points))
        near = np.atleast_1d(self._trees[slice_index].query(center, n_near)[1])
        cells = rng.permutation(near)[: max(2, round(density * n_near))]
        return ((points[cells] - center) / schema.scale).astype(np.float32)

    def _padding(self, epoch: int, index: int) -> RawContext:
        """A context without cells."""
        schema, key = self.source.schema, np.array([self.seed, epoch, index], dtype=np.int64)
        n_ranks, ordered = len(RANKS) if self.targets else 0, schema.sequence_key is not None
        context = empty_context(schema.n_genes, schema.n_dims, n_ranks, key, sequence=ordered)
        nothing = np.zeros(schema.n_genes, dtype=np.float32)
        return RawContext(context, np.empty(0, dtype=np.float32), None, nothing, nothing)

    def _n_portions(self, slice_index: int) -> int:
        """Number of parts of a slice that are read one after the other: one, if the buffer holds it."""
        size, pieces = len(self.source.slices[slice_index].rows), self.source.pieces(slice_index)
        if self.kind == "patch":
            return len(pieces)
        return 1 if self.source.buffer_size is None else min(len(pieces), -(-size // self.source.buffer_size))

    def _n_contexts(self, slice_index: int) -> list[int]:
        """Number of contexts of every portion of a slice, the same in every epoch."""
        pieces = self.source.pieces(slice_index)
        if self.kind == "patch":
            return [len(piece) for piece in pieces]
        largest = max(map(len, pieces))
        parts = np.array_split(np.arange(len(pieces)), self._n_portions(slice_index))
        size = len(self.source.slices[slice_index].rows)
        return [-(-min(len(part) * largest, size) // self.context_size) for part in parts]

    def _cells(self, epoch: int, index: int) -> tuple[int, NDArray[np.int64]]:
        """Give the slice of a context and the numbers of its cells within the slice; none for padding."""
        division = self._settled(epoch)
        number = int(division.sequence[index])
        if number == PADDING:
            return 0, np.empty(0, dtype=np.int64)
        slice_index, cells = division.contexts[number]
        if self.kind == "subset":
            return slice_index, cells
        slice_index, center = int(slice_index), int(cells)
        return slice_index, _nearest(self._trees[slice_index], center, self.context_size)

    def _settled(self, epoch: int) -> Division:
        """The contexts of an epoch and their order, found once."""
        division = self._division  # in one piece: another thread may be at another epoch
        if division is None or division.epoch != epoch:
            division = self._division = self._divide(epoch)
        return division

    def _divide(self, epoch: int) -> Division:
        rng = _generator(_DIVIDE, self.seed, epoch if self.shuffle else 0)
        parts: list[tuple[int, NDArray[np.int64]]] | NDArray[np.int64]
        parts, portions = self._centers() if self.kind == "patch" else self._subsets(rng)
        if not self.shuffle:
            streams = stretches(portions, self.n_streams, self.multiple)
            in_order = [portion.contexts for stream in streams for portion in stream]
            return Division(epoch, parts, np.concatenate(in_order))
        if self.n_streams == 1:
            streams = stretches(portions if self._holds(portions) else _shuffled(portions, rng), 1, self.multiple)
        else:
            streams = stretches(_shuffled(portions, rng), self.n_streams, self.multiple)
        buffer_size = None if self.source.buffer_size is None else max(1, self.source.buffer_size // self.n_streams)
        return Division(epoch, parts, np.concatenate([windowed(stream, buffer_size, rng) for stream in streams]))

    def _holds(self, portions: list[Portion]) -> bool:
        return (
            self.source.buffer_size is None or sum(portion.n_cells for portion in portions) <= self.source.buffer_size
        )

    def _subsets(self, rng: np.random.Generator) -> tuple[list[tuple[int, NDArray[np.int64]]], list[Portion]]:
        """Every portion of every slice, divided at random into contexts."""
        contexts: list[tuple[int, NDArray[np.int64]]] = []
        portions = []
        for i in self._slices:
            pieces, counts = self.source.pieces(i), self._n_contexts(i)
            if len(counts) > 1:
                pieces = [pieces[k] for k in rng.permutation(len(pieces))]
            for part, n in zip(np.array_split(np.arange(len(pieces)), len(counts)), counts, strict=True):
                cells = np.concatenate([pieces[k] for k in part])
                # Ascending cells are read faster, and their order carries no meaning.
                divided = np.array_split(cells[self._order(i, cells, rng)], n)
                portions.append(Portion(np.arange(len(contexts), len(contexts) + n), len(cells)))
                contexts.extend((i, np.sort(each)) for each in divided)
        return contexts, portions

    def _centers(self) -> tuple[NDArray[np.int64], list[Portion]]:
        """Every cell of every slice as a center, by the pieces that are read together."""
        centers, portions, done = [], [], 0
        for i in self._slices:
            for piece in self.source.pieces(i):
                centers.append(np.stack([np.full(len(piece), i), piece], axis=1))
                portions.append(Portion(np.arange(done, done + len(piece)), len(piece)))
                done += len(piece)
        return np.concatenate(centers), portions

    def _order(self, slice_index: int, cells: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Order some cells of a slice at random, gathered to some degree by where they lie."""
        position = self.source.slices[slice_index].position
        strength = self.augmentation.composition if self.augmentation else 0.0
        if position is None or not strength:
            return rng.permutation(len(cells))
        field = _smooth_field((position[cells] - self._center[slice_index]) / self.source.schema.scale, rng)
        return np.argsort(rng.uniform(0.0, strength) * field + rng.standard_normal(len(cells)), kind="stable")

    def _position(
        self, slice_index: int, cells: NDArray[np.int64], rng: np.random.Generator | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Give model units, centered and turned where the frame is free, and where the center of the slice then lies."""
        schema = self.source.schema
        position = self.source.slices[slice_index].position
        if position is None:
            return np.full((len(cells), schema.n_dims), np.nan, dtype=np.float32), np.zeros(schema.n_dims, np.float32)
        points, center = position.take(cells, axis=0), self._center[slice_index]
        if schema.frame == "slice":
            middle = np.full(len(cells), 1 / len(cells)) @ points  # quicker than points.mean(axis=0)
            points, center = points - middle, center - middle
            if rng is not None:
                rotation = _random_rotation(schema.n_dims, rng)
                points, center = points @ rotation, center @ rotation
        return schema.encode_position(points), schema.encode_position(center)


def _shuffled(portions: list[Portion], rng: np.random.Generator) -> list[Portion]:
    return [portions[i] for i in rng.permutation(len(portions))]


def _generator(purpose: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(key, spawn_key=(purpose,)))


def _choose_slices(source: CellSource, names: Sequence[str] | None, kind: str) -> list[int]:
    """Number the slices asked for and refuse positions that cannot be trained on."""
    known = [cells.name for cells in source.slices]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"There is no slice {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, known))}.")
    chosen = [i for i, name in enumerate(known) if names is None or name in names]
    for cells in (source.slices[i] for i in chosen):
        if cells.position is None:
            if kind == "patch":
                raise ValueError('kind="patch" needs positions; read them (positions=True) or use kind="subset".')
        elif absent := int(np.isnan(cells.position).any(axis=1).sum()):
            raise ValueError(
                f"Slice {cells.name!r} has {absent} cells without a position; remove them before training, "
                "or read no positions."
            )
    if not chosen:
        raise ValueError("No slice was chosen; pass slices=None for all of them.")
    return chosen


def _nearest(tree: KDTree, center: int, size: int) -> NDArray[np.int64]:
    """Number the cells nearest to a center, itself first, nearer ones first, ties by number."""
    points = tree.data
    reach = np.max(tree.query(points[center], k=min(size, len(points)))[0])
    # The tree settles ties as its leaves lie: take all that could be tied, and order them here.
    found = np.sort(np.asarray(tree.query_ball_point(points[center], reach * (1 + 1e-9)), dtype=np.int64))
    squared = ((points[found] - points[center]) ** 2).sum(axis=1)
    squared[found == center] = -1.0
    return found[np.argsort(squared, kind="stable")[:size]]


def _smooth_field(x: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Random field over positions (N, D) in model units, of unit variance: a few waves as long as a tissue is wide."""
    field = np.zeros(len(x))
    for _ in range(N_WAVES):
        direction = rng.standard_normal(x.shape[1])
        wave = direction * (rng.uniform(*WAVE_NUMBERS) / np.linalg.norm(direction))
        field += np.sin(x @ wave + rng.uniform(0.0, 2 * np.pi))
    deviation = field.std()
    return field / deviation if deviation > 0 else field


def _change_genes(
    present: NDArray[np.bool_], augmentation: Augmentation | None, rng: np.random.Generator | None
) -> GeneChange:
    """Draw what happens to the genes of a context; gain and shift make up for the genes that are dropped."""
    if augmentation is None or rng is None:
        return GeneChange(present, 0.0, 0.0, present.astype(np.float32), np.zeros(len(present), dtype=np.float32))
    measured, genes = present.copy(), np.flatnonzero(present)
    n_dropped = int(rng.uniform(0.0, augmentation.gene_dropout) * len(genes))
    if n_dropped:
        measured[rng.choice(genes, n_dropped, replace=False)] = False
    dropout = n_dropped / len(genes) if n_dropped else 0.0
    thinning = rng.uniform(0.0, augmentation.thinning)
    kept = (measured / np.float32(np.sqrt(1 - dropout))).astype(np.float32)
    gain, shift = kept, np.zeros(len(present), dtype=np.float32)
    if strength := np.float32(augmentation.gene_noise):
        noise = rng.standard_normal((2, len(present)), dtype=np.float32) * strength
        gain, shift = (1 + noise[0]) * kept, noise[1] * kept
    return GeneChange(measured, dropout, thinning, gain, shift)


def _random_rotation(n_dims: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw from the orthogonal group uniformly: QR of Gaussians with the signs of R moved to Q (Mezzadri 2007)."""
    q, r = np.linalg.qr(rng.standard_normal((n_dims, n_dims)))
    rotation: NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return rotation
