"""Cells from Parquet to AnnData and back: as they were, whatever wrote the file, or one clear line."""

from __future__ import annotations

import json
import re
import shutil

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from alphastomics.cli._output import write_h5ad
from alphastomics.data import read_dataset, read_parquet, write_parquet
from alphastomics.data.parquet._dataset import METADATA_KEY
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue
from files import write_slices

SPLITS = ("train", "validation", "test")
PANEL = 5  # genes that one of the slices lacks


@pytest.fixture(scope="module")
def tissue():
    return synthetic_tissue(n_slices=4, n_cells=(60, 50, 40, 70), n_genes=20, random_state=0)


def make_dataset(tissue, folder, **options):
    raw = write_slices(tissue, folder / "raw", lacking=options.get("panels", ()), n_genes=PANEL)
    split = Stage2Options(split=options.get("split", "cell"), train_ratio=0.5, val_ratio=0.25)
    preprocess(raw, folder / "dataset", Stage1Options(cell_type_key="cell_type"), split)
    return folder / "dataset"


@pytest.fixture(scope="module")
def dataset(tissue, tmp_path_factory):
    return make_dataset(tissue, tmp_path_factory.mktemp("dataset"))


def dense(x):
    return x.toarray() if sp.issparse(x) else np.asarray(x)


def assert_as_they_were(cells, tissue):
    truth = tissue[cells.obs_names]
    assert sp.issparse(cells.X)
    assert cells.X.dtype == np.float32
    np.testing.assert_array_equal(dense(cells.X), dense(truth[:, cells.var_names].X))
    np.testing.assert_array_equal(cells.obsm["spatial"], truth.obsm["spatial"])
    for key in ("slice_id", "cell_type"):
        assert cells.obs[key].astype(str).tolist() == truth.obs[key].astype(str).tolist()


def test_a_dataset_comes_back_as_it_was(dataset, tissue):
    splits = {split: read_dataset(dataset, split) for split in SPLITS}
    for cells in splits.values():
        assert_as_they_were(cells, tissue)
        assert cells.var_names.tolist() == tissue.var_names.tolist()
        assert isinstance(cells.obs["slice_id"].dtype, pd.CategoricalDtype)
        assert "measured_in" not in cells.varm
    names = np.concatenate([cells.obs_names for cells in splits.values()])
    assert sorted(names) == sorted(tissue.obs_names)


def test_a_split_without_cells_is_an_error_that_lists_the_others(dataset, tissue, tmp_path):
    (tmp_path / "raw").mkdir()
    tissue.write_h5ad(tmp_path / "raw" / "a.h5ad")
    preprocess(tmp_path / "raw", tmp_path / "out", Stage1Options(), Stage2Options(train_ratio=0.8, val_ratio=0.2))
    with pytest.raises(ValueError, match="test.*train.*validation"):
        read_dataset(tmp_path / "out", "test")
    with pytest.raises(ValueError, match="split='all'"):
        read_dataset(dataset, "all")


def test_genes_missing_in_a_slice_are_not_zeros(tissue, tmp_path, caplog):
    folder = make_dataset(tissue, tmp_path, panels=("slice_1", "slice_2"))
    cells = read_dataset(folder, "train")
    assert cells.var_names.tolist() == tissue.var_names.tolist()
    measured = cells.varm["measured_in"]
    lacking = tissue.var_names[:PANEL]
    for name in tissue.obs["slice_id"].unique():
        lacks = name in ("slice_1", "slice_2")
        assert measured.index[~measured[name]].tolist() == (lacking.tolist() if lacks else [])
    assert re.search("'slice_1'.* 5 genes", caplog.text)
    # A single file has it too.
    shutil.copy(folder / "data" / "train.parquet", tmp_path / "alone.parquet")
    pd.testing.assert_frame_equal(read_parquet(tmp_path / "alone.parquet").varm["measured_in"], measured)


