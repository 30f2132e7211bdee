"""Agreement of neighborhoods against dense arithmetic and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from sklearn.neighbors import kneighbors_graph

from alphastomics.metrics import _distances, chance_positions, niche_scores, oracle_positions

KEYS = ["label_agreement", "label_agreement_ceiling", "niche_agreement", "niche_agreement_ceiling"]


def zones(n: int = 1500, n_dims: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Cells in four layers, each with a composition of three types."""
    rng = np.random.default_rng(seed)
    true = rng.uniform(size=(n, n_dims))
    shares = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]])
    labels = np.array([rng.choice(3, p=shares[int(4 * height)]) for height in true[:, 0]])
    return true, np.array(["a", "b", "c"])[labels]


def grid(side: int = 24) -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(float(side)), np.arange(float(side))), -1).reshape(-1, 2)


def dense_composition(positions: np.ndarray, labels: np.ndarray, k: int, among: np.ndarray | None = None) -> np.ndarray:
    """Expected composition when ties are broken at random, cell by cell."""
    candidates = np.arange(len(positions)) if among is None else among
    one_hot = labels[:, None] == np.unique(labels)
    rows = []
    for i in range(len(positions)):
        others = candidates[candidates != i]
        distances = np.round(cdist(positions[i : i + 1], positions[others])[0], 9)
        last = np.sort(distances)[k - 1]
        free = k - (distances < last).sum()
        weight = (distances < last) + (distances == last) * free / (distances == last).sum()
        rows.append(weight @ one_hot[others] / k)
    return np.array(rows)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.minimum(a, b).sum(axis=1).mean())


@pytest.mark.parametrize("n_dims", [2, 3])
def test_scores_equal_scikit_learn(n_dims):
    true, labels = zones(400, n_dims)
    predicted = true + np.random.default_rng(1).normal(scale=0.1, size=true.shape)
    one_hot = (labels[:, None] == np.unique(labels)).astype(float)
    truth, found = (kneighbors_graph(x, 15) @ one_hot / 15 for x in (true, predicted))
    scores = niche_scores(true, predicted, labels, n_neighbors=15, n_niches=4)
    assert list(scores) == KEYS
    assert scores["label_agreement"] == pytest.approx(overlap(truth, found), abs=1e-8)
    # The types of the cells come in another order than in the score, which numbers them as they occur.
    columns = [list(np.unique(labels)).index(name) for name in dict.fromkeys(labels)]
    niches = KMeans(4, n_init=10, random_state=0).fit(np.round(truth[:, columns], 9))
    expected = normalized_mutual_info_score(niches.labels_, niches.predict(np.round(found[:, columns], 9)))
    assert scores["niche_agreement"] == pytest.approx(expected, abs=1e-9)
    assert 0.2 < expected < 0.9


def test_the_ceiling_compares_two_halves_of_the_cells():
    true, labels = zones(300)
    scores = niche_scores(true, true, labels, n_neighbors=10, n_niches=3, random_state=4)
    order = np.random.default_rng(4).permutation(300)
    first, second = (dense_composition(true, labels, 10, np.sort(half)) for half in (order[:150], order[150:]))
    assert scores["label_agreement_ceiling"] == pytest.approx(overlap(first, second), abs=1e-8)
    ceilings = [niche_scores(true, x, labels, random_state=4)["niche_agreement_ceiling"] for x in (true, true[::-1])]
    assert ceilings[0] == ceilings[1], "the ceiling does not depend on the prediction"


def test_perfect_and_chance_predictions_and_those_between():
    true, labels = zones()
    scores = {
        "perfect": niche_scores(true, true, labels),
        "near": niche_scores(true, true + np.random.default_rng(0).normal(scale=0.02, size=true.shape), labels),
        "oracle": niche_scores(true, oracle_positions(true, labels), labels),
        "chance": niche_scores(true, chance_positions(true), labels),
    }
    assert scores["perfect"]["label_agreement"] == scores["perfect"]["niche_agreement"] == 1
    assert scores["chance"]["niche_agreement"] < 0.05
    for key in ("label_agreement", "niche_agreement"):
        values = [scores[kind][key] for kind in ("chance", "oracle", "near", "perfect")]
        assert values == sorted(values)
        assert scores["oracle"][key] < scores["perfect"][f"{key}_ceiling"] < 1


