"""From ``.h5ad`` files to a dataset: every cell once, as it was, described as an AnnData of the same cells is."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter

import anndata as ad
import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
from sklearn.preprocessing import StandardScaler

from alphastomics.config import Stage1Options, Stage2Options
from alphastomics.data import AnnDataSource, fit_schema, read_dataset
from alphastomics.data._order import hilbert_order
from alphastomics.data.parquet._columns import from_arrow
from alphastomics.data.parquet._dataset import DatasetInfo
from alphastomics.data.parquet._source import ParquetSource
from alphastomics.data.preprocess import _stage1
from alphastomics.data.preprocess._run import preprocess, stage1, stage2
from alphastomics.datasets import synthetic_tissue
from files import files_in, write_slices

LABELED = Stage1Options(cell_type_key="cell_type")


@pytest.fixture(scope="module")
def _tissue():
    return synthetic_tissue(n_slices=5, n_cells=(90, 70, 40, 110, 60), n_genes=25, random_state=0)


@pytest.fixture
def tissue(_tissue):
    return _tissue.copy()


@pytest.fixture
def raw(tissue, tmp_path):
    """A folder with a file for each slice."""
    return write_slices(tissue, tmp_path / "raw")


def read(folder):
    """All cells of a dataset, and the row groups they are in."""
    info, groups = DatasetInfo.read(folder), []
    for shard in info.shards:
        file = pq.ParquetFile(folder / "data" / shard.file)
        for i in range(file.num_row_groups):
            groups.append((shard, from_arrow(file.read_row_group(i), info.schema.n_genes)))
    return info, groups


def dense(x):
    return x.toarray() if sp.issparse(x) else np.asarray(x)


@pytest.mark.parametrize("split", ["cell", "slice"])
@pytest.mark.parametrize("stored", ["csr", "csc", "dense"])
def test_every_cell_comes_once_as_it_was(raw, tissue, tmp_path, split, stored):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.X = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": dense}[stored](adata.X)
        adata.write_h5ad(path)
    preprocess(raw, tmp_path / "out", LABELED, Stage2Options(split=split, max_shard_size=100))
    info, groups = read(tmp_path / "out")
    names = np.concatenate([cells.names for _, cells in groups])
    assert sorted(names) == sorted(tissue.obs_names)
    for shard, cells in groups:
        truth = tissue[cells.names.astype(str)]
        np.testing.assert_array_equal(cells.expression.toarray(), dense(truth.X))
        np.testing.assert_array_equal(cells.position[:, :2], truth.obsm["spatial"])
        assert (cells.position[:, 2] == 0).all()
        assert set(truth.obs["slice_id"]) == {cells.slice_id}
        assert cells.labels.tolist() == truth.obs["cell_type"].astype(str).tolist()
        np.testing.assert_allclose(cells.library_size, dense(truth.X).sum(1))
        assert shard.n_cells <= 100
    for name in tissue.obs["slice_id"].unique() if split == "slice" else ():
        position = np.concatenate([cells.position[:, :2] for _, cells in groups if cells.slice_id == name])
        np.testing.assert_array_equal(hilbert_order(position), np.arange(len(position)))
    assert {shard.split for shard in info.shards} == {"train", "validation", "test"}


@pytest.mark.parametrize("options", [{"split": "cell"}, {"split": "slice", "train_ratio": 0.6, "frame": "shared"}])
def test_the_description_matches_an_anndata_of_the_training_cells(raw, tissue, tmp_path, options):
    chosen = Stage2Options(**options)
    preprocess(raw, tmp_path / "out", LABELED, chosen)
    info = DatasetInfo.read(tmp_path / "out")
    _, groups = read(tmp_path / "out")
    training = np.concatenate([cells.names for shard, cells in groups if shard.split == "train"]).astype(str)
    expected = fit_schema(tissue[training].copy(), cell_type_key="cell_type", frame=chosen.frame)
    for name in ("genes", "transform", "library_size", "slices", "frame", "n_dims"):
        assert getattr(info.schema, name) == getattr(expected, name)
    for name in ("gene_mean", "gene_scale", "gene_share", "scale", "spacing", "center"):
        np.testing.assert_allclose(getattr(info.schema, name), getattr(expected, name), rtol=1e-9, atol=1e-12)


def test_shares_of_cells_are_exact_over_all_slices(raw, tissue, tmp_path):
    preprocess(raw, tmp_path / "out", LABELED, Stage2Options(train_ratio=0.7, val_ratio=0.2))
    info, groups = read(tmp_path / "out")
    count = Counter()
    for shard, cells in groups:
        count[shard.split] += len(cells.names)
    n = tissue.n_obs
    assert count == {"train": round(0.7 * n), "validation": round(0.9 * n) - round(0.7 * n), "test": n - round(0.9 * n)}
    for name in info.schema.slices:  # and nearly so in every slice
        share = sum(len(c.names) for s, c in groups if c.slice_id == name and s.split == "train")
        assert share == pytest.approx(0.7 * (tissue.obs["slice_id"] == name).sum(), abs=1)


def test_animals_are_not_split(raw, tissue, tmp_path):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.obs["mouse"] = "a" if path.stem in ("slice_0", "slice_3") else path.stem
        adata.write_h5ad(path)
    options = Stage1Options(animal_key="mouse")
    preprocess(raw, tmp_path / "out", options, Stage2Options(split="animal", train_ratio=0.5, val_ratio=0.25))
    _, groups = read(tmp_path / "out")
    where = {cells.slice_id: shard.split for shard, cells in groups}
    assert where["slice_0"] == where["slice_3"]
    assert set(where.values()) == {"train", "validation", "test"}


@pytest.mark.parametrize(("share", "warns"), [(0.25, True), (0.5, False)])
def test_a_training_set_of_one_slice_is_reported(raw, tmp_path, caplog, share, warns):
    n = len(list(raw.iterdir()))
    with caplog.at_level(logging.WARNING, logger="alphastomics"):
        preprocess(raw, tmp_path / "out", LABELED, Stage2Options(split="slice", train_ratio=share, val_ratio=0.25))
    assert (f"Only 1 of {n} slices is in the training set" in caplog.text) == warns


@pytest.mark.parametrize("kind", [str, float])
def test_a_missing_animal_is_an_error(raw, tmp_path, kind):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.obs["mouse"] = kind(path.stem[-1])
        if path.stem in ("slice_1", "slice_2"):
            adata.obs.loc[adata.obs_names[:7], "mouse"] = np.nan
        adata.write_h5ad(path)
    with pytest.raises(ValueError, match=r'slice_1\.h5ad.*obs\["mouse"\].* 7 cells'):
        preprocess(raw, tmp_path / "out", Stage1Options(animal_key="mouse"), Stage2Options(split="animal"))
    assert not (tmp_path / "out").exists()


def test_a_whole_number_is_one_label_however_it_is_stored(raw, tmp_path):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.obs["leiden"] = np.arange(adata.n_obs) % 3
        if path.stem == "slice_1":
            adata.obs.loc[adata.obs_names[:7], "leiden"] = np.nan  # which makes floats of them
        adata.write_h5ad(path)
    preprocess(raw, tmp_path / "out", Stage1Options(cell_type_key="leiden"), Stage2Options())
    assert DatasetInfo.read(tmp_path / "out").schema.cell_types == ("0", "1", "2")


def test_genes_are_matched_by_name_and_missing_ones_are_unmeasured(raw, tissue, tmp_path, caplog):
    path = raw / "slice_1.h5ad"
    adata = ad.read_h5ad(path)
    adata[:, adata.var_names[::-1][:20]].copy().write_h5ad(path)
    preprocess(raw, tmp_path / "out", Stage1Options(), Stage2Options(split="slice"))
    info = DatasetInfo.read(tmp_path / "out")
    lacking = tuple(tissue.var_names[:5])
    assert info.schema.genes == tuple(tissue.var_names)
    assert info.unmeasured == {"slice_1": lacking}
    assert "5 genes" in caplog.text
    _, groups = read(tmp_path / "out")
    (cells,) = [cells for _, cells in groups if cells.slice_id == "slice_1"]
    truth = dense(tissue[cells.names.astype(str)].X)
    truth[:, :5] = 0
    np.testing.assert_array_equal(cells.expression.toarray(), truth)


def test_held_out_slices_do_not_change_the_schema(raw, tmp_path):
    """Two panels, so that the depth follows from the counts of stage 1."""
    options = Stage2Options(split="slice")
    path = raw / "slice_1.h5ad"
    adata = ad.read_h5ad(path)
    adata[:, 5:].copy().write_h5ad(path)
    preprocess(raw, tmp_path / "one", LABELED, options)
    _, groups = read(tmp_path / "one")
    held_out = next(cells.slice_id for shard, cells in groups if shard.split == "test")
    path = raw / f"{held_out}.h5ad"
    adata = ad.read_h5ad(path)
    adata.X = dense(adata.X) + 50 * (np.arange(adata.n_vars) == adata.n_vars - 1)
    adata.obs["cell_type"] = "only here"
    adata.write_h5ad(path)
    preprocess(raw, tmp_path / "other", LABELED, options)
    one, other = (DatasetInfo.read(tmp_path / name).schema for name in ("one", "other"))
    assert one == other


def test_a_gene_list_decides_genes_and_their_order(raw, tissue, tmp_path):
    path = raw / "slice_4.h5ad"
    adata = ad.read_h5ad(path)
    adata[:, adata.var_names != tissue.var_names[11]].copy().write_h5ad(path)
    genes = tuple(tissue.var_names[[7, 3, 11]])
    preprocess(raw, tmp_path / "out", Stage1Options(genes=genes), Stage2Options())
    info = DatasetInfo.read(tmp_path / "out")
    assert info.schema.genes == genes
    assert info.unmeasured == {"slice_4": (tissue.var_names[11],)}


def test_sections_have_their_number_as_height(raw, tmp_path):
    preprocess(raw, tmp_path / "out", Stage1Options(z_spacing=10.0), Stage2Options(frame="shared"))
    info = DatasetInfo.read(tmp_path / "out")
    _, groups = read(tmp_path / "out")
    for _, cells in groups:
        assert (cells.position[:, 2] == 10.0 * int(cells.slice_id[-1])).all()
    assert info.schema.n_dims == 3


@pytest.mark.parametrize("frame", ["slice", "shared"])
def test_a_dataset_in_a_plane_is_described_as_an_anndata_of_its_cells(raw, tmp_path, frame):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.obsm["spatial"] = np.insert(adata.obsm["spatial"], 1, 7.0, axis=1)
        adata.write_h5ad(path)
    options = Stage2Options(frame=frame, train_ratio=1.0, val_ratio=0.0)
    preprocess(raw, tmp_path / "out", Stage1Options(position_is_3d=True), options)
    schema, cells = DatasetInfo.read(tmp_path / "out").schema, read_dataset(tmp_path / "out", "train")
    expected = fit_schema(cells, frame=frame)
    assert (schema.n_dims, schema.plane, len(schema.center)) == (2, (1, 7.0), 2)
    assert (expected.n_dims, expected.plane) == (2, (1, 7.0))
    assert (schema.scale, schema.spacing) == pytest.approx((expected.scale, expected.spacing))
    sources = ParquetSource(tmp_path / "out"), AnnDataSource(cells, expected, positions=True)
    for one, other in zip(*(source.slices for source in sources), strict=True):
        np.testing.assert_array_equal(one.position, other.position)


def test_the_tenth_section_does_not_come_before_the_second(raw, tmp_path, caplog):
    for i, number in enumerate((1, 2, 3, 10, 20)):
        adata = ad.read_h5ad(raw / f"slice_{i}.h5ad")
        del adata.obs["slice_id"]
        adata.write_h5ad(raw / f"section_{number}.h5ad")
        (raw / f"slice_{i}.h5ad").unlink()
    with caplog.at_level("INFO"):
        preprocess(raw, tmp_path / "out", Stage1Options(z_spacing=10.0), Stage2Options())
    _, groups = read(tmp_path / "out")
    heights = {cells.slice_id: set(cells.position[:, 2]) for _, cells in groups}
    order = ["section_1", "section_2", "section_3", "section_10", "section_20"]
    assert heights == {name: {10.0 * i} for i, name in enumerate(order)}
    assert "section_2 at 10, section_3 at 20, section_10 at 30" in caplog.text


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b1", "b2", "b10", "c"],
        ["2", "10", "x"],
        ["s01_z9", "s1_z10", "s2_z1"],
        ["s01", "s1"],
        ["s2", "s" + "9" * 5000],
    ],
)
def test_numbers_in_names_sort_as_numbers(names):
    assert sorted(sorted(names), key=_stage1.natural_order) == names


def test_transformed_values_are_stored_unchanged(raw, tissue, tmp_path):
    preprocess(raw, tmp_path / "out", Stage1Options(log_normalize=False), Stage2Options())
    info = DatasetInfo.read(tmp_path / "out")
    assert info.schema.transform == "none"
    assert not info.counts
    assert info.schema.library_size is None


@pytest.mark.parametrize("kind", ["counts", "binary", "log-normalized", "signed"])
def test_the_kind_of_the_values_is_recorded(raw, tissue, tmp_path, kind):
    for path in raw.glob("*.h5ad"):
        adata = ad.read_h5ad(path)
        values = dense(adata.X)
        change = {"binary": np.sign, "log-normalized": np.log1p, "signed": lambda x: np.log1p(x) - 1}
        adata.X = change.get(kind, np.asarray)(values).astype(np.float32)
        adata.write_h5ad(path)
    preprocess(raw, tmp_path / "out", Stage1Options(log_normalize=kind == "counts"), Stage2Options())
    info = DatasetInfo.read(tmp_path / "out")
    assert info.schema.value_kind == kind
    assert info.schema.is_detected == (kind != "signed")
    assert info.counts == (kind in ("counts", "binary"))


@pytest.mark.parametrize(
    ("n_cells", "message"), [(9, "'slice_0' has 9 cells"), (11, "9 of the 11 cells of slice 'slice_0'.*train_ratio=")]
)
def test_a_slice_of_too_few_cells_is_an_error_before_a_file_is_written(raw, tmp_path, n_cells, message):
    path = raw / "slice_0.h5ad"
    ad.read_h5ad(path)[:n_cells].write_h5ad(path)
    with pytest.raises(ValueError, match=message):
        preprocess(raw, tmp_path / "out", Stage1Options(), Stage2Options())
    assert not (tmp_path / "out").exists()


def test_a_slice_of_zeros_and_ones_among_counts_holds_counts(raw, tmp_path, caplog):
    path = raw / "slice_0.h5ad"
    adata = ad.read_h5ad(path)
    adata.X.data[:] = 1
    adata.write_h5ad(path)
    preprocess(raw, tmp_path / "out", Stage1Options(), Stage2Options())
    info = DatasetInfo.read(tmp_path / "out")
    assert (info.schema.value_kind, info.counts) == ("counts", True)
    assert "not counts" not in caplog.text


def test_logarithms_and_counts_meet_as_logarithms(raw, tissue, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("slice_0", "slice_1"):
        adata = ad.read_h5ad(raw / f"{name}.h5ad")
        adata.X = adata.X.astype(np.float32)
        adata.X.data = np.log1p(adata.X.data)
        adata.write_h5ad(other / f"{name}.h5ad")
        (raw / f"{name}.h5ad").unlink()
    genes = tuple(tissue.var_names)
    stage1(raw, tmp_path / "a", Stage1Options(genes=genes))
    stage1(other, tmp_path / "b", Stage1Options(genes=genes, log_normalize=False))
    stage2([tmp_path / "a", tmp_path / "b"], tmp_path / "out", Stage2Options(split="slice"))
    info = DatasetInfo.read(tmp_path / "out")
    assert (info.schema.transform, info.schema.value_kind, info.counts) == ("none", "log-normalized", False)
    _, groups = read(tmp_path / "out")
    for _, cells in groups:
        if cells.slice_id in ("slice_0", "slice_1"):
            expected = np.log1p(dense(tissue[cells.names.astype(str)].X))
            np.testing.assert_allclose(cells.expression.toarray(), expected, rtol=1e-6)
        else:
            assert cells.expression.max() < 10


# -- again, and after an end that was none ------------------------------------------------------------------------------


def test_finished_files_are_kept(raw, tmp_path, monkeypatch):
    out = tmp_path / "out"
    preprocess(raw, out, LABELED, Stage2Options())
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    monkeypatch.setattr(_stage1, "_write", None)  # would fail
    preprocess(raw, out, LABELED, Stage2Options())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == before


def test_changed_parameters_are_an_error(raw, tmp_path):
    out = tmp_path / "out"
    preprocess(raw, out, LABELED, Stage2Options())
    with pytest.raises(ValueError, match="cell_type_key.*'cell_type'.*None"):
        preprocess(raw, out, Stage1Options(), Stage2Options())
    with pytest.raises(ValueError, match=r"train_ratio.* 0\.8.* 0\.5.*seed.* 0.* 1\b"):
        preprocess(raw, out, LABELED, Stage2Options(train_ratio=0.5, seed=1))


def test_changed_slices_are_an_error(raw, tissue, tmp_path):
    out = tmp_path / "out"
    preprocess(raw, out, LABELED, Stage2Options())
    before = files_in(out)
    adata = ad.read_h5ad(raw / "slice_2.h5ad")
    adata.obs["slice_id"] = "slice_9"
    adata.write_h5ad(raw / "slice_9.h5ad")
    adata = ad.read_h5ad(raw / "slice_3.h5ad")
    adata[:30].copy().write_h5ad(raw / "slice_3.h5ad")
    (raw / "slice_2.h5ad").unlink()
    lists = r"'slice_9'.*'slice_2'.*'slice_3'"
    with pytest.raises(ValueError, match=lists):
        preprocess(raw, out, LABELED, Stage2Options())
    assert files_in(out) == before


def _foreign_metadata(out):
    (out / "metadata.json").write_text('{"mine": 1}')


def _other_dataset(out):
    tissue = synthetic_tissue(n_slices=2, n_cells=30, n_genes=10, random_state=1)
    (out / "other").mkdir()
    tissue.write_h5ad(out / "other" / "a.h5ad")
    preprocess(out / "other", out, Stage1Options(), Stage2Options())
    shutil.rmtree(out / "_intermediate_slices")


def _foreign_data(out):
    (out / "data").mkdir()
    (out / "data" / "train.parquet").write_text("mine")


@pytest.mark.parametrize(
    ("prepare", "second", "message"),
    [
        (None, {"split": "animal"}, r"split='animal'.*animal_key="),
        (_foreign_metadata, {}, r"metadata\.json"),
        (_other_dataset, {}, r"parameters.*'slice_2'"),
        (_foreign_data, {}, r"data/train\.parquet"),
    ],
)
def test_errors_of_the_second_stage_come_before_the_first(raw, tmp_path, monkeypatch, prepare, second, message):
    out = tmp_path / "out"
    out.mkdir()
    if prepare is not None:
        prepare(out)
    before = files_in(out)
    monkeypatch.setattr(_stage1, "_write", None)  # would fail
    with pytest.raises((ValueError, FileExistsError), match=message):
        preprocess(raw, out, LABELED, Stage2Options(**second))
    assert files_in(out) == before


def test_progress_of_both_stages_is_shown(raw, tmp_path, capsys):
    preprocess(raw, tmp_path / "out", LABELED, Stage2Options(max_shard_size=100))
    shown = capsys.readouterr().err
    assert "Reading slices: 100%" in shown
    assert "Writing files: 100%" in shown


def test_a_file_that_changed_is_read_again(raw, tissue, tmp_path):
    stage1(raw, tmp_path / "slices", LABELED)
    adata = ad.read_h5ad(raw / "slice_2.h5ad")
    adata[:30].copy().write_h5ad(raw / "slice_2.h5ad")
    stage1(raw, tmp_path / "slices", LABELED)
    notes = [json.loads(path.read_text()) for path in sorted((tmp_path / "slices").glob("0*.json"))]
    assert [note["n_cells"] for note in notes] == [90, 70, 30, 110, 60]


@pytest.mark.parametrize("after", [0, 2, 4])
def test_an_interrupted_run_ends_as_an_undisturbed_one(raw, tmp_path, after):
    out, straight = tmp_path / "out", tmp_path / "straight"

    def interrupted(function, tasks):
        for i, task in enumerate(tasks):
            if i == after:
                raise KeyboardInterrupt
            yield function(task)

    with pytest.raises(KeyboardInterrupt):
        preprocess(raw, out, LABELED, Stage2Options(max_shard_size=60), run=interrupted)
    assert not (out / "metadata.json").exists()
    stage1(raw, out / "_intermediate_slices", LABELED)
    if after:
        with pytest.raises(KeyboardInterrupt):
            stage2([out / "_intermediate_slices"], out, Stage2Options(max_shard_size=60), run=interrupted)
        assert not (out / "metadata.json").exists()
    preprocess(raw, out, LABELED, Stage2Options(max_shard_size=60))
    preprocess(raw, straight, LABELED, Stage2Options(max_shard_size=60))
    assert files_in(out) == files_in(straight)


# -- bad input ----------------------------------------------------------------------------------------------------------


def _negative(folder):
    adata = ad.read_h5ad(folder / "slice_0.h5ad")
    adata.X = dense(adata.X)
    adata.X[3, 4] = -1
    adata.write_h5ad(folder / "slice_0.h5ad")


def _twice(folder):
    shutil.copy(folder / "slice_0.h5ad", folder / "again.h5ad")


def _in_one_place(folder):
    adata = ad.read_h5ad(folder / "slice_0.h5ad")
    adata.obsm["spatial"][:] = 1.0
    adata.write_h5ad(folder / "slice_0.h5ad")


def test_positions_are_checked_before_a_file_of_the_dataset_is_written(raw, tmp_path, monkeypatch):
    _in_one_place(raw)
    monkeypatch.setattr("alphastomics.data.preprocess._stage2.write_shard", None)
    with pytest.raises(ValueError, match=r"slice 'slice_0' have the same position"):
        preprocess(raw, tmp_path / "out", LABELED, Stage2Options(split="cell"))


def test_hidden_files_are_not_read(raw, tmp_path):
    (raw / "._slice_0.h5ad").write_bytes(b"metadata of macOS")
    preprocess(raw, tmp_path / "out", LABELED, Stage2Options())
    assert (tmp_path / "out" / "metadata.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_negative, r"slice_0\.h5ad.*negative.*'gene_4'"),
        (_twice, r"'slice_0'.*again\.h5ad.*slice_0\.h5ad"),
    ],
)
def test_invalid_input_is_an_error_without_partial_files(raw, tmp_path, change, message):
    change(raw)
    with pytest.raises((ValueError, KeyError, FileNotFoundError), match=message):
        preprocess(raw, tmp_path / "out", LABELED, Stage2Options())
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_different_gene_lists_are_an_error(raw, tissue, tmp_path):
    stage1(raw, tmp_path / "a", Stage1Options(genes=tuple(tissue.var_names)))
    stage1(raw, tmp_path / "b", Stage1Options(genes=tuple(tissue.var_names[[1, 0, *range(2, 25)]])))
    with pytest.raises(ValueError, match="'gene_0'.*'gene_1'"):
        stage2([tmp_path / "a", tmp_path / "b"], tmp_path / "out", Stage2Options())


def test_a_shorter_gene_list_is_an_error(raw, tissue, tmp_path):
    stage1(raw, tmp_path / "a", Stage1Options(genes=tuple(tissue.var_names[:20])))
    stage1(raw, tmp_path / "b", Stage1Options(genes=tuple(tissue.var_names)))
    for folders in (["a", "b"], ["b", "a"]):
        with pytest.raises(ValueError, match=r"'gene_20'.*/b\b"):
            stage2([tmp_path / name for name in folders], tmp_path / "out", Stage2Options())


@pytest.mark.parametrize("position_is_3d", [False, True])
def test_an_unused_third_coordinate_is_logged(raw, tmp_path, caplog, position_is_3d):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.obsm["spatial"] = np.c_[adata.obsm["spatial"], np.arange(adata.n_obs)]
        adata.write_h5ad(path)
    stage1(raw, tmp_path / "out", Stage1Options(position_is_3d=position_is_3d))
    assert caplog.text.count("--position-is-3d") == (not position_is_3d)


def test_more_than_three_coordinates_are_refused(raw, tmp_path):
    path = next(iter(raw.iterdir()))
    adata = ad.read_h5ad(path)
    adata.obsm["spatial"] = np.ones((adata.n_obs, 5))
    adata.write_h5ad(path)
    with pytest.raises(ValueError, match=r"shape \(\d+, 5\).*position_key="):
        stage1(raw, tmp_path / "out", Stage1Options())


@pytest.mark.parametrize(("log_normalize", "factor"), [(True, 0.5), (True, 1.0), (False, 0.5)])
def test_fractional_counts_are_logged(raw, tmp_path, caplog, log_normalize, factor):
    for path in raw.iterdir():
        adata = ad.read_h5ad(path)
        adata.X = adata.X.astype(np.float32) * factor
        adata.write_h5ad(path)
    stage1(raw, tmp_path / "out", Stage1Options(log_normalize=log_normalize))
    n_warnings = len(re.findall("5 slices.*'slice_0'", caplog.text))
    assert n_warnings == (log_normalize and factor != 1)


@pytest.mark.parametrize("split", ["cell", "slice"])
def test_scale_per_slice_standardizes_genes_within_slices(raw, tissue, tmp_path, split):
    options = Stage2Options(split=split, scale_per_slice=True, max_shard_size=100)
    preprocess(raw, tmp_path / "out", LABELED, options)
    info, groups = read(tmp_path / "out")
    assert (info.schema.transform, info.counts) == ("none", False)
    assert set(info.schema.gene_mean) == {0.0}
    assert set(info.schema.gene_scale) == {1.0}
    cells = sp.vstack([cells.expression for _, cells in groups]).toarray()
    names = np.concatenate([np.full(len(cells.names), cells.slice_id) for _, cells in groups])
    position = np.concatenate([cells.position for _, cells in groups])[:, :2]
    size = np.concatenate([cells.library_size for _, cells in groups])
    training = np.concatenate([np.full(len(cells.names), shard.split == "train") for shard, cells in groups])
    median = np.median(size[training])
    for name, rows in tissue.obs.groupby("slice_id", observed=True).indices.items():
        counts = dense(tissue.X[rows]).astype(np.float64)
        logs = np.log1p(counts * (median / counts.sum(1, keepdims=True)))
        expected = StandardScaler().fit_transform(logs)
        here = names == name
        found, places = cells[here], position[here]
        order, expected_order = np.lexsort(places.T), np.lexsort(tissue.obsm["spatial"][rows].T)
        np.testing.assert_allclose(found[order], expected[expected_order], atol=1e-4)