def test_genes_that_no_slice_measures_are_left_out(tissue, tmp_path):
    folder = make_dataset(tissue, tmp_path, panels=("slice_1",), split="slice")
    seen = set()
    for split in SPLITS:
        cells = read_dataset(folder, split)
        if set(cells.obs["slice_id"]) == {"slice_1"}:
            assert cells.var_names.tolist() == tissue.var_names[PANEL:].tolist()
            assert "measured_in" not in cells.varm
            assert_as_they_were(cells, tissue[:, PANEL:])
        seen |= set(cells.obs["slice_id"])
    assert seen == set(tissue.obs["slice_id"])


def test_names_of_cells_in_two_slices_get_the_slice_appended(tissue, tmp_path):
    cells = tissue.copy()
    cells.obs_names = [f"c{i % 60}" for i in range(cells.n_obs - 70)] + [f"d{i}" for i in range(70)]
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, rows in tissue.obs.groupby("slice_id", observed=True).indices.items():
        part = cells.X[rows], cells.obs.iloc[rows], cells.var
        ad.AnnData(*part, obsm={"spatial": cells.obsm["spatial"][rows]}).write_h5ad(raw / f"{name}.h5ad")
    preprocess(raw, tmp_path / "out", Stage1Options(), Stage2Options(train_ratio=1.0, val_ratio=0.0))
    found = read_dataset(tmp_path / "out", "train")
    assert found.obs_names.is_unique
    assert "c3-slice_0" in found.obs_names
    assert "c3-slice_1" in found.obs_names


def test_names_of_cells_without_a_slice_are_unique_too(dataset, tmp_path):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "x.parquet")

    def change(table):
        n, first = len(table), table.column("slice_id")[0].as_py()
        names, slices = [f"c{i // 2}" for i in range(n)], [first if i % 2 else None for i in range(n)]
        table = table.set_column(table.column_names.index("cell_id"), "cell_id", pa.array(names))
        return table.set_column(table.column_names.index("slice_id"), "slice_id", pa.array(slices, pa.string()))

    rewrite(path, change)
    assert read_parquet(path).obs_names[:2].tolist() == ["c0-unassigned", "c0-slice_0"]


# -- a file alone -------------------------------------------------------------------------------------------------------


def test_a_file_of_a_dataset_can_be_read_alone(dataset, tissue, tmp_path):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "alone.parquet")
    assert_as_they_were(read_parquet(path), tissue)
    assert read_parquet(path).obs_names.tolist() == read_dataset(dataset).obs_names.tolist()


def rewrite(path, change, *, metadata=True):
    """Replace the table of a file, with or without its metadata of genes."""
    table = pq.read_table(path)
    stored = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(stored if metadata else None), path)


def test_a_file_without_gene_names_needs_its_dataset(dataset, tissue, tmp_path):
    folder = shutil.copytree(dataset, tmp_path / "copy")
    path = folder / "data" / "test.parquet"
    rewrite(path, lambda table: table, metadata=False)
    assert_as_they_were(read_parquet(path), tissue)
    shutil.copy(path, tmp_path / "alone.parquet")
    with pytest.raises(ValueError, match=r"alone\.parquet.*genes.*metadata\.json"):
        read_parquet(tmp_path / "alone.parquet")


def test_files_of_other_programs_are_read(tissue, tmp_path):
    """Lists of any length and type, as pandas writes them, and several slices in a row group."""
    note = {METADATA_KEY: json.dumps({"genes": list(tissue.var_names), "n_dims": 2, "unmeasured": {}})}
    order = np.random.default_rng(0).permutation(tissue.n_obs)
    cells = tissue[order]
    frame = pd.DataFrame(
        {
            "cell_id": cells.obs_names,
            "slice_id": cells.obs["slice_id"].astype("category").array,
            "cell_type": cells.obs["cell_type"].astype(str).array,
            "position": list(cells.obsm["spatial"]),
            "expression": list(dense(cells.X).astype(np.int64)),
            "age": np.arange(cells.n_obs),
        }
    )
    path = tmp_path / "theirs.parquet"
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(note), path)
    found = read_parquet(path)
    assert_as_they_were(found, tissue)
    assert found.obs["age"].tolist() == list(range(cells.n_obs))


