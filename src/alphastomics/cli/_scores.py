r"""Scores of a model on cells with known positions, and the regression baseline.

The regression places a cell at the mean position of the most similar reference cells:

.. math:: \hat x_i = \frac{1}{k} \sum_{j \in \mathcal N_k(i)} x_j

with neighbors in principal components of :math:`\log(1 + \cdot)` of counts at the median library size. Every reference slice has
its own frame, and a mean over two frames is meaningless. The slices are therefore first moved into the frame of the first one:
each is rigidly aligned to the positions that the regression on the first slice predicts for its cells. No label and no position
of the query is used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics import _keys
from alphastomics._io._atomic import write_json
from alphastomics._io._errors import format_names
from alphastomics._io._json import to_plain
from alphastomics._labels import label_names
from alphastomics.metrics import rigid_align

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics

    Array = NDArray[np.float64]

logger = logging.getLogger(__name__)

N_NEIGHBORS, N_COMPONENTS = 25, 30  # of the regression


def score_model(model: AlphaSTomics, cells: AnnData, *, random_state: int) -> pd.DataFrame:
    """Place the cells of every slice and score them; a table like that of :func:`alphastomics.tl.evaluate` with baselines.

    Raises
    ------
    KeyError
        If the true positions are missing.
    """
    import pandas as pd

    from alphastomics.cli._cells import panels

    tables = [_score(model, part, random_state=random_state) for _, part in panels(cells, model.schema.slice_key)]
    return tables[0] if len(tables) == 1 else pd.concat(tables).sort_index(level=0, sort_remaining=False, kind="stable")


def warn_if_trained(model: AlphaSTomics, cells: AnnData) -> None:
    """Warn if cells are of slices with the names of those that a model was trained on."""
    key = model.schema.slice_key
    names = set(label_names(cells.obs[key].dropna())) if key in cells.obs else set()
    trained = sorted(names & set(model.schema.slices))
    if trained:
        logger.warning(
            "%d of %d slices have the names of slices that the model was trained on (%s): their scores are not those of unseen tissue.",
            len(trained),
            len(names),
            format_names(trained),
        )


def _score(model: AlphaSTomics, cells: AnnData, *, random_state: int) -> pd.DataFrame:
    from alphastomics import tl

    schema = model.schema
    if schema.position_key not in cells.obsm:
        found = ", ".join(map(repr, cells.obsm.keys())) or "none"
        raise KeyError(f'obsm["{schema.position_key}"] is missing (found: {found}); store the true positions there')
    tl.reconstruct(cells, model=model, random_state=random_state)

    def present(key: str | None) -> str | None:
        return key if key in cells.obs else None

    return tl.evaluate(
        cells,
        truth=schema.position_key,
        library_key=present(schema.slice_key),
        cell_type_key=present(schema.cell_type_key),
        baselines=True,
        random_state=random_state,
    )


def write_scores(path: Path, table: pd.DataFrame) -> None:
    """Write the scores of every slice as JSON."""
    scores = {name: part.droplevel(0).to_dict(orient="index") for name, part in table.groupby(level=0)}
    write_json(path, to_plain(scores))


def knn_positions(query: AnnData, reference: AnnData) -> Array:
    """Predict the positions (n_cells, n_dims) of query cells by regression.

    They are in the units of the reference, whose genes are those of the query, and in the frame of its first slice.
    """
    counts = [np.asarray(part.X.toarray(), dtype=np.float64) for part in (reference, query)]
    median = np.median(counts[0].sum(axis=1))
    expression = [np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * median) for x in counts]
    pca = PCA(min(N_COMPONENTS, *expression[0].shape), svd_solver="covariance_eigh").fit(expression[0])
    features, query_features = (pca.transform(x) for x in expression)
    positions = np.array(reference.obsm[_keys.SPATIAL], dtype=np.float64)
    names = reference.obs[_keys.SLICE].to_numpy(dtype=str)
    first, *others = (np.flatnonzero(names == name) for name in np.unique(names))
    anchor = KNeighborsRegressor(min(N_NEIGHBORS, len(first))).fit(features[first], positions[first])
    for rows in others:
        positions[rows] = rigid_align(positions[rows], anchor.predict(features[rows]))[0]
    return KNeighborsRegressor(min(N_NEIGHBORS, len(positions))).fit(features, positions).predict(query_features)
