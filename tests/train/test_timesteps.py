"""Timesteps that each mode may draw, how often, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binomtest, kstest

from alphastomics.diffusion import MIN_TIME, MODES
from alphastomics.train.timesteps import PLACED, Timesteps, draw_timesteps, keyed_rng, stratified_uniform

N = 4000


def draws(mode: str, absent: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([draw_timesteps(mode, rng, modality_dropout=absent) for _ in range(N)])


def likely(share: np.ndarray, expected: float) -> bool:
    return bool(binomtest(int(share.sum()), len(share), expected).pvalue > 1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_positions_are_absent_or_clean(mode, absent):
    t_expr, t_pos = draws(mode, absent).T
    placed = t_pos == 1
    assert likely(placed, PLACED[mode])
    assert not t_expr[placed].any()
    assert not t_pos[~placed].any()
    sampled = t_expr[~placed]
    if mode == "expr_to_pos":
        assert not len(sampled)
        return
    assert likely(sampled == 1, absent)
    noisy = sampled[sampled < 1]
    if absent < 1:
        assert kstest((noisy - MIN_TIME) / (1 - MIN_TIME), "uniform").pvalue > 0.001


@given(key=st.tuples(*[st.integers(0, 2**40)] * 3), mode=st.sampled_from(MODES), purpose=st.integers(0, 3))
def test_timesteps_depend_on_the_key_alone(key, mode, purpose):
    np.random.seed(key[0] % 1000)  # the global generator has no effect
    first, second = (draw_timesteps(mode, keyed_rng(np.array(key), purpose), modality_dropout=0.5) for _ in range(2))
    assert first == second
    assert isinstance(first, Timesteps)


def test_every_part_of_the_key_matters():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]
    values = {float(keyed_rng(np.array(key), purpose).random()) for key in keys for purpose in range(3)}
    assert len(values) == 15


@pytest.mark.parametrize("mode", MODES)
def test_a_given_kind_decides_which_values_are_noisy(mode):
    rng = np.random.default_rng(0)
    for kind in np.linspace(0.025, 0.975, 20):
        drawn = [draw_timesteps(mode, rng, modality_dropout=0.5, kind=float(kind)) for _ in range(50)]
        assert len(set(drawn)) in (1, 50)  # one of the fixed pairs, or a time of its own for every context


def test_kinds_are_uniform_and_even_within_an_epoch():
    """Any few contexts that follow each other share out the kinds."""
    kinds = np.array([[stratified_uniform(np.array([0, epoch, i]), 0) for i in range(40)] for epoch in range(100)])
    assert kstest(kinds[:, 0], "uniform").pvalue > 0.001
    for start in range(32):
        low = (kinds[:, start : start + 8] < 0.5).sum(1)
        assert low.min() >= 3
        assert low.max() <= 5


def test_kinds_depend_on_every_part_of_the_key_and_nothing_else():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    values = [[stratified_uniform(np.array(key), purpose) for key in keys for purpose in (0, 1)] for _ in range(2)]
    assert values[0] == values[1]
    assert len(set(values[0])) == 8