def test_further_columns_of_any_text_type_and_incomplete_booleans_are_read_and_can_be_stored(dataset, tmp_path):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "theirs.parquet")
    n = pq.read_metadata(path).num_rows
    text = pa.array([["a", "b", None][i % 3] for i in range(n)])
    first = pq.read_metadata(path).row_group(0).num_rows
    columns = {
        "large": text.cast(pa.large_string()),
        "coded": text.dictionary_encode(),
        "passed": pa.array([True] * first + [None] * (n - first)),  # the first row group is complete
    }

    def change(table):
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table

    rewrite(path, change)
    table = pq.read_table(path)
    with pq.ParquetWriter(path, table.schema) as file:
        file.write_table(table.slice(0, first))
        file.write_table(table.slice(first))
    write_h5ad(tmp_path / "cells.h5ad", read_parquet(path))
    found = ad.read_h5ad(tmp_path / "cells.h5ad").obs
    for name, column in columns.items():
        values = found[name].astype(object)
        assert values.where(values.notna(), None).tolist() == column.to_pylist()


def test_cells_without_positions_and_slices_are_read(dataset, tmp_path):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "bare.parquet")
    rewrite(path, lambda table: table.drop_columns(["slice_id", "cell_type", "position", "library_size"]))
    cells = read_parquet(path)
    assert list(cells.obs) == []
    assert list(cells.obsm) == []
    write_parquet(cells, tmp_path / "again.parquet")
    again = read_parquet(tmp_path / "again.parquet")
    assert set(again.obs["slice_id"]) == {"slice_0"}
    assert list(again.obs) == ["slice_id"]
    assert np.isnan(again.obsm["spatial"]).all()


def test_names_of_draws_may_be_text(tissue, tmp_path):
    cells = tissue.copy()
    cells.obs["draw"] = np.where(np.arange(cells.n_obs) % 2, "first", "second")
    write_parquet(cells, tmp_path / "out.parquet")
    found = read_parquet(tmp_path / "out.parquet")
    assert found.obs["draw"].astype(str).equals(cells.obs["draw"].astype(str).loc[found.obs_names])


