"""Division of slices into the contexts of an epoch, and the order in which contexts are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.spatial import KDTree

from alphastomics.data._order import PADDING, Chunk, cut_shards, shard_sizes, window_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data._sources import CellSource

DIVIDE, DRAW, THIN = 0, 1, 2  # purposes of generators
N_WAVES, WAVE_NUMBERS = 3, (0.3, 2.0)  # radians per model unit; a slice spans about four units


class Division(NamedTuple):
    """The contexts of an epoch.

    ``contexts`` is a list of the slice and the cells of every subset, or an array of the slice and the center of every
    patch. ``sequence`` holds their numbers in the order in which they are drawn, -1 for padding.
    """

    epoch: int
    contexts: list[tuple[int, NDArray[np.int64]]] | NDArray[np.int64]
    sequence: NDArray[np.int64]


class Divider:
    """Divides slices into contexts, anew for each epoch; arguments as in :class:`~alphastomics.data.ContextDataset`.

    ``slices`` are numbers of slices.
    """

    def __init__(
        self,
        source: CellSource,
        slices: Sequence[int],
        *,
        kind: str,
        seed: int,
        shuffle: bool,
        composition: float,
    ) -> None:
        self.source, self.slices = source, slices
        self.kind, self.seed, self.shuffle, self.composition = kind, seed, shuffle, composition
        self.context_size = self.n_streams = self.multiple = 1
        self.trees = {i: KDTree(source.slices[i].position) for i in slices} if kind == "patch" else {}

    def set_context_size(self, context_size: int) -> None:
        """Set the largest number of cells in a context."""
        self.context_size = context_size
        self._n_drawn = sum(n for i in self.slices for n in self._n_contexts(i))
        self.set_streams(self.n_streams, self.multiple)

    def set_streams(self, n_streams: int, multiple: int) -> None:
        """Set the number of shards, and a number of which their lengths are multiples."""
        self.n_streams, self.multiple = n_streams, multiple
        per_stream = -(-self._n_drawn // n_streams)
        self.length = n_streams * multiple * -(-per_stream // multiple)
        self._division: Division | None = None

    @property
    def in_streams(self) -> list[int]:
        """Number of contexts of each shard, without padding."""
        return shard_sizes(self._n_drawn, self.n_streams)

    def cells(self, epoch: int, index: int) -> tuple[int, NDArray[np.int64]]:
        """Slice of a context, and the numbers of its cells within the slice; no cells for padding."""
        division = self._division_of(epoch)
        number = int(division.sequence[index])
        if number == PADDING:
            return 0, np.empty(0, dtype=np.int64)
        slice_index, cells = division.contexts[number]
        if self.kind == "subset":
            return slice_index, cells
        slice_index, center = int(slice_index), int(cells)
        return slice_index, _nearest(self.trees[slice_index], center, self.context_size)

    def _division_of(self, epoch: int) -> Division:
        """The division of an epoch, computed once."""
        division = self._division  # read once: another thread may replace it with that of another epoch
        if division is None or division.epoch != epoch:
            division = self._division = self._divide(epoch)
        return division

    def _divide(self, epoch: int) -> Division:
        rng = make_generator(DIVIDE, self.seed, epoch if self.shuffle else 0)
        parts: list[tuple[int, NDArray[np.int64]]] | NDArray[np.int64]
        parts, chunks = self._centers() if self.kind == "patch" else self._subsets(rng)
        if not self.shuffle:
            shards = cut_shards(chunks, self.n_streams, self.multiple)
            in_order = [chunk.contexts for shard in shards for chunk in shard]
            return Division(epoch, parts, np.concatenate(in_order))
        if self.n_streams == 1:
            shards = cut_shards(chunks if self._fits_in_buffer(chunks) else _shuffled(chunks, rng), 1, self.multiple)
        else:
            shards = cut_shards(_shuffled(chunks, rng), self.n_streams, self.multiple)
        buffer_size = None if self.source.buffer_size is None else max(1, self.source.buffer_size // self.n_streams)
        return Division(epoch, parts, np.concatenate([window_order(shard, buffer_size, rng) for shard in shards]))

    def _fits_in_buffer(self, chunks: list[Chunk]) -> bool:
        return self.source.buffer_size is None or sum(chunk.n_cells for chunk in chunks) <= self.source.buffer_size

    def _subsets(self, rng: np.random.Generator) -> tuple[list[tuple[int, NDArray[np.int64]]], list[Chunk]]:
        """Every chunk of every slice, divided at random into contexts."""
        contexts: list[tuple[int, NDArray[np.int64]]] = []
        chunks = []
        for i in self.slices:
            pieces, counts = self.source.pieces(i), self._n_contexts(i)
            if len(counts) > 1:
                pieces = [pieces[k] for k in rng.permutation(len(pieces))]
            for part, n in zip(np.array_split(np.arange(len(pieces)), len(counts)), counts, strict=True):
                cells = np.concatenate([pieces[k] for k in part])
                # Sorted, because ascending cells are read faster and their order has no meaning.
                divided = np.array_split(cells[self._order(i, cells, rng)], n)
                chunks.append(Chunk(np.arange(len(contexts), len(contexts) + n), len(cells)))
                contexts.extend((i, np.sort(each)) for each in divided)
        return contexts, chunks

    def _centers(self) -> tuple[NDArray[np.int64], list[Chunk]]:
        """Every cell of every slice as a center, grouped by the pieces that are read together."""
        centers, chunks, done = [], [], 0
        for i in self.slices:
            for piece in self.source.pieces(i):
                centers.append(np.stack([np.full(len(piece), i), piece], axis=1))
                chunks.append(Chunk(np.arange(done, done + len(piece)), len(piece)))
                done += len(piece)
        return np.concatenate(centers), chunks

    def _n_chunks(self, slice_index: int) -> int:
        """Number of parts of a slice that are read one after the other; 1 if the slice fits into the buffer."""
        size, pieces = len(self.source.slices[slice_index].rows), self.source.pieces(slice_index)
        return 1 if self.source.buffer_size is None else min(len(pieces), -(-size // self.source.buffer_size))

    def _n_contexts(self, slice_index: int) -> list[int]:
        """Number of contexts of every chunk of a slice, the same in every epoch."""
        pieces = self.source.pieces(slice_index)
        if self.kind == "patch":
            return [len(piece) for piece in pieces]
        largest = max(map(len, pieces))
        parts = np.array_split(np.arange(len(pieces)), self._n_chunks(slice_index))
        size = len(self.source.slices[slice_index].rows)
        return [-(-min(len(part) * largest, size) // self.context_size) for part in parts]

    def _order(self, slice_index: int, cells: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Random order of some cells of a slice, in which ``composition`` brings nearby cells together."""
        position = self.source.slices[slice_index].position
        if position is None or not self.composition:
            return rng.permutation(len(cells))
        field = _smooth_field((position[cells] - position.mean(axis=0)) / self.source.schema.scale, rng)
        return np.argsort(rng.uniform(0.0, self.composition) * field + rng.standard_normal(len(cells)), kind="stable")


