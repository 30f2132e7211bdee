"""Positions are read from the key that is named, ``"spatial"`` by default, and never from an embedding in their place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from alphastomics import tl
from alphastomics.data import AnnDataSource, fit_schema
from alphastomics.main import main
from alphastomics.model import AlphaSTomics

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

MISSING = r'obsm\["spatial"\]'


@pytest.fixture
def embedded(tissue: AnnData) -> AnnData:
    """Cells whose only coordinates are those of an embedding, which could pass for positions."""
    cells = tissue.copy()
    cells.obsm = {"X_umap": tissue.obsm["spatial"]}
    return cells


@pytest.fixture
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AlphaSTomics, "train", lambda *_, **__: pytest.fail("training was started"))


def test_setup_anndata_rejects_an_embedding_as_position(embedded: AnnData) -> None:
    for read in (fit_schema, AlphaSTomics.setup_anndata):
        with pytest.raises(KeyError, match=rf"{MISSING}.*X_umap.*position_key="):
            read(embedded)
    assert list(embedded.uns) == ["source"]


def test_sample_rejects_an_embedding_as_position(embedded: AnnData, tissue: AnnData) -> None:
    schema = fit_schema(tissue)
    with pytest.raises(KeyError, match=rf"{MISSING}.*X_umap.*position_key="):
        AnnDataSource(embedded, schema, positions=True)
    assert all(piece.position is None for piece in AnnDataSource(embedded, schema, positions=False).slices)


@pytest.mark.usefixtures("_no_training")
def test_reconstruct_rejects_an_embedding_as_position(embedded: AnnData, tissue: AnnData) -> None:
    with pytest.raises(KeyError, match=rf"{MISSING}.*position_key="):
        tl.reconstruct(tissue, reference=embedded)
    embedded.obsm["X_umap"][:9] = np.nan  # NaN marks cells to place, but only among positions
    with pytest.raises(KeyError, match=rf"{MISSING}.*position_key="):
        tl.reconstruct(embedded)
    assert list(embedded.obsm) == ["X_umap"]


@pytest.mark.usefixtures("_no_training")
def test_the_command_line_rejects_an_embedding_as_position(
    embedded: AnnData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded.write_h5ad(tmp_path / "cells.h5ad")
    tokens = ["train", "--input-data", str(tmp_path / "cells.h5ad"), "--output-dir", str(tmp_path / "model")]
    assert main(tokens) == 1
    assert re.search(rf"{MISSING}.*'X_umap'.*--position-key", capsys.readouterr().err)
    assert not (tmp_path / "model").exists()


def test_scores_reject_an_embedding_as_truth(embedded: AnnData) -> None:
    embedded.obsm["spatial_reconstructed"] = embedded.obsm["X_umap"]
    for score, argument in ((tl.evaluate, "truth"), (tl.position_scores, "spatial_key"), (tl.morans_i, "spatial_key")):
        with pytest.raises(KeyError, match=rf"{MISSING}.*{argument}="):
            score(embedded)


def test_other_keys_of_obsm_have_no_effect(tissue: AnnData) -> None:
    schema = fit_schema(tissue)
    expected = AnnDataSource(tissue, schema, positions=True).slices
    tissue.obsm["X_umap"] = np.random.default_rng(0).normal(size=(tissue.n_obs, 2))
    tissue.obsm = {key: tissue.obsm[key] for key in ("X_umap", "spatial")}  # whichever comes first
    assert fit_schema(tissue) == schema
    for found, piece in zip(AnnDataSource(tissue, schema, positions=True).slices, expected, strict=True):
        np.testing.assert_array_equal(found.position, piece.position)
    assert fit_schema(tissue, position_key="X_umap").scale != schema.scale  # who names it gets it
