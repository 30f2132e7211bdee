"""The state of a model as tensors and plain values, and checks of the content of a file.

A file may be damaged or crafted. Names, shapes and types of the tensors are therefore compared with the network that the
configuration describes before memory is allocated for them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from alphastomics._io._errors import describe_error, format_value
from alphastomics.config import NetworkConfig
from alphastomics.config._setting import settings_of
from alphastomics.model._fields import check_registry, read_schema
from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters
from alphastomics.sampling import FittedStatistics
from alphastomics.sampling._sampler import SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike
    from pathlib import Path

    from torch import Tensor

    from alphastomics.data import TissueSchema

FITTED = "fitted."  # prefix of the names of tensors that are not weights of the trained network
MAX_DEPTH = 6  # nested mappings and lists in a training record
MOST_LAYERS = 1000  # limits the time to build the network of a crafted file
REMEDY = "use another copy, or save the model again"


class Kind(NamedTuple):
    """Shape and kind of a tensor in a file."""

    shape: tuple[int, ...]
    is_floating: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelState:
    """A model as tensors and plain values.

    Parameters
    ----------
    weights
        Weights of the network, by name.
    config
        Plain values: ``class``, ``init`` (arguments of the class), ``registry``, ``is_trained``, ``history``,
        ``provenance``, ``versions``.
    fitted
        Statistics of the reference.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    fitted: FittedStatistics

    @property
    def init(self) -> Mapping[str, Any]:
        """Arguments of the class."""
        return self.config["init"]

    @property
    def schema(self) -> TissueSchema:
        """The tissue on which the model was trained."""
        return read_schema(self.config["registry"])

    @property
    def n_cells(self) -> int:
        """Number of cells of the reference."""
        return int(self.config["registry"]["field_registries"]["X"]["summary_stats"]["n_cells"])

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the network."""
        with torch.device("meta"):
            return count_parameters(Denoiser(_network(self.config))).total

    def to_json(self) -> dict[str, Any]:
        """All values except the tensors."""
        return {**self.config, **self.fitted.to_dict()}

    def to_tensors(self) -> dict[str, Tensor]:
        """Weights and fitted statistics."""
        fitted = {f"{FITTED}{name}": tensor for name, tensor in self.fitted.to_tensors().items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in {**self.weights, **fitted}.items()}

    @classmethod
    def restore(cls, path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelState:
        """Rebuild from :meth:`to_json` and :meth:`to_tensors`, read from ``path``.

        Raises ``ValueError`` if a value is missing or invalid, or a weight is NaN or infinite.
        """
        with reading_model(path):
            schema = read_schema(config["registry"])
            check_registry(config["registry"], schema)
            weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(FITTED)}
            for name, tensor in tensors.items():
                if not torch.isfinite(tensor).all():
                    raise ValueError(f"{name} is NaN or infinite")
            fitted = {n.removeprefix(FITTED): tensor for n, tensor in tensors.items() if n.startswith(FITTED)}
            statistics = FittedStatistics.restore(config, fitted, n_genes=schema.n_genes, n_dims=schema.n_dims)
        return cls(weights=weights, config=config, fitted=statistics)


def incomplete_model(path: str | PathLike[str], reason: BaseException | str) -> ValueError:
    """The error for a folder or file that does not contain a complete model."""
    if isinstance(reason, BaseException):
        reason = f"{describe_error(reason)} is missing" if isinstance(reason, KeyError) else describe_error(reason)
    return ValueError(f"{path} does not contain a complete model: {reason}; {REMEDY}")


@contextmanager
def reading_model(path: Path) -> Iterator[None]:
    """Replace any error in the context by the ``ValueError`` of :func:`incomplete_model`."""
    try:
        yield
    except Exception as error:  # a crafted configuration can cause any error
        raise incomplete_model(path, error) from error


def check_tensors(path: Path, config: Mapping[str, Any], found: Mapping[str, Kind]) -> None:
    """Compare the tensors of a file with the network that its configuration describes, built on the meta device.

    Raises ``ValueError`` if one is missing, unknown, of another shape or not of a floating-point type.
    """
    with reading_model(path):
        network = _network(config)
        if not 0 <= network.n_layers <= min(MOST_LAYERS, len(found)):
            raise ValueError(f"the file has no weights for n_layers={format_value(network.n_layers)}")
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in Denoiser(network).state_dict().items()}
    second = f"{FITTED}{SECOND}."
    if any(name.startswith(second) for name in found):
        expected |= {f"{second}{name}": shape for name, shape in expected.items()}
    weights = {name for name in found if not name.startswith(FITTED) or name.startswith(second)}
    for name in sorted(expected.keys() - weights):
        raise incomplete_model(path, f"the weight {name} is missing")
    for name in sorted(weights - expected.keys()):
        raise incomplete_model(path, f"the network has no weight {format_value(name)}")
    for name, (shape, is_floating) in found.items():
        if shape != expected.get(name, shape):
            raise incomplete_model(
                path, f"size mismatch for {name}: {shape} in the file, {expected[name]} in the network"
            )
        if not is_floating:
            raise incomplete_model(path, f"{format_value(name)} does not contain floating-point numbers")


def trainings_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Training records in the configuration of a model; empty without provenance, ``ValueError`` if malformed."""
    provenance = config.get("provenance", {"trainings": []})
    trainings = provenance.get("trainings") if isinstance(provenance, dict) else None
    if not isinstance(trainings, list) or not all(isinstance(each, dict) and _is_shallow(each) for each in trainings):
        raise ValueError('"provenance" is not a list of training records')
    return tuple(trainings)


def _is_shallow(value: Any, depth: int = MAX_DEPTH) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(each, depth - 1) for each in parts)


def _network(config: Mapping[str, Any]) -> DenoiserConfig:
    """The configuration of the network that :class:`AlphaSTomics` makes from these values."""
    schema, init = read_schema(config["registry"]), config["init"]
    names = (settings_of(NetworkConfig).keys() & init.keys()) - {"dropout"}
    return DenoiserConfig(
        n_genes=schema.n_genes,
        n_dims=schema.n_dims,
        sequence=schema.sequence_key is not None,
        mask_tokens=bool(init.get("enable_masking", False)),
        n_cell_types=len(schema.cell_types) if init.get("use_cell_types", False) else 0,
        **{name: init[name] for name in names},
    )
