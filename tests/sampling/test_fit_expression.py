"""The fit of the statistics of sampled expression, which is made when expression is first sampled."""

from __future__ import annotations

import numpy as np
import pytest

from alphastomics.model import AlphaSTomics
from alphastomics.sampling import _fit_expression


@pytest.fixture
def model(small, make_model, train_briefly):
    return train_briefly(make_model(small, mode="any"))


@pytest.fixture
def places(small):
    return small[:60].copy()


@pytest.fixture
def fits(monkeypatch):
    """The samplers with which statistics were fitted."""
    calls, fit = [], _fit_expression.fit_marginals
    monkeypatch.setattr(_fit_expression, "fit_marginals", lambda sampler: calls.append(sampler) or fit(sampler))
    return calls


def write(model, places):
    return model.sample(places, mode="pos_to_expr", n_steps=2).X.toarray()


def test_it_is_made_once_when_expression_is_sampled(model, places, fits):
    model.sample(places)
    assert not fits
    assert model.fitted_.marginals is model.fitted_.dependence is None
    first = write(model, places)
    model.sample(mode="joint", n_cells=20, n_steps=2)
    np.testing.assert_array_equal(write(model, places), first)
    assert len(fits) == 1
    assert model.fitted_.marginal_target is model.fitted_.dependence_target is None


def test_it_needs_no_reference(model, places, tmp_path):
    model.save(tmp_path / "before")
    model.adata.X *= 3  # as by a normalization in place
    expected = write(model, places)
    loaded = AlphaSTomics.load(tmp_path / "before", adata=False)
    assert loaded.fitted_.marginal_target is not None
    np.testing.assert_array_equal(write(loaded, places), expected)


def test_an_invalid_query_costs_no_fit(model, places, fits):
    places.obsm["spatial"][3] = np.nan
    with pytest.raises(ValueError, match="without a position"):
        write(model, places)
    assert not fits


def test_a_slice_of_few_cells_has_no_shared_noise(small, make_model, train_briefly, places):
    model = train_briefly(make_model(small[:40].copy(), mode="any"))
    assert model.fitted_.dependence_target is None
    assert np.isfinite(write(model, places)).all()
    assert (model.fitted_.dependence.share == 0).all()
