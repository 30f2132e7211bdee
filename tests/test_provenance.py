"""Provenance: arguments and versions as plain values without paths and names, and how they are displayed."""

from __future__ import annotations

import json
import platform
import warnings
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from hypothesis import given, strategies as st

from alphastomics._provenance import differing, serialize, serialize_arguments, storable, system, versions
from alphastomics.data import Augmentation
from alphastomics.tl import Provenance, provenance

PATHS = ["/home/me/x.ckpt", "~/x", "C:\\Users\\me", "\\\\server\\me", Path("x"), Path("/home/me")]


def test_versions_match_the_installed_packages():
    found = versions()
    assert found.pop("python") == platform.python_version()
    assert found == {
        name: version(name) for name in ("alphastomics", "torch", "lightning", "scvi-tools", "anndata", "numpy")
    }


def test_the_system_does_not_include_the_host_name():
    assert system() == f"{platform.system()} {platform.machine()}"
    assert platform.node() not in system()


def test_differing_versions_are_found():
    here = versions()
    assert differing(here) == {}
    assert differing(here | {"torch": "0.1", "python": "3.0", "no-such-package": "1"}) == {
        "torch": ("0.1", here["torch"]),
        "python": ("3.0", here["python"]),
        "no-such-package": ("1", None),
    }


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_paths_are_omitted(path):
    assert serialize_arguments({"a": path, "b": [path, 1], "c": {"d": path, "e": 2}}) == {"b": [1], "c": {"e": 2}}


def test_arguments_that_are_paths_data_or_code_are_left_out():
    names = ("adata", "callbacks", "checkpoint", "ckpt_path", "default_root_dir", "logger", "model", "resume")
    assert serialize_arguments(dict.fromkeys(names, "x") | {"max_epochs": 3, "devices": None}) == {"max_epochs": 3}


def test_values_become_plain():
    @dataclass
    class Options:
        size: int
        folder: Path

    values = {
        "numpy": np.float64(0.5),
        "augmentation": Augmentation(thinning=0.5),
        "options": Options(3, Path("/x")),
        "time": timedelta(minutes=2),
        "several": (1, np.int64(2), None),
        "object": object(),
        "flag": np.bool_(True),
    }
    found = serialize(values)
    assert found["augmentation"]["thinning"] == 0.5
    assert {name: value for name, value in found.items() if name != "augmentation"} == {
        "numpy": 0.5, "options": {"size": 3}, "time": 120.0, "several": [1, 2, None], "object": "object", "flag": True,
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found


leaves: Any = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=9)
)
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(names, values, max_size=4))
def test_stored_values_survive_a_file(tmp_path_factory, arguments):
    path = tmp_path_factory.mktemp("uns") / "x.h5ad"
    stored = storable(serialize_arguments(arguments))
    ad.AnnData(np.zeros((1, 1)), uns={"record": stored}).write_h5ad(path)
    assert ad.read_h5ad(path).uns["record"] == stored


# -- tl.provenance -----------------------------------------------------------------------------------------------------


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


def test_text_has_every_part_in_lines_of_100_characters():
    text = repr(provenance(cells(placed=record())))
    first, *lines = text.splitlines()
    assert first == "placed, by reconstruct"
    assert max(map(len, lines)) <= 100
    joined = " ".join(" ".join(lines).split())
    for part in (
        "parameters augmentation.thinning=0.5, n_samples=1, random_state=3",
        "model d_model=64, mode=any, weights=0123456789abcdef",
        "training 40 steps, 4 epochs, 300 cells, 20 genes, 2 slices, seed 7, precision 32-true, device cpu",
        "arguments max_epochs=4",
        "plan lr=0.001",
        "machine cpu, Linux x86_64",
        f"torch {versions()['torch']}",
    ):
        assert part in joined
    assert "differing" not in text


def test_all_records_or_the_one_of_the_key():
    adata = cells(a=record(), b=record(function="sample"), other={"params": 3}, colors=["r"])
    found = provenance(adata)
    assert isinstance(found, Provenance)
    assert list(found) == ["a", "b"]
    assert repr(found).count("by ") == 2
    assert found["b"]["params"]["random_state"] == 3
    assert dict(provenance(adata, "b")) == {"b": adata.uns["b"]}
    with pytest.raises(KeyError, match=r"uns\[\"c\"\].*found: .*'a.*'b.*key="):
        provenance(adata, "c")
    with pytest.raises(KeyError, match="uns"):
        provenance(cells(other={"params": 3}))


@pytest.mark.parametrize("where", ["result", "training"])
def test_differing_versions_give_a_warning(where):
    old = versions() | {"torch": "2.0.0", "numpy": "1.0"}
    changed = record(versions=old) if where == "result" else record(training={"versions": old})
    with pytest.warns(UserWarning, match=r"torch 2\.0\.0.*numpy 1\.0"):
        found = provenance(cells(placed=changed))
    assert found.differing == {name: (old[name], versions()[name]) for name in ("torch", "numpy")}
    assert "differing" in repr(found)


def test_equal_versions_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert provenance(cells(placed=record())).differing == {}


def test_the_table_escapes_html():
    evil = "<script>alert(1)</script>"
    adata = cells(**{evil: record(function=evil, params={evil: evil}, machine={"device": evil})})
    shown = provenance(adata)._repr_html_()
    assert shown.startswith("<table>")
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "seed 7" in shown


def test_the_text_has_no_control_characters():
    text = repr(provenance(cells(placed=record(params={"x": "\x1b[2J\x07\nsudo"}))))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\nsudo" not in text


@pytest.mark.parametrize("part", ["model", "training", "machine", "function"])
def test_missing_and_malformed_parts_are_left_out(part):
    for value in (None, 3, "text", ["a"], np.zeros(3)):
        found = provenance(cells(placed=record(**{part: value})))
        assert "n_samples=1" in repr(found)
        assert "n_samples=1" in found._repr_html_()
    old = {"params": {"n_samples": 2}, "versions": versions()}  # an earlier version
    assert "n_samples=2" in repr(provenance(cells(placed=old)))


def test_a_record_from_a_file_prints_the_same(tmp_path):
    adata = cells(placed=record())
    adata.write_h5ad(tmp_path / "x.h5ad")
    assert repr(provenance(ad.read_h5ad(tmp_path / "x.h5ad"))) == repr(provenance(adata))
