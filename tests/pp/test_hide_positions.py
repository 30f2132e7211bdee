"""``pp.hide_positions``: which positions are hidden, and that the truth is kept."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given, strategies as st

from alphastomics.pp import hide_positions


def make(sizes: tuple[int, ...], *, n_dims: int = 2, key: str | None = "slice_id") -> AnnData:
    """Slices ``s0``, ``s1``, … with interleaved rows and without expression."""
    rng = np.random.default_rng(0)
    names = rng.permutation(np.repeat([f"s{k}" for k in range(len(sizes))], sizes))
    obs = pd.DataFrame({} if key is None else {key: names}, index=[f"c{i}" for i in range(len(names))])
    return AnnData(obs=obs, obsm={"spatial": rng.normal(size=(len(names), n_dims))})


def hidden(adata: AnnData, key: str = "spatial") -> np.ndarray:
    absent = np.isnan(adata.obsm[key])
    assert (absent.all(1) == absent.any(1)).all()
    return absent.all(1)


@given(
    sizes=st.lists(st.integers(3, 40), min_size=1, max_size=4).map(tuple),
    fraction=st.floats(0.2, 0.999),
    n_dims=st.sampled_from([2, 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_exact_fraction_of_every_slice(sizes, fraction, n_dims, seed):
    adata = make(sizes, n_dims=n_dims)
    before = adata.obsm["spatial"].copy()
    assert hide_positions(adata, fraction=fraction, random_state=seed) is None
    for k, size in enumerate(sizes):
        assert hidden(adata)[adata.obs["slice_id"] == f"s{k}"].sum() == round(fraction * size)
    np.testing.assert_array_equal(adata.obsm["spatial_truth"], before)
    kept = ~hidden(adata)
    np.testing.assert_array_equal(adata.obsm["spatial"][kept], before[kept])


@pytest.mark.parametrize("slices", ["s1", ["s1"], ("s2", "s0"), {"s2"}, dict.fromkeys(["s0"])])
def test_whole_slices(slices):
    adata = make((5, 6, 7))
    hide_positions(adata, slices=slices)
    expected = adata.obs["slice_id"].isin([slices] if isinstance(slices, str) else list(slices))
    np.testing.assert_array_equal(hidden(adata), expected)


def test_fraction_of_the_chosen_slices():
    adata = make((10, 20))
    hide_positions(adata, slices="s1", fraction=0.25)
    assert hidden(adata).sum() == hidden(adata)[adata.obs["slice_id"] == "s1"].sum() == 5


def test_the_seed_decides_the_choice():
    draws = [hidden(hide_positions(make((50,)), fraction=0.5, random_state=s, copy=True)) for s in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()


def test_cells_without_a_position_are_not_chosen():
    adata = make((40,))
    adata.obsm["spatial"][:20] = np.nan
    hide_positions(adata, fraction=0.5)
    assert hidden(adata)[:20].all()
    assert hidden(adata)[20:].sum() == 10
    assert np.isnan(adata.obsm["spatial_truth"][:20]).all()


def test_copy_leaves_the_original():
    adata = make((5, 5))
    before = adata.obsm["spatial"].copy()
    result = hide_positions(adata, slices="s0", copy=True)
    assert hidden(result).sum() == 5
    assert list(adata.obsm) == ["spatial"]
    np.testing.assert_array_equal(adata.obsm["spatial"], before)


def test_other_keys_and_integer_positions():
    adata = make((5, 5), key="animal")
    adata.obsm["xy"] = np.arange(20).reshape(10, 2)
    hide_positions(adata, slices="s0", position_key="xy", slice_key="animal")
    np.testing.assert_array_equal(hidden(adata, "xy"), adata.obs["animal"] == "s0")
    assert adata.obsm["xy_truth"].dtype == np.arange(1).dtype
    assert not hidden(adata).any()


def test_without_a_slice_column_all_cells_are_one_slice():
    adata = make((5, 5), key=None)
    hide_positions(adata, fraction=0.3)
    assert hidden(adata).sum() == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "slices=.*fraction="),
        ({"fraction": 0}, ValueError, "fraction=0 "),
        ({"fraction": 1.0}, ValueError, "fraction=1.0 "),
        ({"fraction": float("nan")}, ValueError, "fraction=nan"),
        ({"fraction": 0.01}, ValueError, "fraction=0.01"),
        ({"slices": []}, ValueError, "slices="),
        ({"slices": ["s0", "s9"]}, KeyError, "'s9' .*found: 's0', 's1'.*slices="),
        ({"slices": "s0", "slice_key": "animal"}, KeyError, r'obs\["animal"\]'),
        ({"slices": "s0", "position_key": "xy"}, KeyError, r'obsm\["xy"\] .*position_key=…'),
    ],
)
def test_invalid_input_raises_and_nothing_is_written(options, error, message):
    adata = make((5, 5))
    with pytest.raises(error) as caught:
        hide_positions(adata, **options)
    assert re.search(message, caught.value.args[0])
    assert list(adata.obsm) == ["spatial"]
    assert not hidden(adata).any()


def test_hiding_twice_raises():
    adata = make((5, 5))
    hide_positions(adata, slices="s0")
    with pytest.raises(ValueError, match=r'obsm\["spatial_truth"\]'):
        hide_positions(adata, slices="s1")
    adata.obsm["spatial"] = adata.obsm.pop("spatial_truth")
    hide_positions(adata, slices="s1")
    np.testing.assert_array_equal(hidden(adata), adata.obs["slice_id"] == "s1")


@pytest.mark.parametrize("options", [{"slices": "slice_2"}, {"fraction": 0.2}])
def test_hidden_cells_are_reconstructed_and_scored(tissue, options):
    from alphastomics.tl import evaluate, reconstruct

    hide_positions(tissue, **options)
    absent = hidden(tissue)
    reconstruct(tissue, max_epochs=1, d_model=16, n_layers=1, n_heads=2, context_size=64, enable_progress_bar=False)
    np.testing.assert_array_equal(tissue.obs["spatial_reconstructed_placed"], absent)
    table = evaluate(tissue, truth="spatial_truth")
    assert table["n_cells"].sum() == absent.sum()
    assert table["n_skipped"].sum() == 0
