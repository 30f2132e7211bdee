"""Random changes of the genes: how many are used, how they are scaled, and how far they are shifted."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binomtest, kstest

from alphastomics.model import AlphaSTomics
from alphastomics.sampling._fit_perturbation import OFFSET, SHARES
from alphastomics.sampling._perturbation import Perturbation


@st.composite
def measured_genes(draw) -> np.ndarray:
    """Which of at most 60 genes are measured, at least one."""
    measured = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=60)))
    measured[draw(st.integers(0, len(measured) - 1))] = True
    return measured


@given(
    measured=measured_genes(),
    share=st.floats(0.001, 1.0),
    offset=st.floats(0.0, 3.0),
    seed=st.integers(0, 10**6),
)
def test_a_share_of_the_measured_genes_is_used(measured, share, offset, seed):
    gain, shift = Perturbation(share=share, offset=offset).draw(measured, np.random.default_rng(seed))
    used = gain > 0
    assert gain.shape == shift.shape == measured.shape
    assert gain.dtype == shift.dtype == np.float32
    assert used.sum() == max(1, round(share * measured.sum()))
    assert not (used & ~measured).any()
    assert (gain[~used] == 0).all()
    assert (shift[~used] == 0).all()
    # A sum over genes of independent values keeps its variance, whatever their number.
    assert (gain.astype(float) ** 2).sum() == pytest.approx(len(measured), rel=1e-5)


def test_every_measured_gene_is_used_equally_often():
    measured, rng = np.arange(12) % 3 > 0, np.random.default_rng(0)
    used = np.array([Perturbation(share=0.5, offset=0.0).draw(measured, rng)[0] > 0 for _ in range(2000)])
    for share in used[:, measured].T:
        assert binomtest(int(share.sum()), len(share), 0.5).pvalue > 1e-4
    assert not used[:, ~measured].any()


def test_offsets_of_the_genes_in_use_are_normal():
    measured, rng = np.ones(500, dtype=bool), np.random.default_rng(0)
    draws = [Perturbation(share=0.3, offset=0.7).draw(measured, rng) for _ in range(20)]
    values = np.concatenate([shift[gain > 0] / gain[gain > 0] for gain, shift in draws])
    assert kstest(values / 0.7, "norm").pvalue > 0.001


def test_all_genes_without_offsets_are_no_change():
    gain, shift = Perturbation(share=1.0, offset=0.0).draw(np.ones(40, dtype=bool), np.random.default_rng(0))
    np.testing.assert_array_equal(gain, 1)
    np.testing.assert_array_equal(shift, 0)


def test_a_draw_depends_on_its_generator_alone():
    measured, change = np.ones(40, dtype=bool), Perturbation(share=0.5, offset=0.2)
    first, again, other = (change.draw(measured, np.random.default_rng(seed)) for seed in (0, 0, 1))
    for i in range(2):
        np.testing.assert_array_equal(first[i], again[i])
        assert (first[i] != other[i]).any()


def test_values_survive_json():
    change = Perturbation(share=0.4, offset=0.25)
    assert Perturbation.from_dict(json.loads(json.dumps(asdict(change)))) == change


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"share": 0.0}, "share=0.0"),
        ({"share": 1.01}, "share=1.01"),
        ({"share": float("nan")}, "share=nan"),
        ({"offset": -0.1}, "offset=-0.1"),
        ({"offset": float("inf")}, "offset=inf"),
        ({"offset": float("nan")}, "offset=nan"),
    ],
)
def test_values_out_of_range_raise(values, name):
    with pytest.raises(ValueError, match=name):
        Perturbation.from_dict({"share": 0.5, "offset": 0.1} | values)


@pytest.mark.parametrize("missing", ["share", "offset"])
def test_missing_values_raise(missing):
    values = {"share": 0.5, "offset": 0.1}
    del values[missing]
    with pytest.raises(KeyError, match=missing):
        Perturbation.from_dict(values)


def test_fitted_in_training_and_saved(trained, tmp_path):
    fitted = trained.fitted_.perturbation
    assert SHARES[0] <= fitted.share <= SHARES[-1]
    assert fitted.offset == OFFSET  # the tissue has counts
    trained.save(tmp_path / "model")
    assert AlphaSTomics.load(tmp_path / "model", adata=False).fitted_.perturbation == fitted


def test_a_model_that_samples_no_positions_has_none(model_of):
    assert model_of("pos_to_expr").fitted_.perturbation is None
