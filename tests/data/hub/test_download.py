"""Datasets that were uploaded come back from a stand-in of the Hub, into the cache, and are then datasets on disk."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from alphastomics.data import create_dataloaders, read_dataset
from alphastomics.data.hub import download, upload
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue

# huggingface_hub sends files in a way that httpx advises against.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "lab/tissue"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    synthetic_tissue(n_slices=3, n_cells=(90, 70, 40), n_genes=20, random_state=0).write_h5ad(raw / "all.h5ad")
    preprocess(raw, out, Stage1Options(), Stage2Options(train_ratio=0.6, val_ratio=0.2, max_shard_size=60))
    return out


def test_a_downloaded_dataset_is_that_which_was_uploaded(hub, folder):
    upload(folder, REPO)
    hub.repositories[REPO].files["notes.txt"] = b"not of the dataset"
    found = download(REPO, endpoint=hub.url)
    files = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    assert files == {"metadata.json"} | {f"data/{path.name}" for path in (folder / "data").iterdir()}
    for split in ("train", "validation", "test"):
        one, other = read_dataset(found, split), read_dataset(folder, split)
        np.testing.assert_array_equal(one.X.toarray(), other.X.toarray())
        assert list(one.obs_names) == list(other.obs_names)


def test_a_downloaded_dataset_is_streamed_from_its_folder(hub, folder):
    upload(folder, REPO)
    loaders = create_dataloaders(download(REPO, endpoint=hub.url), 64, context_size=16, buffer_size=50)
    for loader, n_cells in zip(loaders, (120, 40, 40), strict=True):
        seen = Counter(row for batch in loader for row in batch.rows[batch.rows >= 0].tolist())
        assert seen == Counter(range(n_cells))


def test_files_in_the_cache_are_not_downloaded_again(hub, folder):
    upload(folder, REPO)
    found = download(REPO, endpoint=hub.url)
    del hub.requests[:]
    assert download(REPO, endpoint=hub.url) == found
    assert not hub.sent("GET", "/resolve/")


def test_a_damaged_download_is_an_error(hub, folder):
    upload(folder, REPO)
    files = hub.repositories[REPO].files
    files["data/test.parquet"] = files["data/test.parquet"][:-20]
    with pytest.raises(ValueError, match=r"test\.parquet"):
        download(REPO, endpoint=hub.url)
    del files["metadata.json"]
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        download(REPO, endpoint=hub.url)


def test_missing_repositories_raise(hub, folder):
    with pytest.raises(FileNotFoundError, match="lab/nothing.*token"):
        download("lab/nothing", endpoint=hub.url)
    with pytest.raises(ValueError, match="no such/folder/at all"):
        download("no such/folder/at all", endpoint=hub.url)
    upload(folder, REPO)
    with pytest.raises(FileNotFoundError, match="revision.*lab/tissue"):
        download(REPO, revision="v9", endpoint=hub.url)
    hub.misbehave = lambda method, path: (503, {}, {"error": "busy"})
    with pytest.raises(ConnectionError, match="Hub.*later"):
        download("lab/other", endpoint=hub.url)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "alphastomics\[hub\]"'):
        download(REPO)
