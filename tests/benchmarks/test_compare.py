from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from benchmarks import compare

if TYPE_CHECKING:
    import anndata as ad

TINY = {"d_model": 16, "n_layers": 1, "n_heads": 2, "context_size": 64, "accelerator": "cpu", "mode": "expr_to_pos"}


@pytest.fixture
def folds(make_tissue) -> dict[str, tuple[ad.AnnData, ad.AnnData]]:
    tissue = make_tissue(0, n_cells=60, n_slices=3)
    name = tissue.obs["slice_id"].to_numpy()
    return {each: (tissue[name != each], tissue[name == each]) for each in ("s0", "s1", "s2")}


def options(tmp_path, *tokens: str):
    path = ["--output", str(tmp_path / "c.json"), "--figure", str(tmp_path / "c.png")]
    return compare.parse([*path, "--steps", "2", "--configurations", "linear", "gated", *tokens])


@pytest.mark.slow
def test_every_seed_has_a_fold_and_the_second_call_trains_nothing(folds, tmp_path, capsys):
    settings = options(tmp_path, "--seeds", "0", "1")
    compare.run(folds, settings, **TINY)
    content = json.loads(settings.output.read_text())
    assert [(run["configuration"], run["seed"], list(run["scores"])) for run in content["runs"]] == [
        ("linear", 0, ["s0"]),
        ("gated", 0, ["s0"]),
        ("linear", 1, ["s1"]),
        ("gated", 1, ["s1"]),
    ]
    scores = {(r["configuration"], r["seed"]): r["scores"][f"s{r['seed']}"]["aligned_rmsd"] for r in content["runs"]}
    assert content["summary"]["linear"]["aligned_rmsd"] == pytest.approx(
        (scores["linear", 0] + scores["linear", 1]) / 2
    )
    gains = [scores["linear", seed] - scores["gated", seed] for seed in (0, 1)]
    assert content["difference"]["mean"]["linear"]["aligned_rmsd"] == pytest.approx(sum(gains) / 2)
    assert content["difference"]["mean"]["gated"]["aligned_rmsd"] == 0
    assert content["machine"]["cores"]
    assert (tmp_path / "c.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "| linear |" in printed
    compare.run(folds, settings, **TINY)
    assert json.loads(settings.output.read_text()) == content
    assert capsys.readouterr().out == printed


def test_defaults_depend_on_the_tissue():
    starmap, seqfish = (compare.parse(["--benchmark", name]) for name in ("starmap_mpfc", "seqfish"))
    assert (starmap.seeds, seqfish.seeds) == ([0, 1, 2], [0])
    assert (starmap.minutes, seqfish.minutes) == (1.0, 3.0)
    assert seqfish.output.name == "compare_seqfish.json"


def test_differences_need_a_reference_run():
    runs = pd.DataFrame({"configuration": ["a"], "seed": [0], "held_out": ["x"], "failed": [False], "score": [1.0]})
    assert compare.paired_differences(runs) == {}
