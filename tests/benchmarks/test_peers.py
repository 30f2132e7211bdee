from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.peers import _environment

from benchmarks import _data, _placement, peers, unseen

# Package and script have the same name, as those of the peers.
NEAREST = """
import json
import numpy as np

def place(data, seed):
    assert not any(path.endswith("peers") for path in __import__("sys").path)
    distance = ((data["query"][:, None] - data["reference"]) ** 2).sum(2)
    near = data["positions"][distance.argsort(axis=1)[:, :10]]
    return {"nearest": near[:, 0], "nearest_mean": near.mean(axis=1)}
"""


@pytest.fixture
def fold(make_tissue) -> _data.Fold:
    return _data.make_fold("fold", make_tissue(0, turn=2.0), make_tissue(1, n_slices=1))


@pytest.fixture
def make_peer(tmp_path):
    def make(script: str = NEAREST, **options) -> peers.Peer:
        path = tmp_path / "json.py"
        path.write_text(script)
        return peers.Peer(requirements=(), methods=("nearest", "nearest_mean"), script=path, **options)

    return make


def place(peer: peers.Peer, fold: _data.Fold, minutes: float = 1.0) -> dict[str, np.ndarray]:
    return peers.place(peer, Path(sys.executable), fold.reference, fold.query, seed=0, minutes=minutes)


def test_a_peer_places_cells_in_its_own_process(fold, make_peer):
    placed = place(make_peer(), fold)
    assert set(placed) == {"nearest", "nearest_mean"}
    for positions in placed.values():
        scores = _placement.score(fold.truth, fold.in_source_order(positions))
        assert scores["distance_spearman"] > 0.6


def test_arrays_of_a_peer(fold):
    genes = fold.query.var_names[::-2]
    arrays = peers.arrays(fold.reference, fold.query[:, genes].copy(), max_reference=100, seed=0)
    assert arrays["reference"].shape == (100, len(genes))
    assert arrays["positions"].shape == (100, 2)
    assert arrays["is_counts"]
    shared = fold.reference.var_names[fold.reference.var_names.isin(genes)]
    np.testing.assert_array_equal(arrays["query"], fold.query[:, shared].X)
    first, again, other = (
        peers.arrays(fold.reference, fold.query, max_reference=100, seed=seed)["positions"] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("script", "minutes", "reason"),
    [
        ("def place(data, seed):\n    raise ValueError('too few genes')", 1, "ValueError: too few genes"),
        ("def place(data, seed):\n    return {'nearest': data['positions']}", 1, "shape"),
        ("def place(data, seed):\n    bytearray(16 * 2**30)", 1, "MemoryError"),
        ("import time\ndef place(data, seed):\n    time.sleep(60)", 0.02, "--peer-minutes"),
    ],
    ids=["error", "shape", "memory", "time"],
)
def test_failures_of_a_peer(fold, make_peer, script, minutes, reason):
    with pytest.raises(peers.PeerError, match=reason):
        place(make_peer(script), fold, minutes)


def test_runs_of_peers_are_kept_and_count_as_baselines(fold, make_peer, tmp_path, monkeypatch, capsys):
    made = []

    def environment(folder, requirements):
        made.append(folder)
        return Path(sys.executable)

    monkeypatch.setitem(_data.BENCHMARKS, "synthetic", lambda folder: [fold])
    monkeypatch.setattr(peers, "PEERS", {"tangram": make_peer(), "celery": make_peer(n_dims=(3,))})
    monkeypatch.setattr(peers, "METHODS", ("nearest", "nearest_mean"))
    monkeypatch.setattr(unseen, "REPORTED", (*unseen.METHODS, *peers.METHODS))
    monkeypatch.setattr(peers, "environment", environment)
    arguments = ["--tissues", "synthetic", "--seeds", "0", "--no-shifts", "--data-dir", str(tmp_path)]
    arguments += ["--output", str(tmp_path / "unseen.json"), "--peer-dir", str(tmp_path), "--methods"]
    unseen.main([*arguments, "tangram", "celery"])
    assert made == [tmp_path / "tangram"]  # the other one places three dimensions only
    assert not (tmp_path / "unseen.json").exists()
    found = json.loads((tmp_path / "unseen_peers.json").read_text())
    assert [entry["method"] for entry in found["entries"]] == ["nearest", "nearest_mean"]
    assert found["entries"][0]["parameters"] == {"requirements": [], "max_reference": 3000}
    unseen.main([*arguments, "tangram"])
    assert len(made) == 1
    unseen.main([*arguments, "chance", "knn_25"])
    found = json.loads((tmp_path / "unseen.json").read_text())
    assert list(found["summary"]["synthetic, fold"]) == ["chance", "knn_25", "nearest", "nearest_mean"]
    assert set(found["ranks"]) == {"chance", "knn_25", "nearest", "nearest_mean"}
    assert {entry["method"] for entry in found["entries"]} == {"chance", "knn_25"}
    ours = {"alphastomics": found["summary"]["synthetic, fold"]["nearest_mean"]}
    ratios = unseen.ratios({"synthetic, fold": ours | {"nearest_mean": ours["alphastomics"]}})
    assert set(ratios["synthetic, fold"].values()) == {1.0}
    monkeypatch.setitem(peers.PEERS, "tangram", replace(make_peer("fail"), max_reference=50))
    unseen.main([*arguments, "tangram"])
    assert "json.py failed: NameError" in capsys.readouterr().out


def test_an_environment_is_made_once_for_its_requirements(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(_environment, "_run", commands.append)
    folder = tmp_path / "peer"
    folder.mkdir()
    # The commands do nothing here, so the folder must stay.
    monkeypatch.setattr(_environment.shutil, "rmtree", lambda *_, **__: None)
    for requirements in (["a==1"], ["a==1"], ["a==2"]):
        assert _environment.environment(folder, requirements) == folder / "bin" / "python"
    assert [command[-1] for command in commands] == [str(folder), "a==1", str(folder), "a==2"]


def test_a_failed_installation_is_reported(tmp_path):
    with pytest.raises(peers.PeerError, match="pip"):
        _environment._run([sys.executable, "-m", "pip", "install", str(tmp_path / "missing")])
