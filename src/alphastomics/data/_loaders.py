"""Loaders of batches, from memory or from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from alphastomics.data._batch import collate
from alphastomics.data._contexts import ContextDataset
from alphastomics.data._order import StreamSampler
from alphastomics.data.parquet._dataset import SPLITS, DatasetInfo
from alphastomics.data.parquet._source import BUFFER, ParquetSource

if TYPE_CHECKING:
    from os import PathLike

    from alphastomics.data._batch import Batch
    from alphastomics.data._contexts import Augmentation, Kind


def make_loader(
    dataset: ContextDataset,
    contexts_per_batch: int,
    *,
    num_workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    start: int = 0,
) -> DataLoader[Batch]:
    """Loader of the epoch that a dataset of contexts is at.

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
    start
        Batches of the epoch to leave out.
    """
    n_workers = max(1, num_workers)
    dataset.set_streams(world_size * n_workers, contexts_per_batch)
    order = StreamSampler(
        len(dataset), contexts_per_batch, rank=rank, world_size=world_size, n_workers=n_workers, start=start
    )
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=order, collate_fn=collate, num_workers=num_workers)
    return loader


def create_dataloaders(
    data_dir: str | PathLike[str],
    batch_size: int = 1024,
    *,
    context_size: int = 512,
    streaming: bool = True,
    buffer_size: int = BUFFER,
    num_workers: int = 0,
    kind: Kind = "subset",
    augmentation: Augmentation | None = None,
    targets: bool = False,
    seed: int = 0,
) -> tuple[DataLoader[Batch] | None, DataLoader[Batch] | None, DataLoader[Batch] | None]:
    """Loaders of the three splits of a dataset; None where a split has no cells.

    The contexts of another epoch are those after ``loader.dataset.set_epoch(epoch)``.

    Parameters
    ----------
    data_dir
        Folder that ``alphastomics preprocess`` wrote.
    batch_size
        Number of cells in a batch.
    context_size
        Largest number of cells in a context.
    streaming
        Whether at most `buffer_size` cells are held at once; all of them otherwise.
    buffer_size
        Number of cells whose expression a process holds, and among which contexts are shuffled.
    num_workers
        Processes that cut contexts.
    kind
        ``"subset"``: random cells of a slice, each once in an epoch; ``"patch"``: each cell with its nearest ones.
    augmentation
        Random changes to training contexts; none when None.
    targets
        Whether contexts also hold expression as it was measured, and how crowded the surroundings of a cell are.
    seed
        Decides contexts and their order.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is not there or damaged, or an argument is out of range.
    """
    info = DatasetInfo.read(data_dir)
    found: list[DataLoader[Batch] | None] = []
    for split in SPLITS:
        n_cells = sum(shard.n_cells for shard in info.shards if shard.split == split)
        if not n_cells:
            found.append(None)
            continue
        source = ParquetSource(data_dir, (split,), buffer_size=buffer_size if streaming else n_cells)
        dataset = ContextDataset(
            source,
            context_size=context_size,
            kind=kind,
            seed=seed,
            augmentation=augmentation if split == SPLITS[0] else None,
            targets=targets,
        )
        found.append(make_loader(dataset, max(1, batch_size // context_size), num_workers=num_workers))
    train, validation, test = found
    return train, validation, test
