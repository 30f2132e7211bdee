"""Order of the contexts of an epoch, and of cells along a Hilbert curve.

Contexts are drawn at random, but contexts that need the same cells are drawn within a short time. Cells that are read
together, a slice or a part of a large one, are a *chunk*. Chunks are in random order, and a window of chunks with at
most ``buffer_size`` cells is open at a time; the next context is drawn from those left in the window, and a chunk whose
contexts are all drawn makes room for the next one. With a buffer for all cells, every order has the same probability.

Each process has a *shard*, an equal part of the sequence of chunks, with its own window, so that a slice is read
by one process, or by two at the end of a shard. Padding contexts make all shards equally long: all ranks take as many
steps.

Cells that are close on the Hilbert curve are close in the tissue; the reverse holds for most cells. With b bits per
axis the curve visits the :math:`2^{bD}` cubes of a grid so that consecutive cubes touch. The number of a cube is found
axis by axis from the highest bit down (Skilling 2004, AIP Conf. Proc. 707:381): where a bit is set the lower bits of
the first axis are inverted, else they are exchanged with those of the first axis. The number is the Gray code of the
result, with the bits of the axes interleaved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

PADDING = -1  # number of a context without cells


class Chunk(NamedTuple):
    """Numbers (n,) of contexts that need the same cells, and how many cells these are."""

    contexts: NDArray[np.int64]
    n_cells: int


def shard_sizes(total: int, n: int) -> list[int]:
    """Number of contexts, without padding, in each of ``n`` shards of ``total`` contexts."""
    return np.diff(np.round(np.arange(n + 1) * total / n).astype(int)).tolist()


def cut_shards(chunks: Sequence[Chunk], n: int, multiple: int = 1) -> list[list[Chunk]]:
    """Cut chunks, in reading order, into ``n`` shards with equally many contexts, padded to a multiple of ``multiple``."""
    total = sum(len(chunk.contexts) for chunk in chunks)
    length = -(-total // n)
    length = -(-length // multiple) * multiple
    cut: list[list[Chunk]] = [[] for _ in range(n)]
    ends = np.cumsum(shard_sizes(total, n))
    done, shard = 0, 0
    for chunk in chunks:
        left = chunk.contexts
        while len(left):
            while done >= ends[shard]:
                shard += 1
            part, left = np.split(left, [ends[shard] - done])
            cut[shard].append(Chunk(part, chunk.n_cells))
            done += len(part)
    for each in cut:
        lacking = length - sum(len(chunk.contexts) for chunk in each)
        if lacking:
            each.append(Chunk(np.full(lacking, PADDING), 0))
    return cut


def window_order(chunks: Sequence[Chunk], buffer_size: int | None, rng: np.random.Generator) -> NDArray[np.int64]:
    """Contexts in the order in which they are drawn; padding comes last, so that it changes no draw.

    ``chunks`` are in reading order; the window holds ``buffer_size`` cells, or all when None, but at least one chunk.
    """
    padding = [chunk.contexts for chunk in chunks if not chunk.n_cells]
    chunks = [chunk for chunk in chunks if chunk.n_cells]
    drawn = _drawn(chunks, buffer_size, rng) if chunks else np.empty(0, dtype=np.int64)
    return np.concatenate([drawn, *padding])


def _drawn(chunks: Sequence[Chunk], buffer_size: int | None, rng: np.random.Generator) -> NDArray[np.int64]:
    total = sum(len(chunk.contexts) for chunk in chunks)
    if buffer_size is None or sum(chunk.n_cells for chunk in chunks) <= buffer_size:
        return rng.permutation(np.concatenate([chunk.contexts for chunk in chunks]))
    left = [len(chunk.contexts) for chunk in chunks]
    window, order, n_opened, room = list[tuple[int, int]](), list[int](), 0, buffer_size
    for chance in rng.random(total).tolist():
        while n_opened < len(chunks) and (not window or chunks[n_opened].n_cells <= room):
            window += [(n_opened, context) for context in chunks[n_opened].contexts.tolist()]
            room -= chunks[n_opened].n_cells
            n_opened += 1
        chosen = int(chance * len(window))
        window[chosen], window[-1] = window[-1], window[chosen]
        chunk, context = window.pop()
        order.append(context)
        left[chunk] -= 1
        if not left[chunk]:
            room += chunks[chunk].n_cells
    return np.array(order, dtype=np.int64)


class WindowSampler:
    """Batches of contexts for one rank with shards on disk; ``length`` counts the contexts of all ranks and workers.

    Worker w of W of a rank loads every W-th batch; all batches of a worker come from one shard.
    """

    def __init__(
        self,
        length: int,
        contexts_per_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        n_workers: int = 1,
    ) -> None:
        self.per_shard = length // (world_size * n_workers)
        self.contexts_per_batch, self.rank, self.n_workers = contexts_per_batch, rank, n_workers

    def __len__(self) -> int:
        """Number of batches."""
        return self.n_workers * -(-self.per_shard // self.contexts_per_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of the contexts of every batch."""
        for batch in range(len(self)):
            turn, worker = divmod(batch, self.n_workers)
            first = (self.rank * self.n_workers + worker) * self.per_shard
            low = first + turn * self.contexts_per_batch
            yield list(range(low, min(low + self.contexts_per_batch, first + self.per_shard)))

    def n_real(self, batch: int, in_shards: Sequence[int]) -> int:
        """Number of contexts, without padding, in batch ``batch`` of all ranks; ``in_shards`` are those of each shard."""
        turn, worker = divmod(batch, self.n_workers)
        return _between(in_shards[worker :: self.n_workers], turn * self.contexts_per_batch, self.contexts_per_batch)


