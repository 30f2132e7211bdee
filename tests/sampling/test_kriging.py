"""Kriging of positions over the embedding: against Gaussian processes of scikit-learn, and on fields with and without structure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.optimize import lsq_linear
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from alphastomics.sampling import _kriging
from alphastomics.sampling._kriging import (
    MIN_CELLS,
    NOISES,
    WIDTHS,
    _nearest,
    _predict,
    krige_positions,
)

N_CELLS, N_KNOWN = 300, 120


def krige(embedding: torch.Tensor, known: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Positions of cells whose mean is the same, the center of the known positions."""
    return krige_positions(embedding, position.mean(0).expand(len(embedding), -1), known, position).position


def dense(known: np.ndarray, residual: np.ndarray, rows: np.ndarray, width: float, noise: float) -> np.ndarray:
    """Posterior mean of a Gaussian process with all known cells."""
    process = GaussianProcessRegressor(RBF(width, "fixed"), alpha=noise, optimizer=None)
    return process.fit(known, residual).predict(rows).reshape(len(rows), -1)


@pytest.fixture
def cells():
    """Embedding (N, d), known cells, and positions (N, 2) that vary smoothly with the embedding."""
    generator = torch.Generator().manual_seed(0)
    place = torch.rand(N_CELLS, 2, generator=generator, dtype=torch.float64) * 2 - 1
    waves = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    embedding = torch.cat([(place @ waves).sin(), (place @ waves).cos()], dim=1)
    position = torch.stack([(2 * place[:, 0]).sin(), place[:, 0] * place[:, 1]], dim=1)
    return embedding, torch.randperm(N_CELLS, generator=generator)[:N_KNOWN], position


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    n_known=st.integers(1, 30),
    n_features=st.integers(1, 8),
    width=st.floats(0.2, 5.0),
    noise=st.floats(0.01, 1.0),
)
def test_predictions_from_all_known_cells_are_those_of_a_gaussian_process(seed, n_known, n_features, width, noise):
    rng = np.random.default_rng(seed)
    known, rows = rng.standard_normal((n_known, n_features)), rng.standard_normal((40, n_features))
    residual = rng.standard_normal((n_known, 3))
    nearest = _nearest(torch.from_numpy(rows), torch.from_numpy(known))
    found = _predict(nearest, torch.from_numpy(residual), width, noise)
    np.testing.assert_allclose(found, dense(known, residual, rows, width, noise), rtol=1e-7, atol=1e-9)


