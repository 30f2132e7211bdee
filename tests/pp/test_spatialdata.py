"""``pp.from_spatialdata`` and ``pp.to_spatialdata``: against objects of the library, and round trips."""

from __future__ import annotations

import re
import sys

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given, settings, strategies as st

from alphastomics.pp import from_spatialdata, to_spatialdata

sd = pytest.importorskip("spatialdata", reason="needs the extra alphastomics[spatialdata]")
from spatialdata import models  # noqa: E402
from spatialdata.transformations import Affine, Identity, Scale  # noqa: E402

AFFINE = np.array([[0.0, -2.0, 10.0], [2.0, 0.0, -5.0], [0.0, 0.0, 1.0]])


def cells(**regions: list[int] | list[str]) -> AnnData:
    """A table that annotates instances of regions, its rows in a mixed order and its names repeated in no region."""
    obs = pd.DataFrame(
        [(region, instance) for region, instances in regions.items() for instance in instances],
        columns=["region", "cell_id"],
    ).sample(frac=1, random_state=0)
    obs["region"] = obs["region"].astype("category")
    obs.index = [f"c{i}" for i in range(len(obs))]
    return models.TableModel.parse(
        AnnData(np.arange(2.0 * len(obs)).reshape(-1, 2), obs=obs),
        region=list(regions), region_key="region", instance_key="cell_id",
    )  # fmt: skip


def circles(points: np.ndarray, index: list, **systems: object) -> object:
    return models.ShapesModel.parse(
        points, geometry=0, radius=1.0, index=pd.Index(index), transformations=systems or {"global": Identity()}
    )


def make(sizes: tuple[int, ...], n_dims: int = 2) -> AnnData:
    rng = np.random.default_rng(1)
    names = rng.permutation(np.repeat([f"s{k}" for k in range(len(sizes))], sizes))
    obs = pd.DataFrame({"slice_id": names}, index=[f"c{i}" for i in range(len(names))])
    return AnnData(rng.poisson(3.0, (len(names), 4)).astype(float), obs=obs, obsm={
        "spatial": rng.normal(size=(len(names), n_dims)) * 100
    })  # fmt: skip


def test_positions_match_the_coordinate_system_and_regions_are_slices():
    points = np.random.default_rng(0).normal(size=(5, 2))
    affine = Affine(AFFINE, input_axes=("x", "y"), output_axes=("x", "y"))
    sdata = sd.SpatialData(
        shapes={
            "left": circles(points[:3], [7, 2, 5], **{"global": affine, "pixels": Identity()}),
            "right": circles(
                points[3:], [2, 7], **{"global": Scale([3.0, 1.0], axes=("x", "y")), "pixels": Identity()}
            ),
        },
        tables={"table": cells(left=[2, 5, 7], right=[7, 2])},
    )
    adata = from_spatialdata(sdata)
    turned = points[:3] @ AFFINE[:2, :2].T + AFFINE[:2, 2]
    stretched = points[3:] * [3.0, 1.0]
    place = dict(
        zip([("left", i) for i in (7, 2, 5)] + [("right", i) for i in (2, 7)], [*turned, *stretched], strict=True)
    )
    expected = [place[key] for key in zip(adata.obs["region"], adata.obs["cell_id"], strict=True)]
    np.testing.assert_allclose(adata.obsm["spatial"], expected, rtol=1e-12)
    assert adata.obs["slice_id"].tolist() == adata.obs["region"].tolist()
    assert isinstance(adata.obs["slice_id"].dtype, pd.CategoricalDtype)
    place = dict(zip(place, points, strict=True))
    expected = [place[key] for key in zip(adata.obs["region"], adata.obs["cell_id"], strict=True)]
    pixels = from_spatialdata(sdata, coordinate_system="pixels", position_key="xy", slice_key="section")
    np.testing.assert_array_equal(pixels.obsm["xy"], expected)
    assert "section" in pixels.obs
    assert list(sdata["table"].obsm) == []  # what came in is as it was
    assert "slice_id" not in sdata["table"].obs


