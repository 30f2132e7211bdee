from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.baselines import BASELINES, contrastive, distance_mlp, knn_regression, optimal_transport
from benchmarks.baselines._features import common_frame, expression_features, principal_components
from scipy import sparse

from benchmarks import _placement

SHORT = {"n_epochs": 0, "min_steps": 40, "context_size": 128, "n_hidden": 32}
QUICK = {
    "knn_25": knn_regression.knn_25,
    "contrastive": partial(contrastive.place, **contrastive.PARAMETERS | SHORT),
    "distance_mlp": partial(distance_mlp.place, **distance_mlp.PARAMETERS | SHORT),
    "optimal_transport": partial(
        optimal_transport.place, **optimal_transport.PARAMETERS | {"max_reference": 200, "max_iterations": 100}
    ),
}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow
def test_baseline_places_cells(name, make_tissue):
    # Slices turned against each other: a baseline that ignores their frames fails.
    reference, query = make_tissue(0, turn=2.0), make_tissue(1, n_slices=1)
    truth = query.obsm.pop("spatial")
    predicted = QUICK[name](reference, query, seed=0)
    scores = _placement.score(truth, predicted)
    assert scores["distance_spearman"] > 0.75
    assert scores["aligned_rmsd"] < 0.5
    np.testing.assert_array_equal(predicted, QUICK[name](reference, query, seed=0))
    if name != "knn_25":
        assert not np.array_equal(predicted, QUICK[name](reference, query, seed=1))


def test_baselines_leave_the_global_generator_alone(make_tissue):
    before = torch.get_rng_state()
    QUICK["distance_mlp"](make_tissue(0), make_tissue(1, n_slices=1), seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_common_frame_undoes_rotation_and_shift(make_tissue):
    reference = make_tissue(0, turn=2.0)
    upright = make_tissue(0).obsm["spatial"]
    ref, _ = principal_components(*expression_features(reference, reference, scale=True))
    frame = common_frame(reference, ref)
    anchor, moved = slice(0, 150), slice(150, 300)
    np.testing.assert_array_equal(frame[anchor], upright[anchor])
    assert np.sqrt(((frame[moved] - upright[moved]) ** 2).sum(1).mean()) < 0.15


@pytest.mark.parametrize("scale", [True, False])
def test_features_hold_counts_names_and_sparsity(scale, make_tissue):
    reference, query = make_tissue(0), make_tissue(1, n_slices=1)
    ref, new = expression_features(reference, query, scale=scale)
    assert ref.mean(0) == pytest.approx(np.zeros(40), abs=1e-9)
    spread = ref.std(0) if scale else np.sqrt(ref.var(0).mean())
    assert spread == pytest.approx(np.ones_like(spread))
    deeper = query.copy()
    deeper.X = sparse.csr_matrix(3 * deeper.X)
    shuffled = deeper[:, ::-1].copy()  # depth, sparsity and the order of genes are not informative
    np.testing.assert_allclose(expression_features(reference, shuffled, scale=scale)[1], new, atol=1e-6)
    reference.X = reference.X + 0.5
    assert not np.allclose(expression_features(reference, query, scale=scale)[0], ref)


def test_no_common_gene_raises(make_tissue):
    reference, query = make_tissue(0), make_tissue(1)
    query.var_names = "x" + query.var_names
    with pytest.raises(ValueError, match="no gene"):
        BASELINES["knn_25"](reference, query, seed=0)


def test_info_nce_is_smallest_at_its_target():
    positions = torch.tensor([[0.0, 0.0], [0.0, 0.1], [5.0, 0.0], [5.0, 0.1]])
    good = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    loss = partial(contrastive.soft_info_nce, positions=positions, width=0.5, temperature=0.1)
    assert loss(good) < 1e-3
    assert loss(good[[0, 2, 1, 3]]) > 5


def test_distance_loss_ignores_the_frame():
    x = torch.randn(20, 2, dtype=torch.float64)
    turned = x @ torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64) + 3
    assert distance_mlp.distance_loss(turned, x) < 1e-20
    assert distance_mlp.distance_loss(2 * x, x) > 0.1
