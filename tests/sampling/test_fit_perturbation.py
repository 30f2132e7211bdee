"""The share of genes with which draws agree with each other as well as with the truth."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

from alphastomics.data import AnnDataSource
from alphastomics.sampling import _fit_perturbation
from alphastomics.sampling._fit_perturbation import (
    DEFAULT_SHARE,
    OFFSET,
    SHARES,
    _Agreement,
    _fit_share,
    fit_perturbation,
)
from alphastomics.sampling._perturbation import Perturbation


class Known:
    """Draws that agree with each other as with the truth at one share, and better at larger ones."""

    def __init__(self, share: float) -> None:
        self.share, self.calls = share, 0

    def log_ratio(self, perturbation: Perturbation) -> float:
        self.calls += 1
        return perturbation.share - self.share


@pytest.fixture(scope="module", autouse=True)
def _all_shares():
    """Other tests fit on fewer shares."""
    with patch.object(_fit_perturbation, "SHARES", SHARES):
        yield


@given(share=st.floats(SHARES[0], SHARES[-1]))
def test_the_share_is_found_by_bisection(share):
    known = Known(share)
    assert _fit_share(known, 0.0) == pytest.approx(share)
    assert known.calls <= math.ceil(math.log2(len(SHARES) + 1))


@pytest.mark.parametrize(("share", "expected"), [(0.0, SHARES[0]), (1.0, SHARES[-1])])
def test_a_share_outside_of_the_range_is_clipped(share, expected):
    assert _fit_share(Known(share), 0.0) == expected


def test_agreement_is_that_of_draws_relative_to_the_truth(trained, monkeypatch):
    """Draws that are all alike agree with each other; draws that are the truth agree with it as well."""
    source = AnnDataSource(trained.adata, trained.schema, positions=True)
    agreement = _Agreement(trained._make_sampler(), source, source.slices[0])
    rng = np.random.default_rng(0)
    wrong = rng.standard_normal(agreement.true.shape)
    perturbation = Perturbation(share=0.5, offset=0.0)
    monkeypatch.setattr(agreement, "_draw", lambda *_: wrong)
    assert agreement.log_ratio(perturbation) > 1
    monkeypatch.setattr(agreement, "_draw", lambda *_: agreement.true)
    assert agreement.log_ratio(perturbation) == pytest.approx(0)
    monkeypatch.setattr(agreement, "_draw", lambda *_: rng.permutation(agreement.true))
    assert abs(agreement.log_ratio(perturbation)) < 1


def test_too_few_cells_give_the_default(trained):
    source = AnnDataSource(trained.adata, trained.schema, positions=True)
    few = source.slices[0]._replace(rows=source.slices[0].rows[:5], position=source.slices[0].position[:5])
    default = Perturbation(share=DEFAULT_SHARE, offset=OFFSET)  # of counts
    assert fit_perturbation(trained._make_sampler(), source, [few]) == default
    assert fit_perturbation(trained._make_sampler(), source, []) == default
