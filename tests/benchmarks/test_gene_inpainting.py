from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA

from benchmarks import gene_inpainting as inpainting, pos_to_expr


@pytest.fixture
def task(make_tissue):
    pair = make_tissue(0), make_tissue(1, n_slices=1, n_cells=400)
    for tissue in pair:  # types of which three would fix the frame
        x = tissue.obsm["spatial"]
        tissue.obs["cell_type"] = [f"{a:.0f}{b:.0f}" for a, b in np.column_stack([x[:, 0] > 0.5, x[:, 1] > 0.3])]
    return pos_to_expr.make_task(*pair, seed=0)


def test_hidden_entries_equal_scored_entries():
    rng = np.random.default_rng(0)
    genes = inpainting.hide((50, 40), "genes", rng)
    assert genes.sum() == 12 * 50
    assert (genes == genes[0]).all()
    entries = inpainting.hide((50, 40), "entries", rng)
    assert entries.sum() == 600
    assert not (entries == entries[0]).all()


@pytest.mark.parametrize("question", inpainting.QUESTIONS)
def test_hidden_values_are_never_read(task, question):
    hidden = inpainting.hide(task.query.shape, question, np.random.default_rng(0))
    expected = inpainting.baselines(task, hidden, question, 100.0, seed=0)
    task.query.X[hidden] = 99
    poisoned = inpainting.baselines(task, hidden, question, 100.0, seed=0)
    assert list(expected) == [
        "space",
        "space, best k",
        "expression",
        "expression, best k",
        "cell type",
        "cell type, predicted",
    ]
    for name in ("space", "expression", "cell type", "cell type, predicted"):
        np.testing.assert_array_equal(poisoned[name][0], expected[name][0])


@pytest.mark.parametrize("question", inpainting.QUESTIONS)
def test_neighbors_predict_a_gradient_and_the_best_k_is_best(task, question):
    depth = float(np.median(task.reference.X.sum(1)))
    true = pos_to_expr.normalized(task.query.X, depth)
    hidden = inpainting.hide(true.shape, question, np.random.default_rng(0))
    scored = inpainting.scored_entries(task, hidden)
    moran = pos_to_expr.morans_i(true, task.query.obsm["spatial"])
    found = inpainting.baselines(task, hidden, question, depth, seed=0)
    scores = {name: inpainting.score(values, true, scored, moran) for name, (values, _) in found.items()}
    for way in inpainting.BASELINES:
        assert scores[f"{way}, best k"]["pearson"] >= scores[way]["pearson"] > 0.3
        assert found[way][1]["k"] in inpainting.NEIGHBORS
    perfect = inpainting.score(true, true, scored, moran)
    assert perfect == pytest.approx({"pearson": 1, "pearson_spatial": 1, "mse": 0})


def test_only_hidden_entries_are_scored():
    rng = np.random.default_rng(0)
    true, scored = rng.normal(size=(60, 10)), rng.random((60, 10)) < 0.5
    scored[:, 7:] = False
    predicted = np.where(scored, rng.normal(size=true.shape) + true, 1e6)
    scores = inpainting.score(predicted, true, scored, np.arange(10.0))
    each = [np.corrcoef(predicted[scored[:, g], g], true[scored[:, g], g])[0, 1] for g in range(7)]
    assert scores["pearson"] == pytest.approx(np.mean(each))
    assert scores["pearson_spatial"] == pytest.approx(each[6])
    errors = [((predicted - true)[scored[:, g], g] ** 2).mean() for g in range(7)]
    assert scores["mse"] == pytest.approx(np.mean(errors) / np.mean([true[scored[:, g], g].var() for g in range(7)]))


def test_known_genes_give_the_library_size():
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(20))
    counts = 400 * np.tile(share, (5, 1)) * np.arange(1, 6)[:, None]
    known = rng.random((5, 20)) < 0.6
    values = inpainting.at_depth(counts, known, share, 100.0)
    np.testing.assert_allclose(values, np.where(known, np.log1p(100 * share), 0))
    everything = np.ones((1, 20), dtype=bool)
    np.testing.assert_allclose(
        inpainting.at_depth(counts, everything, share, 100.0), pos_to_expr.normalized(counts, 100.0)
    )


def test_components_with_everything_known_are_shrunken_principal_components():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 60)) @ np.diag(np.r_[np.full(5, 4.0), np.ones(55)]) @ rng.normal(size=(60, 60))
    components = inpainting.Components(x)
    z = np.clip((x - x.mean(0)) / x.std(0), -10, 10)
    pca = PCA(50, svd_solver="covariance_eigh").fit(z)
    shrink = 1 - pca.noise_variance_ / pca.explained_variance_
    np.testing.assert_allclose(components(x, np.ones((1, 60), dtype=bool)), pca.transform(z) * shrink, atol=1e-8)
    known = rng.random(x.shape) < 0.7
    together = components(x, known)
    np.testing.assert_allclose(together[3:4], components(x[3:4], known[3:4]))
    poisoned = np.where(known, x, 99.0)
    np.testing.assert_array_equal(components(poisoned, known), together)
    correlation = np.corrcoef(together[:, 0], pca.transform(z)[:, 0])[0, 1]
    assert abs(correlation) > 0.9


def test_neighbor_mean_is_the_mean_of_the_neighbors():
    rng = np.random.default_rng(0)
    values, near = rng.normal(size=(30, 4)), rng.integers(30, size=(7, 5))
    np.testing.assert_allclose(pos_to_expr.neighbor_mean(values, near), values[near].mean(1))


def test_type_means_fall_back_to_all_cells():
    values, labels = np.arange(8.0).reshape(4, 2), np.array(list("aabb"))
    means = inpainting.type_means(values, labels, np.array(["b", "a", "c"]))
    np.testing.assert_array_equal(means, [[5, 6], [1, 2], [3, 4]])


def test_predicted_types_follow_from_components():
    labels = np.repeat(["a", "b"], 100)
    components = np.where(labels == "a", -5.0, 5.0)[:, None] + np.random.default_rng(0).normal(size=(200, 3))
    values = np.where(labels == "a", 1.0, 3.0)[:, None]
    found = inpainting.predicted_type_means(values, labels, components, np.array([[-5.0] * 3, [5.0] * 3]))
    np.testing.assert_allclose(found, [[1.0], [3.0]], atol=0.15)


def test_ratios_are_to_every_other_row_of_the_question():
    line = lambda x: {s: [x, None] for s in inpainting.SCORES}
    summary = {"genes, space": line(0.2), "genes, any": line(0.3), "entries, space": line(0.1)}
    assert inpainting.ratios(summary) == {"genes": {"space": pytest.approx(dict.fromkeys(inpainting.SCORES, 1.5))}}
