"""Whether the tensors of a file are those of the model that its configuration describes, known before any memory is taken."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from alphastomics._disk import reason, shown
from alphastomics.data import TissueSchema
from alphastomics.model._fields import SCHEMA
from alphastomics.nn import Denoiser, DenoiserConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from pathlib import Path

    from torch import Tensor

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
    return f"{reason(error)} is missing" if isinstance(error, KeyError) else reason(error)


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
            raise ValueError(f"there are no weights of n_layers={shown(network.n_layers)}")
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in Denoiser(network).state_dict().items()}
    except Exception as error:  # a crafted configuration can break what reads it in any way
        raise incomplete(path, error) from error
    weights = {name: kind for name, kind in found.items() if not name.startswith(FITTED)}
    for name in sorted(expected.keys() - weights.keys()):
        raise incomplete(path, f"the weight {name} is missing")
    for name in sorted(weights.keys() - expected.keys()):
        raise incomplete(path, f"no weight of this network is called {shown(name)}")
    for name, (shape, is_floating) in found.items():
        if shape != expected.get(name, shape):
            raise incomplete(path, f"size mismatch for {name}, {shape} where the network has {expected[name]}")
        if not is_floating:
            raise incomplete(path, f"{shown(name)} does not hold floating-point numbers")


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
