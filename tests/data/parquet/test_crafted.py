"""Parquet files whose footer or pages are damaged: a one-line error from the checksum or from pyarrow, in no case other cells."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from alphastomics.data import read_parquet, write_parquet
from alphastomics.data.parquet._files import footer_checksum
from alphastomics.datasets import synthetic_tissue


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of cells that belongs to no dataset, so that no checksum of its footer is known."""
    path = tmp_path_factory.mktemp("cells") / "cells.parquet"
    write_parquet(synthetic_tissue(n_slices=2, n_cells=60, n_genes=10, random_state=0), path)
    return path


def one_line(path, data):
    """Read changed bytes: a short error that names the file, or cells."""
    changed = path.with_name("changed.parquet")
    changed.write_bytes(data)
    try:
        return read_parquet(changed)
    except ValueError as error:
        message = str(error)
    assert "changed.parquet" in message
    assert "\n" not in message
    return None


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-1], lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", lambda data: b"", lambda data: data[:4]],
    ids=["cut", "long", "empty", "start"],
)
def test_a_footer_of_another_length_is_an_error(path, change):
    assert one_line(path, change(path.read_bytes())) is None
    with pytest.raises(ValueError, match=r"changed\.parquet"):
        footer_checksum(path.with_name("changed.parquet"))


@settings(max_examples=50, deadline=None)
@given(at=st.floats(0, 1), bytes_=st.binary(min_size=1, max_size=40))
def test_overwritten_pages_change_no_cell(path, at, bytes_):
    """Each page has a checksum; what is before the pages of a column is its header."""
    data, expected = path.read_bytes(), read_parquet(path)
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    place = 4 + int(at * (end - 4 - len(bytes_)))
    found = one_line(path, data[:place] + bytes_ + data[place + len(bytes_) :])
    if found is not None:
        np.testing.assert_array_equal(found.X.toarray(), expected.X.toarray())
        np.testing.assert_array_equal(found.obsm["spatial"], expected.obsm["spatial"])


@pytest.mark.parametrize("key", ["num_rows", "row groups"])
def test_crafted_lengths_are_an_error(path, key):
    """Lengths of a list column that differ from its number of rows."""
    table = pq.read_table(path)
    lists = table.column("expression").combine_chunks() if "expression" in table.column_names else None
    lists = table.column("values").combine_chunks() if lists is None else lists
    name = "expression" if "expression" in table.column_names else "values"
    flat = lists.flatten()
    n = len(flat) if key == "num_rows" else len(flat) - len(table)
    offsets = np.linspace(0, n, len(table) + 1).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), flat)
    changed = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(changed, path.with_name("changed.parquet"))
    data = path.with_name("changed.parquet").read_bytes()
    if key == "num_rows" and name == "expression":
        assert one_line(path, data) is not None
    else:
        assert one_line(path, data) is None
