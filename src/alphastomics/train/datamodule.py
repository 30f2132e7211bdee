r"""Data module: loaders of training and validation contexts.

A batch of B contexts of N cells is divided into A micro-batches of b contexts, with at most T cells on a device at once:

.. math:: A = \lceil B / \lfloor T / N \rfloor \rceil, \qquad b = \lceil B / A \rceil
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from alphastomics.data import Augmentation, ContextDataset
from alphastomics.data._batch import RawBatch, encode_batch
from alphastomics.data._encode import Encoder
from alphastomics.data._loaders import ContextLoader
from alphastomics.data._views import SomeSlices
from alphastomics.train.distributed.processes import group_index
from alphastomics.train.draws import TRAINING, VALIDATION

if TYPE_CHECKING:
    from alphastomics.data import Batch, CellSource


class ContextDataModule(pl.LightningDataModule):
    """Loaders of training and validation contexts.

    Whole slices are held out for validation: held-out cells in a training slice would be neighbors of training cells.

    Parameters
    ----------
    source
        Cells of training, and of validation if ``validation`` is None.
    validation
        Cells of validation; None: slices of ``source`` are held out.
    batch_size
        Number of cells in a batch, which then has ``batch_size // context_size`` contexts, at least one.
    context_size
        Largest number of cells in a context.
    micro_batch_size
        Largest number of cells on a device at once; larger batches are loaded in parts. None: batches are not divided.
    kind
        ``"subset"`` or ``"patch"``, as in :class:`~alphastomics.data.ContextDataset`.
    seed
        Seed of all draws.
    augmentation
        Random changes to training contexts.
    validation_size
        Share of the slices that is held out for validation; None or 0: none.
    num_workers
        Number of processes that cut contexts; 0: a thread of this process.
    targets
        Whether expression is sampled, as in :class:`~alphastomics.data.ContextDataset`.
    group_size
        Number of processes that share a context, see ``train/distributed/processes.py``.

    Raises
    ------
    ValueError
        If slices are to be held out and there is only one, or a context has more than ``micro_batch_size`` cells.
    """

    def __init__(
        self,
        source: CellSource,
        *,
        validation: CellSource | None = None,
        batch_size: int,
        context_size: int,
        micro_batch_size: int | None = None,
        kind: str = "subset",
        seed: int = 0,
        augmentation: Augmentation | None = None,
        validation_size: float | None = None,
        num_workers: int = 0,
        targets: bool = False,
        group_size: int = 1,
    ) -> None:
        super().__init__()
        check_sizes(context_size, batch_size, micro_batch_size)
        self.batch_size = batch_size
        self.micro_batch_size = max(batch_size, context_size) if micro_batch_size is None else micro_batch_size
        self.contexts_per_batch, self.batches_per_step = self._parts(context_size)
        self._contexts_in_validation = self.contexts_per_batch
        self.num_workers, self.group_size = num_workers, group_size
        self._encoder = Encoder(source.schema)
        self._train_loader: ContextLoader | None = None
        self._validation_loader: ContextLoader | None = None
        self._position = {"epoch": 0, "batch": 0}
        names = [cells.name for cells in source.slices]
        held_out = held_out_names(names, validation_size) if validation is None else []
        common: dict[str, Any] = {"context_size": context_size, "kind": kind, "seed": seed, "targets": targets}
        self.train_set = ContextDataset(
            source, augmentation=augmentation, slices=[name for name in names if name not in held_out], **common
        )
        self.validation_set = ContextDataset(source, slices=held_out, **common) if held_out else None
        if validation is not None:
            self.validation_set = ContextDataset(validation, **common)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of the optimizer in an epoch, on one device and without accumulation."""
        return -(-len(self.train_set) // (self.contexts_per_batch * self.batches_per_step))

    def set_context_size(self, context_size: int) -> None:
        """Set the size of the contexts of the next epoch, which needs a new loader; validation contexts keep their size."""
        self.contexts_per_batch, self.batches_per_step = self._parts(context_size)
        self.train_set.set_context_size(context_size)
        if self._train_loader is not None:  # an epoch has ended
            self._position = {"epoch": self.train_set.epoch, "batch": 0}
            self._train_loader = None

    def _parts(self, context_size: int) -> tuple[int, int]:
        """Contexts in a batch of the loader, and batches in a step of the optimizer."""
        return split_batch(max(1, self.batch_size // context_size), context_size, self.micro_batch_size)

    def train_dataloader(self) -> ContextLoader:
        """Loader of the training contexts of the epoch set by :meth:`set_epoch`."""
        self._train_loader = self._loader(self.train_set, self.contexts_per_batch, TRAINING)
        self._train_loader.load_state_dict(self._position)
        return self._train_loader

    def state_dict(self) -> dict[str, int]:
        """Position of the training loader: epoch and batch, 0 after the last batch."""
        if self._train_loader is None:
            return self._position
        state = self._train_loader.state_dict()
        return state | {"batch": state["batch"] % len(self._train_loader)}  # the next epoch may have another length

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the position of the training loader."""
        self._position = state_dict
        if self._train_loader is not None:
            self._train_loader.load_state_dict(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose contexts are cut next."""
        self.train_set.set_epoch(epoch)

    def val_dataloader(self) -> ContextLoader | list[Any]:
        """Loader of the validation contexts, the same in every epoch; an empty list without validation."""
        if self.validation_set is None:
            return []
        self._validation_loader = self._loader(self.validation_set, self._contexts_in_validation, VALIDATION)
        return self._validation_loader

    def n_trained(self, batch: int) -> int:
        """Number of contexts in a training batch, over all groups of processes."""
        assert self._train_loader is not None
        return self._train_loader.n_contexts(batch)

    def n_validated(self, batch: int) -> int:
        """Number of contexts in a validation batch, over all groups of processes."""
        assert self._validation_loader is not None
        return self._validation_loader.n_contexts(batch)

    def on_after_batch_transfer(self, batch: RawBatch | Batch, dataloader_idx: int) -> Batch:
        """Encode raw expression in network units on the device of training."""
        return encode_batch(batch, self._encoder) if isinstance(batch, RawBatch) else batch

    def _loader(self, dataset: ContextDataset, contexts_per_batch: int, purpose: int) -> ContextLoader:
        # No shuffling here: the dataset returns its contexts in random order.
        group, n_groups = group_index(self.trainer, self.group_size)
        plan = getattr(self.trainer, "lightning_module", None)  # none outside of a training
        return ContextLoader(
            dataset,
            contexts_per_batch,
            num_workers=self.num_workers,
            rank=group,
            world_size=n_groups,
            draw=None if plan is None else plan.objective.drawing(purpose),
        )


def split_batch(n_contexts: int, n_cells: int, micro_batch_size: int) -> tuple[int, int]:
    """Contexts of a micro-batch, b, and micro-batches of a batch, A, for a batch of ``n_contexts`` contexts.

    The micro-batches have at least ``n_contexts`` contexts together; the surplus is less than one context each.
    """
    largest = min(n_contexts, micro_batch_size // n_cells)
    if not largest:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is less than a context of {n_cells:,} cells; contexts of "
            f"{micro_batch_size:,} cells would fit"
        )
    parts = -(-n_contexts // largest)
    return -(-n_contexts // parts), parts


def check_sizes(context_size: int, batch_size: int, micro_batch_size: int | None) -> None:
    """Raise ``ValueError`` if a number of cells is not positive."""
    if batch_size < 1 or context_size < 1:
        raise ValueError(f"batch_size={batch_size} and context_size={context_size} must be at least 1 cell")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1 cell")


def training_slices(source: CellSource, validation_size: float | None) -> CellSource:
    """The slices of a source that are not held out for validation."""
    names = [cells.name for cells in source.slices]
    held_out = held_out_names(names, validation_size)
    if not held_out:
        return source
    part: CellSource = SomeSlices(source, [i for i, name in enumerate(names) if name not in held_out])
    return part


def held_out_names(names: list[str], validation_size: float | None) -> list[str]:
    """The last slices by name: their share rounded, with at least one slice on each side."""
    if not validation_size:
        return []
    if not 0 < validation_size < 1:
        raise ValueError(f"validation_size={validation_size} must lie between 0 and 1")
    if len(names) < 2:
        raise ValueError(
            "validation requires at least two slices, because whole slices are held out; leave out validation_size=…, "
            "train_size=… and early_stopping=…"
        )
    return sorted(names)[-min(len(names) - 1, max(1, round(validation_size * len(names)))) :]
