"""The score of a chain against the loss of the same name, and on motions and mirror images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.spatial.transform import Rotation

from alphastomics.chains import chain_fape, synthetic_chains
from alphastomics.chains.fape import chain_frames, fape
from alphastomics.metrics import _distances

seeds = st.integers(0, 10_000)


def folded(seed: int = 0, *, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Positions and places of a chain."""
    adata = synthetic_chains(n_chains=1, noise=noise, random_state=seed)
    return adata.obsm["spatial"], adata.obs["residue"].to_numpy(copy=True)


def loss(true: np.ndarray, predicted: np.ndarray, order: np.ndarray, clamp: float, scale: float) -> float:
    """The same by the loss in double precision."""
    y, x, place = (torch.from_numpy(np.asarray(each))[None] for each in (true, predicted, order))
    mask = torch.ones(place.shape, dtype=torch.bool)
    seen, found = (chain_frames(each, mask, index=place) for each in (y, x))
    return float(fape(x, y, mask, found.axes, seen.axes, clamp=clamp, scale=scale, frame_mask=seen.mask))


@given(seed=seeds, clamp=st.floats(1, 30), gaps=st.booleans())
@settings(max_examples=25, deadline=None)
def test_metric_equals_the_loss_of_the_same_name(seed, clamp, gaps):
    true, order = folded(seed)
    rng = np.random.default_rng(seed)
    if gaps:
        kept = rng.random(len(true)) < 0.8
        true, order = true[kept], order[kept]
    predicted = true + rng.normal(scale=2, size=true.shape)
    expected = loss(true, predicted, order, clamp, 10.0)
    assert chain_fape(true, predicted, order, clamp=clamp) == pytest.approx(expected, abs=1e-6)


@given(seed=seeds)
@settings(max_examples=25, deadline=None)
def test_a_rigid_copy_is_perfect_and_a_mirror_image_is_not(seed):
    true, order = folded(seed)
    moved = Rotation.random(random_state=seed).apply(true) + [5, -80, 3]
    assert chain_fape(true, moved, order) < 1e-4
    assert chain_fape(true, moved * [1, 1, -1], order) > 0.05


@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_motions_and_the_order_of_rows_change_nothing(seed):
    true, order = folded(seed)
    rng = np.random.default_rng(seed)
    predicted = true + rng.normal(size=true.shape)
    rows = rng.permutation(len(true))
    moved = Rotation.random(random_state=seed).apply(predicted) - 7
    expected = chain_fape(true, predicted, order)
    assert chain_fape(true[rows], moved[rows], order[rows] - 12) == pytest.approx(expected, abs=1e-9)


def test_the_worst_is_the_clamp_over_the_scale():
    true, order = folded()
    assert chain_fape(true, 1e6 * true, order, clamp=8, scale=10) == pytest.approx(0.8, abs=0.01)
    assert chain_fape(true, np.ones_like(true), order) > 0.5


def test_chunks_change_nothing(monkeypatch):
    true, order = folded()
    predicted = true[::-1].copy()
    whole = chain_fape(true, predicted, order)
    monkeypatch.setattr(_distances, "CHUNK_ENTRIES", 7 * 3 * len(true))
    assert chain_fape(true, predicted, order) == pytest.approx(whole, rel=1e-12)


def test_a_chain_without_frames_has_no_score():
    straight = np.arange(5.0)[:, None] * [1, 0, 0]
    assert np.isnan(chain_fape(straight, straight, np.arange(5)))
    true, _ = folded()
    assert np.isnan(chain_fape(true, true, 2 * np.arange(len(true))))
    assert np.isnan(chain_fape(true[:2], true[:2], [0, 1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": [0, 1]}, "order"),
        ({"order": np.zeros(9)}, "place"),
        ({"order": np.arange(9) + 0.5}, "integers"),
        ({"order": np.full(9, np.nan)}, "integers"),
        ({"order": list("abcdefghi")}, "integers"),
        ({"order": [None] * 9}, "integers"),
        ({"true": np.zeros((9, 2)), "predicted": np.zeros((9, 2))}, "3 dim.* 2"),
        ({"clamp": 0}, "clamp=0"),
        ({"predicted": np.full((9, 3), np.nan)}, "finite"),
    ],
)
def test_invalid_input_raises(change, message):
    good = {"true": np.ones((9, 3)), "predicted": np.ones((9, 3)), "order": np.arange(9)}
    with pytest.raises(ValueError, match=message):
        chain_fape(**{**good, **change})
