"""A default training step reads no value from the device, for which a GPU would have to finish its work, and copies none to it.

There is no GPU here. The network and its losses run on the device ``meta``, whose tensors have no values to read; a whole training runs on
the CPU, with every operation that would read a value counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alphastomics.train.finite import FiniteCheck
from alphastomics.train.optimization import gradient_norm
from alphastomics.train.plan import TrainingPlan

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}


def devices(values: Any) -> set[str]:
    """Devices of the tensors among some values; tensors of a single number are passed to kernels as arguments."""
    return {x.device.type for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.ndim}


class NoTransfer(TorchDispatchMode):
    """Raises if an operation combines tensors of two devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if len(found := devices((args, kwargs, result))) > 1:
            raise AssertionError(f"{func} combines {found}")
        return result


class NoNewTensor(TorchFunctionMode):
    """Raises if a tensor with values is made for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and str((kwargs or {}).get("device")) == "meta":
            raise AssertionError(f"{func} copies values to the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("autocast_without_data")
@pytest.mark.parametrize("mode", ["any", "expr_to_pos", "pos_to_expr"])
def test_losses_and_gradients_of_a_batch_wait_for_nothing(make_plan, make_batch, mode):
    plan, batch = make_plan(mode=mode), make_batch()
    batch = batch._replace(draws=plan.objective.draw(batch))
    assert mode == "expr_to_pos" or (len(batch.draws.given) and len(batch.draws.absent))
    plan.module.to("meta")
    batch = move_data_to_device(batch, torch.device("meta"))
    with NoNewTensor(), NoTransfer():
        plan.objective.total(plan.objective.losses(batch), batch, count=1.0).backward()
        norm = gradient_norm(plan.module.parameters())
        torch.nn.utils.clip_grads_with_norm_(plan.module.parameters(), 1.0, norm)
    assert norm.device.type == "meta"


class CountReads(TorchDispatchMode, pl.Callback):
    """Counts the operations that read values, in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Counter[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        if func in READS or (func in (aten.index.Tensor, aten.index_put_.default) and masks):
            self.steps[-1][str(func)] += 1
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append(Counter())
        self.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.__exit__(None, None, None)


def test_steps_of_a_training_read_no_value(small, make_model, monkeypatch):
    monkeypatch.setattr(TrainingPlan, "_waits", False)
    monkeypatch.setattr(FiniteCheck, "first", None)  # read from a copy on the CPU
    reads = CountReads()
    make_model(small, mode="any").train(max_epochs=25, callbacks=[reads], accelerator="cpu", enable_progress_bar=False)
    assert len(reads.steps) > 20
    assert not sum(reads.steps, Counter())
