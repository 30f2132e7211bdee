"""The page of recipes: its code runs on objects that have the layout of spatialdata-io."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

sd = pytest.importorskip("spatialdata", reason="needs the extra alphastomics[spatialdata]")
from spatialdata import models  # noqa: E402
from spatialdata.transformations import Scale  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
PIXEL = 0.2125  # µm
SHORT = (
    'max_epochs=1, accelerator="cpu", context_size=64, batch_size=128, d_model=16, n_layers=1, n_heads=2, '
    "enable_progress_bar=False"
)
# Arguments of the readers of spatialdata-io 0.7 that are switches.
XENIUM = {
    "cells_boundaries", "nucleus_boundaries", "cells_as_circles", "cells_labels", "nucleus_labels", "transcripts",
    "morphology_mip", "morphology_focus", "aligned_images", "cells_table", "gex_only",
}  # fmt: skip
MERSCOPE = {"transcripts", "cells_boundaries", "cells_table", "mosaic_images"}


def section(path: str, element: str, identifier: str, polygons: bool) -> sd.SpatialData:
    """A section as a reader returns it: positions of the table in micrometers, ``"global"`` in pixels."""
    from geopandas import GeoDataFrame
    from shapely import Point

    from alphastomics.datasets import synthetic_tissue

    number = int(re.findall(r"\d", path.replace("region_0", ""))[-1])
    tissue = synthetic_tissue(n_slices=2, n_cells=[600, 620], n_genes=40, random_state=0)
    table = tissue[tissue.obs["slice_id"] == f"slice_{number - 1}"].copy()
    table.obs_names = [f"{path[-1]}{i}" for i in range(table.n_obs)]
    table.obs = pd.DataFrame({"region": element, identifier: table.obs_names}, index=table.obs_names)
    table.obs["region"] = table.obs["region"].astype("category")
    to_pixels = {"global": Scale([1 / PIXEL, 1 / PIXEL], axes=("x", "y"))}
    x, names = table.obsm["spatial"], pd.Index(table.obs[identifier])
    if polygons:
        shapes = GeoDataFrame(geometry=[Point(each).buffer(5.0) for each in x], index=names)
        shapes = models.ShapesModel.parse(shapes, transformations=to_pixels)
    else:
        shapes = models.ShapesModel.parse(x, geometry=0, radius=5.0, index=names, transformations=to_pixels)
    table = models.TableModel.parse(table, region=element, region_key="region", instance_key=identifier)
    return sd.SpatialData(shapes={element: shapes}, tables={"table": table})


def xenium(path: str, **switches: bool) -> sd.SpatialData:
    assert switches.keys() <= XENIUM
    assert switches["cells_as_circles"]
    return section(path, "cell_circles", "cell_id", polygons=False)


def merscope(path: str, **switches: bool) -> sd.SpatialData:
    assert switches.keys() <= MERSCOPE
    return section(path, f"{path.replace('/', '_')}_polygons", "EntityID", polygons=True)


@pytest.fixture
def readers(monkeypatch):
    """Stand-ins for the readers of spatialdata-io, which is not a dependency."""
    module = ModuleType("spatialdata_io")
    module.xenium, module.merscope = xenium, merscope  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spatialdata_io", module)


def code(heading: str) -> list[str]:
    """Blocks of Python below a heading of the second level, with short trainings."""
    _, _, part = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    part = re.split(r"\n## ", part)[0]
    return [block.replace("max_time=3600", SHORT) for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]


def run(blocks: list[str], names: dict[str, Any]) -> dict[str, Any]:
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


# ome-zarr 0.15 and anndata 0.12, when a SpatialData is written.
@pytest.mark.filterwarnings("ignore:Call to deprecated class Scaler:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning")
@pytest.mark.filterwarnings("ignore:The index of the dataframe is not monotonic:UserWarning")  # dask, of the points
@pytest.mark.slow
@pytest.mark.parametrize("instrument", ["xenium", "merscope"])
def test_output_of_an_instrument_is_placed(instrument, readers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code("Xenium and MERSCOPE output")
    (other,) = (i for i in (0, 1) if instrument not in blocks[i])
    del blocks[other]
    found = run(blocks, {})
    query, adata = found["query"], found["adata"]
    assert query.n_obs == 620
    assert found["n_pieces"] == 2
    assert adata.obs["piece"].nunique() == 2
    first = found["sections"]["section_1"].tables["table"]
    np.testing.assert_allclose(found["pixels"] * PIXEL, first.obsm["spatial"], rtol=1e-6)
    assert np.isfinite(query.obsm["spatial_reconstructed"]).all()
    assert "moranI" in query.uns
    placed = sd.read_zarr("placed.zarr")
    centroids = sd.get_centroids(placed["section_2"], coordinate_system="global").compute()
    identifiers = query.obs[found["identifier"]]
    expected = query.obsm["spatial_reconstructed"] / PIXEL
    np.testing.assert_allclose(centroids.loc[identifiers], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_known_positions_are_inputs(tmp_path, monkeypatch):
    import anndata as ad

    import alphastomics as asx

    monkeypatch.chdir(tmp_path)
    tissue = asx.datasets.synthetic_tissue(n_slices=2, n_cells=200, n_genes=40, random_state=0)
    first = tissue.obs["slice_id"] == "slice_0"
    reference, query = tissue[first].copy(), tissue[~first].copy()
    landmarks = pd.DataFrame(query.obsm["spatial"], columns=["x", "y"], index=query.obs_names)[::20]
    landmarks.to_csv("landmarks.csv", index_label="cell")
    blocks = code("A few known positions")
    found = run(blocks[:1], {"ad": ad, "asx": asx, "reference": reference, "query": query})
    both, placed = found["both"], found["placed"]
    np.testing.assert_allclose(both[landmarks.index].obsm["spatial_reconstructed"], landmarks)
    assert placed.n_obs == query.n_obs - len(landmarks)
    asx.model.AlphaSTomics.setup_anndata(reference, slice_key="slice_id")
    found["model"] = asx.model.AlphaSTomics(reference, mode="expr_to_pos", d_model=16, n_layers=1, n_heads=2)
    found["model"].train(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
    placed = run(blocks[1:], found)["placed"]
    np.testing.assert_allclose(placed[landmarks.index].obsm["spatial_reconstructed"], landmarks)
    assert np.isfinite(placed.obsm["spatial_reconstructed"]).all()
