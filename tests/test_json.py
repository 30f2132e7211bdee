"""JSON of strangers: what is no strict JSON, or grows in memory, is refused with a reason."""

from __future__ import annotations

import json
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphastomics._io import _json

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(PLAIN)
def test_what_is_written_is_read(values):
    assert _json.parse(json.dumps(values, allow_nan=False)) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"a": 1, "b": {"c": 2, "c": 2}}', "a key twice"),
        ('{"a": NaN}', "has NaN, which is no number"),
        ('{"a": -Infinity}', "has -Infinity"),
        ("[1e999]", "a number that is too large"),
        (f"[{2**64}]", "more than 64 bits"),
        ("9" * 100_000, "more than 64 bits"),
        ("-" + "9" * 30, "more than 64 bits"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[1] [2]", "Extra data"),
    ],
)
def test_what_is_no_json_of_ours_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        _json.parse(text)


@pytest.mark.parametrize("unit", ["[],", '{"a":0},', '"ab",', "0,"])
def test_a_text_takes_no_more_memory_than_a_multiple_of_the_largest(unit):
    largest = 2**18
    text = f"[{unit * (largest // len(unit) - 2)}0]"
    tracemalloc.start()
    with suppress(ValueError):
        _json.parse(text, largest=largest)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * largest


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # a file with a hole: it takes no room
    start = time.monotonic()
    with pytest.raises(ValueError, match="too large, more than 1,000,000 bytes"):
        _json.read(path, largest=10**6)
    assert time.monotonic() - start < 5


def test_other_bytes_are_no_json(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="codec"):
        _json.read(tmp_path / "x.json")