def test_labels_polygons_and_points_give_centroids():
    from geopandas import GeoDataFrame
    from shapely import box

    labels = models.Labels2DModel.parse(
        np.array([[0, 1, 1], [5, 5, 0]]),
        dims=("y", "x"),
        transformations={"global": Scale([10.0, 10.0], axes=("x", "y"))},
    )
    polygons = models.ShapesModel.parse(GeoDataFrame(geometry=[box(0, 0, 2, 4), box(1, 1, 3, 3)], index=["a", "b"]))
    volume = models.PointsModel.parse(pd.DataFrame([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], columns=list("xyz")))

    def places(element: str, **kwargs: object) -> dict:
        table = cells(**{element: list(kwargs["instances"])})
        adata = from_spatialdata(sd.SpatialData.init_from_elements({element: kwargs["of"], "t": table}))
        return dict(zip(adata.obs["cell_id"], adata.obsm["spatial"].tolist(), strict=True))

    assert places("cells", of=labels, instances=[5, 1]) == {1: [20.0, 5.0], 5: [10.0, 15.0]}
    assert places("cells", of=polygons, instances=["b", "a"]) == {"a": [1.0, 2.0], "b": [2.0, 2.0]}
    assert places("cells", of=volume, instances=[0, 1]) == {0: [1.0, 2.0, 3.0], 1: [4.0, 5.0, 6.0]}


def test_a_cell_without_an_instance_has_no_position():
    sdata = sd.SpatialData(shapes={"left": circles(np.ones((2, 2)), [1, 2])}, tables={"table": cells(left=[1, 2, 3])})
    adata = from_spatialdata(sdata)
    np.testing.assert_array_equal(np.isnan(adata.obsm["spatial"]).all(axis=1), adata.obs["cell_id"] == 3)


def test_existing_slices_are_kept():
    table = cells(left=[1, 2])
    table.obs["slice_id"] = ["a", "b"]
    adata = from_spatialdata(sd.SpatialData(shapes={"left": circles(np.ones((2, 2)), [1, 2])}, tables={"table": table}))
    assert adata.obs["slice_id"].tolist() == ["a", "b"]


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    n_dims=st.sampled_from([2, 3]),
    known=st.floats(0.2, 1.0),
)
def test_round_trip(sizes, n_dims, known):
    adata = make(sizes, n_dims)
    rng = np.random.default_rng(2)
    first = ~adata.obs["slice_id"].duplicated().to_numpy()  # every slice keeps a position
    adata.obsm["spatial"][(rng.random(adata.n_obs) > known) & ~first] = np.nan
    before = adata.copy()
    sdata = to_spatialdata(adata)
    back = from_spatialdata(sdata)
    np.testing.assert_array_equal(back.obsm["spatial"], before.obsm["spatial"])
    np.testing.assert_array_equal(back.X, before.X)
    assert back.obs_names.tolist() == before.obs_names.tolist()
    assert back.obs["slice_id"].tolist() == before.obs["slice_id"].tolist()
    assert sorted(sdata.shapes if n_dims == 2 else sdata.points) == sorted(set(before.obs["slice_id"]))
    np.testing.assert_array_equal(adata.obsm["spatial"], before.obsm["spatial"])
    assert list(adata.obs) == ["slice_id"]
    assert list(adata.uns) == []


def test_identifiers_survive_a_round_trip():
    sdata = sd.SpatialData(
        shapes={"left": circles(np.eye(2), ["x", "y"]), "right": circles(np.eye(2) * 3, ["y", "z"])},
        tables={"table": cells(left=["x", "y"], right=["z", "y"])},
    )
    adata = from_spatialdata(sdata)
    adata.obsm["moved"] = adata.obsm["spatial"] + 1
    again = to_spatialdata(adata, position_key="moved", coordinate_system="moved", table="cells")
    assert again.coordinate_systems == ["moved"]
    for region in ("left", "right"):
        there, here = (each[region].geometry.get_coordinates().sort_index() for each in (sdata, again))
        pd.testing.assert_frame_equal(there + 1, here, check_names=False)
    assert again["cells"].uns["spatialdata_attrs"]["instance_key"] == "cell_id"


def test_default_and_given_radius():
    adata = AnnData(np.ones((4, 1)), obsm={"spatial": np.array([[0.0, 0], [4, 0], [8, 0], [12, 0]])})
    sdata = to_spatialdata(adata)
    assert sdata["slice_0"]["radius"].tolist() == [2.0] * 4
    assert sdata["table"].obs["slice_id"].tolist() == ["slice_0"] * 4
    assert to_spatialdata(adata, radius=0.5)["slice_0"]["radius"].tolist() == [0.5] * 4
    adata.obsm["spatial"][:] = 1.0
    assert to_spatialdata(adata)["slice_0"]["radius"].tolist() == [1.0] * 4


