"""Loaders of batches from a dataset that is streamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alphastomics.data.hub._errors import explained, require
from alphastomics.data.hub._stream import StreamedContexts
from alphastomics.data.parquet._dataset import FOLDER, METADATA, SPLITS, DatasetInfo
from alphastomics.data.parquet._files import open_parquet
from alphastomics.data.parquet._source import BUFFER

if TYPE_CHECKING:
    from os import PathLike

    from torch.utils.data import DataLoader

    from alphastomics.config import Augmentation
    from alphastomics.data._batch import Batch
    from alphastomics.data._contexts import Kind

TYPE = "dataset"


def read_info(source: str | PathLike[str], *, revision: str | None = None, endpoint: str | None = None) -> DatasetInfo:
    """What ``metadata.json`` of a dataset says; that of the Hub is kept in the cache of huggingface_hub.

    Parameters
    ----------
    source
        A folder, or ``"organization/name"`` on the Hub.
    revision
        Branch, tag or commit on the Hub; ``main`` when None.
    endpoint
        Address of the Hub; that of ``HF_ENDPOINT`` when None.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    ValueError
        If it describes no dataset that this version reads.
    OSError
        If it is not there, or the Hub cannot be reached.
    """
    if Path(source).is_dir():
        return DatasetInfo.read(source)
    require("huggingface_hub")
    from huggingface_hub import hf_hub_download

    with explained(str(source), "read"):
        path = hf_hub_download(str(source), METADATA, repo_type=TYPE, revision=revision, endpoint=endpoint)
    return DatasetInfo.read(Path(path).parent, check=False)


def create_dataloaders(
    source: str | PathLike[str],
    batch_size: int = 1024,
    *,
    context_size: int = 512,
    buffer_size: int = BUFFER,
    num_workers: int = 0,
    kind: Kind = "subset",
    augmentation: Augmentation | None = None,
    targets: bool = False,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    revision: str | None = None,
) -> tuple[DataLoader[Batch] | None, DataLoader[Batch] | None, DataLoader[Batch] | None]:
    """Loaders of the three splits of a dataset on the Hub, which is read as it comes; None where a split has no cells.

    The contexts of another epoch are those after ``loader.dataset.set_epoch(epoch)``. From a disk,
    :func:`alphastomics.data.create_dataloaders` reads in any order, and is faster.

    Parameters
    ----------
    source
        ``"organization/name"`` on the Hub, or a folder.
    batch_size
        Number of cells in a batch.
    context_size
        Largest number of cells in a context.
    buffer_size
        Number of cells that a process holds, and among which contexts are shuffled; see :class:`StreamedContexts`.
    num_workers
        Processes that read and cut contexts.
    kind
        ``"subset"``: random cells of a slice, each once in an epoch; ``"patch"``: each cell with its nearest ones.
    augmentation
        Random changes to training contexts; none when None.
    targets
        Whether contexts also hold expression as it was measured, and how crowded the surroundings of a cell are.
    seed
        Decides contexts and their order.
    rank, world_size
        Number of this process among those that train together; all get equally many batches.
    revision
        Branch, tag or commit on the Hub; ``main`` when None.

    Raises
    ------
    ImportError
        If datasets is not installed.
    ValueError
        If the dataset is damaged, or an argument is out of range.
    OSError
        If the dataset is not there, or the Hub cannot be reached.
    """
    require("datasets")
    import datasets

    info = read_info(source, revision=revision)
    files = {split: [f"{FOLDER}/{shard.file}" for shard in info.shards if shard.split == split] for split in SPLITS}
    files = {split: names for split, names in files.items() if names}
    if Path(source).is_dir():
        files = {split: [str(Path(source).absolute() / name) for name in names] for split, names in files.items()}
        for path in (path for paths in files.values() for path in paths):
            open_parquet(Path(path)).close()
        found = datasets.load_dataset("parquet", data_files=files, streaming=True)
    else:
        with explained(str(source), "read"):
            found = datasets.load_dataset(str(source), data_files=files, revision=revision, streaming=True)
    loaders: list[DataLoader[Batch] | None] = []
    for split in SPLITS:
        if split not in files:
            loaders.append(None)
            continue
        contexts = StreamedContexts(
            found[split],
            info,
            split,
            context_size=context_size,
            kind=kind,
            seed=seed,
            augmentation=augmentation if split == SPLITS[0] else None,
            targets=targets,
            buffer_size=buffer_size,
        )
        loaders.append(contexts.loader(batch_size, num_workers=num_workers, rank=rank, world_size=world_size))
    train, validation, test = loaders
    return train, validation, test
