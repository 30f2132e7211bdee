"""Marginals of sampled expression: the map itself, how it is fitted, and where it is kept."""

from __future__ import annotations

import numpy as np
import pytest

from alphastomics.model import AlphaSTomics
from alphastomics.sampling._calibration import LEVELS, Marginals, quantiles


def marginals(sampled, true):
    return Marginals(sampled=quantiles(sampled), true=quantiles(true))


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    true = rng.standard_normal((3000, 4)).astype(np.float32)
    true[:, 1] = np.where(rng.random(3000) < 0.7, -0.5, np.abs(true[:, 1]))  # zero counts
    true[:, 2] = 1.0  # a gene without variance
    sampled = (0.4 * rng.standard_normal((2000, 4)) + 0.2).astype(np.float32)
    return sampled, true


def test_mapped_values_have_the_marginals_of_the_reference(samples):
    sampled, true = samples
    mapped = marginals(sampled, true).apply(sampled)
    for g in (0, 1, 3):
        levels = np.linspace(0.01, 0.99, 50)
        np.testing.assert_allclose(np.quantile(mapped[:, g], levels), np.quantile(true[:, g], levels), atol=0.12)
    assert (mapped[:, 1] == np.float32(-0.5)).mean() == pytest.approx(0.7, abs=0.03)
    assert (mapped[:, 2] == 1).all()


def test_mapping_is_monotone_and_keeps_matching_values(samples):
    sampled, true = samples
    mapped = marginals(sampled, true).apply(sampled)
    for g in range(4):
        assert (np.diff(mapped[np.argsort(sampled[:, g]), g]) >= 0).all()
    np.testing.assert_allclose(marginals(true, true).apply(true), true, atol=1e-6)
    shifted = marginals(sampled, true).apply(sampled + 0.2)
    assert (shifted[:, [0, 3]].mean(0) > mapped[:, [0, 3]].mean(0) + 0.2).all()  # a query may differ from the reference


def test_fitted_in_training_and_saved(everything, places, tmp_path):
    fitted = everything.fitted_.marginals
    assert fitted.true.shape == fitted.sampled.shape == (len(LEVELS), places.n_vars)
    assert (np.diff(fitted.true, axis=0) >= 0).all()
    everything.save(tmp_path / "model")
    loaded = AlphaSTomics.load(tmp_path / "model", adata=False)
    for name in ("sampled", "true"):
        np.testing.assert_array_equal(getattr(loaded.fitted_.marginals, name), getattr(fitted, name))


def test_samples_have_as_many_zeros_as_the_reference(everything, reference):
    drawn = everything.sample(reference, mode="pos_to_expr", n_steps=4, random_state=1)
    share, expected = (x.X.toarray() == 0 for x in (drawn, reference))
    assert share.mean() == pytest.approx(expected.mean(), abs=0.1)
    assert np.abs(share.mean(0) - expected.mean(0)).max() < 0.35


def test_a_model_of_positions_alone_has_none(trained):
    assert trained.fitted_.marginals is None
