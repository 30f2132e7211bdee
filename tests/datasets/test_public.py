from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from alphastomics import datasets
from alphastomics.datasets import _public, _public as _atlases

LABELS = {
    "seqfish_embryo": "celltype_mapped_refined",
    "merfish_hypothalamus": "Cell_class",
    "slideseqv2_hippocampus": "cluster",
}
SQUIDPY_NAMES = {"seqfish_embryo": "seqfish", "merfish_hypothalamus": "merfish", "slideseqv2_hippocampus": "slideseqv2"}


def distributed(name: str) -> ad.AnnData:
    """Six cells the way the source has them: other column names, dense float64, float32 positions."""
    obs = pd.DataFrame(index=[f"cell_{i}" for i in range(6)])
    genes = ["Ace2", "Fos", "Blank_1", "Gad1"]
    values = np.arange(24, dtype=np.float64).reshape(6, 4)
    if name in LABELS:
        obs[LABELS[name]] = pd.Categorical(["b", "a", "b", "a", "b", "a"])
    if name == "merfish_hypothalamus":
        obs["Bregma"] = [26.0, 26.0, -9.0, -9.0, 1.0, 1.0]
        obs["Animal_ID"] = 1
        values[2, 1] = np.nan
    n_dims = 3 if name == "drosophila_embryo" else 2
    positions = np.arange(6 * n_dims, dtype=np.float32).reshape(6, n_dims)
    return ad.AnnData(X=values, obs=obs, var=pd.DataFrame(index=genes), obsm={"spatial": positions})


@pytest.fixture(params=sorted({*LABELS, "drosophila_embryo"}))
def name(request) -> str:
    return request.param


def load(name: str, **kwargs) -> ad.AnnData:
    return getattr(datasets, name)(**kwargs)


def check(adata: ad.AnnData, name: str) -> None:
    source = distributed(name)
    assert adata.obsm["spatial"].dtype == np.float64
    np.testing.assert_array_equal(adata.obsm["spatial"], source.obsm["spatial"])
    assert sparse.issparse(adata.X)
    assert adata.X.format == "csr"
    assert adata.X.dtype == np.float32
    np.testing.assert_array_equal(adata.X.toarray(), source[:, adata.var_names].X)
    assert isinstance(adata.obs["slice_id"].dtype, pd.CategoricalDtype)
    assert adata.uns["source"]["name"] == name
    assert adata.uns["source"]["license"]
    if name in LABELS:
        assert adata.obs["cell_type"].tolist() == source.obs[LABELS[name]].tolist()
        assert isinstance(adata.obs["cell_type"].dtype, pd.CategoricalDtype)
    else:
        assert "cell_type" not in adata.obs


@pytest.mark.parametrize("slices", [["a", None] * 3, pd.Categorical(["a", None] * 3), [1.0, np.nan] * 3])
def test_slices_that_are_missing_stay_missing(slices):
    source = distributed("seqfish_embryo")
    source.obs["slice_id"] = slices
    found = _public.harmonize(source, _public.SEQFISH).obs["slice_id"]
    assert found.isna().tolist() == [False, True] * 3
    assert list(found.cat.categories) == (["1"] if slices[0] == 1 else ["a"])


def test_a_local_file_is_harmonized(name, tmp_path, monkeypatch):
    def fail(*args):
        raise AssertionError("nothing may be downloaded for a local path")

    monkeypatch.setattr(_public, "_from_squidpy", fail)
    monkeypatch.setattr(_public, "_from_novosparc", fail)
    distributed(name).write_h5ad(tmp_path / "atlas.h5ad")
    adata = load(name, path=tmp_path / "atlas.h5ad")
    check(adata, name)
    adata.write_h5ad(tmp_path / "harmonized.h5ad")
    again = load(name, path=str(tmp_path / "harmonized.h5ad"))
    check(again, name)
    assert again.obs["slice_id"].tolist() == adata.obs["slice_id"].tolist()


@pytest.mark.parametrize("name", sorted(LABELS))
def test_squidpy_downloads_the_file(name, monkeypatch, caplog):
    loaders = SimpleNamespace(**{SQUIDPY_NAMES[name]: lambda: distributed(name)})
    monkeypatch.setitem(sys.modules, "squidpy", SimpleNamespace(datasets=loaders))
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        check(load(name), name)
    message = caplog.messages[0]
    assert f"https://exampledata.scverse.org/squidpy/{SQUIDPY_NAMES[name]}.h5ad" in message
    assert "size" in message
    assert "doi:10." in message
    assert "license" in message


@pytest.mark.slow
def test_the_urls_match_squidpy():
    registry = pytest.importorskip("squidpy.datasets._registry").get_registry()
    for atlas in (_atlases.SEQFISH, _atlases.MERFISH, _atlases.SLIDESEQ):
        entry = registry[SQUIDPY_NAMES[atlas.name]]
        assert entry.files[0].get_urls(registry.s3_base_url) == [atlas.url]
        assert atlas.contents.startswith(f"{entry.shape[0]:,} ")
        assert f"x {entry.shape[1]:,} genes" in atlas.contents


