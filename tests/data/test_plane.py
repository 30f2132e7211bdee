"""Positions with three columns, one of which is constant."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from alphastomics.data import AnnDataSource, TissueSchema, fit_schema
from alphastomics.data._plane import insert_column, restore_column


def raised(adata, value=5.0, column=2):
    """The cells with a constant third coordinate."""
    result = adata.copy()
    result.obsm["spatial"] = np.insert(result.obsm["spatial"], column, value, axis=1)
    return result


def heights(adata):
    """Another height for each slice: 5 and 9."""
    return np.where(adata.obs["slice_id"] == "s0", 5.0, 9.0)


@pytest.mark.parametrize("frame", ["slice", "shared"])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_constant_column_is_left_out(make_adata, column, frame, caplog):
    adata = make_adata()
    with caplog.at_level(logging.INFO):
        schema = fit_schema(raised(adata, column=column), frame=frame)
    expected = fit_schema(adata, frame=frame).to_dict() | {"plane": [column, 5.0]}
    assert schema.to_dict() == expected
    assert (schema.n_dims, schema.n_columns) == (2, 3)
    assert f'obsm["spatial"][:, {column}] is constant (5): cells are placed in 2D' in caplog.text


def test_a_column_that_is_constant_within_slices_is_left_out_unless_they_share_a_frame(make_adata, caplog):
    adata = make_adata()
    with caplog.at_level(logging.INFO):
        schema = fit_schema(raised(adata, heights(adata)))
    assert schema.to_dict() == fit_schema(adata).to_dict() | {"plane": [2, 5.0]}
    assert (
        "is constant within each slice: cells are placed in 2D, and this column is 5, as in slice 's0'" in caplog.text
    )
    shared = fit_schema(raised(adata, heights(adata)), frame="shared")
    assert (shared.n_dims, shared.plane) == (3, None)


def test_a_column_that_varies_in_one_slice_is_kept(make_adata):
    adata = raised(make_adata())
    adata.obsm["spatial"][np.flatnonzero(adata.obs["slice_id"] == "s1")[0], 2] = 6.0
    schema = fit_schema(adata)
    assert (schema.n_dims, schema.plane, schema.n_columns) == (3, None, 3)


def test_rounding_errors_do_not_count(make_adata):
    adata = make_adata()
    noise = 1e-12 * np.random.default_rng(0).standard_normal(adata.n_obs)
    schema = fit_schema(raised(adata, 5 + noise))
    assert schema.n_dims == 2
    assert schema.plane[1] == pytest.approx(5, abs=1e-10)


def test_the_schema_is_restored_from_json(make_adata):
    schema = fit_schema(raised(make_adata(), 0.1))
    values = json.loads(json.dumps(schema.to_dict()))
    assert TissueSchema.from_dict(values) == schema
    assert TissueSchema.from_dict(values).plane == (2, 0.1)


def test_schemas_of_earlier_versions_have_no_plane(make_adata):
    schema = fit_schema(make_adata())
    values = schema.to_dict()
    del values["plane"]
    assert TissueSchema.from_dict(values) == schema


@pytest.mark.parametrize("wrong", [[3, 5.0], [2, None], [2.0, 5.0], [2], [], 2, [True, 5.0], [2, float("nan")]])
def test_an_invalid_plane_is_an_error(make_adata, wrong):
    values = fit_schema(raised(make_adata())).to_dict()
    with pytest.raises(ValueError, match="plane"):
        TissueSchema.from_dict(values | {"plane": wrong})


def test_a_plane_of_positions_in_3d_is_an_error(make_adata):
    values = fit_schema(make_adata(n_dims=3)).to_dict()
    with pytest.raises(ValueError, match="plane"):
        TissueSchema.from_dict(values | {"plane": [2, 5.0]})


@pytest.mark.parametrize("columns", [2, 3])
def test_positions_are_read_without_the_column(make_adata, columns):
    adata = make_adata()
    query = raised(adata, heights(adata)) if columns == 3 else adata
    source = AnnDataSource(query, fit_schema(raised(adata)), positions=True)
    expected = AnnDataSource(adata, fit_schema(adata), positions=True)
    for one, other in zip(source.slices, expected.slices, strict=True):
        np.testing.assert_array_equal(one.position, other.position)


def test_a_cell_that_lacks_a_coordinate_has_no_position(make_adata):
    adata = raised(make_adata())
    schema = fit_schema(adata)
    adata.obsm["spatial"][4, 2] = np.nan
    source = AnnDataSource(adata, schema, positions=True)
    missing = [cells.rows[np.isnan(cells.position).all(axis=1)] for cells in source.slices]
    np.testing.assert_array_equal(np.concatenate(missing), [4])


def test_a_query_that_is_not_planar_is_an_error(make_adata):
    adata = make_adata()
    with pytest.raises(ValueError, match=r'obsm\["spatial"\]\[:, 2\] differs between the cells of slice \'s0\''):
        AnnDataSource(raised(adata, np.arange(adata.n_obs)), fit_schema(raised(adata)), positions=True)


def test_the_column_is_restored(make_adata):
    adata = make_adata()
    schema, draws = fit_schema(raised(adata)), np.random.default_rng(0).normal(size=(3, adata.n_obs, 2))
    draws[0, 3] = np.nan
    query = raised(adata, heights(adata))
    query.obsm["spatial"][adata.obs["slice_id"] == "s0"] = np.nan
    restored = {
        known: restore_column(draws, query, AnnDataSource(query, schema, positions=known).slices, schema)
        for known in (False, True)
    }
    assert np.isnan(restored[True][0, 3]).all()
    for values in restored.values():
        np.testing.assert_array_equal(values[..., :2], draws)
    assert (restored[False][1:, :, 2] == 5).all()
    np.testing.assert_array_equal(restored[True][1], np.insert(draws[1], 2, heights(adata), axis=1))


def test_positions_of_other_schemas_are_unchanged(make_adata):
    adata = make_adata()
    schema, position = fit_schema(adata), adata.obsm["spatial"]
    np.testing.assert_array_equal(insert_column(position, schema), position)
    np.testing.assert_array_equal(restore_column(position, adata, (), schema), position)
