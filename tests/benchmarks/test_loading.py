from __future__ import annotations

import json

from benchmarks import loading


def test_every_loader_is_timed_and_ratios_are_ours_over_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "CONTEXT", 50)
    out = tmp_path / "loading.json"
    loading.main(["--cells", "400", "--genes", "20", "--slices", "2", "--turns", "2", "--output", str(out)])
    found = json.loads(out.read_text())
    assert len(found["cells_per_second"]) == 2
    assert all(set(turn) == {*loading.DATASET_LOADERS, *loading.OTHER_LOADERS} for turn in found["cells_per_second"])
    turns = [turn["later epochs"] / turn["scvi"] for turn in found["cells_per_second"]]
    assert min(turns) <= found["ratios"]["later epochs"]["scvi"] <= max(turns)


def test_each_of_our_loaders_reads_every_cell(tmp_path):
    n_cells, density = loading.make_files(tmp_path, n_slices=2, n_cells=400, n_genes=20)
    read = loading.readers(tmp_path, n_cells)
    assert 0 < density < 1
    assert {name: read[name]() for name in (*loading.DATASET_LOADERS, "scvi")} == dict.fromkeys(
        (*loading.DATASET_LOADERS, "scvi"), 400
    )
