"""How a model was trained, which its files tell, and how a result was made of it, which ``uns`` tells."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from alphastomics._provenance import plain, serialize_arguments, storable, system, versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.model._model import AlphaSTomics
    from alphastomics.train import TrainingPlan

LEVELS = 6  # of mappings and lists in a record
TIMES = ("finished", "seconds")  # in the files of a model alone: the same seed gives the same ``uns`` at any time


def training_record(
    model: AlphaSTomics, plan: TrainingPlan, arguments: Mapping[str, Any], *, n_cells: int, seconds: float
) -> dict[str, Any]:
    """What is told of a training that has just ended.

    Parameters
    ----------
    model
        The model, with its trainer.
    plan
        What it was trained by.
    arguments
        Those of ``train``, with what was chosen for those that were left open.
    n_cells
        Cells of the reference, held-out ones among them.
    seconds
        How long it took.
    """
    trainer = model.trainer
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "interrupted": bool(trainer.interrupted),
        "seed": model.init_params_["non_kwargs"]["random_state"],
        "n_steps": trainer.global_step,
        "n_epochs": trainer.current_epoch,
        "n_cells": n_cells,
        "n_genes": model.schema.n_genes,
        "n_slices": len(model.schema.slices),
        "precision": str(trainer.precision),
        "device": device_name(trainer.strategy.root_device),
        "n_devices": trainer.world_size,
        "system": system(),
        "arguments": serialize_arguments(arguments),
        "plan": serialize_arguments(asdict(plan.config)),
        "versions": versions(),
    }


def result_record(model: AlphaSTomics, function: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What ``uns`` tells of a result: ``function``, ``params``, ``model``, ``training``, ``machine`` and ``versions``."""
    trained = model.trainings_[-1] if model.trainings_ else {}
    return storable(
        {
            "function": function,
            "params": serialize_arguments(parameters),
            "model": {**plain(model.init_params_["non_kwargs"]), "weights": digest(model)},
            "training": {name: value for name, value in trained.items() if name not in TIMES},
            "machine": {"device": device_name(model.module.device), "system": system()},
            "versions": versions(),
        }
    )


def digest(model: AlphaSTomics) -> str:
    """The first 16 digits of the SHA-256 of the weights, the same after :meth:`AlphaSTomics.save` and ``load``."""
    state, found = model.module.state_dict(), sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """Kind of a device, and which GPU it is where that is known without starting CUDA."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def trainings_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The trainings of a model from its configuration; none in models that were saved before they were told.

    Raises
    ------
    RuntimeError
        If these are none.
    """
    found = config.get("provenance", {"trainings": []})
    trainings = found.get("trainings") if isinstance(found, dict) else None
    if not isinstance(trainings, list) or not all(isinstance(each, dict) and _is_flat(each) for each in trainings):
        raise RuntimeError("provenance does not say how the model was trained")
    return tuple(trainings)


def _is_flat(value: Any, levels: int = LEVELS) -> bool:
    """Whether nothing lies deeper than in a record of ours."""
    if not isinstance(value, (dict, list)):
        return True
    return levels > 0 and all(
        _is_flat(each, levels - 1) for each in (value.values() if isinstance(value, dict) else value)
    )