def test_squidpy_reads_the_same_graph_from_both():
    import squidpy as sq

    adata = make((40, 30))
    adata = adata[adata.obs["slice_id"].sort_values(ascending=False).index].copy()
    adata.obs["slice_id"] = adata.obs["slice_id"].astype("category")
    sdata = to_spatialdata(adata)
    sq.gr.spatial_neighbors_knn(adata, n_neighs=5, library_key="slice_id")
    sq.gr.spatial_neighbors_knn(
        sdata, n_neighs=5, table_key="table", elements_to_coordinate_systems={"s0": "global", "s1": "global"}
    )
    graph = sdata["table"].obsp["spatial_connectivities"]
    assert (graph != adata.obsp["spatial_connectivities"]).nnz == 0
    assert graph.nnz == 5 * adata.n_obs


# ome-zarr 0.15 and anndata 0.12, when a SpatialData is written.
@pytest.mark.filterwarnings("ignore:Call to deprecated class Scaler:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning")
def test_written_and_read(tmp_path):
    adata = make((6, 7))
    adata.uns["spatial_reconstructed"] = {"params": {"n_steps": 1}}
    to_spatialdata(adata).write(tmp_path / "tissue.zarr")
    back = from_spatialdata(sd.read_zarr(tmp_path / "tissue.zarr"))
    np.testing.assert_array_equal(back.obsm["spatial"], adata.obsm["spatial"])
    assert back.obs["slice_id"].tolist() == adata.obs["slice_id"].tolist()


def raises(sdata: sd.SpatialData, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        from_spatialdata(sdata, **options)
    assert re.search(message, caught.value.args[0])


def test_invalid_spatialdata_raises():
    shapes = {"left": circles(np.ones((2, 2)), [1, 2])}
    one = sd.SpatialData(shapes=shapes, tables={"a": cells(left=[1, 2])})
    raises(one, {"table": "b"}, KeyError, r'tables\["b"\] .*\'a\'.*table=…')
    raises(one, {"coordinate_system": "micron"}, KeyError, "'micron'.*'global'.*coordinate_system=")
    two = sd.SpatialData(shapes=shapes, tables={"a": cells(left=[1, 2]), "b": cells(left=[1, 2])})
    raises(two, {}, KeyError, r"2 tables.*a, b.*table=")
    assert from_spatialdata(two, table="b").n_obs == 2
    raises(sd.SpatialData(), {}, KeyError, "0 tables")
    raises(sd.SpatialData(tables={"a": AnnData(np.ones((2, 2)))}), {}, ValueError, "tables")
    other = sd.SpatialData(shapes=shapes, tables={"a": cells(left=["1", "2"])})
    raises(other, {}, ValueError, r'\'left\'.*obs\["cell_id"\].*region: 1, .*table: \'.\'')
    twice = sd.SpatialData(shapes={"left": circles(np.ones((2, 2)), [1, 1])}, tables={"a": cells(left=[1, 2])})
    raises(twice, {}, ValueError, "'left'.*unique")
    volume = models.PointsModel.parse(pd.DataFrame(np.ones((2, 3)), columns=list("xyz")))
    mixed = sd.SpatialData(shapes=shapes, points={"deep": volume}, tables={"a": cells(left=[1, 2], deep=[0, 1])})
    raises(mixed, {}, ValueError, r"\[2, 3\] dimensions")


@pytest.mark.filterwarnings("ignore:The table is annotating:UserWarning")
def test_missing_region_raises():
    raises(sd.SpatialData(tables={"a": cells(gone=[1, 2])}), {}, KeyError, "'gone'")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"position_key": "xy"}, KeyError, r'obsm\["xy"\] '),
        ({"slice_key": "animal"}, KeyError, r'obs\["animal"\] '),
        ({"table": "s1"}, ValueError, "'s1'.*table=…"),
        ({"instance_key": "slice_id"}, ValueError, "slice_id.*instance_key=…"),
    ],
)
def test_invalid_arguments_raise(options, error, message):
    adata = make((5, 5))
    with pytest.raises(error, match=message):
        to_spatialdata(adata, **options)


def test_slice_without_positions_raises():
    adata = make((5, 5))
    adata.obsm["spatial"][adata.obs["slice_id"] == "s1"] = np.nan
    with pytest.raises(ValueError, match="'s1'.*position"):
        to_spatialdata(adata)


def test_invalid_slice_names_raise():
    adata = make((5,))
    adata.obs["slice_id"] = "embryo 2/z2"
    with pytest.raises(ValueError, match="alphanumeric"):
        to_spatialdata(adata)


@pytest.mark.parametrize("function", [from_spatialdata, to_spatialdata])
def test_missing_package_raises(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "spatialdata", None)
    with pytest.raises(ImportError, match=r"pip install 'alphastomics\[spatialdata\]'"):
        function(make((5,)))
