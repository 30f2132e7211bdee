"""Files of torch: tensors and plain values come back, and nothing else is opened."""

from __future__ import annotations

import pickle
import zipfile

import pytest
import torch

from alphastomics._io import _torch as _torch_file


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def path(tmp_path):
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": [1, "two", None]}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def rewritten(path, change=lambda name, content: content, compression=zipfile.ZIP_STORED):
    """The archive with the same parts, some of them changed."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in parts.items():
            new.writestr(name, change(name, content))


def test_tensors_and_plain_values_come_back(path):
    found = _torch_file.read(path)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3))
    assert found["b"] == [1, "two", None]
    del found  # which lies in the file
    rewritten(path)
    assert torch.equal(_torch_file.read(path)["a"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("form", ["archive", "old", "bare"])
def test_a_pickle_is_not_opened(tmp_path, form):
    trap, path = Trap(tmp_path / "sprung"), tmp_path / "x.pt"
    if form == "bare":
        path.write_bytes(pickle.dumps(trap))
    else:
        torch.save({"a": trap}, path, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(
        ValueError, match="more than tensors and plain values, which could run code and is never opened"
    ):
        _torch_file.read(path)
    assert not (tmp_path / "sprung").exists()
    (pickle.loads(path.read_bytes()) if form == "bare" else torch.load(path, weights_only=False)["a"]).close()
    assert (tmp_path / "sprung").exists(), "the trap does not work"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_says_so(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match="it is cut off"):
        _torch_file.read(path)


def test_what_is_compressed_is_refused(path):
    rewritten(path, compression=zipfile.ZIP_DEFLATED)
    torch.load(path, weights_only=True)  # torch would unpack it
    with pytest.raises(ValueError, match="it is compressed, which torch.save does not do"):
        _torch_file.read(path)


def test_a_tensor_that_says_that_it_is_larger_is_not_read_beyond_the_file(path):
    """24 bytes are stored of it."""
    rewritten(path, lambda name, content: content.replace(b"K\x06", b"J\x00\x00\x10\x00"))
    found = _torch_file.read(path)["a"]
    assert found.untyped_storage().nbytes() <= path.stat().st_size
    rewritten(path, lambda name, content: content.replace(b"K\x02K\x03\x86", b"J\x00\x00\x10\x00K\x03\x86"))
    with pytest.raises(ValueError, match="it is damaged"):
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
    ids=["whole", "transposed", "empty", "expanded", "sparse", "meta"],
)
def test_a_tensor_of_which_less_is_stored_is_not_plain(make, plain):
    assert _torch_file.is_plain(make()) == plain


def holding(values):
    """An archive whose values are made by these opcodes."""

    def write(path):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", b"\x80\x02" + values + b".")
            archive.writestr("x/version", "3\n")
        return path

    return write


EMPTY, PUT, GET = b")", b"q\x00", b"h\x00"
PAIRS = EMPTY + 40 * (PUT + GET + b"\x86")  # a tuple of twice the same tuple of twice the same …
LISTS = b"]" + 40 * (PUT + b"](" + 2 * GET + b"e")
LATE = b"]" + PUT + 40 * (b"](" + 2 * GET + b"e" + PUT)


@pytest.mark.parametrize("values", [b"}" + PAIRS + b"K\x01s", LISTS, LATE, b"](" + PAIRS + b"K\x01e"])
def test_values_that_hold_others_again_and_again_are_refused(tmp_path, values):
    """The hash of such a tuple, the key of a dict, would take hours."""
    path = holding(values)(tmp_path / "x.pt")
    with pytest.raises(ValueError, match="hold others so often"):
        _torch_file.read(path)


def test_a_value_that_is_held_a_few_times_is_read(tmp_path):
    path = holding(b"}" + EMPTY + 10 * (PUT + GET + b"\x86") + b"K\x01s")(tmp_path / "x.pt")
    (key,) = _torch_file.read(path)
    for _ in range(10):
        assert key[0] is key[1]
        key = key[0]
    assert key == ()


@pytest.mark.parametrize(("times", "expected"), [(1, 2 + 3 + 4), (2, 2 + 6 + 7), (3, 2 + 9 + 10)])
def test_parts_are_counted_as_often_as_they_are_held(times, expected):
    """Two numbers go into a list, that into another one so many times, and this is the result."""
    assert _torch_file._count_parts(pickle.dumps(times * [[1.5, 2.5]], protocol=2)) == expected
