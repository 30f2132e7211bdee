from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ortho_group

from benchmarks import _data, _models, pos_to_expr, uncertainty


def calibrated(n_draws: int, shape: tuple[int, int], *, seed: int = 0):
    """Draws and a truth from the same distributions, whose spread differs from cell to cell."""
    rng = np.random.default_rng(seed)
    center, s = 50 * rng.normal(size=shape), np.exp(rng.normal(size=(shape[0], 1)))
    draws = center + s * rng.normal(size=(n_draws, *shape))
    return draws, center + s * rng.normal(size=shape)


def placement(n_draws: int, shape: tuple[int, int]):
    """Mean of calibrated draws, its standard deviation over all dimensions, and the truth."""
    draws, truth = calibrated(n_draws, shape)
    return draws.mean(0), np.sqrt(draws.var(0, ddof=1).sum(1)), truth


@pytest.mark.parametrize("n_dims", [2, 3])
def test_calibrated_positions_are_covered(n_dims):
    predicted, s, truth = placement(200, (4000, n_dims))
    scores = uncertainty.score_positions(predicted, s, truth)
    assert scores["spearman"] > 0.5
    assert scores["coverage"] == pytest.approx(0.8, abs=0.02)
    assert scores["error_over_spread"] == pytest.approx(1, abs=0.05)
    unrelated = uncertainty.score_positions(predicted, np.random.default_rng(0).permutation(s), truth)
    assert abs(unrelated["spearman"]) < 0.05
    assert uncertainty.score_positions(predicted, np.full_like(s, s.mean()), truth)["spearman"] == 0


def test_few_calibrated_draws_have_the_expected_scores():
    draws, truth = calibrated(8, (4000, 2))
    s = np.sqrt(draws.var(0, ddof=1).sum(1))
    mean, single = (uncertainty.score_positions(x, s, truth) for x in (draws.mean(0), draws[0]))
    assert mean["error_over_spread"] == pytest.approx(np.sqrt(9 / 8), abs=0.05)
    assert single["error_over_spread"] == pytest.approx(np.sqrt(2), abs=0.07)
    assert single["coverage"] < mean["coverage"] < 0.8


def test_frame_and_scale_of_a_placement_do_not_matter():
    predicted, s, truth = placement(6, (200, 2))
    moved = 3 * predicted @ ortho_group.rvs(2, random_state=0) + [5, -2]
    expected = uncertainty.score_positions(predicted, s, truth)
    assert uncertainty.score_positions(moved, 3 * s, truth) == pytest.approx(expected)
    aligned, scale = uncertainty.align(moved, predicted)
    np.testing.assert_allclose(aligned, predicted)
    assert scale == pytest.approx(1 / 3)


def test_wrong_spread_is_detected():
    predicted, s, truth = placement(16, (1000, 2))
    timid = uncertainty.score_positions(predicted, 0.2 * s, truth)
    assert timid["coverage"] < 0.2
    assert timid["error_over_spread"] > 4
    shy = uncertainty.score_positions(predicted, 5 * s, truth)
    assert shy["coverage"] > 0.99
    assert shy["error_over_spread"] < 0.3


def test_calibrated_expression_is_covered():
    rng = np.random.default_rng(0)
    s = np.exp(rng.normal(size=(3000, 4)))
    error = np.abs(s * rng.normal(size=(3000, 4)))
    scores = uncertainty.score(error, s)
    assert scores["spearman"] > 0.4
    assert scores["coverage"] == pytest.approx(0.8, abs=0.02)
    assert scores["error_over_spread"] == pytest.approx(1, abs=0.05)
    assert uncertainty.score(error, 0.2 * s)["coverage"] < 0.25
    assert abs(uncertainty.score(error[rng.permutation(3000)], s)["spearman"]) < 0.05
    assert uncertainty.score(error, np.zeros_like(s))["spearman"] == 0
    assert uncertainty.score(error, np.zeros_like(s))["coverage"] == 0


@pytest.mark.slow
def test_scores_are_of_the_output_of_the_package(make_tissue):
    reference, held_out = make_tissue(0), make_tissue(1, n_slices=1)
    model, _ = _models.train_or_load(reference, seed=0, minutes=0.02, mode="any", path=None)
    fold = _data.make_fold("observed", reference, held_out)
    for reduce in ("mean", "medoid"):
        predicted, s = uncertainty.place(model, fold, f"position, {reduce}", seed=3)
        placed = model.sample(fold.query.copy(), n_samples=8, reduce=reduce, random_state=3)
        np.testing.assert_allclose(predicted[fold.order], placed.obsm["spatial_reconstructed"])
        np.testing.assert_allclose(s[fold.order], placed.obs["spatial_reconstructed_uncertainty"])
        assert (s > 0).all()
    task = pos_to_expr.make_task(reference, held_out, seed=0)
    scored = np.setdiff1d(np.arange(held_out.n_obs), task.known)
    places = task.query.copy()
    places.X = None
    arguments = {"mode": "pos_to_expr", "n_samples": 8, "n_steps": 10, "random_state": 3}
    given = model.sample(places, reduce="mean", **arguments)
    written, s, true = uncertainty.predict_expression(model, task, 'expression, layers["sd"]', seed=3)
    np.testing.assert_allclose(written, given.X.toarray()[scored])
    np.testing.assert_allclose(s, given.layers["sd"][scored])
    np.testing.assert_allclose(true.sum(1), given.obs["library_size"].to_numpy()[scored])
    drawn = model.sample(places, **arguments)
    counts = np.stack([drawn[drawn.obs["draw"] == k].X.toarray()[scored] for k in range(8)])
    draws = np.log1p(counts / counts.sum(-1, keepdims=True) * model.schema.library_size)
    written, s, of_log = uncertainty.predict_expression(model, task, "expression, log1p", seed=3)
    np.testing.assert_allclose(written, draws.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(s, draws.std(0, ddof=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_log, np.log1p(true))
