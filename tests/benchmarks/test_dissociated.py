"""Scores of placements by held-out genes, on a tissue whose expression determines the position."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from benchmarks.peers._environment import PEER_DIR

from benchmarks import _dissociated, dissociated

N_CELLS, N_GENES = 300, 12


def smooth_tissue(seed: int) -> ad.AnnData:
    """Counts that follow smooth functions of the position."""
    rng = np.random.default_rng(seed)
    position = rng.uniform(size=(N_CELLS, 2))
    phase = np.arange(N_GENES) / N_GENES * 2 * np.pi
    rate = 20 * (1 + np.sin(position @ np.stack([3 * np.cos(phase), 3 * np.sin(phase)]) + phase))
    adata = ad.AnnData(
        rng.poisson(rate).astype(np.float32),
        obs=pd.DataFrame({"slice_id": "a"}, index=[f"c{i}" for i in range(N_CELLS)]),
        var=pd.DataFrame(index=[f"g{i}" for i in range(N_GENES)]),
    )
    adata.obsm["spatial"] = position
    return adata


@pytest.fixture(scope="module")
def folds() -> list[_dissociated.Fold]:
    tissue, other = smooth_tissue(0), smooth_tissue(1)
    query = ad.AnnData(other.X, obs=other.obs[[]], var=other.var)
    return _dissociated.make_folds("smooth", tissue, query, other.obsm["spatial"])


def test_every_gene_is_held_out_once_and_not_read(folds) -> None:
    assert len(folds) == _dissociated.N_FOLDS
    genes = {f"g{i}" for i in range(N_GENES)}
    held_out = [genes - set(fold.reference.var_names) for fold in folds]
    assert sorted(gene for group in held_out for gene in group) == sorted(genes)
    for fold, group in zip(folds, held_out, strict=True):
        assert list(fold.reference.var_names) == list(fold.query.var_names)
        assert fold.shown.shape[1] == fold.expressed.shape[1] == len(group)
        assert "spatial" not in fold.query.obsm


def test_true_places_are_better_than_correlation_and_chance(folds) -> None:
    fold = folds[0]
    true = fold.judge_places(fold.truth)
    assert true["error"] == 0
    best = fold.judge_places(_dissociated.pearson_argmax(fold, seed=0))
    chance = fold.judge_places(_dissociated.chance(fold, seed=0))
    assert true["auc"] > best["auc"] > 0.7
    assert chance["auc"] == pytest.approx(0.5, abs=0.06)
    assert chance["error"] > 3 * best["error"]
    assert fold.judge_values(_dissociated.direct_transfer(fold, seed=0))["auc"] > best["auc"] - 0.05


def test_a_smoothed_correlation_shows_hidden_genes_better(folds) -> None:
    best, smoothed = (
        np.mean([fold.judge_places(place(fold, seed=0))["auc"] for fold in folds])
        for place in (_dissociated.pearson_argmax, _dissociated.pearson_mode)
    )
    assert smoothed > best


def test_rows_of_equal_similarity_are_not_chosen_by_their_order(folds) -> None:
    fold = folds[0]
    places = _dissociated._best_position(fold, np.zeros((2, N_CELLS)), 0)
    np.testing.assert_array_equal(places[0], places[1])
    assert (_dissociated._best_position(fold, np.zeros((1, N_CELLS)), 1) != places[0]).any()


def test_binary_values_are_not_normalized() -> None:
    values = np.array([[0.0, 1.0], [1.0, 1.0]])
    assert _dissociated.log_normalized(values) is values
    assert _dissociated.log_normalized(values + 1).max() < 2


def test_finished_runs_are_kept(folds, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_dissociated, "DATA", {"smooth": lambda _: folds})
    calls = []

    def placed(peer, python, reference, query, *, seed, minutes):
        calls.append(python)
        return dict.fromkeys(peer.methods, reference.obsm["spatial"][: query.n_obs])

    monkeypatch.setattr(dissociated, "environment", lambda folder, requirements: folder)
    monkeypatch.setattr(dissociated.peers, "place", placed)
    output = tmp_path / "results.json"
    arguments = ["--data", "smooth", "--methods", "pearson_argmax", "chance", "tangram", "--seeds", "0", "1"]
    dissociated.main([*arguments, "--output", str(output)])
    before = json.loads(output.read_text())
    dissociated.main([*arguments, "--output", str(output)])
    after = json.loads(output.read_text())
    assert before == after
    assert after["summary"]["smooth"]["pearson_argmax"]["n_seeds"] == 1
    assert after["summary"]["smooth"]["chance"]["n_seeds"] == 2
    assert len(after["entries"]) == 5 * _dissociated.N_FOLDS
    assert calls == [PEER_DIR / "tangram"] * _dissociated.N_FOLDS
