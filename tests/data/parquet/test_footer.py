"""The end of a Parquet file, read without pyarrow: what pyarrow reads there, or an error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphastomics.data import read_parquet
from alphastomics.data.parquet._footer import check_room, read_footer
from alphastomics.data.parquet._thrift import read_struct


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "name": [f"cell_{i}" for i in range(200)],
            "flag": rng.random(200) < 0.5,
            "number": pa.array(rng.integers(0, 9, 200), pa.int32()),
            "real": rng.random(200),
            "lists": [list(range(i % 5)) for i in range(200)],
            "missing": pa.array([None] * 200, pa.float32()),
        },
        metadata={"a": "b"},
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False, "write_statistics": False},
        {"compression": "zstd", "write_page_index": True, "write_page_checksum": True},
        {"use_dictionary": ["name"], "compression": {"name": "snappy", "flag": "none"}, "store_schema": False},
    ],
    ids=["usual", "plain", "zstd", "mixed"],
)
def test_it_reads_what_pyarrow_reads(table, tmp_path, options):
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=60, **options)
    expected = pq.read_metadata(path)
    found = read_footer(path)
    assert [group.n_rows for group in found] == [expected.row_group(i).num_rows for i in range(4)]
    for i, group in enumerate(found):
        columns = [expected.row_group(i).column(j) for j in range(expected.num_columns)]
        assert list(group.columns) == table.column_names
        for chunk, other in zip(group.columns.values(), columns, strict=True):
            assert chunk.n_values == other.num_values
            assert chunk.is_compressed == (other.compression != "UNCOMPRESSED")
            assert chunk.has_dictionary == other.has_dictionary_page
            assert (chunk.start, chunk.n_bytes) == (other.data_page_offset, other.total_compressed_size)
    widths = {name: chunk.width for name, chunk in found[0].columns.items()}
    assert widths == {"name": 8, "flag": 1, "number": 4, "real": 8, "lists": 8, "missing": 4}


@given(st.binary(max_size=60))
def test_any_bytes_are_a_structure_or_an_error(data):
    try:
        _, end = read_struct(data)
    except (IndexError, ValueError):
        return
    assert end <= len(data)


def test_deep_structures_end():
    with pytest.raises(ValueError, match="nested too deeply"):
        read_struct(b"\x1c" * 10_000)


def test_a_value_that_comes_very_often_is_not_read(tmp_path, monkeypatch):
    """A few bytes of a file."""
    monkeypatch.setattr("os.sysconf", lambda name: 2**13)  # 64 MiB
    n = 10**6
    values = pa.ListArray.from_arrays(
        pa.array([0, 10 * n]), pa.DictionaryArray.from_arrays(pa.array(np.zeros(10 * n, "i4")), ["a"])
    )
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"cell_id": ["x"], "expression": values}), path)
    assert path.stat().st_size < 100_000
    footer = read_footer(path)
    check_room(footer, (0,), ("cell_id",))
    with pytest.raises(ValueError, match="it claims to hold 0 GiB, more than the 0 GiB of this machine"):
        check_room(footer, (0,))
    with pytest.raises(ValueError, match=r"bomb\.parquet is no whole Parquet file \(it claims to hold"):
        read_parquet(path)


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-1], lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", lambda data: b""],
    ids=["cut", "long", "empty"],
)
def test_a_file_without_an_end_says_so(table, tmp_path, change):
    path = tmp_path / "x.parquet"
    pq.write_table(table, path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="its end is missing"):
        read_footer(path)
