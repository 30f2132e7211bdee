"""Timesteps that each mode may draw, how often, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binomtest, kstest

from alphastomics.diffusion import MIN_TIME, MODES
from alphastomics.train.timesteps import (
    EXPR_TO_POS,
    FRAME_SHARE,
    POS_TO_EXPR,
    Timesteps,
    draw_timesteps,
    keyed_rng,
    stratified_uniform,
)

N = 4000
SMALLEST_POSITION = 0.05


def draws(mode: str, absent: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([draw_timesteps(mode, rng, modality_dropout=absent, smallest=SMALLEST_POSITION) for _ in range(N)])


def likely(share: np.ndarray, expected: float) -> bool:
    return bool(binomtest(int(share.sum()), len(share), expected).pvalue > 1e-4)


def running(t: np.ndarray) -> np.ndarray:
    return (t > 0) & (t < 1)


@pytest.mark.parametrize("mode", MODES)
def test_active_timesteps_are_above_zero(mode):
    t_expr, t_pos = draws(mode).T
    assert ((t_expr == 0) | (t_expr >= MIN_TIME)).all()
    assert ((t_pos == 0) | (t_pos >= SMALLEST_POSITION)).all()
    assert max(t_expr.max(), t_pos.max()) <= 1


@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_positions_from_expression_are_absent(absent):
    assert {tuple(timesteps) for timesteps in draws("expr_to_pos", absent)} == {(0.0, 1.0)}


@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_expression_from_positions(absent):
    t_expr, t_pos = draws("pos_to_expr", absent).T
    frame = t_pos == 1  # the canonical frame is learned in every mode
    assert likely(frame, FRAME_SHARE)
    assert not t_expr[frame].any()
    assert not t_pos[~frame].any()
    t_expr = t_expr[~frame]
    assert likely(t_expr == 1, absent)
    if absent < 1:
        assert kstest((t_expr[t_expr < 1] - MIN_TIME) / (1 - MIN_TIME), "uniform").pvalue > 0.001


def test_joint_timesteps_are_equal_or_independent_and_include_the_start():
    t_expr, t_pos = draws("joint").T
    both = running(t_expr) & running(t_pos)
    assert likely((t_expr == 0) & (t_pos == 1), 0.25)
    assert likely((t_expr == 1) & (t_pos == 1), 0.05)
    assert likely(both, 0.7)
    equal = both & (t_expr == t_pos)
    assert 0.4 < equal.sum() / both.sum() < 0.75
    assert abs(np.corrcoef(t_expr[both & ~equal], t_pos[both & ~equal])[0, 1]) < 0.1


def test_any_covers_the_timesteps_of_every_mode():
    t_expr, t_pos = draws("any").T
    states = {
        "positions from expression": (t_expr == 0) & (t_pos == 1),
        "expression from positions": running(t_expr) & (t_pos == 0),
        "its mean": (t_expr == 1) & (t_pos == 0),
        "both": running(t_expr) & running(t_pos),
        "the start of both": (t_expr == 1) & (t_pos == 1),
    }
    assert sum(state.sum() for state in states.values()) == N
    assert likely(states["the start of both"], (1 - POS_TO_EXPR) * 0.05)
    assert min(state.mean() for state in states.values()) > 0.005
    frames = EXPR_TO_POS + (POS_TO_EXPR - EXPR_TO_POS) * FRAME_SHARE + (1 - POS_TO_EXPR) * 0.25
    assert likely(states["positions from expression"], frames)
    assert likely((t_pos == 0), (POS_TO_EXPR - EXPR_TO_POS) * (1 - FRAME_SHARE))


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
def test_a_given_kind_decides_which_timesteps_are_active(mode):
    rng = np.random.default_rng(0)
    for kind in (0.05, 0.45, 0.65, 0.95):
        both = [draw_timesteps(mode, rng, modality_dropout=0.5, kind=kind) for _ in range(50)]
        if mode != "any":  # there it decides about the question, and a fresh number about its timesteps
            assert (
                len({(np.ceil(t_expr) + (t_expr == 1), np.ceil(t_pos) + (t_pos == 1)) for t_expr, t_pos in both}) == 1
            )
        assert len(set(both)) in (1, 50) or mode == "any"


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
