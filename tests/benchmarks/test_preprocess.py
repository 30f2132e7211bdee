"""The benchmarks of preprocessing, on few cells."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from benchmarks._slices import make_slice, write_slices

from alphastomics.data.parquet._dataset import DatasetInfo
from benchmarks import atlas, killed, preprocess_memory, preprocess_speed

SMALL = ["--genes", "30", "--reads", "20", "--slices", "2"]


def test_slices_are_the_same_for_the_same_number_and_others_for_another():
    one, again, other = (make_slice(number, 50, 30, 20) for number in (3, 3, 4))
    assert (one.X != again.X).nnz == 0
    assert (one.X != other.X).nnz > 0
    assert 15 < one.X.sum(axis=1).mean() < 25
    assert one.obs["slice_id"].unique().tolist() == ["slice_003"]


@pytest.mark.slow
def test_peaks_of_both_sizes_are_measured(tmp_path):
    out = tmp_path / "memory.json"
    preprocess_memory.main(["--cells", "100", "1000", *SMALL, "--output", str(out)])
    found = json.loads(out.read_text())
    assert [run["cells"] for run in found["runs"]] == [100, 1000]
    assert all(run["peak"] > run["imports"] > 0 for run in found["runs"])
    assert found["ratio"] == found["runs"][1]["peak"] / found["runs"][0]["peak"]


def test_processing_in_memory_gives_the_same_cells(tmp_path):
    write_slices(tmp_path / "raw", n_slices=2, n_cells=200, n_genes=30, n_reads=20)
    preprocess_speed.stages(tmp_path / "raw", tmp_path / "dataset")
    preprocess_speed.in_memory(tmp_path / "raw", tmp_path / "theirs", scale=False)
    theirs = pq.read_table(tmp_path / "theirs" / "train.parquet")
    shards = DatasetInfo.read(tmp_path / "dataset").shards
    tables = [pq.read_table(tmp_path / "dataset" / "data" / shard.file) for shard in shards]
    assert sorted(theirs["cell_id"].to_pylist()) == sorted(name for t in tables for name in t["cell_id"].to_pylist())
    assert set(theirs.column_names) == set(tables[0].column_names) - {"library_size", "n_genes"}


@pytest.mark.slow
def test_speeds_are_ratios_of_ours_over_theirs(tmp_path):
    out = tmp_path / "speed.json"
    preprocess_speed.main(["--cells", "200", *SMALL, "--turns", "2", "--output", str(out)])
    found = json.loads(out.read_text())
    for other in preprocess_speed.IN_MEMORY:
        for clock in preprocess_speed.CLOCKS:
            turns = [turn[other][clock] / turn[preprocess_speed.PREPROCESS][clock] for turn in found["turns"]]
            assert min(turns) <= found["ratios"][other][clock] <= max(turns)


@pytest.mark.slow
def test_stages_that_were_killed_end_as_undisturbed_ones(tmp_path):
    out = tmp_path / "killed.json"
    sizes = ["--cells", "8000", "--genes", "100", "--reads", "50", "--slices", "8"]
    killed.main([*sizes, "--moments", "2", "--output", str(out)])
    found = json.loads(out.read_text())
    assert [stage["stage"] for stage in found["stages"]] == ["stage1", "stage2"]
    runs = [run for stage in found["stages"] for run in stage["runs"]]
    assert len(runs) == 4
    assert all(run["identical"] for run in runs)


@pytest.mark.slow
def test_every_part_of_the_pipeline_is_measured(tmp_path):
    out = tmp_path / "atlas.json"
    atlas.main(["--cells", "1200", *SMALL, "--steps", "2", "--output", str(out)])
    found = json.loads(out.read_text())
    assert [run["part"] for run in found["runs"]] == list(atlas.PARTS)
    assert found["peak"] == max(run["peak"] for run in found["runs"]) > 0
    assert found["runs"][2]["finite"]
