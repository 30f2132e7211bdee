from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.baselines import BASELINES, PARAMETERS

from alphastomics.config import NetworkConfig
from benchmarks import _data, _models, _report, _runner, denoiser_speed, memory, unseen

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fold(make_tissue) -> _data.Fold:
    return _data.make_fold("observed", make_tissue(0), make_tissue(1, n_slices=1))


def test_query_contains_no_truth(fold, make_tissue):
    assert list(fold.query.obs) == ["slice_id"]
    assert not fold.query.obsm
    assert not fold.query.uns
    assert not fold.query.obs_names.str.startswith("fov").any()
    source = make_tissue(1, n_slices=1)
    np.testing.assert_array_equal(fold.in_source_order(np.asarray(fold.query.X)), source.X)
    np.testing.assert_array_equal(fold.truth, source.obsm["spatial"])
    assert not np.array_equal(fold.query.X, source.X)


@pytest.mark.real
def test_drosophila_halves_share_no_position(real_data):
    (fold,) = _data.drosophila3d(real_data)
    reference = {tuple(p) for p in fold.reference.obsm["spatial"]}
    assert len(fold.truth) == 1520
    assert not reference & {tuple(p) for p in fold.truth}


def test_names_agree():
    assert set(BASELINES) == set(PARAMETERS) == set(unseen.BASELINES)


def test_finished_runs_are_kept_and_changed_ones_repeated(fold, tmp_path, monkeypatch, capsys):
    calls = []

    def counted(reference, query, *, seed):
        calls.append(seed)
        return np.random.default_rng(seed).normal(size=(query.n_obs, 2))

    monkeypatch.setitem(BASELINES, "knn_25", counted)
    path = tmp_path / "r.json"

    def run():
        results = _report.Results(path, {"benchmark": "b"})
        for seed in (0, 1):
            for method in ("chance", "knn_25"):
                _runner.run_plain(results, fold, method, seed)

    run()
    run()
    assert calls == [0, 1]
    monkeypatch.setitem(PARAMETERS, "knn_25", {"n_components": 7})
    run()
    assert calls == [0, 1, 0, 1]
    content = json.loads(path.read_text())
    assert len(content["entries"]) == 4
    assert str(ROOT) not in path.read_text()
    assert {"versions", "machine", "parameters", "scores", "seconds", "seed"} <= content["entries"][0].keys()
    assert list(tmp_path.iterdir()) == [path]
    assert "knn_25" in capsys.readouterr().out


def test_interruption_keeps_what_is_finished(fold, tmp_path, monkeypatch):
    def broken(reference, query, *, seed):
        raise KeyboardInterrupt

    monkeypatch.setitem(BASELINES, "knn_25", broken)
    results = _report.Results(tmp_path / "r.json", {"benchmark": "b"})
    _runner.run_plain(results, fold, "chance", 0)
    with pytest.raises(KeyboardInterrupt):
        _runner.run_plain(results, fold, "knn_25", 0)
    (entry,) = json.loads(results.path.read_text())["entries"]
    assert entry["method"] == "chance"
    assert entry["scores"]["distance_spearman"] == pytest.approx(0, abs=0.05)


def test_summary_is_mean_over_folds_then_over_seeds():
    entries = [
        {"method": "m", "fold": f, "seed": s, "seconds": 1.0, "scores": {"a": float(10 * s + i)}}
        for s in (0, 1)
        for i, f in enumerate("xy")
    ]
    summary = _report.summarize(entries, ["m", "absent"], ["x", "y"], [0, 1, 2])
    assert list(summary) == ["m"]
    assert summary["m"]["n_seeds"] == 2
    assert summary["m"]["a"] == pytest.approx([5.5, np.std([0.5, 10.5], ddof=1)])
    assert "5.500 ± 7.071" in _report.table(summary, ["a"])
    single = _report.summarize(entries, ["m"], ["x", "y"], [1])
    assert single["m"]["a"] == [10.5, None]
    assert "±" not in _report.table(single, ["a"])


def test_variants_are_of_one_model(fold, tmp_path, monkeypatch):
    trained = []

    def obtain(fold, *, seed, minutes, path, **network):
        trained.append((seed, network))
        return len(trained), 1.0

    monkeypatch.setattr(_models, "obtain_model", obtain)
    monkeypatch.setattr(_models, "fingerprint", str)
    monkeypatch.setattr(_models, "place", lambda model, query, method, seed: np.eye(query.n_obs, 2))
    results = _report.Results(tmp_path / "r.json", {"benchmark": "b"})
    _runner.run_variants(results, [fold], ["alphastomics"], 0, None)
    for _ in range(2):
        _runner.run_variants(results, [fold], ["alphastomics", "not_adapted"], 0, None)
    assert {e["method"]: e["model"] for e in results.entries} == {"alphastomics": "2", "not_adapted": "2"}
    _runner.run_variants(results, [fold], ["alphastomics"], 0, None, n_layers=2)
    assert {e["method"]: e["parameters"].get("n_layers") for e in results.entries} == {
        "not_adapted": None,
        "alphastomics": 2,
    }
    assert trained == [(0, {}), (0, {}), (0, {"n_layers": 2})]


@pytest.mark.slow
def test_alphastomics_is_trained_saved_and_found_again(fold, tmp_path):
    path = tmp_path / "seqfish" / "held_seed0"
    model, seconds = _models.obtain_model(fold, seed=0, minutes=0.02, path=path)
    again, recorded = _models.obtain_model(fold, seed=0, minutes=0.02, path=path)
    other, _ = _models.obtain_model(fold, seed=0, minutes=0.02, path=tmp_path / "other", n_layers=1)
    assert (len(model.module.blocks), len(other.module.blocks)) == (NetworkConfig.n_layers, 1)
    assert (_models.fingerprint(again), recorded) == (_models.fingerprint(model), seconds)
    for method in unseen.OURS:
        placed = _models.place(again, fold.query, method, seed=0)
        assert placed.shape == fold.truth.shape
        assert np.isfinite(placed).all()


def test_ratios_of_time_and_memory():
    seconds = {"denoiser": [2.0, 3.0, 8.0], "encoder": [1.0, 2.0, 2.0], "encoder, no fast path": [2.0, 3.0, 8.0]}
    memory_bytes = {"denoiser": 30, "encoder": 60, "encoder, no fast path": 30}
    ratios = denoiser_speed.compare(seconds, memory_bytes)
    assert ratios["encoder"] == {"time_ratio": 2.0, "memory_ratio": 0.5}
    assert ratios["encoder, no fast path"] == {"time_ratio": 1.0, "memory_ratio": 1.0}


def test_simulated_slice_is_sparse_counts():
    adata = memory.make_slice(200, 10)
    assert adata.X.format == "csr"
    assert adata.shape == (200, 10)
    assert (adata.X.data == np.round(adata.X.data)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [
        ("denoiser_speed", ["--cells=64", "--genes=8", "--width=16", "--layers=1", "--repeats=1"], "ratios"),
        ("memory", ["--cells", "1100", "1200", "--genes=8", "--steps=1"], "ratios"),
    ],
)
def test_measuring_scripts_run(module, arguments, key, tmp_path):
    output = tmp_path / "m.json"
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--output", str(output)], cwd=ROOT, check=True
    )
    assert json.loads(output.read_text())[key]
