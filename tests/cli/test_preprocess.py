"""The commands that make datasets, from tokens to files."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from alphastomics.data.parquet._dataset import DatasetInfo
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from files import error_line, write_slices


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A folder with a file for each of four slices, of two animals, and a gene list."""
    folder = tmp_path_factory.mktemp("raw")
    tissue = synthetic_tissue(n_slices=4, n_cells=50, n_genes=20, random_state=0)
    tissue.obsm["place"] = tissue.obsm.pop("spatial")
    tissue.obs["label"] = tissue.obs.pop("cell_type")
    tissue.obs["animal"] = np.where(tissue.obs["slice_id"].isin(["slice_0", "slice_1"]), "a", "b")
    write_slices(tissue, folder)
    (folder / "genes.txt").write_text("\n".join(tissue.var_names[:15][::-1]) + "\n\n")
    return folder


def read(folder, split):
    files = sorted((folder / "data").glob(f"{split}*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def run(*tokens):
    return main([str(token) for token in tokens])


KEYS = ["--position-key", "place"]


def test_a_folder_becomes_a_dataset(raw, tmp_path):
    out = tmp_path / "out"
    tokens = ["--max-shard-size", 100, "--cell-type-key", "label"]
    assert run("preprocess", "--input-dir", raw, "--output-dir", out, *KEYS, *tokens) == 0
    names = sorted(str(file.relative_to(out)) for file in out.rglob("*.parquet") if "_intermediate" not in str(file))
    shards = ["data/train-00000.parquet", "data/train-00001.parquet"]
    assert names == ["data/test.parquet", *shards, "data/validation.parquet"]
    assert (out / "metadata.json").is_file()
    assert (out / "_intermediate_slices").is_dir()
    cells = [row for split in ("train", "validation", "test") for row in read(out, split)]
    assert len({row["cell_id"] for row in cells}) == len(cells) == 200
    assert {"position", "cell_type", "slice_id"} <= set(cells[0])
    assert ("expression" in cells[0]) or {"indices", "values"} <= set(cells[0])
    assert len(cells[0]["position"]) == 3


def test_shares_of_cells(raw, tmp_path):
    tokens = ["--train-ratio", 0.5, "--val-ratio", 0.25, "--seed", 1]
    assert run("preprocess", "--input-dir", raw, "--output-dir", tmp_path, *KEYS, *tokens) == 0
    assert [len(read(tmp_path, split)) for split in ("train", "validation", "test")] == [100, 50, 50]


def test_animals_and_labels(raw, tmp_path):
    tokens = ["--split", "animal", "--animal-key", "animal", "--train-ratio", 0.5, "--val-ratio", 0]
    tokens += ["--cell-type-key", "label"]
    assert run("preprocess", "--input-dir", raw, "--output-dir", tmp_path, *KEYS, *tokens) == 0
    groups = [{row["slice_id"] for row in read(tmp_path, split)} for split in ("train", "test")]
    assert sorted(map(sorted, groups)) == [["slice_0", "slice_1"], ["slice_2", "slice_3"]]
    assert all(row["cell_type"] for row in read(tmp_path, "train"))


def test_both_stages_with_a_gene_list_and_no_transform(raw, tmp_path):
    tokens = ["--gene-list-file", raw / "genes.txt", "--skip-log-normalize", "--z-spacing", 10]
    assert run("stage1", "--input-dir", raw, "--output-dir", tmp_path / "slices", *KEYS, *tokens) == 0
    out = tmp_path / "out"
    assert (
        run("stage2", "--input-dirs", tmp_path / "slices", "--output-dir", out, "--skip-scale", "--split", "slice") == 0
    )
    info = DatasetInfo.read(out)
    assert list(info.schema.genes) == (raw / "genes.txt").read_text().split()
    assert info.schema.transform == "none"
    assert set(np.asarray(info.schema.gene_scale)) == {1.0}
    cells = [row for split in ("train", "validation", "test") for row in read(out, split)]
    assert {row["position"][2] for row in cells} == {0.0, 10.0, 20.0, 30.0}


@pytest.mark.parametrize("frame", ["slice", "shared"])
def test_positions_are_normalized_by_default(raw, tmp_path, frame):
    flags = {"default": [], "flag": ["--normalize_position"], "disabled": ["--no-normalize-position"]}
    for name, tokens in flags.items():
        out = ["--output-dir", tmp_path / name, "--frame", frame]
        assert run("preprocess", "--input-dir", raw, *out, *KEYS, *tokens) == 0
    default, flag, plain = (DatasetInfo.read(tmp_path / name).schema for name in flags)
    assert flag.scale == default.scale != 1.0
    assert flag.center == default.center
    assert (plain.scale, plain.center) == (1.0, (0.0, 0.0))
    assert plain.spacing == default.spacing
    for split in ("train", "validation", "test"):  # in the units of the input either way
        assert read(tmp_path / "disabled", split) == read(tmp_path / "default", split)


def test_a_gene_list_of_another_editor_is_read(raw, tmp_path):
    genes = (raw / "genes.txt").read_text().split()
    (tmp_path / "genes.txt").write_text("\r\n".join(genes), encoding="utf-8-sig")
    tokens = ["--gene-list-file", tmp_path / "genes.txt"]
    assert run("preprocess", "--input-dir", raw, "--output-dir", tmp_path / "out", *KEYS, *tokens) == 0
    assert list(DatasetInfo.read(tmp_path / "out").schema.genes) == genes


def test_an_invalid_z_spacing_is_an_error_before_files_are_written(raw, tmp_path, capsys):
    assert run("stage1", "--input-dir", raw, "--output-dir", tmp_path / "out", *KEYS, "--z-spacing", "nan") != 0
    assert re.search("z.spacing", error_line(capsys))
    assert not (tmp_path / "out").exists()


def test_position_is_3d_requires_three_coordinates(raw, tmp_path, capsys):
    assert run("preprocess", "--input-dir", raw, "--output-dir", tmp_path, *KEYS, "--position-is-3d") != 0
    assert error_line(capsys)


def test_an_error_has_a_short_message(raw, tmp_path, capsys):
    tokens = [*KEYS, "--cell-type-key", "nothing"]
    assert run("preprocess", "--input-dir", raw, "--output-dir", tmp_path / "out", *tokens) != 0
    assert re.search(r"slice_0\.h5ad.*nothing", error_line(capsys))
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_changed_parameters_are_an_error(raw, tmp_path, capsys):
    tokens = ["preprocess", "--input-dir", raw, "--output-dir", tmp_path, *KEYS]
    assert run(*tokens) == 0
    assert run(*tokens) == 0  # what is finished is kept
    assert run(*tokens, "--z-spacing", 3) != 0
    assert "z_spacing" in error_line(capsys)
    assert json.loads((tmp_path / "metadata.json").read_text())
