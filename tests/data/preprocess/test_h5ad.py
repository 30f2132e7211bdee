"""Parts of ``.h5ad`` files: whatever the format, rows come as they are, however little is read at once."""

from __future__ import annotations

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from alphastomics.data.preprocess import _h5ad as _hdf5
from alphastomics.data.preprocess._h5ad import Table, open_expression, tidy

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


@pytest.mark.parametrize("stretch", [1, 40, 2**19])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", [np.arange(N_CELLS), np.arange(10, 30), np.array([0, 3, 4, 41, 59]), np.array([7])])
def test_rows_come_as_they_are(counts, tmp_path, monkeypatch, stretch, stored, rows):
    monkeypatch.setattr(_hdf5, "STRETCH", stretch)
    path = tmp_path / "cells.h5ad"
    ad.AnnData(STORED[stored](counts)).write_h5ad(path)
    with h5py.File(path) as file:
        expression = open_expression(file, path, None)
        assert expression.shape == (N_CELLS, N_GENES)
        pieces = list(expression.read(rows))
        n_values = expression.n_values(rows)
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


def test_columns_of_a_table_are_read_alone(tmp_path):
    obs = pd.DataFrame({"a": pd.Categorical(["x", "y", "x"]), "b": [1.0, 2.0, 3.0]}, index=["one", "two", "three"])
    ad.AnnData(np.ones((3, 2)), obs=obs).write_h5ad(tmp_path / "cells.h5ad")
    with h5py.File(tmp_path / "cells.h5ad") as file:
        table = Table(file["obs"])
        assert (len(table), table.columns) == (3, ["a", "b"])
        assert "a" in table
        assert "c" not in table
        assert table["a"].tolist() == ["x", "y", "x"]
        assert table.index.tolist() == ["one", "two", "three"]
        del file  # what was read is kept
    assert table["a"].tolist() == ["x", "y", "x"]


@pytest.mark.filterwarnings("ignore:.*was written without encoding metadata")
def test_tables_of_earlier_files_are_read_as_a_whole(tmp_path):
    with h5py.File(tmp_path / "cells.h5ad", "w") as file:
        obs = file.create_group("obs")
        obs.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "index"})
        obs.attrs["column-order"] = ["a", "b"]
        obs["index"], obs["b"] = ["one", "two"], [1.0, 2.0]
        obs["__categories/a"], obs["a"] = ["x", "y"], np.array([1, 0], dtype=np.int8)
        obs["a"].attrs["categories"] = obs["__categories/a"].ref
    with h5py.File(tmp_path / "cells.h5ad") as file:
        table = Table(file["obs"])
        assert (len(table), table.columns) == (2, ["a", "b"])
        assert table["a"].tolist() == ["y", "x"]
        assert table["b"].tolist() == [1.0, 2.0]
        assert table.index.tolist() == ["one", "two"]


def test_tables_of_the_earliest_files_are_refused(tmp_path):
    with h5py.File(tmp_path / "cells.h5ad", "w") as file:
        file["obs"] = np.array([(b"one", 1.0)], dtype=[("index", "S5"), ("b", "f8")])
        with pytest.raises(ValueError, match=r"cells.h5ad: obs is of a format before anndata 0.7"):
            Table(file["obs"])
