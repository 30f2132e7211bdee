"""Parts of ``.h5ad`` files: whatever the format, rows come as they are, however little is read at once."""

from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from alphastomics.data.preprocess import Stage1Options, _h5ad
from alphastomics.data.preprocess._h5ad import Expression, RawTissue, tidy

N_CELLS, N_GENES = 60, 17


@pytest.fixture
def counts():
    rng = np.random.default_rng(0)
    return sp.csr_matrix(rng.poisson(rng.gamma(0.5, 2.0, (N_CELLS, N_GENES))).astype(np.float64))


STORED = {
    "csr": sp.csr_matrix,
    "csc": sp.csc_matrix,
    "dense": lambda x: x.toarray(),
    "integers": lambda x: x.toarray().astype(np.int64),
    "int32": lambda x: sp.csr_matrix(x.astype(np.int32)),
}


@pytest.mark.parametrize("chunk", [1, 40, 2**19])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", [np.arange(N_CELLS), np.arange(10, 30), np.array([0, 3, 4, 41, 59]), np.array([7])])
def test_rows_come_as_they_are(counts, tmp_path, monkeypatch, chunk, stored, rows):
    monkeypatch.setattr(_h5ad, "CHUNK", chunk)
    path = tmp_path / "cells.h5ad"
    ad.AnnData(STORED[stored](counts)).write_h5ad(path)
    with h5py.File(path) as file:
        expression = Expression(file["X"])
        assert expression.shape == (N_CELLS, N_GENES)
        pieces = list(expression.read(rows))
        n_values = expression.n_values[rows].sum()
    np.testing.assert_array_equal(np.concatenate([numbers for numbers, _ in pieces]), rows)
    found = sp.vstack([block for _, block in pieces])
    np.testing.assert_array_equal(found.toarray(), counts[rows].toarray())
    assert n_values == (found.nnz if sp.issparse(STORED[stored](counts)) else len(rows) * N_GENES)
    for _, block in pieces:
        assert (block.dtype, block.indices.dtype) == (np.float32, np.int32)
        assert block.has_canonical_format


def test_duplicates_are_added_and_zeros_left_out():
    data, columns = np.array([1.0, 2.0, 4.0, 0.0, 3.0]), np.array([2, 0, 2, 1, 1])
    block = tidy(sp.csr_matrix((data, columns, np.array([0, 3, 5])), shape=(2, 3)))
    assert block.indices.tolist() == [0, 2, 1]
    assert block.data.tolist() == [2.0, 5.0, 3.0]


def names_and_columns(path):
    with RawTissue.open(path, Stage1Options()) as tissue:
        columns = {key: tissue.column(key, "slice_key").tolist() for key in tissue.columns}
        return tissue.names(np.arange(len(tissue.position))).tolist(), columns


@pytest.fixture
def path(tmp_path):
    obs = pd.DataFrame({"a": pd.Categorical(["x", "y", "x"]), "b": [1.0, 2.0, 3.0]}, index=["one", "two", "three"])
    ad.AnnData(np.ones((3, 2)), obs=obs, obsm={"spatial": np.ones((3, 2))}).write_h5ad(tmp_path / "cells.h5ad")
    return tmp_path / "cells.h5ad"


def test_columns_of_a_table_are_read_alone(path, monkeypatch):
    read = []
    monkeypatch.setattr(_h5ad, "read_elem", lambda stored: (read.append(stored.name), ad.io.read_elem(stored))[1])
    expected = ["one", "two", "three"], {"a": ["x", "y", "x"], "b": [1.0, 2.0, 3.0]}
    assert names_and_columns(path) == expected
    assert read == ["/obs/_index", "/var/_index", "/obsm/spatial", "/obs/a", "/obs/b"]
    with RawTissue.open(path, Stage1Options()) as tissue, pytest.raises(KeyError, match="slice_key"):
        tissue.column("c", "slice_key")


@pytest.mark.filterwarnings("ignore:.*was written without encoding metadata")
def test_tables_of_anndata_07_are_read_as_a_whole(path):
    with h5py.File(path, "r+") as file:
        del file["obs"]
        obs = file.create_group("obs")
        obs.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "index"})
        obs.attrs["column-order"] = ["a", "b"]
        obs["index"], obs["b"] = ["one", "two", "three"], [1.0, 2.0, 3.0]
        obs["__categories/a"], obs["a"] = ["x", "y"], np.array([1, 0, 1], dtype=np.int8)
        obs["a"].attrs["categories"] = obs["__categories/a"].ref
    assert names_and_columns(path) == (["one", "two", "three"], {"a": ["y", "x", "y"], "b": [1.0, 2.0, 3.0]})


def test_tables_of_earlier_versions_are_an_error(path):
    with h5py.File(path, "r+") as file:
        del file["obs"]
        file["obs"] = np.array([(b"one", 1.0)] * 3, dtype=[("index", "S5"), ("b", "f8")])
    with pytest.raises(ValueError, match=r"cells\.h5ad.*obs.*0\.7"):
        names_and_columns(path)


@pytest.mark.parametrize("stored", ["csr", "csc"])
@pytest.mark.parametrize(("part", "value"), [("indices", 10**6), ("indices", -1), ("indptr", 10**6), ("indptr", -5)])
def test_crafted_indices_are_an_error(counts, tmp_path, stored, part, value):
    path = tmp_path / "cells.h5ad"
    ad.AnnData(STORED[stored](counts), obsm={"spatial": np.ones((N_CELLS, 2))}).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file[f"X/{part}"][5] = value

    def read():
        with RawTissue.open(path, Stage1Options()) as tissue:
            return tissue.n_values(np.arange(N_CELLS)), list(tissue.expression(np.arange(N_CELLS)))

    with pytest.raises(ValueError, match=r"cells\.h5ad"):
        read()
