"""The regression of the demo: neighbors in principal components, also if the slices have separate frames."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import ortho_group

from alphastomics.cli._scores import knn_positions
from alphastomics.datasets import synthetic_tissue
from alphastomics.metrics import distance_spearman


@pytest.fixture(scope="module")
def parts():
    tissue = synthetic_tissue(n_cells=400, n_genes=60, random_state=1)
    is_query = (tissue.obs["slice_id"] == "slice_2").to_numpy()
    return tissue[is_query].copy(), tissue[~is_query].copy()


def test_one_slice_is_plain_regression(parts):
    query, reference = parts[0], parts[1][parts[1].obs["slice_id"] == "slice_0"].copy()
    counts = [a.X.toarray().astype(float) for a in (reference, query)]
    size = np.median(counts[0].sum(1))
    known, query_values = (np.log1p(x / x.sum(1, keepdims=True) * size) for x in counts)
    axes = np.linalg.svd(known - known.mean(0), full_matrices=False)[2][:30].T
    nearest = np.argsort(cdist(query_values @ axes, known @ axes), axis=1)[:, :25]
    expected = reference.obsm["spatial"][nearest].mean(1)
    np.testing.assert_allclose(knn_positions(query, reference), expected, rtol=1e-6)


def test_frames_of_the_slices_do_not_matter(parts):
    query, reference = parts
    expected = knn_positions(query, reference)
    moved = reference.copy()
    second = (moved.obs["slice_id"] == "slice_1").to_numpy()
    turn = ortho_group.rvs(2, random_state=0)
    moved.obsm["spatial"][second] = moved.obsm["spatial"][second] @ turn + [3e3, -5e3]
    np.testing.assert_allclose(knn_positions(query, moved), expected, atol=1e-6)


def test_as_good_as_with_true_frames(parts):
    query, reference = parts
    true = query.obsm["spatial"]
    score = distance_spearman(true, knn_positions(query, reference))
    reference = reference.copy()
    reference.obsm["spatial"] = reference.obsm["spatial_anatomy"]
    registered = distance_spearman(true, knn_positions(query, reference))
    assert score > registered - 0.02
    assert registered > 0.55


def test_query_positions_are_not_read(parts):
    query, reference = parts
    bare = query.copy()
    del bare.obsm
    np.testing.assert_array_equal(knn_positions(bare, reference), knn_positions(query, reference))
