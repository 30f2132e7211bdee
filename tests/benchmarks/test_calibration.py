from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from benchmarks._report import Results
from scipy.spatial.distance import cdist

from alphastomics.nn import Denoiser, DenoiserConfig
from benchmarks import _data, _models, calibration

if TYPE_CHECKING:
    from pathlib import Path

SPREAD = 0.3  # standard deviation of each coordinate; the tissue has a radius of about 1.4


def gaussian(factor: float = 1.0, *, n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws, the mean, and a truth that is a sample of the same Gaussian if ``factor`` is 1."""
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(n, 2))
    truth = mean + SPREAD * rng.normal(size=mean.shape)
    return mean + factor * SPREAD * rng.normal(size=(calibration.N_DRAWS, *mean.shape)), mean, truth


def ratios(scores: dict[str, float]) -> list[float]:
    return [scores[f"{name}, ratio"] for name in calibration.COMPARED]


def test_samples_of_the_distribution_of_the_truth_are_calibrated():
    draws, mean, truth = gaussian()
    scores = calibration.compare(draws, mean, truth)
    assert set(scores) == set(calibration.COLUMNS)
    assert ratios(scores) == pytest.approx([1, 1, 1], abs=0.05)
    assert scores["coverage"] == pytest.approx(0.8, abs=0.05)
    assert scores["spread_over_error"] == pytest.approx(1, abs=0.05)
    # Independent errors: a mean over n cells has 1 / n of the variance.
    radius, n = calibration.rms(truth - truth.mean(0)), calibration.N_SHARED + 1
    rms = np.sqrt(2) * SPREAD / radius
    for kind in ("error", "draws"):
        assert scores[f"smooth, {kind}"] == pytest.approx(rms / np.sqrt(n), rel=0.2)
        assert scores[f"rough, {kind}"] == pytest.approx(rms * np.sqrt(1 - 1 / n), rel=0.05)
    # Half the mean distance of two samples of an isotropic Gaussian in two dimensions.
    assert scores["energy"] == pytest.approx(np.sqrt(np.pi) / 2 * SPREAD / radius, rel=0.05)
    assert abs(scores["spearman"]) < 0.15


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_draws_of_another_spread_are_not_calibrated(factor):
    draws, mean, truth = gaussian(factor)
    scores = calibration.compare(draws, mean, truth)
    knn, spearman, rmsd = ratios(scores)
    if factor < 1:
        assert knn > 1.5
        assert spearman > 1.05
        assert rmsd < 0.6
        assert scores["coverage"] < 0.3
    else:
        assert knn < 0.8
        assert spearman < 0.9
        assert rmsd > 1.1  # the score is at most 1
        assert scores["coverage"] > 0.95
    assert scores["spread_over_error"] == pytest.approx(factor, rel=0.1)
    assert scores["energy"] > 1.1 * calibration.compare(*gaussian())["energy"]


def test_a_spread_that_follows_the_error_has_a_rank_correlation():
    rng = np.random.default_rng(1)
    mean, spread = 10 * rng.normal(size=(300, 2)), np.exp(rng.normal(size=(300, 1)))
    draws = mean + spread * rng.normal(size=(calibration.N_DRAWS, 300, 2))
    assert calibration.compare(draws, mean, mean + spread * rng.normal(size=(300, 2)))["spearman"] > 0.5


def test_the_frame_of_the_draws_and_of_the_truth_does_not_matter():
    draws, mean, truth = gaussian(n=100)
    turned = np.stack([draw @ [[np.cos(k), np.sin(k)], [-np.sin(k), np.cos(k)]] + k for k, draw in enumerate(draws)])
    expected = calibration.compare(draws, mean, truth)
    assert calibration.compare(turned, mean, truth @ [[0, 1], [1, 0]] - 5) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("n", [15, 120])
def test_smooth_part_is_the_mean_over_the_nearest_cells(n):
    rng = np.random.default_rng(0)
    position, displacement = rng.normal(size=(n, 2)), rng.normal(size=(n, 2))
    nearest = np.argsort(cdist(position, position), axis=1)[:, : calibration.N_SHARED + 1]
    expected = np.stack([displacement[cells].mean(0) for cells in nearest])
    np.testing.assert_allclose(calibration.smooth_part(displacement, position), expected, atol=1e-12)
    shared = np.broadcast_to([3.0, -1.0], (n, 2))
    np.testing.assert_allclose(calibration.smooth_part(shared, position), shared)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_only_placements_in_three_dimensions_have_a_rigid_rmsd(n_dims, make_tissue, tmp_path: Path, monkeypatch):
    reference, held_out = make_tissue(0), make_tissue(1, n_slices=1)
    for tissue in (reference, held_out):
        depth = np.random.default_rng(0).normal(size=(tissue.n_obs, n_dims - 2))
        tissue.obsm["spatial"] = np.hstack([tissue.obsm["spatial"], depth])
    fold = _data.make_fold("held_out", reference, held_out)
    draws = np.stack(
        [fold.truth + 0.1 * np.random.default_rng(k).normal(size=fold.truth.shape) for k in range(calibration.N_DRAWS)]
    )
    found = {"placement": (fold.truth / 2, 1.0), "mean": (fold.truth, 1.0), "draws": (draws, 9.0)}
    model = SimpleNamespace(fitted_=SimpleNamespace(perturbation=SimpleNamespace(share=0.5, offset=0.1)))
    monkeypatch.setattr(_models, "train_or_load", lambda *_, **__: (model, 1.0))
    monkeypatch.setattr(_models, "fingerprint", lambda model: "0")
    monkeypatch.setattr(calibration, "sample", lambda *_: found)
    monkeypatch.setattr(calibration, "time_draw", lambda *_: dict.fromkeys(calibration.TIMES, 1.0))
    monkeypatch.setitem(_data.BENCHMARKS, "seqfish", lambda folder: [fold])
    monkeypatch.setattr(calibration, "find_data", lambda folder: tmp_path)
    path = tmp_path / "calibration.json"
    calibration.main(["--seeds", "0", "--output", str(path)])
    scores = {entry["method"]: entry["scores"] for entry in Results(path, {}).entries}
    rigid = {method: values["rigid_rmsd"] for method, values in scores.items() if "rigid_rmsd" in values}
    assert rigid == pytest.approx({"placement": 0.5, "mean": 0} if n_dims == 3 else {}, abs=1e-6)
    assert list(scores) == ["placement", "mean", "draws", "time"]


def test_a_draw_is_timed_against_passes_of_the_network_on_one_thread(make_tissue, monkeypatch):
    fold = _data.make_fold("held_out", make_tissue(0), make_tissue(1, n_slices=1))
    module, calls = Denoiser(DenoiserConfig(n_genes=40, n_dims=2, d_model=16, n_layers=1, n_heads=2)), []
    monkeypatch.setattr(calibration.time, "process_time", lambda: next(clock))
    # Every second call ends an interval: 4 s for two draws, 10 s for the passes; one slow repetition does not count.
    clock = iter(np.cumsum([0, 4, 0, 10, 0, 400, 0, 1000, 0, 4, 0, 10]))

    def sample(query, **arguments):
        assert not np.isin("spatial", list(query.obsm))
        calls.append((arguments["n_samples"], len(query), torch.get_num_threads()))

    def trunk(h, *arguments, **keywords):
        calls.append((h.shape[1], torch.get_num_threads()))
        return forward(h, *arguments, **keywords)

    forward, module.trunk = module.trunk, trunk
    n_threads = torch.get_num_threads()
    times = calibration.time_draw(SimpleNamespace(module=module, sample=sample), fold, 0)
    assert times == pytest.approx({"draw, s": 2, "passes, s": 10, "passes / draw": 5})
    n_cells = len(fold.truth)
    assert calls == [(2, n_cells, 1), *[(n_cells, 1)] * calibration.N_PASSES] * calibration.N_REPEATS
    assert torch.get_num_threads() == n_threads
