from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from alphastomics.chains import synthetic_chains
from benchmarks import chains


def test_truth_in_any_frame_scores_best_and_its_reflection_does_not():
    truth = synthetic_chains(n_chains=4, noise=0)
    moved = Rotation.random(random_state=0).apply(truth.obsm["spatial"]) + 30
    scores = chains.score(truth, moved)
    assert scores["fape"] == pytest.approx(0, abs=1e-6)
    assert scores["fape_mirrored"] > 0.05
    assert scores["distance_spearman"] > 0.999  # equal distances are rounded apart
    assert scores["rmsd"] == pytest.approx(0, abs=1e-6)
    assert scores["bond"] == pytest.approx(3.8, abs=0.03)
    mirrored = chains.score(truth, moved * [1, 1, -1])
    assert mirrored["fape"] == pytest.approx(scores["fape_mirrored"])
    assert mirrored["rmsd"] > 1


def test_chance_has_neither_fold_nor_bonds():
    scores = chains.run(chains.CHANCE, {"held_out": 8, "frame": "slice"}, seed=0)
    assert scores["fape"] > 0.8
    assert abs(scores["distance_spearman"]) < 0.15
    assert scores["bond"] > 8


def test_chains_that_are_placed_are_not_those_of_training():
    query = synthetic_chains(n_chains=2, random_state=chains.HELD_OUT_SEED, **chains.CHAIN)
    train = synthetic_chains(n_chains=2, random_state=0, **chains.CHAIN)
    assert not np.isin(query.obsm["spatial"][:, 0], train.obsm["spatial"][:, 0]).any()


def test_a_context_holds_the_longest_chain():
    adata = synthetic_chains(n_chains=400, **chains.CHAIN)
    assert adata.obs["residue"].max() < chains.TRAINING["context_size"]
