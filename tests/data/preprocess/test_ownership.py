"""Nothing is removed that a command has not written, whatever it is called."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphastomics.data.preprocess import Stage1Options, Stage2Options
from alphastomics.data.preprocess._run import preprocess, stage1, stage2
from alphastomics.datasets import synthetic_tissue
from files import files_in, stop_after, write_slices


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    tissue = synthetic_tissue(n_slices=3, n_cells=40, n_genes=10, random_state=0)
    return write_slices(tissue, tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def slices(raw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    stage1(raw, folder, Stage1Options())
    return folder


def table(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": [1, 2]}), path)


def text(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("data/train.parquet", table),
        ("data/train.parquet", text),
        ("data/notes.txt", text),
        ("data.tmp/important.txt", text),
        ("data.tmp/parameters.json", text),
        ("data.tmp/train.npz", text),
        ("data/train.parquet/inside.txt", text),
        ("data", text),
    ],
)
def test_files_of_other_programs_are_kept(slices, tmp_path, name, make):
    out = tmp_path / "own"
    make(out / name)
    before = files_in(out)
    with pytest.raises(FileExistsError, match="own/data"):
        stage2([slices], out, Stage2Options())
    assert files_in(out) == before


def test_files_of_other_programs_in_an_unfinished_folder_are_kept(slices, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        stage2([slices], tmp_path, Stage2Options(seed=1), run=stop_after(2))
    (tmp_path / "data.tmp" / "important.txt").write_text("mine")
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match=r"data\.tmp/important\.txt"):
        stage2([slices], tmp_path, Stage2Options())
    assert files_in(tmp_path) == before


def test_a_damaged_dataset_with_files_of_other_programs_keeps_its_metadata(slices, tmp_path):
    stage2([slices], tmp_path, Stage2Options())
    (tmp_path / "data" / "train.parquet").write_bytes(b"damaged")
    (tmp_path / "data" / "important.txt").write_text("mine")
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match=r"data/important\.txt"):
        stage2([slices], tmp_path, Stage2Options())
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("ended", ["before the first file", "within", "after the last file", "before the description"])
def test_leftovers_of_an_ended_call_are_replaced(slices, tmp_path, ended):
    straight, out = tmp_path / "straight", tmp_path / "out"
    stage2([slices], straight, Stage2Options())
    out.mkdir()
    if ended == "before the first file":
        (out / "data.tmp").mkdir()
        (out / "data.tmp" / f".parameters.{'a' * 32}.tmp.json").write_text("{")
    elif ended == "within":
        with pytest.raises(KeyboardInterrupt):
            stage2([slices], out, Stage2Options(seed=1), run=stop_after(2))
    else:
        shutil.copytree(straight / "data", out / ("data.tmp" if ended == "after the last file" else "data"))
    stage2([slices], out, Stage2Options())
    assert files_in(out) == files_in(straight)


def test_a_damaged_dataset_is_made_again(raw, tmp_path):
    preprocess(raw, tmp_path, Stage1Options(), Stage2Options())
    before = files_in(tmp_path)
    (tmp_path / "data" / "train.parquet").write_bytes(b"damaged")
    preprocess(raw, tmp_path, Stage1Options(), Stage2Options())
    assert files_in(tmp_path) == before
