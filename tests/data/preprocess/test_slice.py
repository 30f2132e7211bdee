"""Files between the stages and files of datasets: whole, the same whatever is in memory at once, kept when they are finished."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from alphastomics.data._fit_schema import fit_frame, fit_spacing, measure_extent
from alphastomics.data.preprocess import (
    Stage1Options,
    Stage2Options,
    _h5ad as _hdf5,
    _shards,
    _slice as _slice_files,
    _stage1,
)
from alphastomics.data.preprocess._run import preprocess, stage1, stage2
from alphastomics.data.preprocess._slice import read_cells, read_column
from alphastomics.datasets import synthetic_tissue
from files import files_in, stop_after

LABELED = Stage1Options(cell_type_key="cell_type")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Two files, one of them with two slices whose cells are mixed."""
    folder = tmp_path_factory.mktemp("raw")
    tissue = synthetic_tissue(n_slices=3, n_cells=(90, 70, 50), n_genes=20, random_state=0)
    mixed = np.random.default_rng(0).permutation(np.flatnonzero(tissue.obs["slice_id"] != "slice_0"))
    tissue[tissue.obs["slice_id"] == "slice_0"].copy().write_h5ad(folder / "a.h5ad")
    tissue[mixed].copy().write_h5ad(folder / "b.h5ad")
    return folder


def batches_of(n, monkeypatch):
    for module in (_stage1, _slice_files):
        monkeypatch.setattr(module, "BATCH", n)


@pytest.mark.parametrize("stored", ["csr", "csc", "dense"])
def test_chunk_size_does_not_change_the_result(raw, tmp_path, monkeypatch, stored):
    source = tmp_path / "raw"
    source.mkdir()
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.X = {"csr": adata.X.tocsr, "csc": adata.X.tocsc, "dense": adata.X.toarray}[stored]()
        adata.write_h5ad(source / path.name)
    batches_of(16, monkeypatch)
    preprocess(source, tmp_path / "whole", LABELED, Stage2Options(max_shard_size=60))
    monkeypatch.setattr(_stage1, "MAX_VALUES", 300)
    monkeypatch.setattr(_hdf5, "CHUNK", 100)
    preprocess(source, tmp_path / "pieces", LABELED, Stage2Options(max_shard_size=60))
    assert files_in(tmp_path / "whole") == files_in(tmp_path / "pieces")