def test_the_drosophila_embryo_is_read_from_two_files(tmp_path, monkeypatch, caplog):
    (tmp_path / "dge.txt").write_text("aay\tAma\n0.5\t0\n0.25\t1\n0\t2\n")
    (tmp_path / "geometry.txt").write_text("xcoord ycoord zcoord\n-1.5 0.25 3\n4 5 6\n7 8 9\n0 0 0\n")
    hashes = {}

    def retrieve(url, *, known_hash, fname, path):
        hashes[url] = known_hash
        assert Path(path).name == "bdtnp"
        return str(tmp_path / fname)

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        adata = datasets.drosophila_embryo()
    np.testing.assert_array_equal(adata.X.toarray(), [[0.5, 0], [0.25, 1], [0, 2]])
    np.testing.assert_array_equal(adata.obsm["spatial"], [[-1.5, 0.25, 3], [4, 5, 6], [7, 8, 9]])
    assert list(adata.var_names) == ["aay", "Ama"]
    assert list(adata.obs_names) == ["cell_0", "cell_1", "cell_2"]
    assert adata.obs["slice_id"].tolist() == ["drosophila_embryo"] * 3
    assert len(hashes) == 2
    assert all(sha256.startswith("sha256:") and len(sha256) == 71 for sha256 in hashes.values())
    assert "2.4 MB" in caplog.messages[0]


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route to host"),
        ValueError("hash of downloaded file does not match"),
        ExceptionGroup("Failed to download", [OSError("no route to host")]),
    ],
)
def test_failed_download_raises(name, error, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("pooch.retrieve", fail)
    if name in LABELS:
        loaders = SimpleNamespace(**{SQUIDPY_NAMES[name]: fail})
        monkeypatch.setitem(sys.modules, "squidpy", SimpleNamespace(datasets=loaders))
    with pytest.raises(ConnectionError, match=rf"{name}.*https://.*{name}\(path=") as caught:
        load(name)
    assert caught.value.__cause__ is error


def test_an_invalid_file_is_not_a_connection_error(monkeypatch):
    def download():
        atlas = distributed("seqfish_embryo")
        del atlas.obsm["spatial"]
        return atlas

    monkeypatch.setitem(sys.modules, "squidpy", SimpleNamespace(datasets=SimpleNamespace(seqfish=download)))
    with pytest.raises(KeyError, match="spatial"):
        datasets.seqfish_embryo()


def test_sections_of_an_animal_are_slices(tmp_path):
    atlas = distributed("merfish_hypothalamus")
    atlas.write_h5ad(tmp_path / "one.h5ad")
    one = datasets.merfish_hypothalamus(tmp_path / "one.h5ad")
    assert one.obs["slice_id"].tolist() == ["bregma_26"] * 2 + ["bregma_-9"] * 2 + ["bregma_1"] * 2
    atlas.obs["Animal_ID"] = [1, 2] * 3
    atlas.write_h5ad(tmp_path / "two.h5ad")
    two = datasets.merfish_hypothalamus(tmp_path / "two.h5ad")
    assert two.obs["slice_id"].tolist()[:2] == ["animal_1_bregma_26", "animal_2_bregma_26"]
    assert two.obs["slice_id"].nunique() == 6


def test_control_probes_and_unmeasured_genes_are_left_out(tmp_path, caplog):
    distributed("merfish_hypothalamus").write_h5ad(tmp_path / "atlas.h5ad")
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        adata = datasets.merfish_hypothalamus(tmp_path / "atlas.h5ad")
    assert list(adata.var_names) == ["Ace2", "Gad1"]
    assert any("['Fos']" in message for message in caplog.messages)


def test_missing_columns_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"path=.*nowhere\.h5ad"):
        datasets.seqfish_embryo(tmp_path / "nowhere.h5ad")
    atlas = distributed("merfish_hypothalamus")
    for column in ("Bregma", "Cell_class"):
        part = atlas.copy()
        del part.obs[column]
        part.write_h5ad(tmp_path / "part.h5ad")
        with pytest.raises(KeyError, match=column):
            datasets.merfish_hypothalamus(tmp_path / "part.h5ad")
    del atlas.obsm["spatial"]
    atlas.write_h5ad(tmp_path / "part.h5ad")
    with pytest.raises(KeyError, match="spatial"):
        datasets.merfish_hypothalamus(tmp_path / "part.h5ad")


@pytest.mark.real
def test_real_files_keep_their_slices_and_labels(real_data):
    embryo = datasets.seqfish_embryo(real_data / "seqfish_mouse_embryo_dev.h5ad")
    assert embryo.shape == (31956, 351)
    assert embryo.obs["slice_id"].nunique() == 4
    assert embryo.obs["cell_type"].nunique() == 23
    fly = datasets.drosophila_embryo(real_data / "drosophila_bdtnp_3d.h5ad")
    assert fly.obsm["spatial"].shape == (3039, 3)