class RoundRobinSampler:
    """Batches of contexts for one rank with all cells in memory: rank r of R takes every R-th batch of one sequence.

    In a step, R ranks are trained on the contexts of R steps of a single rank. ``length`` is the number of contexts of an
    epoch, with several ranks a multiple of those in a step.
    """

    def __init__(self, length: int, contexts_per_batch: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.contexts_per_batch, self.rank, self.world_size = length, contexts_per_batch, rank, world_size

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.length // (self.contexts_per_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of the contexts of every batch."""
        for turn in range(len(self)):
            first = (turn * self.world_size + self.rank) * self.contexts_per_batch
            yield list(range(first, min(first + self.contexts_per_batch, self.length)))

    def n_real(self, batch: int, in_shards: Sequence[int]) -> int:
        """Number of contexts, without padding, in batch ``batch`` of all ranks; ``in_shards`` are those of the epoch."""
        together = self.contexts_per_batch * self.world_size
        return _between(in_shards, batch * together, together)


def _between(lengths: Sequence[int], first: int, n: int) -> int:
    """Number of elements at positions from ``first`` to ``first + n`` of sequences of these lengths, summed."""
    return sum(min(max(length - first, 0), n) for length in lengths)


KEY_BITS = 62  # of the number of a cube
AXIS_BITS = 20  # of an axis: a cube is a millionth of the tissue wide


def hilbert_order(position: NDArray[np.floating]) -> NDArray[np.int64]:
    """Row numbers (N,) of cells along the curve through the cube around them; ``position`` (N, D) is finite, D at most 8.

    Cells in one cube of the finest grid keep their order.
    """
    n, n_dims = position.shape
    if n == 0:
        return np.empty(0, dtype=np.int64)
    bits = min(AXIS_BITS, KEY_BITS // n_dims)
    low = position.min(axis=0)
    extent = float((position.max(axis=0) - low).max())
    cubes = 2**bits - 1
    x = np.zeros((n, n_dims)) if extent == 0 else (position - low) / extent
    return np.argsort(hilbert_number(np.minimum(x * cubes, cubes).astype(np.uint64), bits), kind="stable")


def hilbert_number(cube: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Numbers (N,) of cubes (N, D), whose coordinates have ``bits`` bits."""
    x = [axis.copy() for axis in cube.T]
    for bit in range(bits - 1, 0, -1):
        below = np.uint64((1 << bit) - 1)
        for axis in x:
            is_set = (axis >> np.uint64(bit)) & np.uint64(1) == 1
            exchanged = np.where(is_set, np.uint64(0), (x[0] ^ axis) & below)
            x[0] ^= np.where(is_set, below, exchanged)
            axis ^= exchanged
    return _interleaved(_gray(x, bits), bits)


def _gray(x: list[NDArray[np.uint64]], bits: int) -> list[NDArray[np.uint64]]:
    """Gray code of the numbers of a cube on all axes, in place."""
    for before, axis in zip(x, x[1:], strict=False):
        axis ^= before
    turned = np.zeros_like(x[0])
    for bit in range(bits - 1, 0, -1):
        is_set = (x[-1] >> np.uint64(bit)) & np.uint64(1) == 1
        turned ^= np.where(is_set, np.uint64((1 << bit) - 1), np.uint64(0))
    for axis in x:
        axis ^= turned
    return x


def _interleaved(x: list[NDArray[np.uint64]], bits: int) -> NDArray[np.uint64]:
    """One number from the bits of all axes: highest bits first, in the order of the axes."""
    number = np.zeros_like(x[0])
    for bit in range(bits - 1, -1, -1):
        for axis in x:
            number = (number << np.uint64(1)) | ((axis >> np.uint64(bit)) & np.uint64(1))
    return number
