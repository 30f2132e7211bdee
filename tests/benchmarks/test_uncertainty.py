from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ortho_group

from benchmarks import _data, _ours, pos_to_expr, uncertainty


def calibrated(n_draws: int, shape: tuple[int, int], *, seed: int = 0):
    """Draws and a truth from the same distributions, whose spread differs from cell to cell."""
    rng = np.random.default_rng(seed)
    centre, s = 50 * rng.normal(size=shape), np.exp(rng.normal(size=(shape[0], 1)))
    draws = centre + s * rng.normal(size=(n_draws, *shape))
    return draws, centre + s * rng.normal(size=shape)


def test_calibrated_positions_are_covered():
    draws, truth = calibrated(8, (4000, 2))
    scores = uncertainty.judge_positions(draws, truth)
    mean, medoid = (scores[row] for row in uncertainty.POSITION_ROWS)
    assert mean["spearman"] > 0.5
    assert mean["coverage_draws"] == pytest.approx(0.8, abs=0.03)
    assert 0.65 < mean["coverage"] < 0.8  # the spread of few draws is what is given, and it is small
    assert mean["error_over_spread"] == pytest.approx(np.sqrt(9 / 7), abs=0.05)
    assert medoid["error_over_spread"] > mean["error_over_spread"]
    assert medoid["coverage"] < mean["coverage"]
    many, truth = calibrated(200, (4000, 2))
    assert uncertainty.judge_positions(many, truth)["position, mean"]["coverage"] == pytest.approx(0.8, abs=0.02)


def test_frame_and_scale_of_a_placement_do_not_matter():
    draws, truth = calibrated(6, (200, 2))
    expected = uncertainty.judge_positions(draws, truth)
    moved = 3 * draws @ ortho_group.rvs(2, random_state=0) + [5, -2]
    for row, scores in uncertainty.judge_positions(moved, truth).items():
        assert scores == pytest.approx(expected[row])
    _, aligned, scale = uncertainty.align(moved, moved[0], draws[0])
    np.testing.assert_allclose(aligned, draws[0])
    assert scale == pytest.approx(1 / 3)


def test_too_small_a_spread_is_found_out():
    draws, truth = calibrated(16, (1000, 2))
    timid = draws.mean(0) + 0.2 * (draws - draws.mean(0))
    for scores in uncertainty.judge_positions(timid, truth).values():
        assert scores["coverage"] < 0.2
        assert scores["coverage_draws"] < 0.2
        assert scores["error_over_spread"] > 4


def test_calibrated_expression_is_covered():
    rng = np.random.default_rng(0)
    s = np.exp(rng.normal(size=(3000, 4)))
    draws, true = s * rng.normal(size=(16, 3000, 4)), s * rng.normal(size=(3000, 4))
    scores = uncertainty.judge_expression(draws, true)
    assert scores["spearman"] > 0.4
    assert scores["coverage_draws"] == pytest.approx(0.8, abs=0.02)
    assert 0.7 < scores["coverage"] < 0.8
    unrelated = uncertainty.judge_expression(draws, true[rng.permutation(3000)])
    assert unrelated["spearman"] < 0.2  # not 0: the mean of few draws is off by the spread
    constant = uncertainty.judge_expression(np.zeros_like(draws), true)
    assert constant["spearman"] == 0
    assert constant["coverage"] == 0


def test_medoid_is_the_draw_nearest_to_the_others():
    draws = np.random.default_rng(0).normal(size=(7, 20, 2))
    cost = [((draws - draws[j]) ** 2).sum() for j in range(7)]
    assert uncertainty.medoid(draws) == int(np.argmin(cost))


@pytest.mark.slow
def test_spread_is_that_of_the_package(make_tissue, tmp_path):
    reference, held_out = make_tissue(0), make_tissue(1, n_slices=1)
    model, _ = _ours.train_or_load(reference, seed=0, minutes=0.02, mode="any", path=None)
    fold = _data.make_fold("held", reference, held_out)
    draws = uncertainty.place(model, fold, seed=3)
    arguments = {"mode": "expr_to_pos", "random_state": 3, **uncertainty.POSITION_DRAWS}
    placed = model.sample(fold.query.copy(), reduce="medoid", **arguments)
    given = placed.obs["position_uncertainty"].to_numpy()
    np.testing.assert_allclose(fold.in_source_order(given), uncertainty.spread(draws))
    np.testing.assert_allclose(fold.in_source_order(placed.obsm["spatial"]), draws[uncertainty.medoid(draws)])
    task = pos_to_expr.make_task(reference, held_out, seed=0)
    drawn = pos_to_expr.draw_expression(model, task.query, None, seed=3)
    asked = task.query.copy()
    asked.X = None
    written = model.sample(asked, mode="pos_to_expr", n_samples=pos_to_expr.SAMPLES, reduce="mean", random_state=3)
    np.testing.assert_allclose(written.layers["sd"], drawn.std(0), rtol=1e-3, atol=1e-4)
