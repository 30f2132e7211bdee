"""``pl.reconstruction``: confidence, marks of known positions, scale bar, notes and title."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from alphastomics.pl import reconstruction
from alphastomics.pl._figure import KNOWN_COLOR, round_length
from alphastomics.pl._reconstruction import PLACED_COLOR
from panels import colors, points

KEY = "spatial_reconstructed"


def test_confidence_has_a_panel_and_a_color_bar_from_0_to_1(adata):
    adata.obs[f"{KEY}_confidence"] = np.linspace(0.2, 0.8, 60)
    axes = reconstruction(adata, show=False)
    assert [ax.get_title() for ax in axes[0]] == ["one: truth", "one: prediction", "one: confidence"]
    np.testing.assert_array_equal(points(axes[1, 2]), points(axes[1, 1]))
    np.testing.assert_allclose(colors(axes[1, 2]), mpl.colormaps["viridis"](np.linspace(0.2, 0.8, 60))[40:])
    bar = axes[0, 0].figure.axes[-1]
    assert (bar.get_ylabel(), bar.get_ylim()) == ("confidence", (0, 1))
    assert reconstruction(adata, confidence=False, show=False).shape == (2, 2)


def test_known_positions_are_marked(adata):
    known = np.arange(60) % 4 == 0
    adata.obs[f"{KEY}_placed"] = ~known
    adata.obs[f"{KEY}_confidence"] = 1.0
    axes = reconstruction(adata, color="type", slices="one", size=10, show=False)
    for ax in axes[0]:
        (scatter,) = ax.collections
        assert scatter.get_sizes().tolist() == [4] * 10 + [10] * 30, "small, and below the others"
        np.testing.assert_allclose(colors(ax)[:10], [KNOWN_COLOR] * 10)
        assert not (colors(ax)[10:] == KNOWN_COLOR).all(axis=1).any()
    (legend,) = axes[0, 0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c", "known position"]
    assert legend.get_title().get_text() == "type"
    (legend,) = reconstruction(adata, show=False)[0, 0].figure.legends
    assert legend.get_title().get_text() == ""


def test_cells_among_known_ones_without_a_true_position(adata):
    known = np.arange(60) < 20
    adata.obs[f"{KEY}_placed"] = ~known
    adata.obsm["spatial"][~known] = np.nan
    axes = reconstruction(adata, slices="one", show=False)
    assert axes.shape == (1, 1), "the truth of no placed cell is known"
    np.testing.assert_allclose(colors(axes[0, 0]), [KNOWN_COLOR] * 20 + [PLACED_COLOR] * 20)


def test_slices_without_placed_cells_are_left_out(adata):
    adata.obs[f"{KEY}_placed"] = adata.obs["slice_id"] == "two"
    axes = reconstruction(adata, show=False)
    assert [ax.get_title() for ax in axes.flat] == ["two: truth", "two: prediction"]
    assert [ax.get_title() for ax in reconstruction(adata, slices="one", show=False).flat] == ["one: prediction"]


def test_the_alignment_is_noted(adata):
    adata.obs[f"{KEY}_placed"] = np.arange(60) != 0
    axes = reconstruction(adata, title="", show=False)
    notes = [ax.get_xlabel() for ax in axes.flat]
    assert notes == ["", "", "", "aligned to the truth by a rigid map"], "the first slice has a known position"
    assert reconstruction(adata, truth=None, show=False)[1, 0].get_xlabel() == ""


@pytest.mark.parametrize(("scale", "text"), [(1, "1"), (500, "500"), (3000, "2,000"), (1e-3, "0.001")])
def test_scale_bar_has_a_round_length(adata, scale, text):
    for key in adata.obsm:
        adata.obsm[key] = adata.obsm[key] * scale
    axes = reconstruction(adata, slices="one", units="µm", show=False)
    (bar,) = axes[0, 0].lines
    length = np.ptp(bar.get_xdata())
    np.testing.assert_allclose(length, float(text.replace(",", "")))
    assert 0.12 < length / np.ptp(axes[0, 0].get_xlim()) < 0.32
    assert [label.get_text() for label in axes[0, 0].texts] == [f"{text} µm"]
    assert not axes[0, 1].lines, "both panels have the same limits"
    assert reconstruction(adata, slices="one", show=False)[0, 0].texts[0].get_text() == text


def test_round_lengths():
    lengths = [1.2, 1.5, 3.0, 3.5, 7.0, 8.0, 0.04, 9999.0]
    assert [round_length(length) for length in lengths] == pytest.approx([1, 2, 2, 5, 5, 10, 0.05, 10_000])


def test_the_figure_has_the_held_out_score(adata):
    scores = {"distance_spearman": 0.8312, "knn_preservation": 0.412, "knn_preservation_chance": 0.0213}
    adata.uns[KEY] = {"params": {}, "training": {"held_out": scores}}
    text = reconstruction(adata, show=False)[0, 0].figure.get_suptitle().replace("\n", " ")
    assert text.endswith("distance Spearman 0.83, kNN preservation 0.41 (chance 0.02)")
    figure, given = plt.subplots(1, 2)
    reconstruction(adata, slices="one", ax=given)
    assert figure.get_suptitle() == ""
    adata.uns[KEY] = {"params": {}, "training": {}}
    assert reconstruction(adata, show=False)[0, 0].figure.get_suptitle() == ""
