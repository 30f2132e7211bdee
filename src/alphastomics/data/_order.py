r"""The order in which the contexts of an epoch are drawn: at random, and so that what is read lasts for a while.

What is read together, a slice or a part of a large one, is a *portion*. Portions are put in random order. A window of them,
no more cells than the buffer holds, is open at a time; the next context is any of those that are left in the window, and a
portion without contexts makes room for the next. A buffer that holds everything gives every order the same chance.

Processes take equal stretches of the sequence of portions, each with a window of its own, so that a slice is read by one of
them, or by two where a stretch ends. Contexts of padding at its end make a stretch as long as the others: all ranks take as
many steps.

Order of cells along a Hilbert curve: cells that are near in it are near in the tissue, and mostly the other way round.

With b bits per axis the curve visits the :math:`2^{bD}` cubes of a grid so that consecutive cubes touch. The number of a
cube is found axis by axis from the highest bit down (Skilling 2004, AIP Conf. Proc. 707:381): where a bit is set the lower
bits of the first axis are turned over, else they are exchanged with those of the first axis; a Gray code of what is left,
its bits interleaved, is the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

PADDING = -1  # number of a context without cells


class Portion(NamedTuple):
    """Contexts that need the same cells.

    Attributes
    ----------
    contexts
        Their numbers, (n,).
    n_cells
        How many cells they need.
    """

    contexts: NDArray[np.int64]
    n_cells: int


def shares(total: int, n: int) -> list[int]:
    """Number of contexts, without padding, in each of ``n`` stretches of ``total`` of them."""
    return np.diff(np.round(np.arange(n + 1) * total / n).astype(int)).tolist()


def stretches(portions: Sequence[Portion], n: int, multiple: int = 1) -> list[list[Portion]]:
    """Cut a sequence of portions into ``n`` stretches with equally many contexts, padded to a multiple.

    Parameters
    ----------
    portions
        In the order in which they are read.
    n
        Number of stretches.
    multiple
        Of which the number of contexts of a stretch is.
    """
    total = sum(len(portion.contexts) for portion in portions)
    length = -(-total // n)
    length = -(-length // multiple) * multiple
    cut: list[list[Portion]] = [[] for _ in range(n)]
    ends = np.cumsum(shares(total, n))
    done, stretch = 0, 0
    for portion in portions:
        left = portion.contexts
        while len(left):
            while done >= ends[stretch]:
                stretch += 1
            part, left = np.split(left, [ends[stretch] - done])
            cut[stretch].append(Portion(part, portion.n_cells))
            done += len(part)
    for each in cut:
        lacking = length - sum(len(portion.contexts) for portion in each)
        if lacking:
            each.append(Portion(np.full(lacking, PADDING), 0))
    return cut


def windowed(portions: Sequence[Portion], buffer_size: int | None, rng: np.random.Generator) -> NDArray[np.int64]:
    """Contexts in the order in which they are drawn; padding comes last, so that it moves no draw.

    Parameters
    ----------
    portions
        In the order in which they are read.
    buffer_size
        Number of cells that are held at once, at least one portion; None holds everything.
    rng
        Where the draws come from.
    """
    padding = [portion.contexts for portion in portions if not portion.n_cells]
    portions = [portion for portion in portions if portion.n_cells]
    drawn = _drawn(portions, buffer_size, rng) if portions else np.empty(0, dtype=np.int64)
    return np.concatenate([drawn, *padding])


def _drawn(portions: Sequence[Portion], buffer_size: int | None, rng: np.random.Generator) -> NDArray[np.int64]:
    total = sum(len(portion.contexts) for portion in portions)
    if buffer_size is None or sum(portion.n_cells for portion in portions) <= buffer_size:
        return rng.permutation(np.concatenate([portion.contexts for portion in portions]))
    left = [len(portion.contexts) for portion in portions]
    window, order, n_opened, room = list[tuple[int, int]](), list[int](), 0, buffer_size
    for chance in rng.random(total).tolist():
        while n_opened < len(portions) and (not window or portions[n_opened].n_cells <= room):
            window += [(n_opened, context) for context in portions[n_opened].contexts.tolist()]
            room -= portions[n_opened].n_cells
            n_opened += 1
        chosen = int(chance * len(window))
        window[chosen], window[-1] = window[-1], window[chosen]
        portion, context = window.pop()
        order.append(context)
        left[portion] -= 1
        if not left[portion]:
            room += portions[portion].n_cells
    return np.array(order, dtype=np.int64)


class WindowSampler:
    """Batches of contexts for one rank, turn and turn about for the processes that load them.

    Process w of W of a rank cuts every W-th batch; all batches of a process come from one stretch, so that what it reads
    serves it again.

    Parameters
    ----------
    length
        Number of contexts of an epoch, all ranks and processes together.
    contexts_per_batch
        Contexts in a batch.
    rank, world_size
        Number of this rank, and of all.
    n_workers
        Processes that load for a rank, at least one.
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
        self.per_stretch = length // (world_size * n_workers)
        self.contexts_per_batch, self.rank, self.n_workers = contexts_per_batch, rank, n_workers

    def __len__(self) -> int:
        """Number of batches."""
        return self.n_workers * -(-self.per_stretch // self.contexts_per_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of the contexts of every batch."""
        for batch in range(len(self)):
            turn, worker = divmod(batch, self.n_workers)
            first = (self.rank * self.n_workers + worker) * self.per_stretch
            low = first + turn * self.contexts_per_batch
            yield list(range(low, min(low + self.contexts_per_batch, first + self.per_stretch)))

    def n_real(self, batch: int, in_stretch: Sequence[int]) -> int:
        """Number of contexts of all ranks in their batch of this number; ``in_stretch`` are those of each stretch."""
        turn, worker = divmod(batch, self.n_workers)
        return _between(in_stretch[worker :: self.n_workers], turn * self.contexts_per_batch, self.contexts_per_batch)


class RoundRobinSampler:
    """Batches of contexts for one rank where all ranks have all cells: rank r of R takes every R-th batch of one sequence.

    The contexts that R ranks see in a step are those of R steps of a single one.

    Parameters
    ----------
    length
        Number of contexts of an epoch, a multiple of what all ranks see in a step where there are several.
    contexts_per_batch
        Contexts in a batch.
    rank, world_size
        Number of this rank, and of all.
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

    def n_real(self, batch: int, in_stretch: Sequence[int]) -> int:
        """Number of contexts of all ranks in their batch of this number; ``in_stretch`` are all of the epoch."""
        together = self.contexts_per_batch * self.world_size
        return _between(in_stretch, batch * together, together)


def _between(lengths: Sequence[int], first: int, n: int) -> int:
    """How many of ``n`` places from ``first`` on are taken, in sequences of these lengths together."""
    return sum(min(max(length - first, 0), n) for length in lengths)


KEY_BITS = 62  # of a number, in all axes
AXIS_BITS = 20  # of an axis: a millionth of the tissue


def hilbert_order(position: NDArray[np.floating]) -> NDArray[np.int64]:
    """Order of cells along the curve through the cube around them.

    Parameters
    ----------
    position
        (N, D), finite, D at most 8.

    Returns
    -------
    Row numbers (N,); cells in one cube of the finest grid keep their order.
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
    """Gray code of the axes, in place."""
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
    """One number of the bits of all axes, highest bits first, the first axis before the others."""
    number = np.zeros_like(x[0])
    for bit in range(bits - 1, -1, -1):
        for axis in x:
            number = (number << np.uint64(1)) | ((axis >> np.uint64(bit)) & np.uint64(1))
    return number
