"""Damaged datasets: an error that names the file, or the same cells as before; never others."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from alphastomics.data import create_dataloaders
from alphastomics.data.parquet._dataset import DatasetInfo
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main


@pytest.fixture(scope="module", params=["sparse", "dense"])
def whole(request, tmp_path_factory):
    """A dataset whose two test and validation files are of the same shape, and the files that it is made of."""
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    tissue = synthetic_tissue(n_slices=2, n_cells=100, n_genes=12, random_state=0)
    counts = tissue.X.toarray()
    tissue.X = counts + 1 if request.param == "dense" else np.where(counts % 10 == 1, counts, 0)
    tissue.write_h5ad(raw / "all.h5ad")
    preprocess(raw, out, Stage1Options(cell_type_key="cell_type"), Stage2Options(max_shard_size=80))
    names = pq.read_schema(out / "data" / "test.parquet").names
    assert ("expression" in names) == (request.param == "dense")
    return raw, out


@pytest.fixture
def dataset(whole, tmp_path):
    shutil.copytree(whole[1], tmp_path / "dataset")
    return tmp_path / "dataset"


def cells_of(folder):
    """All batches of all splits."""
    found = []
    for loader in create_dataloaders(folder, batch_size=50, context_size=50):
        for batch in loader or ():
            found += [part.numpy() for part in batch if isinstance(part, torch.Tensor)]
    return found


def outcome(folder):
    """All batches, or the error message."""
    try:
        return cells_of(folder), ""
    except ValueError as error:
        return None, str(error)


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def assert_raises(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        cells_of(folder)
    assert "\n" not in str(caught.value)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_an_error(dataset, share):
    path = dataset / "data" / "train-00001.parquet"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert_raises(dataset, r"train-00001\.parquet")


def test_a_missing_file_is_an_error(dataset):
    (dataset / "data" / "validation.parquet").unlink()
    assert_raises(dataset, r"validation\.parquet")


def test_a_missing_row_group_is_an_error(dataset):
    path = dataset / "data" / "train-00000.parquet"
    file = pq.ParquetFile(path)
    kept = [file.read_row_group(i) for i in range(file.num_row_groups - 1)]
    with pq.ParquetWriter(path, file.schema_arrow) as writer:
        for table in kept:
            writer.write_table(table)
    assert_raises(dataset, r"train-00000\.parquet.*metadata\.json")


def test_a_swapped_file_is_an_error(dataset):
    one, other = (dataset / "data" / f"{name}.parquet" for name in ("validation", "test"))
    shapes = {shard.file: shard.groups for shard in DatasetInfo.read(dataset).shards}
    assert shapes[one.name] == shapes[other.name]
    one.rename(dataset / "x")
    other.rename(one)
    (dataset / "x").rename(other)
    assert_raises(dataset, r"\.parquet.*metadata\.json")


def places(path, part, rng, n):
    """Places of bytes in a part of a file."""
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if part == "footer":
        return rng.integers(footer, len(data), n)
    metadata = pq.ParquetFile(path).metadata
    chunks = [
        metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)
    ]
    starts = [min(filter(None, [chunk.dictionary_page_offset, chunk.data_page_offset])) for chunk in chunks]
    if part == "headers":  # of pages, which are that long at least
        return rng.choice(starts, n) + rng.integers(0, 20, n)
    return rng.integers(4, footer, n)


@pytest.mark.parametrize("part", ["anywhere", "headers", "footer"])
def test_a_flipped_bit_changes_no_cell_unnoticed(whole, dataset, part):
    path, rng = dataset / "data" / "train-00000.parquet", np.random.default_rng(0)
    expected, n_found = cells_of(dataset), 0
    for place in places(path, part, rng, 25):
        shutil.copy(whole[1] / "data" / path.name, path)
        flip(path, int(place), 1 << int(rng.integers(8)))
        found, message = outcome(dataset)
        if found is None:
            assert re.search(r"train-00000\.parquet", message), place
            n_found += 1
            continue
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"byte {place}")
    assert n_found > 5  # what is found, not only what does not matter


# -- metadata.json ----------------------------------------------------------------------------------------------------


def newer(text):
    return json.dumps(json.loads(text) | {"format_version": 9})


def of_others(text):
    return json.dumps({"format": "another", "format_version": 1})


def incomplete(text):
    values = json.loads(text)
    del values["shards"][0]["groups"]
    return json.dumps(values)


NO_JSON = r"metadata\.json.*JSON"
METADATA = {
    "newer": (newer, r"metadata\.json.* 9\b"),
    "schema": (lambda text: json.dumps(json.loads(text) | {"schema": {}}), r"metadata\.json"),
    "shards": (lambda text: json.dumps(json.loads(text) | {"shards": 3}), r"metadata\.json"),
    "cut": (lambda text: text[: len(text) // 2], NO_JSON),
    "empty": (lambda _: "", NO_JSON),
    "bytes": (lambda _: "\x00\x01", NO_JSON),
    "list": (lambda _: "[]", r"metadata\.json"),
    "others": (of_others, r"metadata\.json"),
    "incomplete": (incomplete, r"metadata\.json.*'groups'"),
}


@pytest.mark.parametrize(("change", "message"), METADATA.values(), ids=METADATA)
def test_invalid_metadata_are_an_error(whole, dataset, capsys, change, message):
    path = dataset / "metadata.json"
    path.write_text(change(path.read_text()))
    before = {path: path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    assert_raises(dataset, message)
    tokens = ["preprocess", "--input-dir", whole[0], "--output-dir", dataset, "--cell-type-key", "cell_type"]
    assert main([*map(str, tokens), "--max-shard-size", "80"]) == 1
    error = capsys.readouterr().err
    (line,) = [
        line
        for line in error.replace("\r", "\n").splitlines()
        if line and not line.startswith(("Reading slices", "Writing files"))
    ]
    assert re.search(message, line)
    slices = dataset / "_intermediate_slices"  # which the first stage has looked at
    assert {path: path.read_bytes() for path in before if slices not in path.parents} == {
        path: content for path, content in before.items() if slices not in path.parents
    }


# -- again ------------------------------------------------------------------------------------------------------------


def test_the_remedy_helps(whole, dataset, caplog):
    """A dataset with a damaged file is not taken for finished when it is made again."""
    path = dataset / "data" / "train-00000.parquet"
    flip(path, path.stat().st_size // 2)
    options = Stage1Options(cell_type_key="cell_type"), Stage2Options(max_shard_size=80)
    preprocess(whole[0], dataset, *options)
    assert str(dataset) in caplog.text
    for name in ("data/train-00000.parquet", "metadata.json"):
        assert (dataset / name).read_bytes() == (whole[1] / name).read_bytes()
    caplog.clear()
    before = path.stat().st_mtime_ns
    preprocess(whole[0], dataset, *options)
    assert (path.stat().st_mtime_ns, caplog.text) == (before, "")


# -- of strangers -----------------------------------------------------------------------------------------------------


def described(folder, change):
    path = folder / "metadata.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "name", ["../../secret.parquet", "/etc/passwd", "..", ".hidden", "a/b.parquet", "a\\b", "x\0y", "x" * 5000]
)
def test_a_file_name_outside_of_the_folder_is_an_error(dataset, tmp_path, name):
    shutil.copy(dataset / "data" / "test.parquet", tmp_path / "secret.parquet")
    described(dataset, lambda values: values["shards"][0].update(file=name))
    assert_raises(dataset, re.escape(str(dataset)))


@pytest.mark.parametrize("name", ["metadata.json", "data/test.parquet", "data"])
def test_a_link_to_a_file_outside_of_the_folder_is_an_error(dataset, tmp_path, name):
    (dataset / name).rename(tmp_path / "elsewhere")
    (dataset / name).symlink_to(tmp_path / "elsewhere")
    assert_raises(dataset, "link")


@pytest.mark.parametrize("n", [-1, 2**63, 1.5, "7", True, None, []])
def test_an_invalid_number_of_cells_is_an_error(dataset, n):
    described(dataset, lambda values: values["shards"][0]["groups"][0].__setitem__(1, n))
    assert_raises(dataset, r"metadata\.json.*damaged")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("genes", value) for value in ("abc", [1, 2], ["\ud800"] * 12, {})),
        *(("gene_mean", value) for value in ([[1.0]] * 12, [True] * 12, ["1"] * 12, "0" * 12)),
        *(("scale", value) for value in ("1", True, None, [1.0])),
        *(("n_dims", value) for value in (2.0, True, "2")),
        *(("position_key", value) for value in (None, 3)),
    ],
)
def test_a_schema_with_wrong_types_is_an_error(dataset, key, value):
    described(dataset, lambda values: values["schema"].update({key: value}))
    assert_raises(dataset, rf"metadata\.json.*({key}|JSON)")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', "[" * 100_000, "[1e999]", "[NaN]", "9" * 5000])
def test_metadata_of_excessive_size_are_an_error(dataset, text):
    (dataset / "metadata.json").write_text(text)
    assert_raises(dataset, NO_JSON)
