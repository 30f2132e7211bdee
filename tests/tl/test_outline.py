"""``tl.fit_outline``."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import shapely

import alphastomics as asx

L_SHAPE = np.array([[0, 0], [4, 0], [4, 1], [1.5, 1], [1.5, 3], [0, 3]], dtype=float)  # no symmetry


def cells_within(outline: np.ndarray, n: int, seed: int = 0) -> np.ndarray:
    """Random points within a polygon."""
    polygon, rng = shapely.Polygon(outline), np.random.default_rng(seed)
    points = rng.uniform(outline.min(0), outline.max(0), (8 * n, 2))
    return points[shapely.contains_xy(polygon, *points.T)][:n]


def motion(angle: float, mirror: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, s], [-mirror * s, mirror * c]])


def placed(position: np.ndarray, **obs: object) -> ad.AnnData:
    adata = ad.AnnData(obs=pd.DataFrame(obs, index=[str(i) for i in range(len(position))]))
    adata.obsm["spatial_reconstructed"] = position
    return adata


@pytest.mark.parametrize("mirror", [1.0, -1.0])
@pytest.mark.parametrize("angle", [1.0, 4.0])
def test_the_frame_is_that_of_the_outline(angle: float, mirror: float) -> None:
    truth = cells_within(L_SHAPE, 800)
    adata = placed(truth @ motion(angle, mirror) + [30.0, -7.0])
    asx.tl.fit_outline(adata, L_SHAPE)
    result = adata.obsm["spatial_reconstructed"]
    assert np.linalg.norm(result - truth, axis=1).max() < 0.15


def test_a_symmetric_outline_keeps_the_orientation() -> None:
    square = 2.0 * np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    truth = cells_within(square, 600)
    adata = placed(truth + [5.0, 1.0])
    with pytest.warns(UserWarning, match="does not determine the frame"):
        asx.tl.fit_outline(adata, square)
    assert np.linalg.norm(adata.obsm["spatial_reconstructed"] - truth, axis=1).max() < 0.1


def test_no_cell_is_outside_and_cells_inside_move_rigidly() -> None:
    truth = cells_within(L_SHAPE, 500)
    noisy = truth + 0.1 * np.random.default_rng(1).standard_normal(truth.shape)
    adata = placed(noisy)
    moved = asx.tl.fit_outline(adata, L_SHAPE, key_added="within", copy=True)
    x, polygon = moved.obsm["within"], shapely.Polygon(L_SHAPE)
    assert (shapely.distance(polygon, shapely.points(x)) < 1e-9).all()
    inside = shapely.contains_xy(polygon.buffer(-1e-9), *x.T)
    assert 0.5 < inside.mean() < 1
    before, after = noisy[inside], x[inside]
    np.testing.assert_allclose(
        np.linalg.norm(after - after[0], axis=1), np.linalg.norm(before - before[0], axis=1), atol=1e-9
    )
    assert "within" not in adata.obsm
    np.testing.assert_array_equal(moved.obsm["spatial_reconstructed"], noisy)


def test_holes_are_outside() -> None:
    hole = shapely.box(0.2, 0.2, 1.2, 1.2)
    ring = shapely.Polygon(L_SHAPE).difference(hole)
    adata = placed(cells_within(L_SHAPE, 400))
    asx.tl.fit_outline(adata, ring)
    assert not shapely.contains_xy(hole.buffer(-1e-9), *adata.obsm["spatial_reconstructed"].T).any()


def test_known_positions_determine_the_frame() -> None:
    truth = cells_within(L_SHAPE, 300) + [2.0, 0.0]  # a part is outside
    is_placed = np.arange(len(truth)) >= 20
    adata = placed(truth, spatial_reconstructed_placed=is_placed)
    asx.tl.fit_outline(adata, L_SHAPE)
    result = adata.obsm["spatial_reconstructed"]
    np.testing.assert_array_equal(result[~is_placed], truth[~is_placed])
    inside = shapely.contains_xy(shapely.Polygon(L_SHAPE), *truth.T)
    np.testing.assert_array_equal(result[inside], truth[inside])
    assert (shapely.distance(shapely.Polygon(L_SHAPE), shapely.points(result[is_placed])) < 1e-9).all()


def test_what_accompanies_a_placement_is_copied_with_it() -> None:
    truth = cells_within(L_SHAPE, 50)
    adata = placed(truth, spatial_reconstructed_placed=np.arange(50) % 5 > 0, within_uncertainty=1.0)
    adata.uns["spatial_reconstructed"] = {"params": {"slice_key": None}}
    asx.tl.fit_outline(adata, L_SHAPE, key_added="within")
    assert adata.obs["within_placed"].tolist() == adata.obs["spatial_reconstructed_placed"].tolist()
    assert "within_uncertainty" not in adata.obs  # of an earlier result
    assert adata.uns["within"] == adata.uns["spatial_reconstructed"]
    adata.obsm["spatial"] = truth
    assert asx.tl.evaluate(adata, prediction="within")["n_cells"].item() == 40


def test_cells_that_were_not_placed_remain_so() -> None:
    position = cells_within(L_SHAPE, 200)
    position[::7] = np.nan
    adata = placed(position)
    asx.tl.fit_outline(adata, L_SHAPE)
    np.testing.assert_array_equal(np.isnan(adata.obsm["spatial_reconstructed"]), np.isnan(position))


def test_the_order_of_cells_and_the_frame_of_the_placement_have_little_effect() -> None:
    truth = cells_within(L_SHAPE, 900)
    order = np.random.default_rng(2).permutation(len(truth))
    first, second = placed(truth), placed(truth[order] @ motion(2.0, -1.0))
    asx.tl.fit_outline(first, L_SHAPE)
    asx.tl.fit_outline(second, L_SHAPE)
    difference = first.obsm["spatial_reconstructed"][order] - second.obsm["spatial_reconstructed"]
    assert np.linalg.norm(difference, axis=1).max() < 0.1


@pytest.mark.parametrize(
    ("outline", "message"),
    [
        ([[0, 0], [1, 1]], "at least three"),
        ([[0, 0], [1, 0], [np.nan, 1]], "finite"),
        ([[0, 0], [1, 1], [1, 0], [0, 1]], "not a valid polygon"),
        ([[0, 0], [1, 1], [2, 2]], "not a valid polygon"),
    ],
)
def test_invalid_outlines(outline: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asx.tl.fit_outline(placed(cells_within(L_SHAPE, 50)), outline)


def test_a_constant_third_column_is_kept() -> None:
    x = cells_within(L_SHAPE, 300) @ motion(1.0, -1.0)
    x[5] = np.nan
    flat = asx.tl.fit_outline(placed(x), L_SHAPE, copy=True).obsm["spatial_reconstructed"]
    raised = asx.tl.fit_outline(placed(np.insert(x, 1, 7.0, axis=1)), L_SHAPE, copy=True).obsm["spatial_reconstructed"]
    np.testing.assert_array_equal(raised[:, [0, 2]], flat)
    assert (raised[:, 1] == 7).all()


def test_no_cells_several_slices_and_three_dimensions_are_refused() -> None:
    x = cells_within(L_SHAPE, 50)
    with pytest.raises(ValueError, match="adata has no cells"):
        asx.tl.fit_outline(placed(x, slice_id="a")[:0].copy(), L_SHAPE)
    with pytest.raises(ValueError, match="2 slices"):
        asx.tl.fit_outline(placed(x, slice_id=["a", "b"] * (len(x) // 2)), L_SHAPE)
    with pytest.raises(ValueError, match="two dimensions"):
        asx.tl.fit_outline(placed(np.c_[x, x[:, :1]]), L_SHAPE)
    with pytest.raises(KeyError, match="basis"):
        asx.tl.fit_outline(placed(x), L_SHAPE, basis="other")
