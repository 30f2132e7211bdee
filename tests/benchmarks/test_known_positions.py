from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from benchmarks._report import Results
from scipy.spatial.distance import cdist

from benchmarks import _data, _models, _placement, known_positions

if TYPE_CHECKING:
    from pathlib import Path


def test_kriging_of_a_smooth_function_is_exact_and_of_an_unrelated_one_is_its_mean():
    rng = np.random.default_rng(0)
    feature = rng.uniform(-1, 1, (400, 3))
    position = np.stack([feature[:, 0] + 0.5 * feature[:, 1] ** 2, np.sin(2 * feature[:, 2])], axis=1) * 100 + 500
    known = np.arange(120)
    predicted = known_positions.krige(feature, known, position[known])
    assert np.abs(predicted - position)[120:].mean() < 1
    unrelated = rng.permutation(position)
    predicted = known_positions.krige(feature, known, unrelated[known])
    assert np.abs(predicted - unrelated[known].mean(0)).max() < 0.35 * unrelated.std()


def test_kriging_depends_on_the_noise_of_the_known_positions():
    rng = np.random.default_rng(1)
    feature = rng.normal(size=(300, 2))
    known, noise = np.arange(200), 0.5 * rng.normal(size=(200, 2))
    predicted = known_positions.krige(feature, known, feature[known] + noise)
    assert np.square(predicted[200:] - feature[200:]).mean() < 0.2 * np.square(noise).mean()
    nearest = cdist(feature[200:], feature[known]).argmin(1)
    copied = feature[nearest] + noise[nearest]
    assert np.square(predicted[200:] - feature[200:]).mean() < np.square(copied - feature[200:]).mean()


class Model:
    """Places all cells at the truth if positions are known, and otherwise at random."""

    def __init__(self, truth: np.ndarray) -> None:
        self.truth, self.given = truth, []

    def sample(self, query, *, mode, random_state, inpaint):
        assert mode == "expr_to_pos"
        assert inpaint == ("spatial" in query.obsm)
        if inpaint:
            self.given.append(query.obsm["spatial"].copy())
        placed = (
            self.truth
            if inpaint
            else np.random.default_rng(random_state).normal(size=(query.n_obs, self.truth.shape[1]))
        )
        return SimpleNamespace(obsm={"spatial_reconstructed": placed})

    def get_latent_representation(self, query):
        assert "spatial" not in query.obsm
        return self.truth.astype(np.float32)


def test_all_methods_are_scored_on_the_cells_that_are_not_known(make_tissue, tmp_path: Path, monkeypatch):
    fold = _data.make_fold("held_out", make_tissue(0), make_tissue(1, n_slices=1, n_cells=600))
    model, scored = Model(fold.truth[fold.order]), []
    score = _placement.score
    monkeypatch.setattr(_models, "train_or_load", lambda *_, **__: (model, 1.0))
    monkeypatch.setattr(_models, "fingerprint", lambda model: "0")
    monkeypatch.setattr(_placement, "score", lambda truth, placed: scored.append(truth) or score(truth, placed))
    monkeypatch.setitem(_data.BENCHMARKS, "seqfish", lambda folder: [fold])
    monkeypatch.setattr(known_positions, "find_data", lambda folder: tmp_path)
    path = tmp_path / "known.json"
    known_positions.main(["--seeds", "0", "--output", str(path)])
    entries = {entry["method"]: entry["scores"] for entry in Results(path, {}).entries}
    assert list(entries) == list(known_positions.METHODS)
    assert entries[known_positions.PLACEMENT]["aligned_rmsd"] == pytest.approx(0, abs=1e-6)
    assert entries[known_positions.KRIGING]["distance_spearman"] > 0.98
    assert entries["known, kriging of expression"]["distance_spearman"] > 0.6
    for method in (known_positions.UNCONDITIONED, known_positions.ALONE):
        assert abs(entries[method]["distance_spearman"]) < 0.1
    (given,) = model.given
    known = np.isfinite(given).all(1)
    assert known.sum() == 30
    np.testing.assert_array_equal(given[known], fold.truth[fold.order][known])
    rest = {tuple(x) for x in fold.truth[fold.order][~known]}
    assert [{tuple(x) for x in truth} for truth in scored] == [rest] * len(entries)
    known_positions.main(["--seeds", "0", "--output", str(path)])
    assert len(model.given) == 1


@pytest.mark.parametrize("within", [True, False])
def test_a_model_is_trained_on_the_known_cells_or_on_other_slices(make_tissue, tmp_path: Path, monkeypatch, within):
    fold = _data.make_fold("held_out", make_tissue(0), make_tissue(1, n_slices=1, n_cells=200))
    references = []

    def train_or_load(reference, **_):
        references.append(reference)
        return Model(fold.truth[fold.order]), 1.0

    monkeypatch.setattr(_models, "train_or_load", train_or_load)
    monkeypatch.setattr(_models, "fingerprint", lambda model: "0")
    monkeypatch.setattr(known_positions, "MAX_KRIGED", 100)
    monkeypatch.setitem(_data.BENCHMARKS, "seqfish", lambda folder: [fold])
    monkeypatch.setattr(known_positions, "find_data", lambda folder: tmp_path)
    path = tmp_path / "known.json"
    known_positions.main(["--seeds", "0", "--known-share", "0.8", "--output", str(path), *["--within"] * within])
    (reference,) = references
    known = known_positions.split(200, 0, 0.8)[0]
    if within:
        assert {tuple(x) for x in reference.obsm["spatial"]} == {tuple(x) for x in fold.truth[known]}
    else:
        assert reference is fold.reference
    methods = [known_positions.PLACEMENT, known_positions.UNCONDITIONED, known_positions.ALONE, known_positions.NEAREST]
    assert [entry["method"] for entry in Results(path, {}).entries] == methods
