"""``pl.reconstruction``: which points are drawn where, and in which color."""

from __future__ import annotations

import subprocess
import sys

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from matplotlib.colors import to_rgba

from alphastomics.pl import reconstruction
from alphastomics.pl._color import MISSING
from panels import colors, points


def test_truth_beside_the_aligned_prediction(adata):
    axes = reconstruction(adata, show=False)
    assert axes.shape == (2, 2)
    assert [ax.get_title() for ax in axes.flat] == ["one: truth", "one: prediction", "two: truth", "two: prediction"]
    for row, cells in zip(axes, (slice(0, 40), slice(40, 60)), strict=True):
        np.testing.assert_allclose(points(row[0]), adata.obsm["spatial"][cells])
        np.testing.assert_allclose(points(row[1]), adata.obsm["spatial"][cells], atol=1e-9)
        np.testing.assert_array_equal(colors(row[0]), colors(row[1]))
        assert row[0].get_xlim() == row[1].get_xlim()
        assert all(ax.get_aspect() == 1 for ax in row)


def test_alignment_does_not_change_the_size(adata):
    adata.obsm["spatial_reconstructed"] *= 3
    axes = reconstruction(adata, slices="one", show=False)
    np.testing.assert_allclose(np.ptp(points(axes[0, 1]), axis=0), 3 * np.ptp(points(axes[0, 0]), axis=0))


def test_slices_with_known_cells_are_not_moved(adata):
    adata.obs["spatial_reconstructed_placed"] = np.arange(60) != 0
    axes = reconstruction(adata, show=False)
    np.testing.assert_allclose(points(axes[0, 1]), adata.obsm["spatial_reconstructed"][:40])
    np.testing.assert_allclose(points(axes[1, 1]), adata.obsm["spatial"][40:], atol=1e-9)


def test_default_colors_match_the_true_position(adata):
    corners = np.array([[0.0, 0], [4, 0], [0, 2], [4, 2], [2, 1]])
    cells = adata[:5].copy()
    cells.obsm["spatial"] = corners
    cells.obsm["spatial_reconstructed"] = corners[::-1].copy()
    axes = reconstruction(cells, show=False)
    shades = colors(axes[0, 0])
    expected = [to_rgba(color) for color in ("#2b4c9b", "#d7433b", "#1fa187", "#f4c430")]
    np.testing.assert_allclose(shades[:4], expected)
    np.testing.assert_allclose(shades[4], np.mean(expected, axis=0))
    np.testing.assert_array_equal(colors(axes[0, 1]), shades)


def test_cells_without_a_true_position_are_gray(adata):
    adata.obsm["spatial"][:5] = np.nan
    adata.obsm["spatial_reconstructed"][39] = np.nan
    axes = reconstruction(adata, slices=["one"], show=False)
    assert len(points(axes[0, 0])) == 35
    assert len(points(axes[0, 1])) == 39
    np.testing.assert_allclose(points(axes[0, 1])[5:], adata.obsm["spatial"][5:39], atol=1e-9)
    gray = (colors(axes[0, 1]) == MISSING).all(axis=1)
    assert gray.tolist() == [True] * 5 + [False] * 34


