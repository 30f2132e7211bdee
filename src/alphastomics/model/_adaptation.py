"""Mixin of the model class: adaptation to a query."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from alphastomics.config import Augmentation, PlanConfig, SamplingConfig
from alphastomics.data import AnnDataSource
from alphastomics.model._base import ModelBase, count_steps
from alphastomics.sampling import FittedStatistics
from alphastomics.sampling._confidence import compare_query, fit_confidence_cells
from alphastomics.sampling._draws import check_mode
from alphastomics.sampling._fit import fit_statistics
from alphastomics.sampling._position_draws import predict_positions
from alphastomics.sampling._second import weights_of
from alphastomics.train.adaptation import LEAST_UNMATCHED, adapt
from alphastomics.train.runner import seconds_of

if TYPE_CHECKING:
    from datetime import timedelta

    from anndata import AnnData

logger = logging.getLogger(__name__)


class AdaptationMixin(ModelBase):
    """Adapts a trained model to a query."""

    def adapt(
        self,
        adata: AnnData,
        *,
        inpaint: bool = SamplingConfig.inpaint,
        max_time: str | timedelta | dict[str, float] | float | None = None,
    ) -> None:
        """Adapt a trained model to the cells of a query, which it then places more accurately.

        The model predicts the positions of the query, and is trained further on the reference and on the query at these positions;
        this is repeated once. The second network is trained further as well, if there is one. The number of steps is at
        most 30 % of that of all trainings, and less for a small query. The query may come from another specimen or another instrument.
        Its positions are not read, except for known ones with ``inpaint``. :func:`alphastomics.tl.reconstruct` adapts the models that it
        trains to a query that differs from the reference. After an error or an interruption, the model is as before.

        Parameters
        ----------
        adata
            The query, not modified.
        inpaint
            Whether positions of `adata` that are not NaN are known.
        max_time
            Maximal duration, as in :meth:`train`. None: no limit.

        Raises
        ------
        RuntimeError
            If the model is not trained.
        ValueError
            If the model does not place cells, or was loaded without its reference, or `max_time` is not positive.

        Examples
        --------
        >>> model.adapt(query)
        >>> placed = model.sample(query)
        """
        check_mode("expr_to_pos", self.mode)
        max_seconds = seconds_of(max_time)
        trained = self._make_sampler()
        if self.adata is None and self._dataset is None:
            raise ValueError("This model was loaded without data; load it with adata= to adapt it")
        reference, training = self._trained_source(), self.trainings_[-1]
        query = self._query_source(adata, positions=inpaint)
        second, fitted = trained.second, trained.fitted
        weights = weights_of(self.module)
        try:
            n_steps = adapt(
                self.module,
                second,
                reference,
                query,
                predict=lambda: predict_positions(trained, query, inpaint=inpaint),
                mode=self.mode,
                diffusion=self.diffusion,
                plan=PlanConfig(**training["plan"]),
                augmentation=Augmentation(**training["arguments"]["augmentation"]),
                n_steps=count_steps(self.trainings_),
                seed=self._arguments["random_state"],
                max_seconds=math.inf if max_seconds is None else max_seconds,
            )
            if second is not None and fitted.second is not None:
                fitted = replace(fitted, second=replace(fitted.second, weights=weights_of(second)))
            adapted = replace(trained, second=None, fitted=FittedStatistics())
            statistics = fit_statistics(adapted, reference, deformation=trained.deformation)
        except BaseException:  # the fitted statistics are those of the previous weights
            self.module.load_state_dict(weights)
            raise
        adaptations = [*training.get("adaptations", []), {"n_cells": query.n_cells, "n_steps": n_steps}]
        self.trainings_ = (*self.trainings_[:-1], training | {"adaptations": adaptations})
        self.fitted_ = replace(statistics, perturbation=fitted.perturbation, second=fitted.second)

    def _differs(self, adata: AnnData) -> bool:
        """Whether a query differs from the reference by more than cells of the reference from each other, so that adapting helps."""
        compared = fit_confidence_cells(self._training_source())
        if compared is None:
            return True
        share = compare_query(compared, self._query_source(adata, positions=False))
        differs = share > LEAST_UNMATCHED
        logger.info(
            "%.0f %% of the cells of the query have a confidence below 0.05 (5 %% expected of cells like the reference): %s.",
            100 * share,
            "the network will be adapted" if differs else "not adapted",
        )
        return differs

    def _query_source(self, adata: AnnData, *, positions: bool) -> AnnDataSource:
        """The cells of a query, without the warnings of :meth:`sample`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return AnnDataSource(self._read_query(adata), self.schema, positions=positions)
