"""Everything that sampling depends on, in one frozen object: network, processes, schema, mode and fitted statistics."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from alphastomics.sampling._calibration import Dependence, Marginals
from alphastomics.sampling._confidence import ConfidenceCells
from alphastomics.sampling._expression_target import ExpressionTarget
from alphastomics.sampling._frames import ReferenceFrame
from alphastomics.sampling._overlap import NearestDistances
from alphastomics.sampling._perturbation import Perturbation
from alphastomics.sampling._reference_cells import ReferenceCells
from alphastomics.sampling._retrieval import WEIGHT
from alphastomics.sampling._second import SecondNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data import TissueSchema
    from alphastomics.diffusion import Mode, Process
    from alphastomics.nn import Denoiser

MIN_COUNT = 1e-3  # smaller counts are rounding errors of the inverse transform

Statistic: TypeAlias = Marginals | Dependence | ExpressionTarget | NearestDistances | ReferenceCells | ConfidenceCells
_STATISTICS: dict[str, type[Statistic]] = {
    "marginals": Marginals,
    "dependence": Dependence,
    "marginal_target": ExpressionTarget,
    "dependence_target": ExpressionTarget,
    "nearest": NearestDistances,
    "reference_cells": ReferenceCells,
    "confidence_cells": ConfidenceCells,
}
SECOND = "second"  # prefix of the names of the weights of the second network


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedStatistics:
    """Statistics of the reference that are fitted after training; None for those that the mode does not need.

    Parameters
    ----------
    frame
        Where the canonical frame lies in the first reference slice; None before training and for a shared frame.
    deformation
        Strength of the deformation of contexts in the last training; None before training.
    marginals, dependence
        For sampled expression; None until expression is sampled.
    marginal_target, dependence_target
        What they are fitted to, until then; the second is None for a reference of few cells.
    nearest
        Distances of neighboring cells, for sampled positions.
    reference_cells
        Cells that are retrieved for draws of positions, that complete others, and from which new slices are drawn.
    confidence_cells
        Cells with which a query is compared; None for a reference of few cells.
    perturbation
        Changes of the genes, for draws of positions.
    second
        Second network, for placements.
    """

    frame: ReferenceFrame | None = None
    deformation: float | None = None
    marginals: Marginals | None = None
    dependence: Dependence | None = None
    marginal_target: ExpressionTarget | None = None
    dependence_target: ExpressionTarget | None = None
    nearest: NearestDistances | None = None
    reference_cells: ReferenceCells | None = None
    confidence_cells: ConfidenceCells | None = None
    perturbation: Perturbation | None = None
    second: SecondNetwork | None = None

    def to_dict(self) -> dict[str, Any]:
        """The parts that are stored as JSON."""
        parts = {"frame": self.frame, "perturbation": self.perturbation}
        plain = {name: None if part is None else asdict(part) for name, part in parts.items()}
        return plain | {"deformation": self.deformation, "second_share": self.second and self.second.share}

    def to_tensors(self) -> dict[str, Tensor]:
        """The parts that are stored as tensors, by ``statistic.array``."""
        statistics: dict[str, Statistic | None] = {name: getattr(self, name) for name in _STATISTICS}
        arrays = {
            f"{name}.{part.name}": torch.from_numpy(getattr(statistic, part.name))
            for name, statistic in statistics.items()
            if statistic is not None
            for part in fields(statistic)
        }
        return arrays | {
            f"{SECOND}.{name}": weight for name, weight in (self.second.weights if self.second else {}).items()
        }

    @classmethod
    def restore(
        cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor], *, n_genes: int, n_dims: int
    ) -> FittedStatistics:
        """Rebuild from :meth:`to_dict` and :meth:`to_tensors`.

        Raises
        ------
        KeyError, TypeError
            If a part is missing or unknown.
        ValueError
            If a part has another shape than a tissue of ``n_genes`` genes and ``n_dims`` dimensions.
        """
        frame, deformation = values["frame"], values["deformation"]
        if frame is not None:
            frame = ReferenceFrame.from_dict(frame)
            if len(frame.centroid) != n_dims:
                raise ValueError(f"the frame has {len(frame.centroid)} dimensions instead of {n_dims}")
        if deformation is not None and not (isinstance(deformation, float) and math.isfinite(deformation)):
            raise ValueError(f"deformation={deformation!r} is not a finite number")
        perturbation = values["perturbation"]
        if perturbation is not None:
            perturbation = Perturbation.from_dict(perturbation)
        arrays: dict[str, dict[str, NDArray[np.float32]]] = {}
        weights: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            statistic, _, part = name.partition(".")
            if statistic == SECOND:
                weights[part] = tensor
            else:
                arrays.setdefault(statistic, {})[part] = tensor.float().numpy().copy()
        share = values["second_share"]
        second = None if share is None and not weights else SecondNetwork(weights=weights, share=share)
        statistics: dict[str, Any] = {name: _STATISTICS[name](**parts) for name, parts in arrays.items()}
        for name, each in statistics.items():
            if not each.is_valid(n_genes, n_dims):
                raise ValueError(f"{name} are not those of a fit to {n_genes} genes in {n_dims} dimensions")
        return cls(frame=frame, deformation=deformation, perturbation=perturbation, second=second, **statistics)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampler:
    """A trained network with everything that is needed to sample from it.

    Parameters
    ----------
    module
        The denoiser.
    diffusion
        The diffusion process of expression.
    schema
        The tissue on which the network was trained.
    mode
        What it was trained to sample.
    fitted
        Statistics of the reference.
    second
        The second network, whose mean is averaged with that of ``module`` in placements.
    """

    module: Denoiser
    diffusion: Process
    schema: TissueSchema
    mode: Mode
    fitted: FittedStatistics = field(default_factory=FittedStatistics)
    second: Denoiser | None = None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.module.device

    @property
    def shared_frame(self) -> bool:
        """Whether positions are registered to one frame."""
        return self.schema.frame == "shared"

    @property
    def deformation(self) -> float:
        """Strength with which views of a slice are deformed, as in the last training; 0 for a shared frame."""
        return 0.0 if self.shared_frame else self.fitted.deformation or 0.0

    @property
    def refines(self) -> bool:
        """Whether layouts are refined by default: for counts, log-normalized and binary values."""
        return self.schema.is_detected

    @property
    def retrieval_weight(self) -> float:
        """Weight of retrieved positions in a placement: 0 for counts, log-normalized and binary values."""
        return 0.0 if self.schema.is_detected else WEIGHT

    @property
    def perturbation(self) -> Perturbation:
        """Changes of the genes from which draws of positions follow."""
        if self.fitted.perturbation is None:
            raise RuntimeError("The model has no perturbation of genes; train it or load a trained one")
        return self.fitted.perturbation

    @property
    def reference_frame(self) -> ReferenceFrame:
        """Where the canonical frame lies in the first reference slice."""
        if self.fitted.frame is None:
            raise RuntimeError("The model has no reference frame; train it or load a trained one")
        return self.fitted.frame

    def to_user(self, x: NDArray[np.float32], *, in_user_frame: bool = False) -> NDArray[np.float64]:
        """Positions (N, D) in user units, from the canonical frame or, with ``in_user_frame``, from that of the user."""
        if in_user_frame or self.shared_frame:
            return self.schema.decode_position(x)
        return self.reference_frame.to_user(x, self.schema)

    def decode_draw(
        self, x: NDArray[np.float32], library_size: NDArray[np.float64] | None = None
    ) -> NDArray[np.float32]:
        """Expression (N, G) in user units from a draw in network units, with the marginals of the reference."""
        x = x if self.fitted.marginals is None else self.fitted.marginals.apply(x)
        values = self.schema.decode_expression(x, library_size)
        if self.schema.transform == "log1p":
            values[values < MIN_COUNT] = 0.0
        return values
