"""One name for a slice, whatever the type of its column."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from alphastomics.cli._cells import panels
from alphastomics.data import read_parquet, write_parquet
from alphastomics.data._checks import check_measured
from alphastomics.data._slices import slice_rows
from alphastomics.pp import hide_positions
from alphastomics.tl._compare_splits import make_splits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import anndata as ad

    Make = Callable[..., ad.AnnData]


@pytest.fixture(params=["float", "categories", "objects"])
def numbered(request: pytest.FixtureRequest, make_adata: Make) -> ad.AnnData:
    """Slices 1 and 2 as a column with a missing value had them."""
    adata = make_adata()
    names = adata.obs["slice_id"].map({"s0": 1.0, "s1": 2.0})
    kinds = {"float": float, "categories": "category", "objects": object}
    adata.obs["slice_id"] = names.astype(kinds[request.param])
    return adata


def test_integers_stored_as_floats_have_the_names_of_integers(numbered: ad.AnnData, tmp_path: Path) -> None:
    assert [name for name, _ in slice_rows(numbered, "slice_id")] == ["1", "2"]
    write_parquet(numbered, tmp_path / "x.parquet")
    assert set(read_parquet(tmp_path / "x.parquet").obs["slice_id"]) == {"1", "2"}
    for chosen in ("1", [1.0], 1):
        hidden = hide_positions(numbered, slices=chosen, copy=True)
        assert np.isnan(hidden.obsm["spatial"]).any(axis=1).sum() == 60
    arguments = {"setup": {"slice_key": "slice_id", "cell_type_key": None}, "init": {}}
    assert make_splits(numbered, None, [2.0], [0], arguments)[0].held_out == ("2",)


def test_measured_genes_of_slices_stored_as_floats_are_found(numbered: ad.AnnData) -> None:
    measured = pd.DataFrame({"1": True, "2": np.arange(12) > 2}, index=numbered.var_names)
    numbered.varm["measured_in"] = measured
    assert [part.shape for _, part in panels(numbered, None)] == [(60, 12), (45, 9)]
    with pytest.raises(ValueError, match="1 slices lack genes"):
        check_measured(numbered)


def test_a_slice_with_the_name_of_cells_without_a_slice_is_an_error(make_adata: Make, tmp_path: Path) -> None:
    adata = make_adata()
    adata.obs["slice_id"] = adata.obs["slice_id"].replace("s0", "unassigned")
    assert [name for name, _ in slice_rows(adata, "slice_id", missing=True)] == ["s1", "unassigned"]
    adata.obs["slice_id"] = adata.obs["slice_id"].replace("s1", None)
    for function in (
        lambda: slice_rows(adata, "slice_id", missing=True),
        lambda: write_parquet(adata, tmp_path / "x.parquet"),
    ):
        with pytest.raises(ValueError, match='"unassigned".* 45 cells without a slice'):
            function()
