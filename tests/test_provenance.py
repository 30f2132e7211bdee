"""Arguments and versions as plain values: whatever is given, and without a place or a name of anybody."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphastomics._provenance import differing, plain, serialize_arguments, storable, system, versions
from alphastomics.data import Augmentation

PLACES = ["/home/me/x.ckpt", "~/x", "C:\\Users\\me", "\\\\server\\me", Path("x"), Path("/home/me")]


def test_versions_are_those_that_are_installed():
    found = versions()
    assert found.pop("python") == platform.python_version()
    assert found == {
        name: version(name) for name in ("alphastomics", "torch", "lightning", "scvi-tools", "anndata", "numpy")
    }


def test_the_system_does_not_name_the_machine():
    assert system() == f"{platform.system()} {platform.machine()}"
    assert platform.node() not in system()


def test_other_versions_are_found():
    here = versions()
    assert differing(here) == {}
    assert differing(here | {"torch": "0.1", "python": "3.0", "no-such-package": "1"}) == {
        "torch": ("0.1", here["torch"]),
        "python": ("3.0", here["python"]),
        "no-such-package": ("1", None),
    }


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_no_place_is_told(place):
    assert serialize_arguments({"a": place, "b": [place, 1], "c": {"d": place, "e": 2}}) == {"b": [1], "c": {"e": 2}}


def test_what_says_where_or_holds_objects_is_not_told():
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
    found = plain(values)
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
def test_what_is_stored_survives_a_file(tmp_path_factory, arguments):
    path = tmp_path_factory.mktemp("uns") / "x.h5ad"
    stored = storable(serialize_arguments(arguments))
    ad.AnnData(np.zeros((1, 1)), uns={"record": stored}).write_h5ad(path)
    assert ad.read_h5ad(path).uns["record"] == stored
