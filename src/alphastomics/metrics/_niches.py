r"""Agreement of true and predicted neighborhoods, measured by the labels of their cells.

The composition of a neighborhood is the share of each label :math:`l` among the :math:`k` nearest other cells of cell i:

.. math:: c_{il} = \frac1k \sum_{j \in \mathrm{kNN}(i)} [l_j = l]

With compositions :math:`c` at the true and :math:`\hat c` at the predicted positions, and the niche :math:`\nu(c)`, the nearest of
the k-means centers of the true compositions,

.. math::

    \text{label agreement} = \operatorname{mean}_i \Bigl( 1 - \tfrac12 \sum_l |c_{il} - \hat c_{il}| \Bigr), \qquad
    \text{niche agreement} = \operatorname{NMI}\bigl( \nu(c),\, \nu(\hat c) \bigr)

A composition of :math:`k` cells is a sample of the neighborhood, so that neighborhoods that differ only in which cells of a label are
where agree in part. The ceiling is the agreement of two such samples of the same neighborhood: of the compositions of all cells among
two random halves of the cells at the true positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score

from alphastomics._checks import check_seed
from alphastomics.metrics._distances import check_pair, row_chunks
from alphastomics.metrics._neighbors import N_NEIGHBORS, nearest_cells, neighbor_probability

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

N_NICHES = 10
N_STARTS = 10  # of k-means, the best of which is used
DIGITS = 9  # of compositions, so that rounding errors of tied distances do not separate equal ones
NICHE_SCORES = ("label_agreement", "label_agreement_ceiling", "niche_agreement", "niche_agreement_ceiling")


def niche_scores(
    true: ArrayLike,
    predicted: ArrayLike,
    labels: ArrayLike,
    *,
    n_neighbors: int = N_NEIGHBORS,
    n_niches: int = N_NICHES,
    random_state: int = 0,
) -> dict[str, float]:
    """Score predicted positions of one slice by the labels of the cells in each neighborhood.

    A cell is not in its own neighborhood. Where several cells are tied for the last places, the composition is its expectation
    over random tie-breaking, so that a prediction that is a single point has the composition of the slice everywhere. Niches are
    clusters of the true compositions by k-means; both scores depend neither on the frame nor on the unit of the positions.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, (n_cells, n_dims), in any frame and unit.
    labels
        Label of each cell, such as its type, (n_cells,).
    n_neighbors
        Number of cells in a neighborhood.
    n_niches
        Number of niches; fewer if there are fewer different true compositions.
    random_state
        Seed of k-means and of the halves of the ceilings.

    Returns
    -------
    ``label_agreement``, the mean over cells of 1 minus the total variation distance between the true and the predicted
    composition, and ``niche_agreement``, the normalized mutual information of the true and the predicted niches
    (``sklearn.metrics.normalized_mutual_info_score``); both are 1 for equal neighborhoods. ``label_agreement_ceiling`` and
    ``niche_agreement_ceiling`` are the same scores of the neighborhoods of all cells among one random half of the cells and
    those among the other half, at the true positions and with as many neighbors. A prediction can exceed them if it preserves
    neighbors of a cell and not only their labels. Scores are NaN unless there are more than ``n_neighbors`` cells, and ceilings
    unless there are more than ``n_neighbors`` in each half.

    Raises
    ------
    ValueError
        If the shapes differ, a value is not finite, a label is missing, or an argument is below 1.
    """
    y, x = check_pair(true, predicted)
    codes = pd.factorize(np.asarray(labels, dtype=object))[0]
    if codes.shape != (len(y),) or (codes < 0).any():
        raise ValueError(
            f"labels must name one label for each of the {len(y)} cells; leave out cells whose label is missing"
        )
    if n_neighbors < 1 or n_niches < 1:
        raise ValueError(f"n_neighbors={n_neighbors} and n_niches={n_niches} must be at least 1")
    check_seed(random_state)
    scores = dict.fromkeys(NICHE_SCORES, float("nan"))
    if len(y) <= n_neighbors:
        return scores
    one_hot = np.eye(codes.max() + 1)[codes]
    truth = _compositions(y, one_hot, n_neighbors)
    n_different = len(np.unique(truth, axis=0))
    niches = KMeans(min(n_niches, n_different), n_init=N_STARTS, random_state=random_state).fit(truth)
    pairs = {"": (truth, _compositions(x, one_hot, n_neighbors))}
    order = np.random.default_rng(random_state).permutation(len(y))
    halves = order[: len(y) // 2], order[len(y) // 2 :]
    if len(halves[0]) > n_neighbors:
        first, second = (_compositions(y, one_hot, n_neighbors, np.sort(half)) for half in halves)
        pairs["_ceiling"] = first, second
    for suffix, (a, b) in pairs.items():
        scores[f"label_agreement{suffix}"] = float(1 - np.abs(a - b).sum(axis=1).mean() / 2)
        found = normalized_mutual_info_score(niches.predict(a), niches.predict(b))
        scores[f"niche_agreement{suffix}"] = float(found)
    return scores


def _compositions(
    positions: NDArray[np.float64], one_hot: NDArray[np.float64], k: int, among: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Share of each label among the k nearest other cells, of those in ``among``, (n_cells, n_labels)."""
    neighbors, is_tied = nearest_cells(positions, k, among)
    shares = one_hot[neighbors].sum(axis=1)
    tied = np.flatnonzero(is_tied)
    for rows in row_chunks(len(tied), len(positions)):
        cells = tied[rows]
        shares[cells] = neighbor_probability(positions, cells, k, among) @ one_hot
    return np.round(shares / k, DIGITS)
