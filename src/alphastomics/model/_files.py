"""A model on disk: ``model.safetensors`` (weights), ``config.json`` (everything else); nothing is ever unpickled."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alphastomics._disk import WRITE, denied, reason
from alphastomics._provenance import versions
from alphastomics.data import TissueSchema
from alphastomics.model._dependence import Dependence
from alphastomics.model._exemplars import Exemplars
from alphastomics.model._fields import SCHEMA
from alphastomics.model._frames import ReferenceFrame
from alphastomics.model._marginals import Marginals
from alphastomics.model._outline import Outlines
from alphastomics.model._provenance import trainings_of
from alphastomics.train.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from anndata import AnnData
    from torch import Tensor

    from alphastomics.model._model import AlphaSTomics

FORMAT = "alphastomics-model"
FORMAT_VERSION = 1
FITTED = "fitted."  # before the names of tensors that are not weights
_FITTED: dict[str, type[Marginals | Dependence | Outlines | Exemplars]] = {
    "marginals": Marginals,
    "dependence": Dependence,
    "outlines": Outlines,
    "exemplars": Exemplars,
}
WEIGHTS, CONFIG, DATA = "model.safetensors", "config.json", "adata.h5ad"
LARGEST_CONFIG = 256 * 2**20  # bytes: 10^6 genes fit many times over


class Stored(NamedTuple):
    """What a model folder holds."""

    weights: dict[str, Tensor]
    config: dict[str, Any]


def write_model(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write a model folder; each file is written under a temporary name and renamed.

    Raises
    ------
    FileExistsError
        If the folder exists, is not empty, and ``overwrite`` is false.
    OSError
        If it cannot be written.
    """
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} exists and is not empty; pass overwrite=True to replace the model in it")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    text = json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **config}, indent=1, allow_nan=False)
    temporary = folder / f".{WEIGHTS}.tmp"
    try:
        save_file(tensors, temporary)
    except SafetensorError as error:  # what the system says of a disk
        raise OSError(f"{folder / WEIGHTS} cannot be written ({reason(error)}); {WRITE}") from error
    temporary.replace(folder / WEIGHTS)
    temporary = folder / f".{CONFIG}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / CONFIG)


def read_model(folder: Path) -> Stored:
    """Read a model folder.

    Raises
    ------
    FileNotFoundError
        If the folder or one of its two files is missing; a folder with a pickled model says so.
    ValueError
        If a file is not ours, truncated, or of another version.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a model of AlphaSTomics: {name} is missing{_pickle_hint(folder)}")
    if (folder / CONFIG).stat().st_size > LARGEST_CONFIG:
        raise ValueError(f"{folder / CONFIG} is too large to be a model's configuration")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} is truncated or not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG} does not describe a model of AlphaSTomics")
    if config.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format version {config.get('format_version')}; this package reads {FORMAT_VERSION}"
        )
    try:
        with (folder / WEIGHTS).open("rb"):  # of a file that may not be read safetensors says that it is missing
            weights = load_file(folder / WEIGHTS)
    except PermissionError as error:
        raise denied(folder / WEIGHTS, error) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{folder / WEIGHTS} is truncated or not a safetensors file: {error}") from error
    return Stored(weights, config)


def model_config(model: AlphaSTomics) -> dict[str, Any]:
    """Everything about a model but its tensors, as plain values."""
    history = {name: {int(i): float(v) for i, v in t.iloc[:, 0].items()} for name, t in (model.history_ or {}).items()}
    return {
        "class": type(model).__name__,
        "init": plain(model.init_params_["non_kwargs"]),
        "registry": plain(model.registry_),
        "is_trained": model.is_trained_,
        "history": plain(history),
        "frame": model.frame_.to_dict() if model.frame_ is not None else None,
        "deformation": model.deformation_,
        "provenance": {"trainings": plain(model.trainings_)},
        "versions": versions(),
    }


def model_tensors(model: AlphaSTomics) -> dict[str, Tensor]:
    """Weights, and what was fitted after training."""
    return model.module.state_dict() | fitted_to_tensors(model)


def fitted_to_tensors(model: AlphaSTomics) -> dict[str, Tensor]:
    """What was fitted after training, which goes beside the weights: the tensors of each object behind its name."""
    return {
        f"{FITTED}{name}.{field.name}": torch.from_numpy(getattr(value, field.name))
        for name in _FITTED
        if (value := getattr(model, f"{name}_")) is not None
        for field in fields(value)
    }


def _restore_fitted(model: AlphaSTomics, tensors: Mapping[str, Tensor]) -> None:
    """Undo :func:`fitted_to_tensors`; None where there is nothing."""
    n_genes, n_dims = model.schema.n_genes, model.schema.n_dims
    for name, kind in _FITTED.items():
        prefix = f"{FITTED}{name}."
        parts = {n.removeprefix(prefix): value.float().numpy() for n, value in tensors.items() if n.startswith(prefix)}
        if not parts:
            continue
        value = kind(**parts)
        if not value.fits(n_genes, n_dims):
            raise RuntimeError(f"{name} do not fit {n_genes} genes in {n_dims} dimensions")
        setattr(model, f"{name}_", value)


def _deformation(value: Any) -> float | None:
    """The strength of deformation of the last training; None in models saved before it was."""
    if value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise RuntimeError(f"deformation={value!r} is not a finite number")


def _pickle_hint(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.p*t*")) if folder.is_dir() else []
    return f" ({', '.join(found)} is there: pickled models can run code and are never opened)" if found else ""


def plain(value: Any) -> Any:
    """Nested values as JSON types: arrays and tuples as lists, numpy numbers as numbers."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Tell what a damaged model breaks as the damage that it is."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{folder} does not hold a whole model: {error}") from error


def restore(
    cls: type[AlphaSTomics],
    folder: Path,
    stored: Stored,
    adata: AnnData | Literal[False] | None,
    *,
    accelerator: str,
    device: int | str,
) -> AlphaSTomics:
    """Rebuild a model from what its folder, or checkpoint, holds; see :meth:`AlphaSTomics.load`."""
    target = device_of(accelerator, device)
    config = stored.config
    if config.get("class") != cls.__name__:
        raise ValueError(f"{folder} holds a {config.get('class')}, not a {cls.__name__}")
    if adata is None and (folder / DATA).is_file():
        adata = ad.read_h5ad(folder / DATA)
    with _whole(folder):
        registry, setup = config["registry"], dict(config["registry"]["setup_args"])
        TissueSchema.from_dict(registry[SCHEMA])
    data = None if adata is False else adata
    if data is not None:  # what is wrong with these data is no fault of the folder
        cls.setup_anndata(data, **setup, source_registry=registry)
    with _whole(folder):
        model = cls(data, registry if data is None else None, **config["init"])
        _restore_fitted(model, stored.weights)
        model.module.load_state_dict(
            {name: value for name, value in stored.weights.items() if not name.startswith(FITTED)}
        )
        model.frame_ = ReferenceFrame.from_dict(config["frame"]) if config["frame"] is not None else None
        model.deformation_ = _deformation(config.get("deformation"))
        model.trainings_ = trainings_of(config)
        model.history_ = {
            name: pd.DataFrame({name: pd.Series({int(i): v for i, v in values.items()}, dtype=float)}).rename_axis(
                "epoch"
            )
            for name, values in config["history"].items()
        }
        model.is_trained_ = bool(config["is_trained"])
    model.module.eval()
    model.to_device(target)
    return model
