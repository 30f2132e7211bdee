"""Benchmark of the confidence: left-out types and the summary."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from benchmarks import unmatched


def tissue(seed: int, n: int = 400) -> ad.AnnData:
    profiles = np.random.default_rng(9).dirichlet(np.full(30, 0.3), size=4)
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 4, n)
    return ad.AnnData(
        X=sp.csr_matrix(rng.poisson(120 * profiles[kind]).astype(np.float32)),
        obs=pd.DataFrame({"cell_type": kind.astype(str), "slice_id": "one"}, index=[f"cell_{i}" for i in range(n)]),
        obsm={"spatial": rng.normal(size=(n, 2))},
    )


def test_a_type_that_is_left_out_is_found():
    scores = unmatched.leave_out(tissue(0), tissue(1), "2")
    assert set(scores) == set(unmatched.SCORES)
    assert scores["auc"] > 0.95
    assert scores["found"] > 0.9 > 0.3 > scores["false"]


def test_the_summary_has_the_mean_and_the_smallest_auc():
    def entry(method: str, fold: str, **scores: float) -> dict:
        return {"method": method, "fold": fold, "scores": {name.replace("__", ", "): v for name, v in scores.items()}}

    entries = [
        entry("a", "seqfish, x", auc=0.9, auc__distance=0.5, found=0.8, false=0.1),
        entry("b", "seqfish, x", auc=0.7, auc__distance=0.7, found=0.4, false=0.3),
        entry("half", "seqfish, x", low__05=0.06, low__25=0.2),
    ]
    line = unmatched.summarize(entries)["seqfish"]
    assert line["types"] == 2
    assert line["auc"] == pytest.approx(0.8)
    assert line["auc, smallest"] == 0.7
    assert line["low, half"] == 0.06
    assert "seqfish" in unmatched.table({"seqfish": line})
