"""Loaders of batches, from memory or from disk."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from alphastomics.data._batch import collate_raw, encode_batch
from alphastomics.data._contexts import ContextDataset
from alphastomics.data._encode import Encoder
from alphastomics.data._order import RoundRobinSampler, WindowSampler
from alphastomics.data.parquet._dataset import SPLITS, DatasetInfo
from alphastomics.data.parquet._source import BUFFER, ParquetSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from os import PathLike

    from alphastomics.config import Augmentation
    from alphastomics.data._batch import Batch, RawBatch, RawContext
    from alphastomics.data._contexts import Kind

AHEAD = 3  # batches that wait for the network


class ContextLoader:
    """Batches of the epoch that a dataset of contexts is at.

    The position, an epoch and the number of batches of it that were handed out, is kept by :meth:`state_dict`, under the names
    that Lightning asks for; the next pass after :meth:`load_state_dict` begins there.

    Parameters
    ----------
    dataset
        The contexts.
    contexts_per_batch
        Contexts in a batch.
    num_workers
        Processes that cut contexts, each from a part of the tissue of its own.
    rank, world_size
        Number of this process among those that train together; all get equally many batches.
    prefetch
        Without worker processes, whether a thread cuts batches ahead while the network works. Where nothing works
        meanwhile, handing batches from one thread to another only takes time.
    raw
        Whether batches hold expression as it was measured, which :meth:`encode` brings to network units, best on the device
        that trains; network units when False.
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
    ) -> None:
        self.dataset, self.num_workers, self.prefetch, self.is_raw = dataset, num_workers, prefetch, raw
        self._order: WindowSampler | RoundRobinSampler
        if dataset.source.buffer_size is None:  # every process has all cells in memory
            dataset.set_streams(1, contexts_per_batch * world_size if world_size > 1 else 1)
            self._order = RoundRobinSampler(len(dataset), contexts_per_batch, rank=rank, world_size=world_size)
        else:
            n_workers = max(1, num_workers)
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
        """Number of contexts, without padding, that all ranks have in their batch of this number."""
        return self._order.n_real(batch, self.dataset.in_streams)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose contexts are cut next."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"epoch": self.dataset.epoch, "batch": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position."""
        self.dataset.set_epoch(state["epoch"])
        self._done = self._start = state["batch"] % len(self)

    def encode(self, raw: RawBatch) -> Batch:
        """The batch in network units, on the device where it is; the values of ``raw`` are overwritten."""
        return encode_batch(raw, self._encoder)

    def __iter__(self) -> Iterator[RawBatch | Batch]:
        """Batches, from the position on."""
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
            _Raw(self.dataset), batch_sampler=batches, collate_fn=collate_raw, num_workers=self.num_workers
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
        return collate_raw([self.dataset.raw(i) for i in batch])


class _Raw(Dataset["RawContext"]):
    """The contexts of a dataset before their transform, for PyTorch's loader."""

    def __init__(self, dataset: ContextDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> RawContext:
        return self.dataset.raw(index)


def create_dataloaders(
    data_dir: str | PathLike[str],
    batch_size: int = 1024,
    *,
    context_size: int = 512,
    streaming: bool = True,
    buffer_size: int = BUFFER,
    num_workers: int = 0,
    prefetch: bool = True,
    kind: Kind = "subset",
    shuffle: bool = True,
    augmentation: Augmentation | None = None,
    targets: bool = False,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    raw: bool = False,
) -> tuple[ContextLoader | None, ContextLoader | None, ContextLoader | None]:
    """Loaders of the three splits of a dataset; None where a split has no cells.

    The contexts of another epoch are those after ``loader.set_epoch(epoch)``; ``loader.state_dict()`` is the position within
    it, from which ``loader.load_state_dict(state)`` goes on.

    Parameters
    ----------
    data_dir
        Folder that ``alphastomics preprocess`` wrote.
    batch_size
        Number of cells in a batch.
    context_size
        Largest number of cells in a context, and no more than `batch_size`.
    streaming
        Whether contexts are shuffled among `buffer_size` cells; among all of them otherwise.
    buffer_size
        Number of cells whose slices are read at the same time, and among which contexts are shuffled. Files are mapped, so more
        cells take no more memory; fewer keep what is read together where a disk is slow.
    num_workers
        Processes that cut contexts.
    prefetch
        Without worker processes, whether a thread cuts batches ahead while the network works.
    kind
        ``"subset"``: random cells of a slice, each once in an epoch; ``"patch"``: each cell with its nearest ones.
    shuffle
        Whether contexts are cut anew in every epoch and come in random order; otherwise they are always the same, slice by slice.
    augmentation
        Random changes to training contexts; none when None.
    targets
        Whether contexts also hold expression as it was measured, and the local density around each cell.
    seed
        Decides contexts and their order.
    rank, world_size
        Number of this process among those that train together; all get equally many batches, and each cell comes to one.
    raw
        Whether expression is left as it was measured, which is quickest: ``loader.encode(batch)``, on a GPU after
        the batch was brought there, is then what loaders give otherwise.

    Returns
    -------
    Loaders of :class:`~alphastomics.data.Batch`, for training, validation and testing.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is not there or damaged, or an argument is out of range.
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
            patches=False,
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