def _shuffled(chunks: list[Chunk], rng: np.random.Generator) -> list[Chunk]:
    return [chunks[i] for i in rng.permutation(len(chunks))]


def make_generator(purpose: int, *key: int) -> np.random.Generator:
    """Create a generator that depends on nothing but its purpose and key."""
    return np.random.default_rng(np.random.SeedSequence(key, spawn_key=(purpose,)))


def _nearest(tree: KDTree, center: int, size: int) -> NDArray[np.int64]:
    """Numbers of the cells nearest to a center: the center first, then by distance, ties by number."""
    points = tree.data
    reach = np.max(tree.query(points[center], k=min(size, len(points)))[0])
    # The tree breaks ties by its own layout: take all cells that could be tied, and sort them here.
    found = np.sort(np.asarray(tree.query_ball_point(points[center], reach * (1 + 1e-9)), dtype=np.int64))
    squared = ((points[found] - points[center]) ** 2).sum(axis=1)
    squared[found == center] = -1.0
    return found[np.argsort(squared, kind="stable")[:size]]


def _smooth_field(x: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Random field over positions (N, D) in model units, of unit variance: a sum of waves about as long as a tissue is wide."""
    field = np.zeros(len(x))
    for _ in range(N_WAVES):
        direction = rng.standard_normal(x.shape[1])
        wave = direction * (rng.uniform(*WAVE_NUMBERS) / np.linalg.norm(direction))
        field += np.sin(x @ wave + rng.uniform(0.0, 2 * np.pi))
    deviation = field.std()
    return field / deviation if deviation > 0 else field
