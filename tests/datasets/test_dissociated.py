from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import sparse

from alphastomics import datasets
from alphastomics.datasets._dissociated import SHA256

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three cells of a tissue and two dissociated cells, genes in another order."""
    (tmp_path / "Spatial_count.txt").write_text("Gad2\tVip\n3\t0\n1\t2\n0\t5\n")
    (tmp_path / "Locations.txt").write_text("X\tY\n1.5\t2\n3\t4\n5\t6\n")
    (tmp_path / "scRNA_count.txt").write_text("\tLS-1\tLS-2\nVip\t7\t0\nGad2\t0\t900\n")
    return tmp_path


def check(tissue, query) -> None:
    np.testing.assert_array_equal(tissue.X.toarray(), [[3, 0], [1, 2], [0, 5]])
    np.testing.assert_array_equal(tissue.obsm["spatial"], [[1.5, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(query.X.toarray(), [[0, 7], [900, 0]])
    assert list(tissue.var_names) == list(query.var_names) == ["Gad2", "Vip"]
    assert list(query.obs_names) == ["LS-1", "LS-2"]
    assert tissue.obs["slice_id"].tolist() == ["osmfish_cortex"] * 3
    assert "spatial" not in query.obsm
    for adata in (tissue, query):
        assert sparse.issparse(adata.X)
        assert adata.X.dtype == np.float32
        assert "MIT" in adata.uns["source"]["license"]


def test_a_local_folder_is_read(folder: Path) -> None:
    check(*datasets.osmfish_cortex(folder))
    (folder / "Locations.txt").write_text("X\tY\n1.5\t2\n")
    with pytest.raises(ValueError, match="3 cells and 1 positions.*pass the folder"):
        datasets.osmfish_cortex(folder)
    (folder / "Locations.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks Locations\.txt; leave path out"):
        datasets.osmfish_cortex(folder)


def test_the_files_are_downloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hashes = {}

    def retrieve(url: str, *, known_hash: str, fname: str, path: Path) -> str:
        hashes[url.rpartition("/")[2]] = known_hash
        return str(folder / fname)

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        check(*datasets.osmfish_cortex())
    assert hashes == {name: f"sha256:{sha256}" for name, sha256 in SHA256.items()}
    assert "0.4 MB" in caplog.messages[0]


def test_a_failed_download_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("pooch.retrieve", fail)
    with pytest.raises(ConnectionError, match=r"osmfish_cortex.*https://.*osmfish_cortex\(path="):
        datasets.osmfish_cortex()