def test_the_ceiling_is_the_score_of_cells_that_are_permuted_among_their_neighbors():
    true, labels = zones(4000)
    rng = np.random.default_rng(0)
    tile = (true * 20).astype(int) @ [20, 1]  # of 10 cells
    predicted = true[np.lexsort((rng.random(4000), tile))][np.argsort(np.argsort(tile, kind="stable"))]
    scores = niche_scores(true, predicted, labels, n_niches=4)
    for name in ("label_agreement", "niche_agreement"):
        assert scores[name] == pytest.approx(scores[f"{name}_ceiling"], abs=0.05)


@pytest.mark.parametrize("tissue", ["random", "grid"])
def test_frame_unit_and_names_change_nothing(tissue):
    true, labels = zones(576)
    true = grid() if tissue == "grid" else true
    predicted = true + np.random.default_rng(2).normal(scale=0.1 * np.ptp(true), size=true.shape)
    expected = niche_scores(true, predicted, labels)
    turn = np.array([[np.cos(1.0), -np.sin(1.0)], [np.sin(1.0), np.cos(1.0)]])
    moved = niche_scores(true, 7 * predicted @ turn.T + 3, labels)
    assert moved == pytest.approx(expected, abs=1e-9)
    assert niche_scores(true @ turn.T, predicted, labels) == pytest.approx(expected, abs=1e-9)
    assert niche_scores(true, true @ (-3 * turn), labels)["niche_agreement"] == 1
    assert niche_scores(true, predicted, [{"a": 7, "b": "x", "c": True}[name] for name in labels]) == expected


@pytest.mark.parametrize("k", [4, 7])
def test_ties_and_duplicates_count_by_their_probability(k):
    points = grid(8)
    points = np.concatenate([points, points[:20], points[:20], points[:5], points[:5]])
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=len(points)).astype(str)
    rounded = np.round(points + rng.normal(size=points.shape))
    scores = niche_scores(points, rounded, labels, n_neighbors=k, random_state=3)
    truth, found = (dense_composition(x, labels, k) for x in (points, rounded))
    assert scores["label_agreement"] == pytest.approx(overlap(truth, found), abs=1e-8)
    order = np.random.default_rng(3).permutation(len(points))
    halves = np.sort(order[: len(points) // 2]), np.sort(order[len(points) // 2 :])
    first, second = (dense_composition(points, labels, k, half) for half in halves)
    assert scores["label_agreement_ceiling"] == pytest.approx(overlap(first, second), abs=1e-8)


def test_a_collapsed_prediction_has_the_composition_of_the_slice_everywhere():
    true, labels = zones(500)
    scores = niche_scores(true, np.zeros_like(true), labels)
    one_hot = labels[:, None] == np.unique(labels)
    everywhere = (one_hot.sum(axis=0) - one_hot) / 499
    expected = overlap(dense_composition(true, labels, 20), everywhere)
    assert scores["label_agreement"] == pytest.approx(expected, abs=1e-8)
    assert scores["niche_agreement"] < 0.05


def test_chunks_change_nothing(monkeypatch):
    _, labels = zones(576)
    predicted = np.round(grid() + np.random.default_rng(1).normal(size=(576, 2)))
    expected = niche_scores(grid(), predicted, labels)
    monkeypatch.setattr(_distances, "CHUNK_ENTRIES", 5000)
    assert niche_scores(grid(), predicted, labels) == pytest.approx(expected, rel=1e-9)


def test_few_cells_and_few_compositions():
    true, labels = zones(41)
    assert np.isnan(list(niche_scores(true[:20], true[:20], labels[:20]).values())).all()
    scores = niche_scores(true, true, labels)
    assert scores["niche_agreement"] == 1
    assert np.isnan([scores["label_agreement_ceiling"], scores["niche_agreement_ceiling"]]).all()
    assert np.isnan(list(niche_scores(true[:0], true[:0], []).values())).all()
    one_label = niche_scores(*zones(100)[:1], chance_positions(zones(100)[0]), ["a"] * 100)
    assert list(one_label.values()) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a"] * 9}, "labels"),
        ({"labels": ["a"] * 9 + [None]}, "labels"),
        ({"n_neighbors": 0}, "n_neighbors"),
        ({"n_niches": 0}, "n_niches"),
        ({"predicted": np.zeros((9, 2))}, "true and predicted"),
    ],
)
def test_invalid_arguments_raise(options, message):
    true = np.random.default_rng(0).uniform(size=(10, 2))
    with pytest.raises(ValueError, match=message):
        niche_scores(**({"true": true, "predicted": true, "labels": ["a"] * 10} | options))