@pytest.mark.parametrize("storage", ["sparse", "dense"])
@pytest.mark.parametrize("n_dims", [2, 3])
def test_there_and_back(tissue, tmp_path, storage, n_dims):
    rng = np.random.default_rng(0)
    cells = tissue[rng.permutation(tissue.n_obs)].copy()
    cells.X = cells.X.multiply(rng.random(cells.shape) < (0.1 if storage == "sparse" else 1.0)).tocsr()
    cells.X = cells.X if storage == "sparse" else cells.X.toarray() + 1
    cells.obsm["spatial"] = rng.normal(size=(cells.n_obs, n_dims))
    cells.obsm["spatial"][0] = np.nan
    cells.obs["draw"] = rng.integers(0, 2, cells.n_obs)
    cells.obs["spatial_reconstructed_uncertainty"] = rng.random(cells.n_obs)
    cells.obs["note"] = pd.Categorical(np.where(rng.random(cells.n_obs) < 0.5, "a", None))
    cells.obs["position"] = "taken"
    cells.layers["sd"] = rng.random(cells.shape).astype(np.float32)
    before = dense(cells.X).copy()
    path = tmp_path / "out.parquet"
    write_parquet(cells, path)
    table = pq.read_table(path)
    assert ("expression" in table.column_names) == (storage == "dense")
    found = read_parquet(path)
    assert found.var_names.tolist() == cells.var_names.tolist()
    assert found.obsm["spatial"].shape[1] == n_dims
    truth = cells[found.obs_names]
    np.testing.assert_array_equal(dense(found.X), dense(truth.X))
    np.testing.assert_array_equal(dense(cells.X), before)
    np.testing.assert_array_equal(found.obsm["spatial"], truth.obsm["spatial"])
    for key in ("slice_id", "cell_type", "draw", "spatial_reconstructed_uncertainty"):
        assert found.obs[key].tolist() == truth.obs[key].tolist()
    assert found.obs["note"].fillna("-").tolist() == truth.obs["note"].astype(object).fillna("-").tolist()
    assert set(found.obs["position"]) == {"taken"}
    np.testing.assert_allclose(table.column("library_size").to_numpy(), dense(truth.X).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(np.stack(table.column("sd").to_numpy()), truth.layers["sd"])
    groups = pq.ParquetFile(path)
    for i in range(groups.num_row_groups):
        one = groups.read_row_group(i)
        assert len(one.column("slice_id").unique()) == len(one.column("draw").unique()) == 1


def test_names_of_cells_may_be_numbers(tissue, tmp_path):
    cells = tissue[:30].copy()
    cells.obs.index = pd.RangeIndex(30)
    write_parquet(cells, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet", columns=["cell_id"])["cell_id"].to_pylist() == [
        str(i) for i in range(30)
    ]


def test_columns_of_obs_with_names_of_the_dataset_come_back(tissue, tmp_path):
    cells = tissue.copy()
    names = ["position", "obs_position", "obs_obs_position", "library_size", "sd", "obs_note", "obs_slice_id"]
    for i, name in enumerate(names):
        cells.obs[name] = i + np.arange(cells.n_obs) / 1000
    cells.layers["sd"] = dense(cells.X)
    write_parquet(cells, tmp_path / "out.parquet")
    table, found = pq.read_table(tmp_path / "out.parquet"), read_parquet(tmp_path / "out.parquet")
    np.testing.assert_allclose(table.column("library_size").to_numpy(), dense(cells[found.obs_names].X).sum(1))
    np.testing.assert_array_equal(np.stack(table.column("sd").to_numpy()), cells[found.obs_names].layers["sd"])
    pd.testing.assert_frame_equal(found.obs[names], cells.obs.loc[found.obs_names, names])
    with pytest.raises(ValueError, match="obs_slice_id"):
        write_parquet(cells, tmp_path / "other.parquet", slice_key="cell_type")


def test_unmeasured_genes_are_written(tissue, tmp_path):
    folder = make_dataset(tissue, tmp_path, panels=("slice_1",))
    cells = read_dataset(folder)
    write_parquet(cells, tmp_path / "out.parquet")
    again = read_parquet(tmp_path / "out.parquet")
    pd.testing.assert_frame_equal(again.varm["measured_in"], cells.varm["measured_in"])


def test_values_without_a_parquet_type_are_an_error(tissue, tmp_path):
    cells = tissue.copy()
    cells.obs["odd"] = np.arange(cells.n_obs) * 1j
    with pytest.raises(ValueError, match=r'obs\["odd"\]'):
        write_parquet(cells, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n_columns", [1, 5])
def test_positions_of_a_wrong_shape_are_an_error_before_a_file_is_written(tissue, tmp_path, n_columns):
    cells = tissue.copy()
    cells.obsm["spatial"] = np.ones((cells.n_obs, n_columns))
    with pytest.raises(ValueError, match=rf'obsm\["spatial"\] has {n_columns} columns, not 2 or 3'):
        write_parquet(cells, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


# -- what is not whole ----------------------------------------------------------------------------------------------------


def lists(table, name, value, kind):
    column = [value] * len(table)
    return table.set_column(table.column_names.index(name), name, pa.array(column, kind))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["cell_id"]), "cell_id and expression"),
        (lambda t: t.drop_columns(["expression"]), "expression.*cell_id, indices and values"),
        (lambda t: lists(t, "cell_id", None, pa.string()), "cell_id.*55 cells"),
        (lambda t: lists(t, "expression", [1.0] * 3, pa.list_(pa.float32())), "expression.* 3 .* 20 genes"),
        (lambda t: lists(t, "expression", ["a"] * 20, pa.list_(pa.string())), "expression.*string"),
        (lambda t: lists(t, "expression", 1.0, pa.float32()), "expression.*float.*lists"),
        (lambda t: lists(t, "position", [1.0], pa.list_(pa.float64())), "position.* 1 coord"),
        (lambda t: lists(t, "position", None, pa.list_(pa.float64())), "position.*55 cells"),
        (lambda t: t.slice(0, 0), "no cells"),
    ],
)
def test_columns_of_wrong_length_give_a_short_error(dataset, tmp_path, change, message):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "odd.parquet")
    rewrite(path, change)
    with pytest.raises(ValueError, match=rf"odd\.parquet.*{message}"):
        read_parquet(path)


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([0, 20], [1.0, 1.0], "indices.*0 … 19"),
        ([-1], [1.0], "indices.*0 … 19"),
        ([0, 1], [1.0], "indices.*values"),
        ([3, 3], [1.0, 1.0], "gene.*twice"),
        ([None], [1.0], "indices.*missing"),
    ],
)
def test_indices_out_of_range_give_a_short_error(dataset, tmp_path, indices, values, message):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "odd.parquet")

    def change(table):
        n, table = len(table), table.drop_columns(["expression"])
        table = table.append_column("indices", pa.array([indices] * n, pa.list_(pa.int32())))
        return table.append_column("values", pa.array([values] * n, pa.list_(pa.float32())))

    rewrite(path, change)
    with pytest.raises(ValueError, match=rf"odd\.parquet.*{message}"):
        read_parquet(path)


