"""Checkpoints of training (``.ckpt``), read as tensors and plain values only, so that no file can run code.

They are Lightning's, with an entry :data:`~alphastomics.train.checkpoint.KEY` for the model: ``config``, the JSON text of
``config.json`` of a model folder, and, when training has ended, ``tensors``, those of ``model.safetensors``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from alphastomics._io import _json, _torch as _torch_file
from alphastomics._io._atomic import replacing
from alphastomics._io._errors import describe_error, format_value, permission_error
from alphastomics.model._fields import schema_values
from alphastomics.model._state import Kind, ModelState, check_tensors
from alphastomics.train.checkpoint import KEY, find_checkpoints, write

if TYPE_CHECKING:
    from os import PathLike

    from alphastomics.train.memory.layout import BatchLayout

logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "alphastomics-checkpoint", 5


def describe(state: ModelState, layout: BatchLayout) -> dict[str, Any]:
    """The entry for the model in a checkpoint of its training."""
    config = json.dumps(state.to_json(), allow_nan=False)
    sizes = {name: getattr(layout, name) for name in ("context_size", "batch_size", "micro_batch_size")}
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "config": config, "contexts": sizes}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises
    ------
    FileNotFoundError, PermissionError
        If the file does not exist or must not be read.
    ValueError
        If it is damaged, of another program or version, or contains other than tensors and plain values.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; pass the path of a checkpoint as resume=")
    try:
        checkpoint = _read(path)
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of AlphaSTomics ({describe_error(error)}); pass another file"
        ) from error
    return _check_format(path, checkpoint)


def _read(path: Path) -> Any:
    try:
        return _torch_file.read(path)
    except PermissionError as error:
        raise permission_error(path, error) from error


def _check_format(path: Path, checkpoint: Any) -> dict[str, Any]:
    about = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of AlphaSTomics")
    if about.get("format_version") != FORMAT_VERSION:
        version = format_value(about.get("format_version"))
        raise ValueError(f"{path} has format version {version}; this package reads {FORMAT_VERSION}")
    found: dict[str, Any] = checkpoint
    return found


def _read_config(path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    try:
        config = _json.parse(checkpoint[KEY]["config"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} does not describe its model: {describe_error(error)}") from error
    if not isinstance(config, dict) or not all(isinstance(config.get(part), dict) for part in ("init", "registry")):
        raise ValueError(f"{path} does not describe its model")
    return config


def read_model(path: Path) -> ModelState:
    """Read the model from a checkpoint; raises the errors of :func:`read_checkpoint`, or if the training has not ended."""
    checkpoint = read_checkpoint(path)
    tensors = checkpoint[KEY].get("tensors")
    if tensors is None:
        raise ValueError(
            f"{path} belongs to a training that has not ended; resume it with resume=… before loading the model"
        )
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and _torch_file.is_plain(value)
        for name, value in tensors.items()
    ):
        raise ValueError(f"{path} does not contain a complete model; use another copy, or train the model again")
    config = _read_config(path, checkpoint)
    check_tensors(path, config, {name: Kind(tuple(t.shape), t.is_floating_point()) for name, t in tensors.items()})
    return ModelState.restore(path, config, tensors)


class ResumeState(NamedTuple):
    """The parts of a checkpoint that are needed before a training resumes, without tensors.

    ``contexts`` are the sizes of contexts and batches, empty if the checkpoint has none; ``epoch`` and ``step`` those at
    which the training stopped.
    """

    path: Path
    config: dict[str, Any]
    contexts: dict[str, int]
    epoch: Any
    step: Any


def find_resume_state(resume: str | PathLike[str] | None, checkpoint: str | PathLike[str] | None) -> ResumeState | None:
    """The checkpoint from which a training resumes; None for a new training.

    ``resume`` is its path, or ``"last"`` for the newest complete one in ``checkpoint``, where the training writes its own.

    Raises
    ------
    OSError
        If the file does not exist or cannot be read.
    ValueError
        If ``resume="last"`` is given without ``checkpoint``, or the file is not a checkpoint of this package.
    """
    if resume is None:
        return None
    if resume != "last":
        path = Path(resume)
        return _resume_state(path, read_checkpoint(path))
    if checkpoint is None:
        raise ValueError("resume='last' needs checkpoint=; pass it, or pass a path as resume=")
    for path in find_checkpoints(checkpoint):
        try:
            content = _read(path)
        except ValueError as error:
            logger.warning("%s is skipped: %s.", path, error)
        else:
            return _resume_state(path, _check_format(path, content))
    logger.info("There is no checkpoint in %s yet; training starts from the beginning.", checkpoint)
    return None


def _resume_state(path: Path, checkpoint: dict[str, Any]) -> ResumeState:
    sizes = checkpoint[KEY].get("contexts")
    valid = isinstance(sizes, dict) and all(type(value) is int and value > 0 for value in sizes.values())
    epoch, step = checkpoint.get("epoch"), checkpoint.get("global_step")
    return ResumeState(path, _read_config(path, checkpoint), sizes if valid else {}, epoch, step)


def check_resumable(resume_state: ResumeState, state: ModelState, *, max_epochs: int) -> None:
    """Raise ``ValueError`` if a checkpoint is of another model, of other cells, or beyond ``max_epochs``."""
    path, saved = resume_state.path, resume_state.config
    for name, value in _json.to_plain(state.init).items():
        found = saved["init"].get(name)
        if found != value:
            raise ValueError(
                f"{path} belongs to a model with {name}={format_value(found)}, but this model has {name}={value!r}; resume with "
                "the arguments of the interrupted training"
            )
    try:
        same = schema_values(saved["registry"]) == _json.to_plain(schema_values(state.config["registry"]))
    except (KeyError, TypeError):
        same = False
    if not same:
        raise ValueError(f"{path} belongs to a training on other cells; resume with the data of that training")
    epoch, step = resume_state.epoch, resume_state.step
    if not isinstance(epoch, int) or not isinstance(step, int) or 0 <= max_epochs < epoch:
        raise ValueError(
            f"{path} was written in epoch {format_value(epoch)}, beyond max_epochs={max_epochs}; increase max_epochs"
        )
    logger.info("Resuming from step %d, in epoch %d.", step, epoch)


def finalize(path: Path, state: ModelState) -> None:
    """Add the trained model to the checkpoint of its training, so that it can be loaded from there."""
    checkpoint = read_checkpoint(path)
    tensors = {name: tensor.clone() for name, tensor in state.to_tensors().items()}
    checkpoint[KEY] |= {"config": json.dumps(state.to_json(), allow_nan=False), "tensors": tensors}
    with replacing(path, sync=True) as temporary:
        write(checkpoint, temporary)
