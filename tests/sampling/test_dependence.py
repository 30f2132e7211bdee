"""What the noise of neighboring cells has in common, how it is fitted, and where it is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from alphastomics.metrics import morans_i
from alphastomics.model import AlphaSTomics
from alphastomics.nn import nearest_neighbors
from alphastomics.sampling._calibration import N_NEIGHBORS, Dependence, Neighborhood


@pytest.fixture
def position():
    return np.random.default_rng(0).random((4000, 2))


def nearest(position):
    return nearest_neighbors(torch.from_numpy(position), N_NEIGHBORS)


def draw(share, position, seed=0, mean=None):
    around = Neighborhood.from_neighbors(nearest(position), None if mean is None else torch.from_numpy(mean))
    dependence = Dependence(share=np.asarray(share, dtype=np.float32))
    return dependence.noise(around, torch.Generator().manual_seed(seed)).numpy()


def test_each_cell_is_marginally_standard_normal(position):
    share = [0.0, 0.3, 1.0]
    draws = np.stack([draw(share, position[:200], seed) for seed in range(400)])
    np.testing.assert_allclose(draws.mean(0), 0, atol=0.25)
    np.testing.assert_allclose(draws.var(0).mean(0), 1, atol=0.03)
    assert draws.var(0).max() < 1.6
    np.testing.assert_allclose(np.quantile(draws, [0.1, 0.9], axis=(0, 1)), [[-1.2816] * 3, [1.2816] * 3], atol=0.02)


def test_morans_i_is_proportional_to_the_share(position):
    x = draw([0.0, 0.25, 0.5, 1.0], position)
    found = morans_i(x, position)
    assert found[0] == pytest.approx(0, abs=0.03)
    np.testing.assert_allclose(found[1:3], found[3] * np.array([0.25, 0.5]), atol=0.03)
    assert found[3] > 0.3
    assert abs(np.corrcoef(x[:, 2], x[:, 3])[0, 1]) < 0.1  # genes are drawn apart


def test_chance_is_kept_out_of_the_slice(position):
    position = position[:600]
    waves = np.sin(4 * position @ np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]))
    mean = (waves + np.random.default_rng(1).normal(size=waves.shape)).astype(np.float32)
    near = nearest(position).numpy()
    graph = np.zeros((600, 600))
    np.put_along_axis(graph, near, 1 / near.shape[1], axis=1)

    def statistic(x):
        x = x - x.mean(0)
        return ((graph @ x) * x).sum(0) / np.square(x).sum(0)

    draws = [draw([0.0, 0.3, 0.8], position, seed, mean) for seed in range(3)]
    for x in draws:
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(x.var(0), 1, atol=1e-4)
        for gene in range(3):
            assert np.corrcoef(x[:, gene], mean[:, gene])[0, 1] == pytest.approx(0, abs=1e-4)
    alone, together = (np.array([statistic(a * mean + x) for x in draws]) for a in (0.0, 1.0))
    assert alone.std(0).max() < 0.01  # 600 cells leave .02 to chance
    assert together.std(0).max() < 0.01
    by_chance = np.array([statistic(draw([0.0, 0.3, 0.8], position, seed)) for seed in range(3)])
    np.testing.assert_allclose(alone.mean(0), by_chance.mean(0), atol=0.03)


@pytest.mark.parametrize("n", [1, 2, N_NEIGHBORS, N_NEIGHBORS + 1])
def test_few_cells(n, position):
    assert np.isfinite(draw([0.5, 1.0], position[:n])).all()


def test_fitted_in_training_and_saved(everything, places, tmp_path):
    share = everything.fitted_.dependence.share
    assert share.shape == (places.n_vars,)
    assert ((share >= 0) & (share <= 1)).all()
    everything.save(tmp_path / "model")
    loaded = AlphaSTomics.load(tmp_path / "model", adata=False)
    np.testing.assert_array_equal(loaded.fitted_.dependence.share, share)


def test_neighbors_are_as_alike_as_in_the_reference(everything, places, monkeypatch):
    def level():
        drawn = everything.sample(places, mode="pos_to_expr", n_steps=8, random_state=1)
        return np.nanmean(morans_i(drawn.X, places.obsm["spatial"]))

    true = np.nanmean(morans_i(np.log1p(places.X.toarray()), places.obsm["spatial"]))
    with_it = level()
    monkeypatch.setattr(everything, "fitted_", replace(everything.fitted_, dependence=None))
    without = level()
    assert abs(with_it - true) < abs(without - true)
    assert with_it > without
