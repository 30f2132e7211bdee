"""One model that is trained to be compared with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from alphastomics.data import AnnDataSource, ContextDataset, collate
from alphastomics.model._model import AlphaSTomics
from alphastomics.nn import count_parameters, matched_width
from alphastomics.train import NonFiniteLossError, TrainingRecorder
from alphastomics.train.distributed.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anndata import AnnData

    from alphastomics.data import Batch
    from alphastomics.data._batch import Context
    from alphastomics.nn import ParameterCount

VALIDATION_CONTEXTS = 8
LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # where weights became infinite


class TrialRecord(NamedTuple):
    """What a training left besides the model.

    Attributes
    ----------
    recorder
        Curves, and the time of a step.
    n_steps
        Steps of the optimizer.
    failure
        Why training ended before its time; empty where it did not.
    """

    recorder: TrainingRecorder
    n_steps: int
    failure: str


def make_trial_model(
    reference: AnnData, arguments: Mapping[str, Any], *, match: Mapping[str, Any] | None = None
) -> AlphaSTomics:
    """Make an untrained model of a registered reference.

    Parameters
    ----------
    reference
        Cells after :meth:`AlphaSTomics.setup_anndata`.
    arguments
        Arguments of :class:`AlphaSTomics`.
    match
        Arguments, on top of the others, of a model whose total number of parameters the width shall reach as nearly as the
        heads allow.
    """
    model = AlphaSTomics(reference, **arguments)
    if match is None:
        return model
    wanted = parameters_of(AlphaSTomics(reference, **{**arguments, **match})).total
    return AlphaSTomics(reference, **{**arguments, "d_model": matched_width(model.module.config, wanted)})


def parameters_of(model: AlphaSTomics) -> ParameterCount:
    """Number of parameters of the network, and of those that a cell meets."""
    return count_parameters(model.module)


def device_kind(accelerator: str, devices: Any) -> str:
    """Kind of the device on which a training would run: ``"cpu"``, ``"cuda"``, …"""
    return str(device_of(accelerator, devices).type)


def train_trial(model: AlphaSTomics, query: AnnData, **arguments: Any) -> TrialRecord:
    """Train a model while the loss on held-out slices is watched, which changes nothing.

    A loss that becomes infinite or NaN ends the training and is recorded.

    Parameters
    ----------
    model
        Untrained model.
    query
        Held-out cells with positions.
    **arguments
        Arguments of :meth:`AlphaSTomics.train`.

    Raises
    ------
    KeyboardInterrupt
        If the training was interrupted: Lightning ends as if it were finished.
    """
    recorder = TrainingRecorder(_held_out_batches(model, query, arguments))
    callbacks = [*arguments.pop("callbacks", []), recorder]
    failure = ""
    try:
        model.train(callbacks=callbacks, **arguments)
    except (NonFiniteLossError, LinAlgError) as error:
        failure = str(error)
    if model.trainer.interrupted and not failure:
        raise KeyboardInterrupt
    return TrialRecord(recorder, model.trainer.global_step, failure)


def _held_out_batches(model: AlphaSTomics, query: AnnData, arguments: Mapping[str, Any]) -> list[Batch]:
    """A few contexts of the held-out slices, the same for every model of every seed."""
    source = AnnDataSource(query, model.schema, positions=True)
    size = arguments.get("context_size", 512)
    if size == "auto":
        size = max(len(cells.rows) for cells in source.slices)
    kind = arguments.get("context_kind", "subset")
    dataset = ContextDataset(source, context_size=size, kind=kind, seed=0, targets=model.mode != "expr_to_pos")
    contexts: list[Context] = []
    for epoch in range(VALIDATION_CONTEXTS):
        dataset.set_epoch(epoch)
        contexts += [dataset[i] for i in range(min(len(dataset), VALIDATION_CONTEXTS - len(contexts)))]
    per_batch = max(1, arguments.get("batch_size", 1024) // size)
    return [collate(contexts[i : i + per_batch]) for i in range(0, len(contexts), per_batch)]
