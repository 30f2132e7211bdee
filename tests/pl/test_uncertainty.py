"""``pl.uncertainty``: the placement, colored by the uncertainty."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from alphastomics.pl import uncertainty
from alphastomics.pl._color import MISSING
from alphastomics.pl._figure import KNOWN_COLOR

KEY = "spatial_reconstructed"


@pytest.fixture
def adata() -> AnnData:
    """Two placed slices, with uncertainties from 1 to 30 and one that is unknown."""
    obs = pd.DataFrame({"slice_id": np.repeat(["one", "two"], [20, 10])}, index=[f"cell{i}" for i in range(30)])
    obs[f"{KEY}_uncertainty"] = np.arange(1.0, 31)
    obs.iloc[3, 1] = np.nan
    return AnnData(obs=obs, obsm={KEY: np.random.default_rng(0).uniform(size=(30, 2)) * 1000})


def test_cells_are_colored_by_their_uncertainty(adata):
    axes = uncertainty(adata, units="µm", show=False)
    assert [ax.get_title() for ax in axes[:, 0]] == ["one: uncertainty", "two: uncertainty"]
    (scatter,) = axes[1, 0].collections
    np.testing.assert_allclose(scatter.get_offsets(), adata.obsm[KEY][20:])
    np.testing.assert_allclose(scatter.get_facecolors(), mpl.colormaps["viridis"](np.arange(21, 31) / 30))
    np.testing.assert_allclose(axes[0, 0].collections[0].get_facecolors()[3], MISSING)
    bar = axes[0, 0].figure.axes[-1]
    assert (bar.get_ylabel(), bar.get_ylim()) == ("uncertainty (µm)", (0, 30))
    assert axes[0, 0].texts[0].get_text() == "200 µm"


def test_known_positions_are_marked(adata):
    adata.obs[f"{KEY}_placed"] = np.arange(30) >= 5
    axes = uncertainty(adata, vmax=10, show=False)
    np.testing.assert_allclose(axes[0, 0].collections[0].get_facecolors()[:5], [KNOWN_COLOR] * 5)
    assert [text.get_text() for text in axes[0, 0].figure.legends[0].get_texts()] == ["known position"]
    assert axes[0, 0].figure.axes[-1].get_ylim() == (0, 10)


def test_given_axes_are_used(adata, tmp_path):
    adata.obs[f"{KEY}_placed"] = np.arange(30) >= 5
    _, given = plt.subplots()
    assert uncertainty(adata, slices="one", ax=given, save=tmp_path / "plot.png").item() is given
    assert [text.get_text() for text in given.get_legend().get_texts()] == ["known position"]
    assert (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prediction": "x"}, KeyError, r'obsm\["x"\]'),
        ({"slices": "three"}, KeyError, "'three'.*slices="),
        ({"title": ["a"]}, ValueError, "2 panels"),
        ({"library_key": "x"}, KeyError, "library_key"),
    ],
)
def test_invalid_input_raises_before_plotting(adata, options, error, message):
    with pytest.raises(error, match=message):
        uncertainty(adata, **options)
    assert not plt.get_fignums()


def test_without_an_uncertainty(adata):
    del adata.obs[f"{KEY}_uncertainty"]
    with pytest.raises(KeyError, match=r"uncertainty.*pass n_samples=8 to alphastomics.tl.reconstruct"):
        uncertainty(adata)
