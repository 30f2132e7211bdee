"""Exemplars against the dense Gaussian posterior, and what they add to an uninformative network."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from alphastomics.data import AnnDataSource
from alphastomics.diffusion import Process
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.sampling import ExpressionSampler, FittedStatistics, Sampler, _completion, _fit
from alphastomics.sampling._completion import Exemplars, _scores
from alphastomics.sampling._reference_cells import ReferenceCells

N_GENES = 12


def cells(n: int, seed: int) -> np.ndarray:
    """Cells of two kinds that differ in every gene."""
    rng = np.random.default_rng(seed)
    kind = np.where(rng.random(n) < 0.5, -1.0, 1.0)[:, None] * np.linspace(0.5, 1.5, N_GENES)
    return (kind + 0.2 * rng.normal(size=(n, N_GENES))).astype(np.float32)


@pytest.fixture
def exemplars() -> Exemplars:
    return Exemplars(expression=cells(400, 0))


def test_scores_are_the_mean_of_the_dense_posterior():
    """Conditional mean of s given the known genes of x = W s + e, from the joint covariance."""
    rng = np.random.default_rng(0)
    loadings, noise, x = rng.normal(size=(N_GENES, 3)), 0.4, rng.normal(size=(5, N_GENES))
    known = rng.random(x.shape) < 0.6
    found = _scores(x, known, loadings, noise)
    for row, mask, score in zip(x, known, found, strict=True):
        w = loadings[mask]
        expected = w.T @ np.linalg.solve(w @ w.T + noise * np.eye(mask.sum()), row[mask])
        np.testing.assert_allclose(score, expected, atol=1e-10)
    everywhere = np.ones((1, N_GENES), dtype=bool)
    np.testing.assert_allclose(
        _scores(x, everywhere, loadings, noise), _scores(x, np.repeat(everywhere, 5, 0), loadings, noise), atol=1e-10
    )


def test_with_everything_known_neighbors_match_principal_components(exemplars, monkeypatch):
    monkeypatch.setattr(_completion, "N_NEIGHBORS", 7)
    query = cells(20, 1)
    pca = PCA(N_GENES, random_state=0).fit(exemplars.expression)
    noise = 1e-6  # as many components as genes leave none
    weight = (pca.explained_variance_ - noise) / pca.explained_variance_
    a, b = (pca.transform(x) * weight for x in (exemplars.expression, query))
    near = np.argsort(((b[:, None] - a) ** 2).sum(2), axis=1)[:, :7]
    found = exemplars.nearest_mean(query, np.ones(query.shape, dtype=bool))
    np.testing.assert_allclose(found, exemplars.expression[near].mean(1), atol=1e-5)


@pytest.mark.parametrize("panel", [True, False])
def test_hidden_values_follow_the_known_ones_and_are_never_read(exemplars, panel):
    query, rng = cells(60, 1), np.random.default_rng(2)
    known = np.broadcast_to(rng.random(N_GENES) < 0.6, query.shape) if panel else rng.random(query.shape) < 0.6
    found = exemplars.nearest_mean(query, known)
    assert np.abs(found - query)[~known].mean() < 0.25
    np.testing.assert_array_equal(exemplars.nearest_mean(np.where(known, query, np.nan), known), found)
    order = rng.permutation(60)
    np.testing.assert_allclose(exemplars.nearest_mean(query[order], known[order]), found[order], atol=1e-6)


def test_chunks_change_nothing(exemplars, monkeypatch):
    query, known = cells(60, 1), np.random.default_rng(2).random((60, N_GENES)) < 0.6
    expected = exemplars.nearest_mean(query, known)
    monkeypatch.setattr(_completion, "CHUNK", 7)
    np.testing.assert_array_equal(exemplars.nearest_mean(query, known), expected)


def test_a_small_reference_is_enough():
    few = Exemplars(expression=cells(3, 0))
    known = np.random.default_rng(0).random((4, N_GENES)) < 0.5
    assert few.nearest_mean(cells(4, 1), known) == pytest.approx(
        np.repeat(few.expression.mean(0)[None], 4, 0), abs=1e-5
    )


def reference_cells(expression: np.ndarray) -> ReferenceCells:
    n = len(expression)
    return ReferenceCells(
        position=np.zeros((n, 2), np.float32), slice=np.zeros(n, np.float32), feature=np.zeros((n, 0), np.float32),
        cell_feature=np.zeros((n, 0), np.float32), expression=expression, sequence=np.zeros(n, np.float32),
    )  # fmt: skip


def sampler(known: np.ndarray, exemplars: Exemplars | None) -> ExpressionSampler:
    """A sampler whose network has a head of 0, so that the mean of every cell is 0."""
    module = Denoiser(DenoiserConfig(n_genes=N_GENES, n_dims=2, d_model=16, n_layers=1, n_heads=2)).eval()
    torch.nn.init.zeros_(module.expression_out.weight)
    torch.nn.init.zeros_(module.expression_out.bias)
    position = torch.from_numpy(np.random.default_rng(0).normal(size=(len(known), 2)).astype(np.float32))
    trained = Sampler(
        module=module,
        diffusion=Process(),
        schema=SimpleNamespace(),
        mode="pos_to_expr",
        fitted=FittedStatistics(reference_cells=None if exemplars is None else reference_cells(exemplars.expression)),
    )
    return ExpressionSampler(trained, position, max_context=1000, observed=torch.from_numpy(known))


def test_exemplars_replace_a_network_without_information(exemplars):
    true = cells(80, 1)
    hidden = np.random.default_rng(1).random(true.shape) < 0.3
    known = np.where(hidden, np.nan, true)
    known[0], known[1] = np.nan, true[1]  # a cell of which nothing is known, and one that is known
    shift = sampler(known, exemplars).shift[0].numpy()
    assert np.abs(shift - true)[2:][hidden[2:]].mean() < 0.3
    assert not shift[:2].any()
    assert not sampler(known, None).shift.any()


def test_exemplars_that_are_of_no_use_are_not_used():
    true = cells(80, 1)
    known = np.where(np.random.default_rng(1).random(true.shape) < 0.3, np.nan, true)
    useless = Exemplars(expression=-10 * np.abs(cells(400, 0)))
    assert np.abs(sampler(known, useless).shift.numpy()).max() < 0.5


@pytest.mark.parametrize(
    ("mode", "has_feature"), [("expr_to_pos", True), ("pos_to_expr", False), ("joint", False), ("any", True)]
)
def test_a_model_keeps_what_its_mode_uses(model_of, tmp_path, mode, has_feature):
    model = model_of(mode)
    cells = model.fitted_.reference_cells
    assert (cells.feature.shape[1] > 0) == has_feature
    assert cells.position.shape == (model.adata.n_obs, 2)
    np.testing.assert_array_equal(cells.slice, np.repeat([0, 1], 100))
    source = AnnDataSource(model.adata, model.schema, positions=True)
    np.testing.assert_array_equal(cells.expression, source.expression(np.arange(200)))
    model.save(tmp_path / "m")
    again = type(model).load(tmp_path / "m", adata=False).fitted_.reference_cells
    for name in ("position", "slice", "feature", "expression"):
        np.testing.assert_array_equal(getattr(again, name), getattr(cells, name))


def test_a_large_panel_keeps_fewer_cells(everything, monkeypatch):
    source = AnnDataSource(everything.adata, everything.schema, positions=True)
    monkeypatch.setattr(_fit, "MAX_VALUES", 6 * everything.schema.n_genes)
    cells = _fit.fit_reference_cells(everything._make_sampler(), source, source.slices)
    np.testing.assert_array_equal(cells.slice, [0, 0, 1, 1, 2, 2])
    assert cells.expression.shape == (6, everything.schema.n_genes)
