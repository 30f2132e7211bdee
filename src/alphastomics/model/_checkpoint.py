"""Checkpoints of training (``.ckpt``): read as tensors and plain values only, so that no file can run code.

A checkpoint is one of Lightning's, and says under :data:`~alphastomics.train.checkpoint.KEY` of which model it is:
``config``, the JSON text that a model folder holds as ``config.json``, and ``tensors``, those of its
``model.safetensors``, once training has ended and what is fitted after it is there.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from alphastomics._io import _json
from alphastomics._io import _torch as _torch_file
from alphastomics._io._atomic import replacing
from alphastomics._io._errors import describe_error, format_value, permission_error
from alphastomics.model import _files
from alphastomics.model import _files as _weights
from alphastomics.model._fields import SCHEMA
from alphastomics.train.checkpoint import KEY, find_checkpoints, write

if TYPE_CHECKING:
    from os import PathLike

    from alphastomics.model._model import AlphaSTomics
    from alphastomics.train.memory.fit import BatchLayout

logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "alphastomics-checkpoint", 1


def describe(model: AlphaSTomics, contexts: BatchLayout) -> dict[str, Any]:
    """What a checkpoint of a training of this model says of it."""
    config = json.dumps(_files.model_config(model), allow_nan=False)
    sizes = {"context_size": contexts.context_size, "micro_batch_size": contexts.micro_batch_size}
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "config": config, "contexts": sizes}


def _read(path: Path) -> Any:
    try:
        return _torch_file.read(path)
    except PermissionError as error:
        raise permission_error(path, error) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    PermissionError
        If it may not be read.
    ValueError
        If it is not ours, truncated, of another version, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; there is no training to resume")
    try:
        checkpoint = _read(path)
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is no checkpoint of AlphaSTomics: {describe_error(error)}; name another file"
        ) from error
    return _ours(path, checkpoint)


def _ours(path: Path, checkpoint: Any) -> dict[str, Any]:
    """Refuse what is not of AlphaSTomics, or of another version."""
    about = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of AlphaSTomics")
    if about.get("format_version") != FORMAT_VERSION:
        version = format_value(about.get("format_version"))
        raise ValueError(f"{path} has format version {version}; this package reads {FORMAT_VERSION}")
    own: dict[str, Any] = checkpoint
    return own


def _config(path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    try:
        config = _json.parse(checkpoint[KEY]["config"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} does not say which model it is of: {describe_error(error)}") from error
    if not isinstance(config, dict) or not all(isinstance(config.get(part), dict) for part in ("init", "registry")):
        raise ValueError(f"{path} does not say which model it is of")
    return config


def read_model(path: Path) -> _files.Stored:
    """Read the model that a finished training has left in its checkpoint.

    Raises
    ------
    FileNotFoundError, ValueError
        As :func:`read_checkpoint`; also if the training has not ended.
    """
    checkpoint = read_checkpoint(path)
    tensors = checkpoint[KEY].get("tensors")
    if tensors is None:
        raise ValueError(
            f"{path} is of a training that has not ended; continue it with resume=… before using the model"
        )
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and _torch_file.is_plain(value)
        for name, value in tensors.items()
    ):
        raise ValueError(f"{path} does not hold a whole model; take another copy, or train it again")
    config = _config(path, checkpoint)
    _weights.check(
        path, config, {name: _weights.Kind(tuple(t.shape), t.is_floating_point()) for name, t in tensors.items()}
    )
    return _files.Stored(tensors, config)


class ResumeState(NamedTuple):
    """What a training that goes on has to know of its checkpoint before it starts; the tensors stay on the disk.

    Attributes
    ----------
    path
        The file.
    config
        What it says of its model.
    contexts
        Sizes of contexts and batches; empty where it does not tell.
    epoch, step
        How far it is.
    """

    path: Path
    config: dict[str, Any]
    contexts: dict[str, int]
    epoch: Any
    step: Any


def find(resume: str | PathLike[str] | None, checkpoint: str | PathLike[str] | None) -> ResumeState | None:
    """The checkpoint from which a training goes on; None if it begins.

    Parameters
    ----------
    resume
        Its path, or ``"last"`` for the newest whole one that ``checkpoint`` names.
    checkpoint
        Where the training keeps its own.

    Raises
    ------
    OSError
        If it is not there, or cannot be read.
    ValueError
        If none is named, or it is not ours.
    """
    if resume is None:
        return None
    if resume != "last":
        path = Path(resume)
        return _begun(path, read_checkpoint(path))
    if checkpoint is None:
        raise ValueError("resume='last' goes on from what checkpoint= names; give it, or resume= a path")
    for path in find_checkpoints(checkpoint):
        try:
            content = _read(path)
        except ValueError as error:
            logger.warning("%s is left out: %s.", path, error)
        else:
            return _begun(path, _ours(path, content))
    logger.info("There is no checkpoint in %s yet; training begins anew.", checkpoint)
    return None


def _begun(path: Path, checkpoint: dict[str, Any]) -> ResumeState:
    told = checkpoint[KEY].get("contexts")
    whole = isinstance(told, dict) and all(type(value) is int and value > 0 for value in told.values())
    epoch, step = checkpoint.get("epoch"), checkpoint.get("global_step")
    return ResumeState(path, _config(path, checkpoint), told if whole else {}, epoch, step)


def check_resumable(resume_state: ResumeState, model: AlphaSTomics, *, max_epochs: int) -> None:
    """Refuse a checkpoint of another model, of other cells, or of a longer training, and say what differs.

    Raises
    ------
    ValueError
        If the training cannot go on from there.
    """
    path, there, here = resume_state.path, resume_state.config, _files.plain(_files.model_config(model))
    for name, value in here["init"].items():
        found = there["init"].get(name)
        if found != value:
            raise ValueError(
                f"{path} is of a model with {name}={format_value(found)}, and this one has {name}={value!r}; resume with the arguments "
                "of the training that was interrupted"
            )
    if there["registry"].get(SCHEMA) != here["registry"][SCHEMA]:
        raise ValueError(f"{path} is of a training on other cells; resume with the data of that training")
    epoch, step = resume_state.epoch, resume_state.step
    if not isinstance(epoch, int) or not isinstance(step, int) or 0 <= max_epochs < epoch:
        raise ValueError(f"{path} is of epoch {format_value(epoch)}, beyond max_epochs={max_epochs}; give more epochs")
    logger.info("Going on from step %d, in epoch %d.", step, epoch)


def finalize(path: Path, model: AlphaSTomics) -> None:
    """Put the trained model into the checkpoint of its training, from which it can then be loaded."""
    checkpoint = read_checkpoint(path)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in _files.model_tensors(model).items()}
    config = json.dumps(_files.model_config(model), allow_nan=False)
    checkpoint[KEY] |= {"config": config, "tensors": tensors}
    with replacing(path, sync=True) as temporary:
        write(checkpoint, temporary)
