"""Whether the tensors of a file are those of the model that its configuration describes, known before any memory is taken.

A model on disk: ``model.safetensors`` (weights), ``config.json`` (everything else); nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from alphastomics._io import _json
from alphastomics._io._atomic import replacing, write_text
from alphastomics._io._errors import WRITE, describe_error, format_value, permission_error
from alphastomics._io._untrusted import check_inside, check_memory
from alphastomics._provenance import trainings_of, versions
from alphastomics.data import TissueSchema
from alphastomics.data._h5ad import read_h5ad
from alphastomics.model._fields import SCHEMA, PositionField, schema_fields
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.sampling._calibration import Marginals
from alphastomics.sampling._dependence import Dependence
from alphastomics.sampling._exemplars import Exemplars
from alphastomics.sampling._frames import ReferenceFrame
from alphastomics.sampling._outline import Outlines
from alphastomics.train.distributed.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike
    from pathlib import Path

    from anndata import AnnData
    from torch import Tensor

    from alphastomics.model._model import AlphaSTomics

FITTED = "fitted."  # before the names of tensors that are not weights
FLOATING = ("F64", "F32", "F16", "BF16")  # numbers as safetensors calls them
MOST_LAYERS = 1000  # networks take time for each, and a file says quickly that it has many
REMEDY = "take another copy, or save it again"


class Kind(NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    is_floating: bool


def read_header(path: Path) -> dict[str, Kind]:
    """What a safetensors file says of its tensors; they are not read."""
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}
        return {name: Kind(tuple(part.get_shape()), part.get_dtype() in FLOATING) for name, part in parts.items()}


def incomplete(path: str | PathLike[str], why: BaseException | str) -> ValueError:
    """What is said of a folder, or file, that does not hold a whole model."""
    why = why if isinstance(why, str) else _named(why)
    return ValueError(f"{path} does not hold a whole model: {why}; {REMEDY}")


def _named(error: BaseException) -> str:
    return f"{describe_error(error)} is missing" if isinstance(error, KeyError) else describe_error(error)


def check(path: Path, config: Mapping[str, Any], found: Mapping[str, Kind]) -> None:
    """Refuse weights that are not those of the network, which is made without memory to know them.

    Parameters
    ----------
    path
        Folder or file of the model, for messages.
    config
        What it says of itself.
    found
        What its file says of the tensors.

    Raises
    ------
    ValueError
        If one is missing, superfluous, of another shape, or no floating-point numbers.
    """
    try:
        network = _network(config)
        if not 0 <= network.n_layers <= min(MOST_LAYERS, len(found)):
            raise ValueError(f"there are no weights of n_layers={format_value(network.n_layers)}")
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in Denoiser(network).state_dict().items()}
    except Exception as error:  # a crafted configuration can break what reads it in any way
        raise incomplete(path, error) from error
    weights = {name: kind for name, kind in found.items() if not name.startswith(FITTED)}
    for name in sorted(expected.keys() - weights.keys()):
        raise incomplete(path, f"the weight {name} is missing")
    for name in sorted(weights.keys() - expected.keys()):
        raise incomplete(path, f"no weight of this network is called {format_value(name)}")
    for name, (shape, is_floating) in found.items():
        if shape != expected.get(name, shape):
            raise incomplete(path, f"size mismatch for {name}, {shape} where the network has {expected[name]}")
        if not is_floating:
            raise incomplete(path, f"{format_value(name)} does not hold floating-point numbers")


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights with which nothing can be computed.

    Raises
    ------
    ValueError
        If one is NaN or infinite.
    """
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} is NaN or infinite")


def _network(config: Mapping[str, Any]) -> DenoiserConfig:
    """The network that a configuration describes, as :class:`AlphaSTomics` makes it."""
    schema, init = TissueSchema.from_dict(config["registry"][SCHEMA]), config["init"]
    names = {field.name for field in fields(DenoiserConfig)} & set(init)
    return DenoiserConfig(
        n_genes=schema.n_genes,
        n_dims=schema.n_dims,
        sequence=schema.sequence_key is not None,
        mask_tokens=bool(init.get("enable_masking", False)),
        **{name: init[name] for name in names - {"n_genes", "n_dims", "sequence", "mask_tokens", "dropout"}},
    )


