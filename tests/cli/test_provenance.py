"""``alphastomics provenance``: how the results in a file were made."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

from alphastomics._provenance import versions
from alphastomics.main import main
from alphastomics.tl import provenance


def record(**changes):
    return {"function": "sample", "params": {"n_steps": 3}, "versions": versions()} | changes


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "placed.h5ad"
    uns = {"alphastomics": record(), "placed": record(function="reconstruct"), "colors": ["red"]}
    ad.AnnData(np.zeros((3, 2)), uns=uns).write_h5ad(path)
    return path


def test_command_prints_the_text_of_the_function(file, capsys):
    assert main(["provenance", "--input-data", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{provenance(ad.read_h5ad(file))}\n"
    assert "alphastomics, by sample" in printed
    assert main(["provenance", "--input-data", str(file), "--key", "placed"]) == 0
    assert capsys.readouterr().out.startswith("placed, by reconstruct\n")


@pytest.mark.parametrize(
    ("content", "tokens", "message"),
    [
        ({"placed": record()}, ["--key", "other"], "found: 'placed'); pass another --key"),
        ({}, [], "uns has no provenance record"),
        (b"text", [], "x.h5ad cannot be read as .h5ad"),
        (b"\x89HDF\r\n\x1a\n", [], "x.h5ad cannot be read as .h5ad"),
    ],
)
def test_files_without_provenance_give_a_short_error(content, tokens, message, tmp_path, capsys):
    path = tmp_path / "x.h5ad"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        ad.AnnData(np.zeros((1, 1)), uns=content).write_h5ad(path)
    assert main(["provenance", "--input-data", str(path), *tokens]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alphastomics: ")
    assert message in line


def test_differing_versions_are_reported(tmp_path):
    path = tmp_path / "x.h5ad"
    ad.AnnData(np.zeros((1, 1)), uns={"placed": record(versions=versions() | {"torch": "1.0"})}).write_h5ad(path)
    with pytest.warns(UserWarning, match=r"torch 1\.0"):
        assert main(["provenance", "--input-data", str(path)]) == 0