@pytest.mark.parametrize("stored", [b"no", b"[]", b'{"genes": ["a", "a"], "n_dims": 2, "unmeasured": {}}'])
def test_invalid_metadata_of_a_file_are_an_error(dataset, tmp_path, stored):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "odd.parquet")
    pq.write_table(pq.read_table(path).replace_schema_metadata({METADATA_KEY: stored}), path)
    with pytest.raises(ValueError, match=r"odd\.parquet.*genes"):
        read_parquet(path)


def test_a_damaged_file_gives_a_short_error(dataset, tmp_path):
    path = shutil.copy(dataset / "data" / "test.parquet", tmp_path / "x.parquet")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"x\.parquet"):
        read_parquet(path)
    group = pq.ParquetFile(dataset / "data" / "test.parquet").metadata.row_group(0)
    chunk = group.column(group.num_columns - 1)
    flipped = bytearray(data)
    flipped[(chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(ValueError, match=r"[Rr]ow group 0.*x\.parquet"):
        read_parquet(path)
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        read_parquet(tmp_path / "none.parquet")


def test_a_dataset_with_a_replaced_file_is_an_error(dataset, tmp_path):
    folder = shutil.copytree(dataset, tmp_path / "copy")
    path = folder / "data" / "test.parquet"
    whole = path.read_bytes()
    with pq.ParquetFile(path) as file, pq.ParquetWriter(tmp_path / "less", file.schema_arrow) as less:
        less.write_table(file.read_row_group(0))
    shutil.move(tmp_path / "less", path)
    with pytest.raises(ValueError, match=r"metadata\.json"):
        read_dataset(folder)
    path.write_bytes(whole)
    lose_a_cell(path)
    forget_footers(folder)
    with pytest.raises(ValueError, match="group 0 .* 14 .*'slice_0'.* 15 .*'slice_0'"):
        read_dataset(folder)


def forget_footers(folder):
    """Remove the checksums of the footers from a dataset."""
    path = folder / "metadata.json"
    path.write_text(re.sub(r'"footer": "[0-9a-f]+"', '"footer": ""', path.read_text()))


def lose_a_cell(path):
    file = pq.ParquetFile(path)
    tables = [file.read_row_group(i) for i in range(file.num_row_groups)]
    with pq.ParquetWriter(path, tables[0].schema) as less:
        for i, table in enumerate(tables):
            less.write_table(table.slice(int(i == 0)))
