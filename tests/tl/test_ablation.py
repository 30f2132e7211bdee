"""The ablation of the earlier guide to experts: its four configurations, and what it asks to be recorded of each."""

from __future__ import annotations

import numpy as np
import pytest

from alphastomics import tl
from alphastomics.datasets import synthetic_tissue
from alphastomics.tl import Configuration
from alphastomics.tl._compare import CONFIGURATIONS

# Experts on linear attention, one for each cell, are in no default row: `gated_moe_4_top_1` has them on gated attention.
ABLATION = {
    "baseline": CONFIGURATIONS["linear"],
    "+gated": CONFIGURATIONS["gated"],
    "+moe": Configuration(model={"attention": "linear", "use_moe": True, "num_experts": 4, "moe_top_k": 1}),
    "+both": CONFIGURATIONS["gated_moe_8_top_2"],
}
TINY = {
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 2,
    "context_size": 64,
    "batch_size": 128,
    "accelerator": "cpu",
    "precision": "32-true",
    "enable_progress_bar": False,
    "n_samples": 1,
    "n_steps": 2,
    "max_cells": 40,
}


@pytest.fixture(scope="module")
def compared():
    """Cells with the tables of the four, and their summary."""
    cells = synthetic_tissue(n_slices=2, n_cells=80, n_genes=20, random_state=0)
    table = tl.compare(cells, configurations=ABLATION, seeds=[0], max_steps=4, **TINY)
    return cells, table


def test_experts_and_their_numbers_are_those_of_the_guide(compared):
    _, table = compared
    total, idle = table["parameters"], table["parameters"] - table["active_parameters"]
    d, hidden = 16, 64
    one_of_4, one_of_8 = (2 * d * hidden // n + hidden // n + d for n in (4, 8))
    assert idle[["baseline", "+gated"]].tolist() == [0, 0]
    assert (idle["+moe"], idle["+both"]) == (3 * one_of_4, 6 * one_of_8)
    routers = {n: (n - 1) * d + 2 * n * d for n in (4, 8)}  # further biases, the router and its noise
    assert total["+moe"] - total["baseline"] == routers[4]
    assert total["+both"] - total["+gated"] == routers[8]


def test_all_train_equally_long_and_what_is_to_be_recorded_is(compared):
    cells, table = compared
    rows = table.loc[list(ABLATION)]
    assert rows["n_steps"].tolist() == [4] * 4
    recorded = ["parameters", "active_parameters", "train_seconds"]
    recorded += ["expression_mse", "distance_matrix_mse", "distance_spearman", "knn_preservation"]
    assert np.isfinite(rows[recorded].astype(float).to_numpy()).all()
    curves = cells.uns["comparison"]["curves"].set_index("configuration")
    for name in ABLATION:
        curve = curves.loc[name]
        assert len(curve) > 1
        assert np.isfinite(curve[["train_loss", "validation_loss"]].to_numpy()).all()