def test_predictions_from_the_nearest_known_cells_are_those_of_a_gaussian_process_of_them(cells, monkeypatch):
    embedding, known, position = cells
    monkeypatch.setattr(_kriging, "N_NEIGHBORS", 9)
    found = _predict(_nearest(embedding, embedding[known]), position[known], 0.7, 0.1)
    far = np.linalg.norm(embedding.numpy()[:, None] - embedding[known].numpy(), axis=-1)
    for i in range(0, N_CELLS, 17):
        near = known[np.argsort(far[i])[:9]]
        expected = dense(embedding[near].numpy(), position[near].numpy(), embedding[i : i + 1].numpy(), 0.7, 0.1)
        np.testing.assert_allclose(found[i : i + 1], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("weight", [0.4, 3.0, -1.0])
def test_width_noise_and_drift_minimize_the_error_of_known_cells_that_are_left_out(cells, weight):
    embedding, known, position = cells
    known = known[:24]
    rough = torch.randn(position.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = rough + position
    position = position + weight * rough
    h = ((embedding - embedding.mean(0)) / embedding.std(0)).numpy()
    origin = position[known].mean(0).numpy()
    offset = mean.numpy() - origin
    x, y = h[known], np.hstack([position[known].numpy() - origin, offset[known]])
    far = np.linalg.norm(x[:, None] - x, axis=-1)
    scale = far.sum() / (len(x) * (len(x) - 1))
    others = [np.delete(np.arange(len(x)), i) for i in range(len(x))]
    fits = []
    for width, noise in ((w * scale, n) for w in WIDTHS for n in NOISES):
        predicted = [dense(x[j], y[j], x[i : i + 1], width, noise)[0] for i, j in enumerate(others)]
        of_position, of_mean = np.hsplit(y - predicted, 2)
        fit = lsq_linear(of_mean.reshape(-1, 1), of_position.ravel(), (0, 1))
        fits.append((fit.cost, width, noise, fit.x[0]))
    cost, width, noise, drift = min(fits)
    residual = y[:, :2] - drift * y[:, 2:]
    expected = origin + drift * offset + dense(x, residual, h, width, noise)
    found, unexplained = krige_positions(embedding, mean, known, position[known])
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert unexplained == pytest.approx(min(1, 2 * cost / np.square(y[:, :2]).sum()))  # lsq_linear halves the squares
    assert (drift < 1e-6, 1 - drift < 1e-6) == (weight < 0, weight > 1)


def test_a_cell_that_is_left_out_is_no_neighbor_of_its_own():
    known = torch.zeros(40, 4)
    neighbors = _nearest(known[::2], known, torch.arange(0, 40, 2))
    assert neighbors.indices.shape == (20, 39)
    assert not (neighbors.indices == torch.arange(0, 40, 2)[:, None]).any()


def test_positions_that_vary_smoothly_are_recovered(cells):
    embedding, known, position = cells
    rest = np.setdiff1d(np.arange(N_CELLS), known)
    error = (krige(embedding, known, position[known]) - position)[rest]
    assert float(error.square().mean()) < 0.02 * float(position[rest].square().mean())


def test_noise_is_hardly_followed(cells):
    embedding, known, position = cells
    noise = torch.randn(position.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert float(krige(embedding, known, noise[known]).square().mean()) < 0.3


def test_blocks_of_rows_change_nothing(cells, monkeypatch):
    embedding, known, position = cells
    expected = krige(embedding, known, position[known])
    monkeypatch.setattr(_kriging, "ROWS", 7)
    torch.testing.assert_close(krige(embedding, known, position[known]), expected)


def test_order_of_the_cells_does_not_matter(cells):
    embedding, known, position = cells
    expected = krige(embedding, known, position[known])
    order = torch.randperm(N_CELLS, generator=torch.Generator().manual_seed(2))
    where = torch.argsort(order)[known.flip(0)]
    found = krige(embedding[order], where, position[known.flip(0)])
    torch.testing.assert_close(found, expected[order])


def test_rotated_known_positions_give_the_rotated_result(cells):
    embedding, known, position = cells
    expected = krige(embedding, known, position[known])
    rotation = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    torch.testing.assert_close(krige(embedding, known, position[known] @ rotation), expected @ rotation)


def test_scale_and_shift_of_the_embedding_do_not_matter(cells):
    embedding, known, position = cells
    factor = torch.linspace(0.1, 50, embedding.shape[1], dtype=torch.float64)
    torch.testing.assert_close(
        krige(factor * embedding + 9, known, position[known]),
        krige(embedding, known, position[known]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cells_of_one_embedding_have_one_position(cells, dtype):
    _, known, position = cells
    position = position.to(dtype) + 1
    found = krige(torch.ones(N_CELLS, 4, dtype=dtype), known, position[known])
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_drift_is_the_one_that_fits(cells, weight):
    """Of the mean, the weight with which it predicts the positions; an embedding of noise adds nothing."""
    _, known, _ = cells
    generator = torch.Generator().manual_seed(1)
    embedding, mean = (torch.randn(N_CELLS, k, generator=generator, dtype=torch.float64) for k in (4, 2))
    mean = mean - mean[known].mean(0)
    found = krige_positions(embedding, mean, known, weight * mean[known]).position
    torch.testing.assert_close(found, weight * mean, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("n_known", [0, 1, MIN_CELLS - 1, MIN_CELLS])
def test_few_known_positions_leave_the_mean(cells, n_known):
    embedding, known, mean = cells
    found, unexplained = krige_positions(embedding, mean, known[:n_known], mean[known[:n_known]] + 1)
    assert (found is mean) == (unexplained == 1) == (n_known < MIN_CELLS)
