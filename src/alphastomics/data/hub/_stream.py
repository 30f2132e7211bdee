"""Contexts cut while a dataset is streamed.

A stream is read from the beginning of a file to its end. What ``metadata.json`` says of the files is enough to plan an epoch
before anything is read: files follow each other in random order, what a file holds of a slice is a portion, portions are
divided among ranks and their workers as in :mod:`alphastomics.data._order`, and every process draws its contexts from a
window of portions, ``buffer_size`` cells, that moves along its files. Which cells a context holds, and what happens to them,
depends on seed, epoch and portion alone: not on the number of processes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from alphastomics.data._batch import Context, collate, empty_context
from alphastomics.data._checks import check_choice
from alphastomics.data._contexts import ContextDataset
from alphastomics.data._local_density import RANKS
from alphastomics.data._order import PADDING, Portion, stretches, windowed
from alphastomics.data.hub._portion import StretchSource, check_slice, plan_stretches
from alphastomics.data.parquet._files import ROW_GROUP
from alphastomics.data.parquet._source import BUFFER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    import datasets
    from alphastomics.config import Augmentation
    from alphastomics.data._batch import Batch
    from alphastomics.data._contexts import Kind
    from alphastomics.data.hub._portion import Stretch
    from alphastomics.data.parquet._dataset import DatasetInfo


class StreamedContexts(IterableDataset[Context]):
    """The contexts of one epoch, in the order in which a process gets them.

    Rows of a context are numbers of cells in the split, its files in the order of ``metadata.json``.

    Parameters
    ----------
    cells
        A split, as ``datasets.load_dataset(..., streaming=True)`` gives it: neither filtered nor shuffled.
    info
        What ``metadata.json`` says, from :func:`~alphastomics.data.hub.read_info`.
    split
        Which split `cells` is.
    context_size
        Largest number of cells in a context.
    kind
        ``"subset"``: random cells of a slice, each once in an epoch; ``"patch"``: each cell with its nearest ones.
    seed
        Decides contexts and their order.
    augmentation
        Random changes; none when None.
    targets
        Whether contexts also hold expression as it was measured, and how crowded the surroundings of a cell are.
    buffer_size
        Number of cells that a process holds, and among which contexts are shuffled. What a file holds of a slice is cut
        where it is more, and each part counts as a slice.

    Raises
    ------
    ValueError
        If the dataset has no such split or `cells` has another number of files, or an argument is out of range.
    """

    def __init__(
        self,
        cells: datasets.IterableDataset,
        info: DatasetInfo,
        split: str = "train",
        *,
        context_size: int = 512,
        kind: Kind = "subset",
        seed: int = 0,
        augmentation: Augmentation | None = None,
        targets: bool = False,
        buffer_size: int = BUFFER,
    ) -> None:
        shards = [shard for shard in info.shards if shard.split == split]
        if not shards:
            raise ValueError(f"the dataset has no cells for {split}")
        if (n_files := getattr(cells, "num_shards", None)) != len(shards):
            raise ValueError(
                f"cells streams {n_files} files and the split {split!r} has {len(shards)}; pass the split as "
                "datasets.load_dataset(..., streaming=True) gives it"
            )
        check_choice("kind", kind, ("subset", "patch"))
        if min(context_size, buffer_size) < 1 or seed < 0:
            raise ValueError(f"{context_size=} and {buffer_size=} must be positive and {seed=} not negative")
        if augmentation is not None and augmentation.thinning and not info.counts:
            raise ValueError('Only integer counts under transform="log1p" can be thinned; set thinning=0.')
        self.cells = cells.with_format("arrow")
        self.info, self.split, self.seed = info, split, seed
        self.buffer_size, self.targets = buffer_size, targets
        self._options: dict[str, Any] = {
            "context_size": context_size,
            "kind": kind,
            "augmentation": augmentation,
            "targets": targets,
        }
        self._names = [shard.file for shard in shards]
        self._slices = {
            name: i for i, name in enumerate(sorted({name for shard in shards for name, _ in shard.groups}))
        }
        self._files = plan_stretches(shards, buffer_size)
        per_context = 1 if kind == "patch" else context_size
        self._n_contexts = {each.start: -(-each.n_cells // per_context) for file in self._files for each in file}
        # In shared memory, because workers that outlive an epoch hold their own copy of everything else.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.set_streams(1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; loader workers that are kept between epochs see it too."""
        self._epoch.fill_(epoch)

    def set_streams(
        self, contexts_per_batch: int, *, num_workers: int = 0, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> None:
        """Choose who draws which contexts.

        Parameters
        ----------
        contexts_per_batch
            Contexts in a batch.
        num_workers
            Processes of the loader.
        rank, world_size
            Number of this process among those that train together; all get equally many contexts.
        start
            Batches of the epoch to leave out: where an interrupted epoch goes on.
        """
        self.contexts_per_batch, self.n_workers = contexts_per_batch, max(1, num_workers)
        self.rank, self.world_size, self.start = rank, world_size, start
        n_streams = world_size * self.n_workers
        per_stream = -(-sum(self._n_contexts.values()) // n_streams)
        self._batches = self.n_workers * -(-per_stream // contexts_per_batch)

    def loader(
        self, batch_size: int = 1024, *, num_workers: int = 0, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> DataLoader[Batch]:
        """Loader of batches of ``batch_size`` cells; for the other arguments see :meth:`set_streams`."""
        contexts_per_batch = max(1, batch_size // self._options["context_size"])
        self.set_streams(contexts_per_batch, num_workers=num_workers, rank=rank, world_size=world_size, start=start)
        loader: DataLoader[Any] = DataLoader(
            self, batch_size=contexts_per_batch, collate_fn=collate, num_workers=num_workers
        )
        return loader

    def __len__(self) -> int:
        """Number of contexts that this rank gets in an epoch, those of padding too."""
        return max(0, self._batches - self.start) * self.contexts_per_batch

    def __iter__(self) -> Iterator[Context]:
        """Draw the contexts of a process, batch after batch; a loader takes turns between its processes."""
        worker = get_worker_info()
        number = 0
        if worker is not None:
            import fsspec.asyn

            fsspec.asyn.reset_lock()  # that of the process which was forked may be held for ever
            number = worker.id
        if (1 if worker is None else worker.num_workers) != self.n_workers:
            raise ValueError("the loader has another number of workers than set_streams was told; use loader()")
        turn, stream = divmod(self.start + number, self.n_workers)
        epoch = int(self._epoch)
        portions, order = self._plan(epoch, self.rank * self.n_workers + stream)
        yield from self._draw(epoch, portions, order[turn * self.contexts_per_batch :])

    def _plan(self, epoch: int, stream: int) -> tuple[list[Stretch], NDArray[np.int64]]:
        """All portions in the order of reading, and the contexts of a stream, numbered through these portions."""
        rng = np.random.default_rng([self.seed, epoch])
        portions = [each for file in rng.permutation(len(self._files)) for each in self._files[file]]
        ends = np.cumsum([self._n_contexts[each.start] for each in portions])
        numbers = np.split(np.arange(ends[-1]), ends[:-1])
        needs = [Portion(contexts, each.n_cells) for contexts, each in zip(numbers, portions, strict=True)]
        mine = stretches(needs, self.world_size * self.n_workers, self.contexts_per_batch)[stream]
        return portions, windowed(mine, self.buffer_size, np.random.default_rng([self.seed, epoch, stream]))

    def _draw(self, epoch: int, portions: list[Stretch], order: NDArray[np.int64]) -> Iterator[Context]:
        """Contexts in the order given; a portion is read when its first one is due, and forgotten after its last."""
        firsts = np.cumsum([0] + [self._n_contexts[each.start] for each in portions])
        places = np.searchsorted(firsts, order, side="right") - 1
        left = Counter(places[order != PADDING].tolist())
        reading = self._read([portions[i] for i in sorted(left)])
        waiting, window = iter(sorted(left)), dict[int, ContextDataset]()
        for index, (number, place) in enumerate(zip(order.tolist(), places.tolist(), strict=True)):
            if number == PADDING:
                yield self._padding(epoch, index)
                continue
            while place not in window:
                window[next(waiting)] = self._open(epoch, next(reading))
            context = window[place][number - int(firsts[place])]
            left[place] -= 1
            if not left[place]:
                del window[place]
            yield context._replace(slice_index=self._slices[portions[place].name])

    def _open(self, epoch: int, source: StretchSource) -> ContextDataset:
        """Contexts of a portion, from a seed of its own."""
        words = np.random.SeedSequence([self.seed, int(source.slices[0].rows[0])]).generate_state(1, np.uint64)
        contexts = ContextDataset(source, seed=int(words[0] >> np.uint64(1)), **self._options)
        contexts.set_epoch(epoch)
        return contexts

    def _read(self, portions: list[Stretch]) -> Iterator[StretchSource]:
        """Portions in the order given, in which those of a file follow each other."""
        rows, file, offset = _Rows(iter(())), -1, 0
        for each in portions:
            if each.file != file:
                one = self.cells.shard(num_shards=len(self._names), index=each.file)
                rows, file, offset = _Rows(one.iter(batch_size=ROW_GROUP)), each.file, 0
            rows.skip(each.offset - offset)
            table = rows.take(each.n_cells)
            offset = each.offset + each.n_cells
            check_slice(table, each, self._names[each.file])
            yield StretchSource(self.info, each, table)

    def _padding(self, epoch: int, index: int) -> Context:
        """A context without cells."""
        schema, key = self.info.schema, np.array([self.seed, epoch, index], dtype=np.int64)
        return empty_context(schema.n_genes, schema.n_dims, len(RANKS) if self.targets else 0, key)


class _Rows:
    """Rows of a file, taken from its tables as they come."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, n: int) -> pa.Table:
        """The next rows, fewer if the file ends."""
        parts = list(self._next(n))
        return pa.concat_tables(parts) if parts else pa.table({})

    def skip(self, n: int) -> None:
        """Pass over the next rows."""
        for _ in self._next(n):
            pass

    def _next(self, n: int) -> Iterator[pa.Table]:
        while n > 0:
            if self._rest is None or not self._rest.num_rows:
                self._rest = next(self._tables, None)
                if self._rest is None:
                    return
            part = self._rest.slice(0, n)
            self._rest = self._rest.slice(part.num_rows)
            n -= part.num_rows
            yield part