def test_categories(adata):
    adata.obs.loc[["cell0"], "type"] = np.nan
    adata.uns["type_colors"] = ["#ff0000", "#00ff00", "#0000ff"]
    axes = reconstruction(adata, color="type", show=False)
    expected = [to_rgba(adata.uns["type_colors"][i % 3]) for i in range(60)]
    expected[0] = MISSING
    np.testing.assert_allclose(colors(axes[0, 0]), expected[:40])
    np.testing.assert_allclose(colors(axes[1, 1]), expected[40:])
    (legend,) = axes[0, 0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
    assert [handle.get_color() for handle in legend.legend_handles] == ["#ff0000", "#00ff00", "#0000ff"]
    only = adata[adata.obs["type"] == "b"].copy()
    only.obs["type"] = only.obs["type"].cat.set_categories(["a", "b", "c"])
    del only.uns["type_colors"]
    palette = {"a": "k", "b": "#00ff00", "c": "w"}
    axes = reconstruction(only, color="type", palette=palette, show=False)
    np.testing.assert_allclose(colors(axes[0, 0]), [to_rgba("#00ff00")] * len(points(axes[0, 0])))
    assert [text.get_text() for text in axes[0, 0].figure.legends[0].get_texts()] == ["b"]


@pytest.mark.parametrize("n", [3, 23, 80])
@pytest.mark.parametrize("palette", [None, "viridis"])
def test_every_category_has_its_own_color(adata, n, palette):
    wide = AnnData(obs=pd.DataFrame({"type": [f"t{i}" for i in range(n)]}, index=[f"c{i}" for i in range(n)]))
    wide.obsm["spatial_reconstructed"] = np.random.default_rng(0).normal(size=(n, 2))
    axes = reconstruction(wide, color="type", palette=palette, show=False)
    assert len(np.unique(colors(axes[0, 0]), axis=0)) == n


def test_numbers_and_genes_have_one_scale(adata):
    axes = reconstruction(adata, color="score", cmap="viridis", show=False)
    np.testing.assert_allclose(colors(axes[1, 0]), mpl.colormaps["viridis"](np.linspace(0, 1, 60))[40:])
    figure = axes[0, 0].figure
    assert len(figure.axes) == 5, "four panels and one color bar"
    assert figure.axes[-1].get_ylabel() == "score"
    gene = adata.X[:, 1].toarray().ravel()
    axes = reconstruction(adata, color="Pax6", cmap="magma", vmax=2, show=False)
    np.testing.assert_allclose(colors(axes[0, 1]), mpl.colormaps["magma"](np.clip(gene / 2, 0, 1))[:40])


def test_without_truth_only_the_prediction_is_plotted(adata):
    del adata.obsm["spatial"]
    axes = reconstruction(adata, show=False)
    assert axes.shape == (2, 1)
    np.testing.assert_allclose(points(axes[0, 0]), adata.obsm["spatial_reconstructed"][:40])
    assert reconstruction(adata, truth=None, show=False).shape == (2, 1)
    with pytest.raises(KeyError, match=r'obsm\["elsewhere"\] '):
        reconstruction(adata, truth="elsewhere", show=False)


def test_three_dimensions_are_aligned_then_projected(adata):
    rng = np.random.default_rng(1)
    true = rng.normal(size=(60, 3))
    adata.obsm["spatial"] = true
    adata.obsm["spatial_reconstructed"] = true @ np.linalg.qr(rng.normal(size=(3, 3)))[0] + 2
    axes = reconstruction(adata, library_key="slice_id", show=False)
    np.testing.assert_allclose(points(axes[0, 1]), true[:40, :2], atol=1e-9)


def test_a_constant_height_of_the_truth_is_left_out(adata):
    expected = points(reconstruction(adata, show=False)[0, 0])
    adata.obsm["spatial"] = np.c_[adata.obsm["spatial"], np.full(adata.n_obs, 5.0)]
    adata.uns["spatial_reconstructed"] = "no record"
    found = points(reconstruction(adata, show=False)[0, 0])
    np.testing.assert_array_equal(found, expected)


def test_slices_are_chosen_and_ordered(adata):
    axes = reconstruction(adata, slices=["two", "one"], title=["a", "b", "c", "d"], show=False)
    assert [len(points(ax)) for ax in axes[:, 0]] == [20, 40]
    assert [ax.get_title() for ax in axes.flat] == ["a", "b", "c", "d"]
    with pytest.raises(KeyError, match=r"'three'.*slices=.*'one', 'two'"):
        reconstruction(adata, slices=["three"], show=False)


def test_given_axes_are_used_and_nothing_is_shown(adata, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))
    figure, given = plt.subplots(1, 2)
    axes = reconstruction(adata, slices="one", ax=given, show=True)
    assert axes.ravel().tolist() == list(given)
    assert plt.get_fignums() == [figure.number]
    (single,) = reconstruction(adata, slices="one", truth=None, ax=given[0]).ravel()
    assert single is given[0]
    reconstruction(adata, slices="one", color="type", ax=given)
    assert [text.get_text() for text in given[1].get_legend().get_texts()] == ["a", "b", "c"]
    assert not figure.legends
    with pytest.raises(ValueError, match=r"ax\b.* 2 .* 4"):
        reconstruction(adata, ax=given)


def test_show_and_save(adata, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(True))
    assert reconstruction(adata, show=True) is None
    assert shown == [True]
    # The backend of these tests writes files only: nothing can be shown, the axes come back.
    assert reconstruction(adata).shape == (2, 2)
    monkeypatch.setattr(mpl, "get_backend", lambda: "qtagg")
    monkeypatch.delitem(sys.modules, "scanpy", raising=False)
    assert reconstruction(adata) is None
    assert shown == [True, True]
    reconstruction(adata, dpi=50, figsize=(4, 4), show=False, save=tmp_path / "tissue.png")
    assert (tmp_path / "tissue.png").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["tissue.png"]


def test_autoshow_of_scanpy(adata, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(mpl, "get_backend", lambda: "qtagg")
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))
    monkeypatch.setitem(sys.modules, "scanpy", SimpleNamespace(settings=SimpleNamespace(autoshow=False)))
    assert reconstruction(adata) is not None


def test_a_gene_must_have_one_name(adata):
    adata.var_names = ["twice", "twice", "once"]
    with pytest.raises(ValueError, match=r"several genes.*var_names_make_unique"):
        reconstruction(adata, color="twice")


def test_a_palette_may_have_the_categories_as_keys(adata):
    adata.obs["cluster"] = pd.Categorical(np.arange(adata.n_obs) % 2)
    axes = reconstruction(adata, color="cluster", palette={0: "r", 1: "b"}, show=False)
    assert {tuple(color) for color in colors(axes[0, 0])} == {to_rgba("r"), to_rgba("b")}


def test_markers_and_options_of_scatter(adata):
    axes = reconstruction(adata, size=7, alpha=0.5, show=False)
    (scatter,) = axes[0, 0].collections
    assert set(scatter.get_sizes()) == {7}
    assert (scatter.get_facecolors()[:, 3] == 0.5).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"color": "nothing"}, KeyError, "color='nothing'"),
        ({"prediction": "x"}, KeyError, "tl.reconstruct"),
        ({"library_key": "x"}, KeyError, "library_key"),
        ({"color": "type", "palette": ["r"]}, ValueError, "palette"),
        ({"color": "type", "palette": {"a": "r"}}, ValueError, "palette.*'b', 'c'"),
        ({"title": ["a"]}, ValueError, "4 panels"),
        ({"slices": []}, ValueError, "slices="),
    ],
)
def test_invalid_input_raises_before_plotting(adata, options, error, message):
    with pytest.raises(error, match=message):
        reconstruction(adata, **options)
    assert not plt.get_fignums()


def test_the_data_is_not_modified(adata):
    before = adata.copy()
    reconstruction(adata, color="type", show=False)
    assert dict(adata.uns) == dict(before.uns)
    np.testing.assert_array_equal(adata.obsm["spatial_reconstructed"], before.obsm["spatial_reconstructed"])


def test_importing_the_plots_does_not_import_matplotlib():
    code = "import sys, alphastomics.pl; sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
