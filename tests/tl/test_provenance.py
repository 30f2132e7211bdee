"""What is told of how a result was made."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pytest

from alphastomics._provenance import versions
from alphastomics.tl import Provenance, provenance


def record(**changes):
    return {
        "function": "reconstruct",
        "params": {"n_samples": 1, "random_state": 3, "augmentation": {"thinning": 0.5}},
        "model": {"mode": "any", "d_model": 64, "weights": "0123456789abcdef"},
        "training": {
            "seed": 7, "n_steps": 40, "n_epochs": 4, "n_cells": 300, "n_genes": 20, "n_slices": 2, "precision": "32-true",
            "device": "cpu", "system": "Linux x86_64", "arguments": {"max_epochs": 4}, "plan": {"lr": 0.001},
            "versions": versions(),
        },
        "machine": {"device": "cpu", "system": "Linux x86_64"},
        "versions": versions(),
    } | changes  # fmt: skip


def cells(**uns):
    return ad.AnnData(np.zeros((2, 1)), uns=uns)


def test_everything_is_told_in_lines_that_a_terminal_holds():
    text = repr(provenance(cells(placed=record())))
    first, *lines = text.splitlines()
    assert first == "placed, by reconstruct"
    assert max(map(len, lines)) <= 100
    joined = " ".join(" ".join(lines).split())
    for part in (
        "parameters augmentation.thinning=0.5, n_samples=1, random_state=3",
        "model d_model=64, mode=any, weights=0123456789abcdef",
        "trained 40 steps, 4 epochs, 300 cells, 20 genes, 2 slices, seed 7, precision 32-true, device cpu",
        "arguments max_epochs=4",
        "plan lr=0.001",
        "made on cpu, Linux x86_64",
        f"torch {versions()['torch']}",
    ):
        assert part in joined
    assert "other here" not in text


def test_all_results_are_told_or_the_one_that_is_asked_for():
    adata = cells(a=record(), b=record(function="sample"), other={"params": 3}, colors=["r"])
    found = provenance(adata)
    assert isinstance(found, Provenance)
    assert list(found) == ["a", "b"]
    assert repr(found).count("by ") == 2
    assert found["b"]["params"]["random_state"] == 3
    assert dict(provenance(adata, "b")) == {"b": adata.uns["b"]}
    with pytest.raises(KeyError, match=r"uns\[\"c\"\] does not tell.*found: .*a.*b.*key="):
        provenance(adata, "c")
    with pytest.raises(KeyError, match="uns tells of nothing"):
        provenance(cells(other={"params": 3}))


@pytest.mark.parametrize("where", ["result", "training"])
def test_other_versions_are_warned_of(where):
    old = versions() | {"torch": "2.0.0", "numpy": "1.0"}
    changed = record(versions=old) if where == "result" else record(training={"versions": old})
    with pytest.warns(UserWarning, match=r"torch 2\.0\.0 \(.* here\).*numpy 1\.0 \(.* here\)"):
        found = provenance(cells(placed=changed))
    assert found.differing == {name: (old[name], versions()[name]) for name in ("torch", "numpy")}
    assert "other here" in repr(found)


def test_versions_of_here_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert provenance(cells(placed=record())).differing == {}


def test_a_notebook_shows_a_table_in_which_nothing_runs():
    evil = "<script>alert(1)</script>"
    adata = cells(**{evil: record(function=evil, params={evil: evil}, machine={"device": evil})})
    shown = provenance(adata)._repr_html_()
    assert shown.startswith("<table>")
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "seed 7" in shown


def test_a_terminal_obeys_nothing_of_what_a_file_says():
    text = repr(provenance(cells(placed=record(params={"x": "\x1b[2J\x07\nsudo"}))))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\nsudo" not in text


@pytest.mark.parametrize("part", ["model", "training", "machine", "function"])
def test_parts_that_are_missing_or_something_else_are_left_out(part):
    for value in (None, 3, "text", ["a"], np.zeros(3)):
        found = provenance(cells(placed=record(**{part: value})))
        assert "n_samples=1" in repr(found)
        assert "n_samples=1" in found._repr_html_()
    old = {"params": {"n_samples": 2}, "versions": versions()}  # of an earlier version of this package
    assert "n_samples=2" in repr(provenance(cells(placed=old)))


def test_what_a_file_brings_is_told_the_same(tmp_path):
    adata = cells(placed=record())
    adata.write_h5ad(tmp_path / "x.h5ad")
    assert repr(provenance(ad.read_h5ad(tmp_path / "x.h5ad"))) == repr(provenance(adata))
