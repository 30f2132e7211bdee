from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks._data import make_fold

from alphastomics.datasets import synthetic_tissue
from benchmarks import _placement, shell


@pytest.mark.slow
def test_all_commands_run_and_their_output_is_scored(tmp_path, monkeypatch):
    tissue = synthetic_tissue(n_slices=3, n_cells=(120, 110, 100), n_genes=20, random_state=0)
    name = tissue.obs["slice_id"].astype(str).to_numpy()
    fold = make_fold("slice_2", tissue[name != "slice_2"], tissue[name == "slice_2"])
    monkeypatch.setitem(shell.BENCHMARKS, "seqfish", lambda _: [fold])
    monkeypatch.setattr(shell, "find_data", lambda _: tmp_path)
    out = tmp_path / "shell.json"
    shell.main(["--minutes", "0.1", "--buffer-size", "100", "--output", str(out)])
    found = json.loads(out.read_text())
    assert [command[0] for command in found["commands"]] == ["preprocess", "train", "sample", "test"]
    assert "--streaming" in found["commands"][1]
    assert set(found["sample"]) == set(_placement.METRICS)
    assert set(found["test"]) == {"slice_2"}
    assert np.isfinite(list(found["sample"].values())).all()
    assert not any(str(tmp_path) in argument for command in found["commands"] for argument in command)
