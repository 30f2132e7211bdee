"""Scores of neighborhoods against scikit-learn, scipy, and a dense reference with ties."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import ks_2samp
from sklearn.neighbors import kneighbors_graph

from alphastomics.metrics import _distances, knn_preservation, nearest_neighbor_ks


def noisy_tissue(n_dims: int = 2, n: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n_dims)
    true = rng.uniform(size=(n, n_dims))
    return true, true + rng.normal(scale=0.05, size=true.shape)


def dense_overlap(true: np.ndarray, predicted: np.ndarray, k: int) -> float:
    """Expected overlap when ties are broken at random, cell by cell."""

    def probability(positions: np.ndarray, i: int) -> np.ndarray:
        distances = np.delete(cdist(positions[i : i + 1], positions)[0], i)
        last = np.sort(distances)[k - 1]
        free = k - (distances < last).sum()
        return (distances < last) + (distances == last) * free / (distances == last).sum()

    return float(np.mean([probability(true, i) @ probability(predicted, i) for i in range(len(true))])) / k


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("k", [1, 20, 149])
def test_knn_preservation_equals_scikit_learn(n_dims, k):
    true, predicted = noisy_tissue(n_dims)
    graphs = [kneighbors_graph(positions, k) for positions in (true, predicted)]
    expected = graphs[0].multiply(graphs[1]).sum() / (k * len(true))
    assert knn_preservation(true, predicted, n_neighbors=k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_knn_preservation_equals_squidpy():
    import squidpy
    from anndata import AnnData

    true, predicted = noisy_tissue()
    adata = AnnData(obsm={"true": true, "predicted": predicted})
    graphs = []
    for key in ("true", "predicted"):
        squidpy.gr.spatial_neighbors_knn(adata, spatial_key=key, n_neighs=20, key_added=key)
        graphs.append(adata.obsp[f"{key}_connectivities"])
    expected = graphs[0].multiply(graphs[1]).sum() / (20 * len(true))
    assert knn_preservation(true, predicted) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_ties_and_duplicates_count_by_their_probability(k):
    grid = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0)), -1).reshape(-1, 2)
    doubled = np.concatenate([grid, grid[:20], grid[:20], grid[:5], grid[:5]])
    rounded = np.round(doubled + np.random.default_rng(0).normal(size=doubled.shape))
    for true, predicted in ((doubled, rounded), (rounded, doubled), (doubled, noisy_tissue(n=len(doubled))[1])):
        expected = dense_overlap(true, predicted, k)
        assert knn_preservation(true, predicted, n_neighbors=k) == pytest.approx(expected, abs=1e-12)


def test_a_collapsed_prediction_scores_chance_in_any_order_of_the_cells():
    true, _ = noisy_tissue()
    true = true[np.argsort(true[:, 0])]
    for predicted in (np.zeros_like(true), np.repeat([[0.0, 0], [1, 0]], 75, axis=0)[np.tile([0, 1], 75) * 75]):
        assert knn_preservation(true, predicted) == pytest.approx(20 / 149, abs=0.02)
    assert knn_preservation(true, np.zeros_like(true)) == pytest.approx(20 / 149, abs=1e-12)


def test_cells_that_share_a_position_are_neighbors_of_each_other():
    """Five piles of four cells: the three nearest are the others of the pile, never the cell itself."""
    piles = np.repeat(np.arange(5.0)[:, None], 4, axis=0) * [10, 0]
    assert knn_preservation(piles, piles + np.arange(20)[:, None] * 1e-3, n_neighbors=3) == 1
    assert nearest_neighbor_ks(piles, piles) == 0


def test_chunks_change_nothing(monkeypatch):
    true, _ = noisy_tissue()
    tied = np.round(true, 1)
    expected = knn_preservation(true, tied)
    monkeypatch.setattr(_distances, "CHUNK_ENTRIES", 700)
    assert knn_preservation(true, tied) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("k", [0, 150])
def test_invalid_numbers_of_neighbors_raise(k):
    with pytest.raises(ValueError, match="n_neighbors.*150"):
        knn_preservation(*noisy_tissue(), n_neighbors=k)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_nearest_neighbor_ks_equals_scipy(n_dims):
    true, predicted = noisy_tissue(n_dims)
    nearest = []
    for positions in (true, predicted):
        distances = cdist(positions, positions)
        np.fill_diagonal(distances, np.inf)
        nearest.append(distances.min(axis=1))
    expected = ks_2samp(*nearest).statistic
    assert 0.05 < expected < 0.9
    assert nearest_neighbor_ks(true, predicted) == pytest.approx(expected, abs=1e-12)
    assert nearest_neighbor_ks(true, 1000 * true) == 1, "units are those of the truth"
    assert nearest_neighbor_ks(true, np.zeros_like(true)) == 1
    assert nearest_neighbor_ks(np.zeros_like(true), np.zeros_like(true)) == 0
    assert np.isnan(nearest_neighbor_ks(true[:1], true[:1]))


def test_rounding_does_not_break_ties_of_a_rotated_grid():
    grid = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0)), -1).reshape(-1, 2)
    turn = np.array([[np.cos(1.0), -np.sin(1.0)], [np.sin(1.0), np.cos(1.0)]])
    assert nearest_neighbor_ks(grid, grid @ turn.T + 1000) == 0