FORMAT = "alphastomics-model"
FORMAT_VERSION = 2
_FITTED: dict[str, type[Marginals | Dependence | Outlines | Exemplars]] = {
    "marginals": Marginals,
    "dependence": Dependence,
    "outlines": Outlines,
    "exemplars": Exemplars,
}
WEIGHTS, CONFIG, DATA = "model.safetensors", "config.json", "adata.h5ad"
PICKLED = (".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth")  # endings of what others save models in


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
    with replacing(folder / WEIGHTS) as temporary:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(f"{folder / WEIGHTS} cannot be written ({describe_error(error)}); {WRITE}") from error
    write_text(folder / CONFIG, text)


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
        check_inside(folder, folder / name)
    config = _read_config(folder / CONFIG)
    if config.get("format_version") != FORMAT_VERSION:
        version = format_value(config.get("format_version"))
        raise ValueError(f"{folder} has format version {version}; this package reads {FORMAT_VERSION}")
    path = folder / WEIGHTS
    with _weights_of(path):
        check_memory(path.stat().st_size)
        found = read_header(path)
    check(folder, config, found)
    with _weights_of(path):
        weights = load_file(path)
    return Stored(weights, config)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = _json.read(path)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is truncated or not JSON: {describe_error(error)}; {REMEDY}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe a model of AlphaSTomics; name another folder")
    return config


@contextmanager
def _weights_of(path: Path) -> Iterator[None]:
    """Name the file in what is raised when it is not what it says that it is."""
    try:
        with path.open("rb"):  # of a file that may not be read safetensors says that it is missing
            yield
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        why = f"truncated or not a safetensors file: {describe_error(error)}"
        raise ValueError(f"{path} is {why}; {REMEDY}") from error


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
        parts = {
            n.removeprefix(prefix): value.float().numpy().copy() for n, value in tensors.items() if n.startswith(prefix)
        }
        if not parts:
            continue
        value = kind(**parts)
        if not value.fits(n_genes, n_dims):
            raise RuntimeError(f"{name} do not fit {n_genes} genes in {n_dims} dimensions")
        setattr(model, f"{name}_", value)


def _check_registry(registry: dict[str, Any], schema: TissueSchema) -> None:
    """What scvi-tools says of the reference must be what the schema says of it."""
    entries = registry["field_registries"]
    for field in schema_fields(schema):
        parts = [entries[field.registry_key][part] for part in ("data_registry", "state_registry", "summary_stats")]
        described = all(isinstance(part, dict) for part in parts)
        if described and isinstance(field, PositionField):
            described = isinstance(parts[1].get("column_names"), list)
        if not described:
            raise ValueError(f"its registry does not describe {field.registry_key}")
    stats = entries["X"]["summary_stats"]
    if stats["n_vars"] != schema.n_genes or entries["X"]["state_registry"]["n_vars"] != schema.n_genes:
        raise ValueError(f"its registry and its schema differ in the number of genes, {schema.n_genes}")
    if type(stats["n_cells"]) is not int or stats["n_cells"] < 0:
        raise ValueError("its registry does not say how many cells there were")


def _frame(values: Any, schema: TissueSchema) -> ReferenceFrame | None:
    if values is None:
        return None
    frame = ReferenceFrame.from_dict(values)
    if len(frame.centroid) != schema.n_dims:
        raise ValueError(f"its frame is not one of {schema.n_dims} dimensions")
    return frame


def _deformation(value: Any) -> float | None:
    """The strength of deformation of the last training; None in models saved before it was."""
    if value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise RuntimeError(f"deformation={value!r} is not a finite number")


def _pickle_hint(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED) if folder.is_dir() else []
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
    except Exception as error:  # a crafted configuration can break what reads it in any way
        raise incomplete(folder, error) from error


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
        raise ValueError(f"{folder} holds a model of {format_value(config.get('class'))}, not of {cls.__name__}")
    if adata is None and (folder / DATA).is_file():
        check_inside(folder, folder / DATA)
        adata = read_h5ad(folder / DATA)
    with _whole(folder):
        registry, setup = config["registry"], dict(config["registry"]["setup_args"])
        schema = TissueSchema.from_dict(registry[SCHEMA])
        _check_registry(registry, schema)
        if others := setup.keys() - signature(cls.setup_anndata).parameters.keys():
            raise ValueError(f"setup_anndata has no argument {format_value(min(others))}")
    data = None if adata is False else adata
    if data is not None:  # what is wrong with these data is no fault of the folder
        cls.setup_anndata(data, **setup, source_registry=registry)
    with _whole(folder):
        weights = {name: value for name, value in stored.weights.items() if not name.startswith(FITTED)}
        check_finite(weights)
        model = cls(data, registry if data is None else None, **config["init"])
        _restore_fitted(model, stored.weights)
        model.module.load_state_dict(weights)
        model.frame_ = _frame(config["frame"], schema)
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
