"""Loaders of batches of contexts, from memory or from disk."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from alphastomics.config import DEFAULT_BATCH_SIZE, DEFAULT_CONTEXT_SIZE, RunConfig, TrainingConfig
from alphastomics.data._batch import collate_raw, encode_batch
from alphastomics.data._contexts import ContextDataset
from alphastomics.data._encode import Encoder
from alphastomics.data._order import RoundRobinSampler, WindowSampler
from alphastomics.data.parquet._dataset import SPLITS, DatasetInfo
from alphastomics.data.parquet._source import BUFFER_SIZE, ParquetSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from os import PathLike

    from alphastomics.config import Augmentation
    from alphastomics.data._batch import Batch, DrawFunction, RawBatch, RawContext
    from alphastomics.data._contexts import Kind

AHEAD = 3  # batches that are loaded ahead of the network


class ContextLoader:
    """Iterates over the batches of the current epoch of a dataset of contexts.

    The position, an epoch and the number of its batches that were yielded, is returned by :meth:`state_dict` and restored by
    :meth:`load_state_dict`, which Lightning calls; the next iteration starts there.

    Parameters
    ----------
    dataset
        The contexts.
    contexts_per_batch
        Number of contexts in a batch.
    num_workers
        Number of worker processes that draw contexts; each has its own shard of the cells if the data on disk exceed the
        buffer. 0 draws them in this process.
    rank, world_size
        Rank of this process, and number of processes that train together; all have the same number of batches.
    prefetch
        Without worker processes, whether a thread loads batches ahead, which is faster if the network computes meanwhile.
    raw
        Whether batches are :class:`RawBatch`, with expression in user units, which :meth:`encode` transforms to network
        units on the training device; otherwise they are :class:`Batch`.
    draw
        Function that draws the random numbers of a training step; None: batches have none.
    """

    def __init__(
        self,
        dataset: ContextDataset,
        contexts_per_batch: int,
        *,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        prefetch: bool = True,
        raw: bool = True,
        draw: DrawFunction | None = None,
    ) -> None:
        self.dataset, self.num_workers, self.prefetch, self.is_raw = dataset, num_workers, prefetch, raw
        self._contexts, self._collate = _Raw(dataset, draw), partial(collate_raw, draw=draw)
        self._order: WindowSampler | RoundRobinSampler
        if dataset.source.buffer_size is None:  # every process has all cells in memory
            dataset.set_streams(1, contexts_per_batch * world_size if world_size > 1 else 1)
            self._order = RoundRobinSampler(len(dataset), contexts_per_batch, rank=rank, world_size=world_size)
        else:
            n_cells = sum(len(cells.rows) for cells in dataset.source.slices)
            # Shards of workers are padded to whole batches, which counts if the data are small enough for one window.
            n_workers = 1 if n_cells <= dataset.source.buffer_size else max(1, num_workers)
            dataset.set_streams(world_size * n_workers, contexts_per_batch)
            self._order = WindowSampler(
                len(dataset), contexts_per_batch, rank=rank, world_size=world_size, n_workers=n_workers
            )
        self._done = self._start = 0
        self._encoder = Encoder(dataset.source.schema)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self._order)

    def n_contexts(self, batch: int) -> int:
        """Number of contexts, without padding, in batch number `batch` of all ranks together."""
        return self._order.n_real(batch, self.dataset.in_streams)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and the number of its batches that were yielded."""
        return {"epoch": self.dataset.epoch, "batch": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position at the next iteration."""
        ended = state["batch"] >= len(self)
        self.dataset.set_epoch(state["epoch"] + ended)
        self._done = self._start = 0 if ended else state["batch"]

    def encode(self, raw: RawBatch) -> Batch:
        """Transform a batch to network units, on its device; the values of `raw` are overwritten."""
        return encode_batch(raw, self._encoder)

    def __iter__(self) -> Iterator[RawBatch | Batch]:
        """Yield batches, starting at the position."""
        start, self._start = self._start, 0
        batches = list(self._order)[start:]
        self._done = start
        for batch in self._cut_all(batches):
            self._done += 1
            yield batch if self.is_raw else self.encode(batch)

    def _cut_all(self, batches: Sequence[list[int]]) -> Iterable[RawBatch]:
        if self.num_workers:
            return self._in_processes(batches)
        return self._ahead(batches) if self.prefetch else map(self._cut, batches)

    def _in_processes(self, batches: Sequence[list[int]]) -> DataLoader[RawBatch]:
        loader: DataLoader[Any] = DataLoader(
            self._contexts,
            batch_sampler=batches,
            collate_fn=self._collate,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # the global one is left unchanged
        )
        return loader

    def _ahead(self, batches: Sequence[list[int]]) -> Iterator[RawBatch]:
        waiting: deque[Future[RawBatch]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="contexts") as pool:
            try:
                for batch in batches:
                    waiting.append(pool.submit(self._cut, batch))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for each in waiting:
                    each.cancel()

    def _cut(self, batch: Sequence[int]) -> RawBatch:
        return self._collate([self._contexts[i] for i in batch])


class _Raw(Dataset["RawContext"]):
    """Contexts with expression in user units, and with local density where it is an input of the network."""

    def __init__(self, dataset: ContextDataset, draw: DrawFunction | None) -> None:
        self.dataset, self.draw = dataset, draw

    def __getitem__(self, index: int) -> RawContext:
        return self.dataset.raw(index, given=None if self.draw is None else self.draw.given)


def create_dataloaders(
    data_dir: str | PathLike[str],
    batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    context_size: int = DEFAULT_CONTEXT_SIZE,
    streaming: bool = True,
    buffer_size: int = BUFFER_SIZE,
    num_workers: int = TrainingConfig.num_workers,
    prefetch: bool = True,
    kind: Kind = "subset",
    shuffle: bool = True,
    augmentation: Augmentation | None = None,
    targets: bool = False,
    seed: int = RunConfig.seed,
    rank: int = 0,
    world_size: int = 1,
    raw: bool = False,
) -> tuple[ContextLoader | None, ContextLoader | None, ContextLoader | None]:
    """Loaders of the three splits of a dataset; None where a split has no cells.

    ``loader.set_epoch(epoch)`` sets the epoch; ``loader.state_dict()`` is the position within it, from which
    ``loader.load_state_dict(state)`` continues.

    Parameters
    ----------
    data_dir
        Folder written by ``alphastomics preprocess``.
    batch_size
        Number of cells in a batch.
    context_size
        Largest number of cells in a context, at most `batch_size`.
    streaming
        Whether contexts are shuffled among `buffer_size` cells; among all of them otherwise.
    buffer_size
        Number of cells whose slices are read at the same time, and among which contexts are shuffled. Files are mapped into
        memory, so a larger buffer takes no more memory; a smaller one reads fewer places at a time, for slow disks.
    num_workers
        Number of worker processes that draw contexts; 0 draws them in this process.
    prefetch
        Without worker processes, whether a thread loads batches ahead while the network computes.
    kind
        ``"subset"``: random cells of a slice, each once in an epoch; ``"patch"``: each cell with its nearest ones.
    shuffle
        Whether contexts differ between epochs and are in random order; otherwise they are always the same, slice by slice.
    augmentation
        Random changes to training contexts; none when None.
    targets
        Whether contexts also hold expression without augmentation, and the local density around each cell.
    seed
        Seed of contexts and their order.
    rank, world_size
        Rank of this process, and number of processes that train together; all have the same number of batches, and each
        cell goes to one process.
    raw
        Whether loaders yield :class:`~alphastomics.data.RawBatch`, with expression in user units, which is fastest:
        ``loader.encode(batch)`` transforms a batch to network units, on the device of the batch.

    Returns
    -------
    Loaders of :class:`~alphastomics.data.Batch`, for training, validation and testing.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is missing or damaged, or an argument is out of range.
    """
    info = DatasetInfo.read(data_dir)
    found: list[ContextLoader | None] = []
    for split in SPLITS:
        n_cells = info.n_cells(split)
        if not n_cells:
            found.append(None)
            continue
        source = ParquetSource(data_dir, (split,), buffer_size=buffer_size if streaming else n_cells)
        dataset = ContextDataset(
            source,
            context_size=min(context_size, batch_size),
            kind=kind,
            seed=seed,
            shuffle=shuffle,
            augmentation=augmentation if split == SPLITS[0] else None,
            targets=targets,
        )
        per_batch = max(1, batch_size // context_size)
        found.append(
            ContextLoader(
                dataset,
                per_batch,
                num_workers=num_workers,
                rank=rank,
                world_size=world_size,
                prefetch=prefetch,
                raw=raw,
            )
        )
    train, validation, test = found
    return train, validation, test
