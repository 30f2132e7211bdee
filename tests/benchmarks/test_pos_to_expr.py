from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
from scipy.stats import ortho_group

from benchmarks import pos_to_expr


def test_centroids_fix_the_rigid_map():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(200, 2)), rng.choice(list("abcd"), 200)
    x += np.array([{"a": (3, 0), "b": (0, 5), "c": (-4, 1), "d": (1, -2)}[label] for label in labels])
    turn = ortho_group.rvs(2, random_state=1)
    y = x @ turn + [10, -3]
    np.testing.assert_allclose(pos_to_expr.rigid_map(x, labels, y, labels)(x), y)
    extra = np.concatenate([labels, ["e"]])  # a type of one side only is ignored
    np.testing.assert_allclose(pos_to_expr.rigid_map(x, labels, np.vstack([y, [99, 99]]), extra)(x), y)


def task_of(position, reference, query, known):
    cells = type("Cells", (), {})
    of = cells()
    of.X = reference
    target = cells()
    target.X, target.obsm, target.n_obs = query, {"spatial": position}, len(query)
    return pos_to_expr.Task(of, target, position, known)


def test_the_truth_has_perfect_scores_and_a_constant_none():
    rng = np.random.default_rng(0)
    position = rng.uniform(size=(300, 2))
    true = np.column_stack([position, rng.normal(size=(300, 8))])
    task = task_of(position, true, true, np.arange(15))
    perfect = pos_to_expr.score(true, true, task)
    assert perfect == pytest.approx({"pearson": 1, "mse": 0, "moran": 1, "variance": 1})
    constant = pos_to_expr.score(np.broadcast_to(true.mean(0), true.shape), true, task)
    assert constant["pearson"] == pytest.approx(0)
    assert constant["mse"] == pytest.approx(1, abs=0.05)
    assert constant["variance"] == pytest.approx(0)


def test_only_unknown_cells_and_spatial_genes_are_scored():
    rng = np.random.default_rng(0)
    position = rng.uniform(size=(300, 2))
    true = np.column_stack([position, rng.normal(size=(300, 8))])
    predicted = true.copy()
    predicted[:15] = 50.0
    predicted[:, 2:] = 0.0
    scores = pos_to_expr.score(predicted, true, task_of(position, true, true, np.arange(15)))
    assert scores["pearson"] == pytest.approx(1)
    assert scores["mse"] == pytest.approx(0)


def test_baselines_read_known_values_only():
    rng = np.random.default_rng(0)
    position, reference = rng.uniform(size=(300, 2)), rng.poisson(3, size=(300, 5))
    query, known = rng.poisson(3, size=(300, 5)), np.arange(0, 300, 20)
    expected = pos_to_expr.baselines(task_of(position, reference, query, known), 15.0)
    poisoned = query.copy()
    poisoned[np.setdiff1d(np.arange(300), known)] = 99
    for name, values in pos_to_expr.baselines(task_of(position, reference, poisoned, known), 15.0).items():
        np.testing.assert_array_equal(values, expected[name])


def test_baseline_of_true_layers_uses_the_layers():
    """Two intermixed layers, which positions do not predict."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(400, 2))
    layer = rng.choice(["L1", "L2"], 400)
    counts = rng.poisson(np.where(layer == "L1", 5, 50)[:, None] * [1, 0, 0] + [0, 60, 60])
    cells = ad.AnnData(
        counts, obs={"layer": layer, "cell_type": np.where(x[:, 0] < 0.5, "a", "b")}, obsm={"spatial": x}
    )
    task = pos_to_expr.Task(cells, cells, x, np.arange(20))
    true = pos_to_expr.normalized(counts, 150.0)
    guess = pos_to_expr.true_layers(task, cells, 150.0)
    assert pos_to_expr.gene_correlation(guess, true)[0] > 0.95
    assert pos_to_expr.gene_correlation(pos_to_expr.baselines(task, 150.0)["reference neighbors"], true)[0] < 0.3
    del cells.obs["layer"]
    assert pos_to_expr.true_layers(task, cells, 150.0) is None


def test_other_cells_predict_a_gradient_but_not_noise():
    """A cell is not among its own neighbors: they do not predict a gene without a spatial pattern."""
    rng = np.random.default_rng(0)
    position = rng.uniform(size=(400, 2))
    gradient = rng.poisson(50 * position[:, :1] * np.ones((1, 5)) + 1)
    noise = rng.poisson(20, size=(400, 20))
    for counts, low, high in ((np.hstack([gradient, noise]), 0.8, 1.0), (noise, -0.1, 0.2)):
        task = task_of(position, counts, counts, np.arange(20))
        scores, k = pos_to_expr.all_other_cells(task, 500.0)
        assert low < scores["pearson"] < high
        assert k in pos_to_expr.OTHER_NEIGHBORS
