"""Files of anndata: links to other files and sizes beyond the memory raise before reading."""

from __future__ import annotations

import re

import h5py
import numpy as np
import pytest

from alphastomics.data._h5ad import read_h5ad
from alphastomics.data.preprocess import Stage1Options, stage1


@pytest.fixture
def path(tissue, tmp_path):
    (tmp_path / "raw").mkdir()
    path = tmp_path / "raw" / "cells.h5ad"
    tissue.write_h5ad(path)
    return path


def external(file, other):
    with h5py.File(other, "w") as secret:
        secret["x"] = np.ones(360)
    file["obs/secret"] = h5py.ExternalLink(str(other), "/x")


def external_group(file, other):
    with h5py.File(other, "w") as secret:
        secret["x/y"] = np.ones(360)
    file["uns/secret"] = h5py.ExternalLink(str(other), "/x")


def through_a_link(file, other):
    external(file, other)
    file.move("obs/secret", "uns/hidden")
    file["obs/secret"] = h5py.SoftLink("/uns/hidden")


def storage(file, other):
    other.write_bytes(b"secrets!" * 360)
    file.create_dataset("obs/secret", (360,), "f8", external=[(str(other), 0, 8 * 360)])


def virtual(file, other):
    with h5py.File(other, "w") as secret:
        secret["x"] = np.ones(360)
    layout = h5py.VirtualLayout((360,), "f8")
    layout[:] = h5py.VirtualSource(str(other), "x", (360,))
    file.create_virtual_dataset("obs/secret", layout)


def hollow(file, other):
    file.create_dataset("obs/secret", (10**9,), "f8", chunks=(1024,))


def enormous(file, other):
    """A sparse file: the stated size without stored data."""
    space, properties = h5py.h5s.create_simple((10**8,)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    h5py.h5d.create(file["obs"].id, b"secret", h5py.h5t.NATIVE_DOUBLE, space, properties)


CRAFTED = {
    external: "obs/secret",
    external_group: "uns/secret",
    through_a_link: "uns/hidden",
    storage: "obs/secret",
    virtual: "obs/secret",
    hollow: r"obs/secret.* 7\.5 GiB",
    enormous: " 1 GiB.* 0 GiB",
}


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch):
    """256 MiB."""
    monkeypatch.setattr("os.sysconf", lambda name: 2**14)


@pytest.mark.parametrize(("change", "message"), CRAFTED.items(), ids=[change.__name__ for change in CRAFTED])
def test_links_to_other_files_and_excessive_sizes_are_errors(path, tmp_path, change, message):
    with h5py.File(path, "r+") as file:
        change(file, tmp_path / "other.h5")
    with pytest.raises(ValueError, match=rf"cells\.h5ad.*{message}"):
        read_h5ad(path)
    with pytest.raises(ValueError, match=rf"cells\.h5ad.*{message}"):
        stage1(path.parent, tmp_path / "out", Stage1Options())
    assert not list((tmp_path / "out").glob("*.arrow"))


def test_links_within_the_file_are_followed_and_loops_end(path):
    with h5py.File(path, "r+") as file:
        file["uns/same"] = file["obs/cell_type"]
        file["obsm/again"] = h5py.SoftLink("/obsm/spatial")
    found = read_h5ad(path)
    np.testing.assert_array_equal(found.obsm["again"], found.obsm["spatial"])
    with h5py.File(path, "r+") as file:
        file["uns/loop"] = file["uns"]
    with pytest.raises(ValueError, match=r"cells\.h5ad") as caught:
        read_h5ad(path)
    assert "\n" not in str(caught.value)


def test_chunked_matrices_may_exceed_memory(path, tmp_path):
    with h5py.File(path, "r+") as file:
        enormous(file, None)
        file.move("obs/secret", "layers/secret")
    assert stage1(path.parent, tmp_path / "out", Stage1Options()) == 3


def test_an_inconsistent_sparse_matrix_is_an_error(path):
    with h5py.File(path, "r+") as file:
        file["X/indices"][5] = 10**6
    with pytest.raises(ValueError, match=r"cells\.h5ad.*ind"):
        read_h5ad(path)


@pytest.mark.parametrize("content", [b"", b"no", b"\x89HDF\r\n\x1a\n" + bytes(100)])
def test_other_formats_are_an_error(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_h5ad(path)
