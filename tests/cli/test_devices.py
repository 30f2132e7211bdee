"""A missing or invalid device: a short error, and no output."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from alphastomics.train import _lightning_compat
from alphastomics.train.distributed.devices import count_devices, device_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
TINY = {"mode": "expr_to_pos", "d_model": 16, "n_layers": 1, "n_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``cells.h5ad``, and ``model`` of them."""
    folder = tmp_path_factory.mktemp("devices")
    tissue = synthetic_tissue(n_slices=2, n_cells=60, n_genes=20, random_state=0)
    tissue.write_h5ad(folder / "cells.h5ad")
    AlphaSTomics.setup_anndata(tissue, slice_key="slice_id")
    AlphaSTomics(tissue, **TINY).save(folder / "model")
    return folder


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["train", "--input-data", "CELLS", "--gpus", "1"], "--gpus 1 .*omit --gpus"),
        (
            ["train", "--input-data", "CELLS", "--accelerator", "cuda"],
            r"no device for accelerator='cuda' \(.*omit --accelerator …",
        ),
        (["train", "--input-data", "CELLS", "--devices", "0"], r"no device for devices=0 \(.*omit --devices …"),
        (
            ["train", "--input-data", "CELLS", "--accelerator", "cpu", "--devices", "foo"],
            r"accelerator='cpu' and devices='foo' \(.*omit --accelerator … and --devices …",
        ),
        (
            [
                "sample",
                "--checkpoint",
                "MODEL",
                "--input-data",
                "CELLS",
                "--output",
                "out.h5ad",
                "--accelerator",
                "gpu",
            ],
            "accelerator='gpu'",
        ),
        (["demo", "--output-dir", "out", "--gpus", "1"], "--gpus"),
        (["compare", "--input-data", "CELLS", "--output-dir", "out", "--accelerator", "gpu"], "accelerator='gpu'"),
    ],
)
def test_a_missing_device_gives_a_short_error(folder, tmp_path, tokens, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"CELLS": str(folder / "cells.h5ad"), "MODEL": str(folder / "model")}
    assert main([places.get(token, token) for token in tokens]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alphastomics: ")
    assert re.search(message, line)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_device_raises_in_python(folder):
    with pytest.raises(ValueError, match="accelerator='gpu'"):
        AlphaSTomics.load(folder / "model", adata=False, accelerator="gpu")
    assert device_of("cpu", 2) == torch.device("cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_has_its_own_gpu(monkeypatch, rank):
    gpus = [torch.device("cuda", 3), torch.device("cuda", 5)]
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(_lightning_compat, "parse_device_args", lambda **_: ("gpu", [3, 5], gpus[0]))
    monkeypatch.setattr(_lightning_compat, "_AcceleratorConnector", lambda **_: SimpleNamespace(_parallel_devices=gpus))
    assert device_of("gpu", [3, 5]) == gpus[rank]
    assert count_devices("gpu", [3, 5]) == 2
