"""Kriging of positions over the embedding: against Gaussian processes of scikit-learn, and on fields with and without structure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from alphastomics.sampling import _kriging
from alphastomics.sampling._kriging import (
    MIN_CELLS,
    N_NEIGHBORS,
    NOISES,
    WIDTHS,
    _nearest_known,
    _predict,
    krige_positions,
)

N_CELLS, N_KNOWN = 300, 120


def krige_residual(embedding: torch.Tensor, known: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return _kriging.krige_residual(embedding, known, residual)[0]


def dense(known: np.ndarray, residual: np.ndarray, rows: np.ndarray, width: float, noise: float) -> np.ndarray:
    """Posterior mean of a Gaussian process with all known cells."""
    process = GaussianProcessRegressor(RBF(width, "fixed"), alpha=noise, optimizer=None)
    return process.fit(known, residual).predict(rows).reshape(len(rows), -1)


@pytest.fixture
def cells():
    """Embedding (N, d), known cells, and a residual (N, 2) that is a smooth function of the embedding."""
    generator = torch.Generator().manual_seed(0)
    place = torch.rand(N_CELLS, 2, generator=generator, dtype=torch.float64) * 2 - 1
    waves = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    embedding = torch.cat([(place @ waves).sin(), (place @ waves).cos()], dim=1)
    residual = torch.stack([(2 * place[:, 0]).sin(), place[:, 0] * place[:, 1]], dim=1)
    return embedding, torch.randperm(N_CELLS, generator=generator)[:N_KNOWN], residual


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
    found = _predict(
        torch.from_numpy(known),
        *_nearest_known(torch.from_numpy(rows), torch.from_numpy(known), n_known),
        torch.from_numpy(residual),
        width,
        noise,
    )
    np.testing.assert_allclose(found, dense(known, residual, rows, width, noise), rtol=1e-7, atol=1e-9)


def test_predictions_from_the_nearest_known_cells_are_those_of_a_gaussian_process_of_them(cells):
    embedding, known, residual = cells
    found = _predict(embedding[known], *_nearest_known(embedding, embedding[known], 9), residual[known], 0.7, 0.1)
    far = np.linalg.norm(embedding.numpy()[:, None] - embedding[known].numpy(), axis=-1)
    for i in range(0, N_CELLS, 17):
        near = known[np.argsort(far[i])[:9]]
        expected = dense(embedding[near].numpy(), residual[near].numpy(), embedding[i : i + 1].numpy(), 0.7, 0.1)
        np.testing.assert_allclose(found[i : i + 1], expected, rtol=1e-7, atol=1e-9)


def test_width_and_noise_minimize_the_error_of_known_cells_that_are_left_out(cells):
    embedding, known, residual = cells
    known = known[: N_NEIGHBORS - 8]
    h = ((embedding - embedding.mean(0)) / embedding.std(0)).numpy()
    x, y = h[known], residual[known].numpy()
    far = np.linalg.norm(x[:, None] - x, axis=-1)
    scale = far.sum() / (len(x) * (len(x) - 1))
    others = [np.delete(np.arange(len(x)), i) for i in range(len(x))]

    def error(width: float, noise: float) -> float:
        left_out = [dense(x[j], y[j], x[i : i + 1], width, noise)[0] for i, j in enumerate(others)]
        return float(((left_out - y) ** 2).sum())

    width, noise = min(((w * scale, n) for w in WIDTHS for n in NOISES), key=lambda pair: error(*pair))
    np.testing.assert_allclose(
        krige_residual(embedding, known, residual[known]), dense(x, y, h, width, noise), atol=1e-9
    )


def test_a_smooth_residual_is_recovered(cells):
    embedding, known, residual = cells
    rest = np.setdiff1d(np.arange(N_CELLS), known)
    error = (krige_residual(embedding, known, residual[known]) - residual)[rest]
    assert float(error.square().mean()) < 0.02 * float(residual[rest].square().mean())


def test_noise_is_hardly_followed(cells):
    embedding, known, residual = cells
    noise = torch.randn(residual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert float(krige_residual(embedding, known, noise[known]).square().mean()) < 0.3


def test_blocks_of_rows_change_nothing(cells, monkeypatch):
    embedding, known, residual = cells
    expected = krige_residual(embedding, known, residual[known])
    monkeypatch.setattr(_kriging, "ROWS", 7)
    torch.testing.assert_close(krige_residual(embedding, known, residual[known]), expected)


def test_order_of_the_cells_does_not_matter(cells):
    embedding, known, residual = cells
    expected = krige_residual(embedding, known, residual[known])
    order = torch.randperm(N_CELLS, generator=torch.Generator().manual_seed(2))
    where = torch.argsort(order)[known.flip(0)]
    found = krige_residual(embedding[order], where, residual[known.flip(0)])
    torch.testing.assert_close(found, expected[order])


def test_a_rotated_residual_gives_the_rotated_prediction(cells):
    embedding, known, residual = cells
    expected = krige_residual(embedding, known, residual[known])
    rotation = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    torch.testing.assert_close(krige_residual(embedding, known, residual[known] @ rotation), expected @ rotation)


def test_scale_and_shift_of_the_embedding_do_not_matter(cells):
    embedding, known, residual = cells
    factor = torch.linspace(0.1, 50, embedding.shape[1], dtype=torch.float64)
    torch.testing.assert_close(
        krige_residual(factor * embedding + 9, known, residual[known]),
        krige_residual(embedding, known, residual[known]),
    )


@pytest.mark.parametrize("n_known", [0, 1, MIN_CELLS - 1, MIN_CELLS])
def test_few_known_cells_change_nothing(cells, n_known):
    embedding, known, residual = cells
    found = krige_residual(embedding, known[:n_known], residual[known[:n_known]])
    assert found.shape == residual.shape
    assert bool(found.any()) == (n_known >= MIN_CELLS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cells_of_one_embedding_have_one_residual(cells, dtype):
    _, known, residual = cells
    residual = residual.to(dtype) + 1
    found = krige_residual(torch.ones(N_CELLS, 4, dtype=dtype), known, residual[known])
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-4, atol=1e-4)


def test_the_residual_of_a_common_shift_is_that_shift(cells):
    """Up to the share that the noise leaves at 0."""
    embedding, known, _ = cells
    shift = torch.tensor([0.4, -0.2], dtype=torch.float64)
    found = krige_residual(embedding, known, shift.expand(N_KNOWN, 2))
    torch.testing.assert_close(found, shift.expand(N_CELLS, 2), rtol=0.1, atol=0)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_drift_is_the_one_that_fits(cells, weight):
    """Of the mean, the weight with which it predicts the positions; an embedding of noise adds nothing."""
    _, known, _ = cells
    generator = torch.Generator().manual_seed(1)
    embedding, mean = (torch.randn(N_CELLS, k, generator=generator, dtype=torch.float64) for k in (4, 2))
    mean = mean - mean[known].mean(0)
    found = krige_positions(embedding, mean, known, weight * mean[known])
    rest = torch.ones(N_CELLS, dtype=torch.bool)
    rest[known] = False
    torch.testing.assert_close(found[rest], weight * mean[rest], atol=1e-9, rtol=1e-9)


def test_few_known_positions_leave_the_mean(cells):
    embedding, known, residual = cells
    assert krige_positions(embedding, residual, known[: MIN_CELLS - 1], residual[known[: MIN_CELLS - 1]]) is residual
