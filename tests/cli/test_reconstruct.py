"""The command ``reconstruct`` against the function."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics import tl
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from files import error_line

if TYPE_CHECKING:
    from pathlib import Path

KEY = "spatial_reconstructed"
ARGUMENTS = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_size": 64, "max_epochs": 2, "accelerator": "cpu"}
FLAGS = [token for name, value in ARGUMENTS.items() for token in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``query.h5ad``, without positions, ``ref.h5ad``, and both in ``both.h5ad``."""
    monkeypatch.chdir(tmp_path)
    tissue = synthetic_tissue(n_cells=90, n_genes=20, random_state=0)
    is_query = (tissue.obs["slice_id"] == "slice_2").to_numpy()
    tissue[~is_query].write_h5ad("ref.h5ad")
    query = tissue[is_query].copy()
    del query.obsm["spatial"]
    query.write_h5ad("query.h5ad")
    tissue.obsm["spatial"][is_query] = np.nan
    tissue.write_h5ad("both.h5ad")
    return tmp_path


def test_the_command_places_cells_as_the_function_does(here, capsys):
    tokens = ["reconstruct", "query.h5ad", "--reference", "ref.h5ad", "--n-samples", "2", "--seed", "3", *FLAGS]
    assert main(tokens) == 0
    written = ad.read_h5ad("reconstructed.h5ad")
    expected = ad.read_h5ad("query.h5ad")
    tl.reconstruct(expected, ad.read_h5ad("ref.h5ad"), n_samples=2, random_state=3, devices=1, **ARGUMENTS)
    assert written.obsm[KEY].tobytes() == expected.obsm[KEY].tobytes()
    assert list(written.obs) == list(expected.obs)
    assert 'their positions are in obsm["spatial_reconstructed"]' in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == "both.h5ad query.h5ad reconstructed.h5ad ref.h5ad".split()


def test_names_of_cells_that_may_be_missing_are_written(here):
    query = ad.read_h5ad("query.h5ad")
    query.obs_names = query.obs_names.astype("string")  # as anndata 0.13 stores them
    query.obs["note"] = pd.array(["a"] * (query.n_obs - 1) + [None], dtype="string")
    with ad.settings.override(allow_write_nullable_strings=True):
        query.write_h5ad("query.h5ad")
    assert main(["reconstruct", "query.h5ad", "ref.h5ad", "--no-adapt", *FLAGS]) == 0
    assert list(ad.read_h5ad("reconstructed.h5ad").obs_names) == list(query.obs_names)


def test_a_model_is_kept_and_used_again(here):
    first = ["reconstruct", "query.h5ad", "--reference", "ref.h5ad", "--no-adapt", "--model-dir", "model", *FLAGS]
    assert main([*first, "--output", "first.h5ad"]) == 0
    again = ["reconstruct", "query.h5ad", "--checkpoint", "model", "--accelerator", "cpu", "--output", "again.h5ad"]
    assert main(again) == 0
    sampled = ["sample", "--input-data", "query.h5ad", "--checkpoint", "model", "--accelerator", "cpu"]
    assert main([*sampled, "--output", "sampled.h5ad"]) == 0
    places = [ad.read_h5ad(f"{name}.h5ad").obsm[KEY] for name in ("first", "again", "sampled")]
    np.testing.assert_array_equal(places[0], places[1])
    np.testing.assert_array_equal(places[0], places[2])


def test_cells_without_a_position_are_placed_among_the_others(here):
    assert main(["reconstruct", "both.h5ad", *FLAGS]) == 0
    written, before = ad.read_h5ad("reconstructed.h5ad"), ad.read_h5ad("both.h5ad")
    unknown = np.isnan(before.obsm["spatial"]).any(1)
    np.testing.assert_array_equal(written.obs[KEY + "_placed"], unknown)
    np.testing.assert_array_equal(written.obsm[KEY][~unknown], before.obsm["spatial"][~unknown])
    assert np.isfinite(written.obsm[KEY]).all()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--reference", "ref.h5ad", "--checkpoint", "."], "--reference and --checkpoint exclude each other"),
        (
            ["--checkpoint", ".", "--max-time", "5", "--slice-key", "z"],
            "--max-time, --slice-key cannot change a trained",
        ),
        (["--reference", "ref.h5ad", "--output", "placed.csv"], "placed.csv must end in"),
        (["--reference", "ref.h5ad", "--model-dir", "."], "pass another folder to --model-dir"),
        (["--reference", "ref.h5ad", "--independent", "--refine"], "refine=True has no effect"),
        (["--reference", "ref.h5ad", "--position-key", "xy"], r'obsm\["xy"\] is missing'),
        ([], r'obsm\["spatial"\] is missing; pass --position-key …, or --reference … or --checkpoint …'),
    ],
)
def test_wrong_options_are_errors_before_any_training(here, capsys, tokens, message):
    assert main(["reconstruct", "query.h5ad", *tokens]) == 1
    assert re.search(message, error_line(capsys))
    assert not (here / "reconstructed.h5ad").exists()


def test_an_existing_file_of_the_default_name_is_kept(here, capsys):
    (here / "reconstructed.h5ad").write_bytes(b"mine")
    assert main(["reconstruct", "query.h5ad", "--reference", "ref.h5ad"]) == 1
    assert "pass another file to --output" in error_line(capsys)
    assert (here / "reconstructed.h5ad").read_bytes() == b"mine"
