"""Which cells meet in which batch, by arithmetic and through Lightning."""

from __future__ import annotations

from collections import Counter

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics.train import ContextDataModule
from alphastomics.train.datamodule import held_out_names


def slices_of(batches) -> set[int]:
    return {int(i) for batch in batches for i in batch.slice_index}


class Recorder(pl.Callback):
    """Keeps every batch, by epoch."""

    def __init__(self) -> None:
        self.training: dict[int, list] = {}
        self.validation: dict[int, list] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.training.setdefault(trainer.current_epoch, []).append(batch)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.validation.setdefault(trainer.current_epoch, []).append(batch)


def contexts(batches) -> list[frozenset[int]]:
    return [frozenset(row[row >= 0].tolist()) for batch in batches for row in batch.rows]


@pytest.mark.parametrize(
    ("batch_size", "context_size", "expected"), [(100, 40, 2), (10, 40, 1), (200, 200, 1), (80, 40, 2)]
)
def test_a_batch_counts_cells(source, batch_size, context_size, expected):
    datamodule = ContextDataModule(source, batch_size=batch_size, context_size=context_size)
    assert datamodule.contexts_per_batch == expected
    batches = [raw.batch for raw in datamodule.train_dataloader()]
    assert len(batches) == datamodule.steps_per_epoch
    assert {len(batch.mask) for batch in batches[:-1]} <= {expected}
    assert max(int(batch.mask.sum(1).max()) for batch in batches) <= context_size
    rows = torch.cat([batch.rows[batch.mask] for batch in batches]).tolist()
    assert sorted(rows) == list(range(source.n_cells))


def test_no_context_mixes_slices(source):
    of_cell = np.empty(source.n_cells, dtype=int)
    for i, cells in enumerate(source.slices):
        of_cell[cells.rows] = i
    for batch, *_ in ContextDataModule(source, batch_size=100, context_size=40).train_dataloader():
        for rows, mask, i in zip(batch.rows, batch.mask, batch.slice_index, strict=True):
            assert set(of_cell[rows[mask]]) == {int(i)}


@pytest.mark.parametrize(("share", "expected"), [(0.1, 1), (0.4, 1), (0.6, 2), (0.99, 2)])
def test_whole_slices_are_held_out(source, share, expected):
    datamodule = ContextDataModule(source, batch_size=100, context_size=40, validation_size=share)
    training, validation = (
        slices_of(raw.batch for raw in datamodule.train_dataloader()),
        slices_of(raw.batch for raw in datamodule.val_dataloader()),
    )
    assert training | validation == {0, 1, 2}
    assert not training & validation
    assert len(validation) == expected
    assert validation == set(range(3 - expected, 3))


def test_held_out_slices_do_not_depend_on_their_order():
    names = ["b", "d", "a", "c"]
    assert held_out_names(names, 0.5) == ["c", "d"]
    assert held_out_names(names[::-1], 0.5) == ["c", "d"]


@pytest.mark.parametrize("nothing", [None, 0, 0.0])
def test_by_default_nothing_is_held_out(source, nothing):
    datamodule = ContextDataModule(source, batch_size=100, context_size=40, validation_size=nothing)
    assert list(datamodule.val_dataloader()) == []
    assert slices_of(raw.batch for raw in datamodule.train_dataloader()) == {0, 1, 2}


def test_invalid_arguments_raise(source):
    for share in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"validation_size={share}"):
            ContextDataModule(source, batch_size=100, context_size=40, validation_size=share)
    with pytest.raises(ValueError, match="validation_size"):
        held_out_names(["a"], 0.1)
    with pytest.raises(ValueError, match="batch_size=0"):
        ContextDataModule(source, batch_size=0, context_size=40)


def test_validation_is_not_augmented_and_never_changes(source):
    datamodule = ContextDataModule(source, batch_size=100, context_size=40, validation_size=0.3)
    first = [raw.batch for raw in datamodule.val_dataloader()]
    datamodule.set_epoch(3)
    for one, (other, *_) in zip(first, datamodule.val_dataloader(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one[:-1], other[:-1], strict=True) if not x.is_floating_point())
        assert torch.equal(one.expression, other.expression)
        assert torch.equal(one.position, other.position)
        assert bool(one.measured.all())


def test_lightning_cuts_new_contexts_in_every_epoch(source, make_plan, fit):
    recorder = Recorder()
    fit(make_plan(), max_epochs=3, callbacks=[recorder], data={"validation_size": 0.3})
    held_out = set(source.slices[2].rows.tolist())
    everything = set(range(source.n_cells)) - held_out
    for epoch in range(3):
        found = contexts(recorder.training[epoch])
        assert Counter(cell for context in found for cell in context) == Counter(everything)
        assert {int(key[1]) for batch in recorder.training[epoch] for key in batch.key} == {epoch}
        assert frozenset().union(*contexts(recorder.validation[epoch])) == held_out
    assert len(set(contexts(recorder.training[0])) & set(contexts(recorder.training[1]))) == 0
    assert contexts(recorder.validation[0]) == contexts(recorder.validation[2])
