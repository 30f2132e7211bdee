"""Agreement of both modalities: its definition, its floor and its ceiling."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.decomposition import PCA

from alphastomics.datasets import synthetic_tissue
from alphastomics.metrics import distance_spearman, log1p_normalized, modality_agreement, oracle_positions


@pytest.fixture(scope="module")
def slices() -> dict:
    """Expression, positions and types of two slices of one tissue."""
    adata = synthetic_tissue(n_slices=2, n_cells=500, n_genes=100, random_state=0)
    parts = [adata[adata.obs["slice_id"] == name] for name in ("slice_0", "slice_1")]
    return {
        "expression": [log1p_normalized(part.X, 300) for part in parts],
        "positions": [part.obsm["spatial"] for part in parts],
        "types": parts[0].obs["cell_type"].to_numpy(),
    }


def agreement(slices: dict, positions: np.ndarray | None = None, **options) -> float:
    (x, y), (p, q) = slices["expression"], slices["positions"]
    return modality_agreement(x, p if positions is None else positions, y, q, **options)


def test_is_the_spearman_of_distances_to_the_places_of_nearest_neighbors(slices):
    (x, y), (p, q) = ([e.toarray() for e in slices["expression"]], slices["positions"])
    components = PCA(10, svd_solver="full").fit(y)
    a, b = components.transform(x), components.transform(y)
    nearest = np.argsort(np.square(a[:, None] - b[None]).sum(axis=2), axis=1)[:, :15]
    expected = distance_spearman(q[nearest].mean(axis=1), p, n_rows=500)
    assert agreement(slices, n_components=10, n_neighbors=15) == pytest.approx(expected, abs=1e-6)


def test_floor_types_and_ceiling_are_in_order(slices):
    p = slices["positions"][0]
    rng = np.random.default_rng(0)
    chance = agreement(slices, rng.permutation(p))
    typed = agreement(slices, oracle_positions(p, slices["types"]))
    noisy = agreement(slices, p + rng.normal(scale=100, size=p.shape))
    ceiling = agreement(slices)
    assert abs(chance) < 0.1
    assert chance + 0.15 < typed < noisy < ceiling - 0.03
    assert ceiling > 0.5


def test_independent_modalities_are_at_the_floor_though_both_are_real(slices):
    """Real positions in their own order, and real expression: it is smooth in no frame but its own."""
    assert abs(agreement(slices, slices["positions"][1])) < 0.1


def test_smooth_expression_in_the_wrong_place_does_not_agree(slices):
    """Two halves exchanged: neighborhoods stay the same, the tissue changes."""
    x, p = slices["expression"][0], slices["positions"][0]
    axis = np.linalg.svd(p - p.mean(axis=0), full_matrices=False)[2][0]
    along = (p - p.mean(axis=0)) @ axis
    exchanged = p + np.where(along < np.median(along), np.ptp(along) / 2, -np.ptp(along) / 2)[:, None] * axis
    assert agreement(slices, exchanged) < agreement(slices) / 2
    assert x.shape[0] == len(exchanged)


def test_frame_unit_order_and_storage_change_nothing(slices):
    (x, y), (p, q) = slices["expression"], slices["positions"]
    expected = modality_agreement(x, p, y, q)
    turn = np.array([[0.6, -0.8], [-0.8, -0.6]])
    assert modality_agreement(x, 1e-3 * p @ turn + 7, y, q) == pytest.approx(expected, abs=1e-9)
    assert modality_agreement(x, p, y, 5 * q @ turn) == pytest.approx(expected, abs=1e-9)
    order = np.random.default_rng(0).permutation(len(q))
    assert modality_agreement(x, p, y[order], q[order]) == pytest.approx(expected, abs=1e-6)
    assert modality_agreement(x.toarray(), p, sparse.csc_matrix(y), q) == pytest.approx(expected, abs=1e-6)


def test_a_collapsed_sample_scores_nothing(slices):
    assert agreement(slices, np.zeros_like(slices["positions"][0])) == 0
    (x, y), (p, q) = slices["expression"], slices["positions"]
    assert np.isnan(modality_agreement(x[:1], p[:1], y, q))


def test_invalid_input_raises(slices):
    (x, y), (p, q) = slices["expression"], slices["positions"]
    with pytest.raises(ValueError, match=r"sample.*500 cells.*\(499, 2\)"):
        modality_agreement(x, p[1:], y, q)
    with pytest.raises(ValueError, match="the same in all cells"):
        modality_agreement(np.ones((60, 5)), np.zeros((60, 2)), np.ones((60, 5)), np.zeros((60, 2)))
    with pytest.raises(ValueError, match="10 cells.*100 genes"):
        modality_agreement(x, p, y[:10], q[:10])