def test_slices_between_the_stages_are_arrow_files(raw, tmp_path, monkeypatch):
    batches_of(32, monkeypatch)
    stage1(raw, tmp_path, LABELED)
    path = tmp_path / "00000.arrow"
    with ipc.open_file(path) as file:
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [32, 32, 26]
        whole = file.read_all()
    assert read_column(path, "library_size").to_pydict() == whole.select(["library_size"]).to_pydict()
    record = json.loads(path.with_suffix(".json").read_text())
    rows = np.array([3, 4, 31, 64, 89])
    parts = list(read_cells(path, rows, 20, record["checksums"]))
    assert np.concatenate([part.names for part in parts]).tolist() == whole["cell_id"].take(rows).to_pylist()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_intermediate_files_are_an_error(raw, tmp_path, damage):
    slices = tmp_path / "slices"
    stage1(raw, slices, LABELED)
    path = slices / "00001.arrow"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        values = np.array(ipc.open_file(path).read_all()["values"].chunk(0).flatten(), dtype=np.float32).tobytes()
        content[content.index(values) + 100] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"00001\.arrow"):
        stage2([slices], tmp_path / "out", Stage2Options())
    assert not (tmp_path / "out" / "metadata.json").exists()
    assert not (tmp_path / "out" / "data").exists()
    path.unlink()
    stage1(raw, slices, LABELED)
    stage2([slices], tmp_path / "out", Stage2Options())
    preprocess(raw, tmp_path / "straight", LABELED, Stage2Options())
    assert files_in(tmp_path / "out") == {
        name: content
        for name, content in files_in(tmp_path / "straight").items()
        if not name.startswith("_intermediate")
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("stage1.json", "[]", r"stage1\.json"),
        ("stage1.json", "{}", r"stage1\.json"),
        (
            "stage1.json",
            '{"format": "alphastomics-slices", "format_version": 4, "slices": 3}',
            r"stage1\.json.*damaged",
        ),
        ("00001.json", "{}", r"00001\.json.*damaged"),
        ("00001.json", "[]", r"00001\.json.*damaged"),
        ("00001.json", "{", r"00001\.json.*JSON"),
    ],
)
def test_invalid_records_are_an_error(raw, tmp_path, name, content, message):
    stage1(raw, tmp_path / "slices", LABELED)
    (tmp_path / "slices" / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        stage2([tmp_path / "slices"], tmp_path / "out", Stage2Options())
    with pytest.raises(ValueError, match=message):
        stage1(raw, tmp_path / "slices", LABELED)
    assert (tmp_path / "slices" / name).read_text() == content


@pytest.mark.parametrize("name", ["00001.json", "00000.arrow"])
def test_files_of_other_programs_with_names_of_slices_are_kept(raw, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=name):
        stage1(raw, tmp_path, LABELED)
    assert files_in(tmp_path) == {name: b"mine"}


def test_unknown_cell_types_are_null(raw, tmp_path):
    preprocess(raw, tmp_path, Stage1Options(), Stage2Options())
    for path in (tmp_path / "data").iterdir():
        column = pq.read_table(path)["cell_type"]
        assert column.null_count == len(column) > 0
        assert str(column.type) == "string"


def test_labels_that_are_missing_are_null(raw, tmp_path):
    source = tmp_path / "raw"
    source.mkdir()
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        if path.stem == "b":
            adata.obs.loc[adata.obs_names[:5], "cell_type"] = np.nan
        adata.write_h5ad(source / path.name)
    preprocess(source, tmp_path / "out", LABELED, Stage2Options())
    tables = [pq.read_table(path) for path in (tmp_path / "out" / "data").iterdir()]
    missing = [name for t in tables for name in t["cell_id"].filter(t["cell_type"].is_null()).to_pylist()]
    assert sorted(missing) == sorted(ad.read_h5ad(raw / "b.h5ad").obs_names[:5])


def test_finished_files_are_kept_if_the_parameters_are_the_same(raw, tmp_path, monkeypatch):
    slices, out, options = tmp_path / "slices", tmp_path / "out", Stage2Options(max_shard_size=50)
    stage1(raw, slices, LABELED)
    with pytest.raises(KeyboardInterrupt):
        stage2([slices], out, options, run=stop_after(3))
    unfinished = sorted(path.name for path in (out / "data.tmp").glob("*.parquet"))
    written, write = [], _shards._write
    monkeypatch.setattr(_shards, "_write", lambda task, note: (written.append(task.target.name), write(task, note)))
    stage2([slices], out, options)
    assert len(unfinished) == 3
    assert not set(unfinished) & set(written)
    names = sorted(path.name for path in (out / "data").iterdir())
    assert names == sorted([*unfinished, *written])  # and no notes, no temporary files
    assert not (out / "data.tmp").exists()


def test_finished_files_of_other_parameters_are_not(raw, tmp_path):
    slices, out = tmp_path / "slices", tmp_path / "out"
    stage1(raw, slices, LABELED)
    with pytest.raises(KeyboardInterrupt):
        stage2([slices], out, Stage2Options(max_shard_size=50, seed=1), run=stop_after(3))
    stage2([slices], out, Stage2Options(max_shard_size=50))
    stage2([slices], tmp_path / "straight", Stage2Options(max_shard_size=50))
    assert files_in(out) == files_in(tmp_path / "straight")


def test_extents_of_slices_give_the_frame_of_all_their_cells():
    rng = np.random.default_rng(0)
    slices = {name: rng.normal(i, 1 + i, (20 + 10 * i, 3)) for i, name in enumerate("abc")}
    extents = {name: measure_extent(name, points) for name, points in slices.items()}
    everything = np.concatenate(list(slices.values()))
    scale, center = fit_frame(extents, "shared")
    np.testing.assert_allclose(center, everything.mean(axis=0))
    np.testing.assert_allclose(scale, np.sqrt(everything.var(axis=0).sum() / 3))
    assert fit_spacing(extents) == np.median([extent.spacing for extent in extents.values()])


def test_cells_in_one_place_do_not_count_as_neighbors():
    points = np.stack([np.arange(12.0), np.ones(12)], axis=1)
    assert measure_extent("a", np.repeat(points, 3, axis=0)).spacing == 1
