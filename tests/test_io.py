"""Files of unknown origin: plain values come back, anything else is a short error; files are complete or absent."""

from __future__ import annotations

import json
import pickle
import time
import zipfile

import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics._io import _atomic, _json, _torch as _torch_file
from files import Trap

# -- JSON -----------------------------------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(PLAIN)
def test_json_round_trip(values):
    assert _json.parse(json.dumps(values, allow_nan=False)) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "property name"),
        ('{"a": 1, "b": {"c": 2, "c": 2}}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ("[1e999]", "1e999"),
        (f"[{2**64}]", "64 bits"),
        ("9" * 100_000, "digits"),
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
        ("[1] [2]", "Extra data"),
    ],
)
def test_invalid_json_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        _json.parse(text)


def test_a_large_file_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no disk space
    start = time.monotonic()
    with pytest.raises(ValueError, match="1,000,000 bytes"):
        _json.read(path, max_bytes=10**6)
    assert time.monotonic() - start < 5


def test_json_of_other_bytes_is_an_error(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="codec"):
        _json.read(tmp_path / "x.json")


# -- torch ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": [1, "two", None]}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def rewrite(path, change=lambda name, content: content, compression=zipfile.ZIP_STORED):
    """Write the archive again with the same parts, some of them changed."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in parts.items():
            new.writestr(name, change(name, content))


def test_tensors_and_plain_values_come_back(path):
    found = _torch_file.read(path)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3))
    assert found["b"] == [1, "two", None]
    del found  # it is mapped from the file
    rewrite(path)
    assert torch.equal(_torch_file.read(path)["a"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("form", ["archive", "old", "bare"])
def test_objects_are_never_unpickled(tmp_path, form):
    trap, path = Trap(tmp_path / "sprung"), tmp_path / "x.pt"
    if form == "bare":
        path.write_bytes(pickle.dumps(trap))
    else:
        torch.save({"a": trap}, path, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(ValueError, match="code"):
        _torch_file.read(path)
    assert not (tmp_path / "sprung").exists()
    (pickle.loads(path.read_bytes()) if form == "bare" else torch.load(path, weights_only=False)["a"]).close()
    assert (tmp_path / "sprung").exists(), "the trap does not work"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_torch_file_is_an_error(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match="truncated"):
        _torch_file.read(path)


def test_a_compressed_archive_is_an_error(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(10**5)}, path)
    rewrite(path, compression=zipfile.ZIP_DEFLATED)
    torch.load(path, weights_only=True)  # torch would unpack it
    with pytest.raises(ValueError, match="unpacks"):
        _torch_file.read(path)


def test_a_tensor_with_a_crafted_size_is_not_read_beyond_the_file(path):
    """24 bytes of it are stored."""
    rewrite(path, lambda name, content: content.replace(b"K\x06", b"J\x00\x00\x10\x00"))
    found = _torch_file.read(path)["a"]
    assert found.untyped_storage().nbytes() <= path.stat().st_size
    rewrite(path, lambda name, content: content.replace(b"K\x02K\x03\x86", b"J\x00\x00\x10\x00K\x03\x86"))
    with pytest.raises(ValueError, match="damaged"):
        _torch_file.read(path)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: torch.ones(3, 2), True),
        (lambda: torch.ones(3, 2).T, True),
        (lambda: torch.ones(0), True),
        (lambda: torch.ones(1).expand(10**12), False),
        (lambda: torch.ones(3).to_sparse(), False),
        (lambda: torch.ones(3, device="meta"), False),
    ],
    ids=["contiguous", "transposed", "empty", "expanded", "sparse", "meta"],
)
def test_a_plain_tensor_has_a_stored_value_for_each_element(make, plain):
    assert _torch_file.is_plain(make()) == plain


# -- atomic writes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unique", [False, True])
def test_a_failed_write_leaves_the_earlier_file(tmp_path, unique):
    path = tmp_path / "x.json"
    _atomic.write_json(path, {"a": 1})

    def fail():
        with _atomic.replacing(path, unique=unique) as temporary:
            assert temporary.suffix == path.suffix
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "notes.tmp").write_text("of the user")
    names = []
    for _ in range(2):
        with _atomic.replacing(tmp_path / "x.parquet", unique=True) as temporary:
            temporary.write_text("x")
            (tmp_path / "copy").write_text("x")
            names.append(temporary)
    assert len(set(names)) == 2
    names[0].write_text("left behind")
    _atomic.remove_temporary(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.tmp", "x.parquet", "copy"}


def test_a_symbolic_link_is_written_through(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "here" / "x.json", tmp_path / "there" / "scores"
    link.symlink_to("../there/scores")  # which does not exist yet
    for value in (1, 2):
        _atomic.write_json(link, value)
        assert link.is_symlink()
        assert json.loads(target.read_text()) == value
    with _atomic.replacing(link) as temporary:
        assert (temporary.parent, temporary.suffix) == (target.parent, ".json")
        temporary.write_text("3")
    assert list(target.parent.iterdir()) == [target]


def test_errors_of_the_system_name_the_file_and_a_remedy(tmp_path):
    with pytest.raises(OSError, match=r"x\.json.*No such file or directory"):
        _atomic.write_json(tmp_path / "missing" / "x.json", {})
