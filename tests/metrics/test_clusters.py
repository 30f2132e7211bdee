"""Scores of clusters against scikit-learn and all matchings."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from alphastomics.metrics import cluster_scores, matched_accuracy

KEYS = ["adjusted_rand", "normalized_mutual_information", "matched_accuracy"]


def best_accuracy(labels: np.ndarray, clusters: np.ndarray) -> float:
    """The best of all one-to-one matchings; -1 stands for no match."""
    found = np.unique(clusters)
    targets = [*np.unique(labels), *range(-len(found), 0)]
    return max(
        float((labels == np.array(choice)[np.searchsorted(found, clusters)]).mean())
        for choice in permutations(targets, len(found))
    )


@settings(max_examples=50)
@given(pairs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=40))
def test_equal_their_oracles_for_any_numbers_of_labels_and_clusters(pairs):
    labels, clusters = np.array(pairs).T
    scores = cluster_scores(labels, clusters)
    assert list(scores) == KEYS
    assert scores["adjusted_rand"] == pytest.approx(adjusted_rand_score(labels, clusters), abs=1e-12)
    assert scores["normalized_mutual_information"] == pytest.approx(
        normalized_mutual_info_score(labels, clusters), abs=1e-12
    )
    assert scores["matched_accuracy"] == pytest.approx(best_accuracy(labels, clusters), abs=1e-12)
    assert matched_accuracy(labels, clusters) == scores["matched_accuracy"]


def test_scores_ignore_label_names():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=200)
    clusters = np.where(rng.random(200) < 0.3, rng.integers(6, size=200), labels)
    expected = cluster_scores(labels, clusters)
    named = np.array(["b", "a", "d", "c"], dtype=object)[labels]
    assert cluster_scores(named, clusters.astype(str)) == pytest.approx(expected, abs=1e-12)
    assert cluster_scores(labels, (7 - clusters) * 3) == pytest.approx(expected, abs=1e-12)
    assert cluster_scores(named, 10 + labels) == pytest.approx(dict.fromkeys(KEYS, 1), abs=1e-12)


def test_shuffled_clusters_score_chance():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=4000)
    scores = cluster_scores(labels, rng.permutation(labels))
    assert abs(scores["adjusted_rand"]) < 0.01
    assert scores["normalized_mutual_information"] < 0.01
    assert scores["matched_accuracy"] == pytest.approx(0.25, abs=0.03)


def test_more_clusters_than_cells_of_a_label_give_no_warning():
    assert cluster_scores(np.arange(50), np.arange(50)) == pytest.approx(dict.fromkeys(KEYS, 1), abs=1e-12)


def test_no_cell_has_no_score():
    assert np.isnan(list(cluster_scores([], []).values())).all()
    assert np.isnan(matched_accuracy([], []))


def test_invalid_input_raises():
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\)"):
        cluster_scores([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="1 clusters"):
        cluster_scores(["a", "b"], [None, "x"])
