"""Base of the model class: attributes, sampler, state, and check of a query."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scvi.model.base import BaseModelClass

from alphastomics._io._json import to_plain
from alphastomics._provenance import versions
from alphastomics.data import AnnDataSource
from alphastomics.data._checks import check_in_memory
from alphastomics.model._state import ModelState
from alphastomics.sampling import FittedStatistics, Sampler
from alphastomics.sampling._fit import fit_nearest, fit_reference_cells, fit_statistics
from alphastomics.sampling._fit_expression import fit_expression
from alphastomics.sampling._fit_perturbation import fit_perturbation
from alphastomics.sampling._second import SecondNetwork, weights_of
from alphastomics.train.datamodule import training_slices
from alphastomics.train.timesteps import PLACED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import CellSource, TissueSchema
    from alphastomics.data.parquet._source import ParquetSource
    from alphastomics.diffusion import Mode, Process
    from alphastomics.nn import Denoiser
    from alphastomics.sampling._perturbation import Perturbation
    from alphastomics.train.cross_fit import CrossFit


class ModelBase(BaseModelClass):
    """Base of the mixins of :class:`AlphaSTomics`.

    Attributes
    ----------
    module
        The network.
    schema
        The schema of the reference.
    diffusion
        Diffusion process of expression.
    trainings_
        Records of :mod:`alphastomics._provenance`, one for each training; its ``adaptations`` are in the order of the calls of ``adapt``.
    """

    module: Denoiser
    schema: TissueSchema
    diffusion: Process
    trainings_: tuple[dict[str, Any], ...]
    _dataset: ParquetSource | None  # the reference, if it is on disk
    _fitted: FittedStatistics
    _second: tuple[CrossFit, Perturbation] | None = None  # of the last training, until statistics are fitted
    _unfitted_deformation: float | None = None  # of a training that an error ended, before its statistics were fitted

    @property
    def fitted_(self) -> FittedStatistics:
        """Statistics of the reference, fitted after training; after a training that an error ended, at the first use."""
        if self._unfitted_deformation is not None:
            self._fit_statistics(self._trained_source(), self._unfitted_deformation)
        return self._fitted

    @fitted_.setter
    def fitted_(self, fitted: FittedStatistics) -> None:
        self._fitted, self._unfitted_deformation = fitted, None

    def _training_source(self) -> CellSource:
        """The reference with its positions."""
        return self._dataset or AnnDataSource(self.adata, self.schema, positions=True)

    def _trained_source(self) -> CellSource:
        """The slices of the reference that the last training did not hold out, with their positions."""
        return training_slices(self._training_source(), self.trainings_[-1]["arguments"].get("validation_size"))

    def _fit_statistics(self, source: CellSource, deformation: float) -> None:
        """Fit the statistics of the reference to the trained network."""
        sampler = Sampler(module=self.module, diffusion=self.diffusion, schema=self.schema, mode=self.mode)
        fitted = fit_statistics(sampler, source, deformation=deformation)
        if self._second is not None:
            (second, perturbation), self._second = self._second, None
            fitted = replace(fitted, perturbation=perturbation, second=self._kept_network(second))
        self.fitted_ = fitted

    def _placing_sampler(self, module: Denoiser) -> Sampler:
        """A sampler with another network that only places cells."""
        return Sampler(module=module, diffusion=self.diffusion, schema=self.schema, mode="expr_to_pos")

    def _fit_draws(self, source: CellSource, second: CrossFit) -> None:
        """Fit the spread of draws of positions on cells that a second network has not seen."""
        other = self._placing_sampler(second.module)
        cells = fit_reference_cells(other, source, second.slices)
        other = replace(other, fitted=FittedStatistics(nearest=fit_nearest(source), reference_cells=cells))
        self._second = second, fit_perturbation(other, source, second.held_out)

    def _kept_network(self, second: CrossFit) -> SecondNetwork | None:
        """The second network, for counts, log-normalized and binary values; with others it does not improve the placement."""
        if not self.schema.is_detected:
            return None
        # A training that was resumed counts its steps from the beginning.
        trainings = self.trainings_[-1:] if self.trainer.ckpt_path else self.trainings_
        adaptations = [each for training in trainings for each in training.get("adaptations", [])]
        n_placed = PLACED[self.mode] * count_steps([*trainings, *adaptations])
        return SecondNetwork(weights=weights_of(second.module), share=second.n_steps / (second.n_steps + n_placed))

    @property
    def mode(self) -> Mode:
        """Mode in which the model is trained, ``"expr_to_pos"``, ``"pos_to_expr"``, ``"joint"`` or ``"any"``."""
        return self._arguments["mode"]

    @property
    def _arguments(self) -> dict[str, Any]:
        """Arguments of the model class."""
        return self.init_params_["non_kwargs"]

    def _make_sampler(self) -> Sampler:
        """The sampler with the trained network; raises an error if the model is not trained."""
        self._check_if_trained(warn=False, message="The model is not trained; call train() first")
        second = self.fitted_.second
        return Sampler(
            module=self.module,
            diffusion=self.diffusion,
            schema=self.schema,
            mode=self.mode,
            fitted=self.fitted_,
            second=None if second is None else second.build(self.module),
        )

    def _with_expression(self, sampler: Sampler) -> Sampler:
        """The sampler of this model with the statistics of sampled expression, which are fitted at the first call."""
        if sampler.fitted.marginal_target is None:
            return sampler
        self.fitted_ = fit_expression(sampler)
        return replace(sampler, fitted=self.fitted_)

    def _read_query(self, adata: AnnData | None, indices: Sequence[int] | NDArray[np.int64] | None = None) -> AnnData:
        """The rows ``indices`` of a query, or of the reference when ``adata`` is None."""
        adata = self.adata if adata is None else adata
        if adata is None:
            raise ValueError("This model was loaded without data; pass adata")
        check_in_memory(adata)
        if indices is not None:
            adata = adata[_check_rows(indices, adata.n_obs)]
        if adata.n_obs == 0:
            raise ValueError("The query has no cells; pass some, or check indices")
        return adata

    def _state(self, fitted: FittedStatistics | None = None) -> ModelState:
        """The model as tensors and plain values, with other fitted statistics unless these are None."""
        history = {
            name: {int(i): float(v) for i, v in table.iloc[:, 0].items()}
            for name, table in (self.history_ or {}).items()
        }
        config = {
            "class": type(self).__name__,
            "init": to_plain(self._arguments),
            "registry": to_plain(self.registry_),
            "is_trained": self.is_trained_,
            "history": to_plain(history),
            "provenance": {"trainings": to_plain(self.trainings_)},
            "versions": versions(),
        }
        return ModelState(weights=self.module.state_dict(), config=config, fitted=fitted or self.fitted_)


def count_steps(records: Iterable[Mapping[str, Any]]) -> int:
    """Number of steps of all trainings or adaptations with these records."""
    return sum(int(record["n_steps"]) for record in records)


def _check_rows(indices: Sequence[int] | NDArray[np.int64], n_cells: int) -> NDArray[np.int64]:
    """Row numbers (n,) of a query; raises ``ValueError`` for others."""
    rows = np.asarray(indices)
    if rows.dtype == bool and rows.shape == (n_cells,):
        return np.flatnonzero(rows)
    if not rows.size:
        return rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= n_cells:
        raise ValueError(
            f"indices=… must be row numbers of the query from 0 to {n_cells - 1}, or a mask of its cells; pass such rows"
        )
    return rows
