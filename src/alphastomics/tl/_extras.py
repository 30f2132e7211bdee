"""Optional scores of :func:`alphastomics.tl.evaluate`: expression, autocorrelation, modality agreement, clusters, niches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from alphastomics._keys import MODALITY_AGREEMENT
from alphastomics.data._checks import check_in_memory
from alphastomics.metrics import cluster_scores, expression_scores, moran_correlation, niche_scores
from alphastomics.metrics._moran import N_NEIGHBORS
from alphastomics.tl._agreement import AgreementScorer
from alphastomics.tl._expression import ExpressionPair, read_pair
from alphastomics.tl._placed import cell_types
from alphastomics.tl._tables import read_clusters

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraScores:
    """Data of the optional scores, read once for all slices.

    Parameters
    ----------
    pair
        True and predicted expression, or None if no score uses them.
    expression
        Whether expression was predicted.
    autocorrelation
        Whether Moran's I is compared.
    scorer
        Real slices for the modality agreement, or None.
    clusters
        Labels and clusters of all cells, each (n_cells,), or None.
    types
        Cell types of all cells, (n_cells,), or None if niches are not compared.
    score_niches
        :func:`alphastomics.metrics.niche_scores` with its options.
    """

    pair: ExpressionPair | None
    expression: bool
    autocorrelation: bool
    scorer: AgreementScorer | None
    clusters: tuple[NDArray[np.object_], NDArray[np.object_]] | None
    types: NDArray[np.object_] | None
    score_niches: Callable[..., dict[str, float]]

    @classmethod
    def read(
        cls,
        adata: AnnData,
        *,
        truth: str,
        prediction: str | None,
        layer: str | None,
        expression_layer: str | None,
        transform: str,
        autocorrelation: bool,
        reference: AnnData | None,
        library_key: str | None,
        label_key: str,
        cluster_key: str | None,
        cell_type_key: str | None,
        niches: bool,
        n_niches: int,
        n_neighbors: int,
        random_state: int,
    ) -> ExtraScores:
        """Read what the arguments of :func:`alphastomics.tl.evaluate` require."""
        pair = None
        if reference is not None:
            check_in_memory(reference, "reference")
        if expression_layer is not None or autocorrelation or reference is not None:
            pair = read_pair(
                adata,
                expression_layer,
                layer=layer,
                prediction_layer=None,
                transform=transform,
                argument="expression_layer",
            )
        scorer = None
        if reference is not None:
            scorer = AgreementScorer.fit(
                adata, reference, spatial_key=truth, layer=layer, library_key=library_key, transform=transform,
                random_state=random_state, expression_layer=expression_layer, argument="truth",
            )  # fmt: skip
        types = cell_types(adata, prediction, cell_type_key) if niches else None
        if niches and types is None:
            raise ValueError("niches=True requires cell types; pass cell_type_key=…")
        return cls(
            pair=pair,
            expression=expression_layer is not None,
            autocorrelation=autocorrelation or expression_layer is not None,
            scorer=scorer,
            clusters=None if cluster_key is None else read_clusters(adata, label_key, cluster_key),
            types=types,
            score_niches=partial(niche_scores, n_neighbors=n_neighbors, n_niches=n_niches, random_state=random_state),
        )

    def score(
        self,
        cells: NDArray[np.int64],
        order: NDArray[np.int64] | None,
        true: Array,
        positions: Array,
        *,
        chosen: NDArray[np.int64],
    ) -> dict[str, float]:
        """Score some cells of one slice.

        Parameters
        ----------
        cells
            Rows of the cells, (n,).
        order
            Permutation of a baseline, (n,), or None for the prediction.
        true, positions
            True positions and those to score, (n, n_dims).
        chosen
            Indices into `cells` of those to score.
        """
        scores: dict[str, float] = {}
        if self.pair is not None:
            scores |= self._score_expression(self.pair, cells, order, true, positions, chosen)
        if self.clusters is not None:
            labels, clusters = (values[cells] for values in self.clusters)
            if order is not None:
                clusters = clusters[order]
            known = chosen[~(pd.isna(labels[chosen]) | pd.isna(clusters[chosen]))]
            scores |= cluster_scores(labels[known], clusters[known])
        if self.types is not None:
            types = self.types[cells]
            known = chosen[~pd.isna(types[chosen])]
            scores |= self.score_niches(true[known], positions[known], types[known])
        return scores

    def _score_expression(
        self,
        pair: ExpressionPair,
        cells: NDArray[np.int64],
        order: NDArray[np.int64] | None,
        true: Array,
        positions: Array,
        chosen: NDArray[np.int64],
    ) -> dict[str, float]:
        scores: dict[str, float] = {}
        expression, predicted, measured = pair.scaled(cells)
        if self.expression:
            other = predicted if order is None else expression[order]
            scores = {"n_genes": int(measured.sum()), **expression_scores(expression[chosen], other[chosen])}
        sampled = predicted if order is None else expression
        if self.autocorrelation:
            enough = len(chosen) > N_NEIGHBORS
            sides = (expression[chosen], true[chosen], sampled[chosen], positions[chosen])
            scores["moran_correlation"] = moran_correlation(*sides) if enough else float("nan")
        if self.scorer is not None:
            raw = pair.predicted if order is None else pair.true
            scores[MODALITY_AGREEMENT] = self.scorer.score(self.scorer.scaled(raw[cells[chosen]]), positions[chosen])
        return scores
