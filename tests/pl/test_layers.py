"""Plots of attention and experts, on tables made by hand."""

from __future__ import annotations

import anndata as ad
import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from alphastomics import pl

PARTS = {"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1]}


@pytest.fixture
def adata() -> ad.AnnData:
    rng = np.random.default_rng(0)
    names = [f"c{i}" for i in range(6)]
    adata = ad.AnnData(np.zeros((6, 2)), obs=pd.DataFrame(index=names), obsm={"spatial": rng.normal(size=(6, 2))})
    adata.uns["attention_gates"] = {
        "summary": pd.DataFrame(PARTS | {"mean": [0.5, 0.6, 0.2, 0.4], "sd": [0.1, 0.2, 0.1, 0.1]})
    }
    adata.uns["attention_sinks"] = {
        "summary": pd.DataFrame(PARTS | {"slice": "a", "share": [0.2, 0.3, 0.6, 1.0], "uniform": 0.1})
    }
    adata.uns["experts"] = {
        "summary": pd.DataFrame(
            {"layer": PARTS["layer"], "expert": PARTS["head"], "usage": [0.4, 0.6, 0.1, 0.9], "probability": 0.5}
        )
    }
    adata.obsm["attention_maps"] = pd.DataFrame(
        {"c1": [0.1, 0.2, 0.7, np.nan, np.nan, np.nan], "c4": [np.nan] * 3 + [0.5, 0.3, 0.2]}, index=names
    )
    return adata


def test_gates_and_the_usual_range(adata):
    ax = pl.attention_gates(adata, show=False)
    heads = [container.lines[0].get_ydata().tolist() for container in ax.containers]
    assert heads == [[0.5, 0.2], [0.6, 0.4]]
    (band,) = [patch for patch in ax.patches if patch.get_label() == "usual range of the mean"]
    assert band.get_extents().transformed(ax.transData.inverted()).intervaly == pytest.approx([0.3, 0.7])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["usual range of the mean", "head 0", "head 1"]


def test_sinks_are_relative_to_uniform_attention(adata):
    ax = pl.attention_sinks(adata, show=False)
    heights = [points.get_offsets()[:, 1].tolist() for points in ax.collections]
    assert heights == [pytest.approx([2, 6]), pytest.approx([3, 10])]
    assert ax.lines[0].get_ydata()[0] == 1


def test_usage_and_balanced_usage(adata):
    ax = pl.expert_usage(adata, show=False)
    assert [[bar.get_height() for bar in bars] for bars in ax.containers] == [[0.4, 0.1], [0.6, 0.9]]
    assert ax.lines[0].get_ydata()[0] == 0.5


def test_a_map_shows_the_cells_of_the_slice(adata):
    axes = pl.attention_maps(adata, show=False)
    assert axes.shape == (1, 2)
    for ax, cell, rows in zip(axes[0], ("c1", "c4"), ([0, 1, 2], [5, 4, 3]), strict=True):
        cells, itself = ax.collections
        np.testing.assert_array_equal(cells.get_offsets(), adata.obsm["spatial"][rows])
        np.testing.assert_array_equal(cells.get_array(), adata.obsm["attention_maps"][cell].iloc[rows])
        np.testing.assert_array_equal(itself.get_offsets()[0], adata.obsm["spatial"][int(cell[1])])
        assert ax.get_title() == cell


def test_a_map_of_cells_that_were_removed(adata):
    cells, itself = pl.attention_maps(adata[2:].copy(), show=False)[0, 0].collections
    assert (len(cells.get_offsets()), len(itself.get_offsets())) == (1, 0)


@pytest.mark.parametrize("name", ["attention_gates", "attention_sinks", "expert_usage"])
def test_given_axes_are_used_and_nothing_is_shown(adata, name, monkeypatch, tmp_path):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))
    _, given = plt.subplots()
    assert getattr(pl, name)(adata, ax=given, show=True, save=tmp_path / "x.png") is given
    assert (tmp_path / "x.png").exists()
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize("name", ["attention_gates", "attention_sinks", "expert_usage", "attention_maps"])
def test_missing_results_raise(adata, name):
    with pytest.raises(KeyError, match=rf"\"other\".*tl\.{name}"):
        getattr(pl, name)(adata, key="other")
    assert not plt.get_fignums()


def test_position_key(adata):
    with pytest.raises(KeyError, match=r"\"elsewhere\".* position_key="):
        pl.attention_maps(adata, position_key="elsewhere")
