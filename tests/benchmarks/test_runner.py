from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from benchmarks.baselines import BASELINES, PARAMETERS

from benchmarks import _data, _models, _placement, _report, _runner, denoiser_speed, memory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fold(make_tissue) -> _data.Fold:
    return _data.make_fold("observed", make_tissue(0), make_tissue(1, n_slices=1))


def options(tmp_path: Path, *arguments: str):
    return _runner.parse("seqfish", ["--output", str(tmp_path / "r.json"), *arguments])


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


def test_controls(fold):
    chance, oracle = (_runner.control(fold, name, seed=0) for name in ("chance", "oracle"))
    for permuted in (chance, oracle):
        np.testing.assert_array_equal(np.sort(permuted, axis=0), np.sort(fold.truth, axis=0))
    left = fold.labels == "a"
    np.testing.assert_array_equal(np.sort(oracle[left], axis=0), np.sort(fold.truth[left], axis=0))
    assert _placement.score(fold.truth, oracle)["knn_20"] > _placement.score(fold.truth, chance)["knn_20"]


def test_names_agree():
    assert set(BASELINES) == set(PARAMETERS) == set(_runner.BASELINE_NAMES)
    assert set(_data.BENCHMARKS) == set(_data.DEFAULT_MINUTES)


def test_finished_runs_are_kept_and_changed_ones_repeated(fold, tmp_path, monkeypatch, capsys):
    calls = []

    def counted(reference, query, *, seed):
        calls.append(seed)
        return np.random.default_rng(seed).normal(size=(query.n_obs, 2))

    monkeypatch.setitem(BASELINES, "knn_25", counted)
    settings = options(tmp_path, "--methods", "chance", "knn_25", "--seeds", "0", "1")
    _runner.run("seqfish", [fold], settings)
    _runner.run("seqfish", [fold], settings)
    assert calls == [0, 1]
    monkeypatch.setitem(PARAMETERS, "knn_25", {"n_components": 7})
    _runner.run("seqfish", [fold], settings)
    assert calls == [0, 1, 0, 1]
    content = json.loads(settings.output.read_text())
    assert len(content["entries"]) == 4
    assert str(ROOT) not in settings.output.read_text()
    assert {"versions", "machine", "parameters", "scores", "seconds", "seed"} <= content["entries"][0].keys()
    assert list(tmp_path.iterdir()) == [settings.output]
    assert "knn_25" in capsys.readouterr().out


def test_interruption_keeps_what_is_finished(fold, tmp_path, monkeypatch):
    def broken(reference, query, *, seed):
        raise KeyboardInterrupt

    monkeypatch.setitem(BASELINES, "knn_25", broken)
    settings = options(tmp_path, "--methods", "chance", "knn_25", "--seeds", "0")
    with pytest.raises(KeyboardInterrupt):
        _runner.run("seqfish", [fold], settings)
    assert [e["method"] for e in json.loads(settings.output.read_text())["entries"]] == ["chance"]


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

    def obtain(fold, *, seed, minutes, path):
        trained.append(seed)
        return len(trained), 1.0

    monkeypatch.setattr(_models, "obtain_model", obtain)
    monkeypatch.setattr(_models, "fingerprint", str)
    monkeypatch.setattr(_models, "place", lambda model, query, method, seed: np.eye(query.n_obs, 2))
    _runner.run("seqfish", [fold], options(tmp_path, "--methods", "alphastomics", "--seeds", "0"))
    both = options(tmp_path, "--methods", "alphastomics", "mean", "--seeds", "0")
    _runner.run("seqfish", [fold], both)
    assert {e["method"]: e["model"] for e in json.loads(both.output.read_text())["entries"]} == {
        "alphastomics": "2",
        "mean": "2",
    }
    _runner.run("seqfish", [fold], both)
    assert trained == [0, 0]


@pytest.mark.slow
def test_alphastomics_is_trained_saved_and_found_again(fold, tmp_path):
    path = tmp_path / "seqfish" / "held_seed0"
    model, seconds = _models.obtain_model(fold, seed=0, minutes=0.02, path=path)
    again, recorded = _models.obtain_model(fold, seed=0, minutes=0.02, path=path)
    assert (_models.fingerprint(again), recorded) == (_models.fingerprint(model), seconds)
    for method in (_models.DEFAULT, *_models.VARIANTS):
        placed = _models.place(again, fold.query, method, seed=0)
        assert placed.shape == fold.truth.shape
        assert np.isfinite(placed).all()


def test_a_variant_is_the_mean_or_the_first_draw(make_tissue):
    class Model:
        """Returns the arguments as an AnnData of as many draws."""

        def sample(self, query, *, mode, random_state, n_samples=1, reduce=None):
            n = 1 if reduce else n_samples
            draws = [query.copy() for _ in range(n)]
            for k, draw in enumerate(draws):
                draw.obsm["spatial"] = np.stack([np.arange(query.n_obs), np.full(query.n_obs, k)], axis=1)
            return ad.concat(draws, index_unique="-") if n > 1 else draws[0]

    query = make_tissue(1, n_slices=1)
    expected = np.stack([np.arange(query.n_obs), np.zeros(query.n_obs)], axis=1)
    for method in _models.VARIANTS:
        np.testing.assert_array_equal(_models.place(Model(), query, method, seed=0), expected)


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
