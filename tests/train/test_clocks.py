"""Clocks that each mode may draw, how often, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, kstest

from alphastomics.train.clocks import MODES, SMALLEST, Clocks, draw_clocks, keyed_rng

N = 4000
SMALLEST_POSITION = 0.05


def draws(mode: str, absent: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([draw_clocks(mode, rng, absent=absent, smallest=SMALLEST_POSITION) for _ in range(N)])


def likely(share: np.ndarray, expected: float) -> bool:
    return bool(binomtest(int(share.sum()), len(share), expected).pvalue > 1e-4)


def running(t: np.ndarray) -> np.ndarray:
    return (t > 0) & (t < 1)


@pytest.mark.parametrize("mode", MODES)
def test_clocks_that_run_keep_away_from_zero(mode):
    t_expr, t_pos = draws(mode).T
    assert ((t_expr == 0) | (t_expr >= SMALLEST)).all()
    assert ((t_pos == 0) | (t_pos >= SMALLEST_POSITION)).all()
    assert max(t_expr.max(), t_pos.max()) <= 1


@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_positions_from_expression(absent):
    t_expr, t_pos = draws("expr_to_pos", absent).T
    assert not t_expr.any()
    assert likely(t_pos == 1, absent)
    if absent < 1:
        spread = (t_pos[t_pos < 1] - SMALLEST_POSITION) / (1 - SMALLEST_POSITION)
        assert kstest(spread, "uniform").pvalue > 0.001


@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_expression_from_positions(absent):
    t_expr, t_pos = draws("pos_to_expr", absent).T
    assert not t_pos.any()
    assert likely(t_expr == 1, absent)
    if absent < 1:
        assert kstest((t_expr[t_expr < 1] - SMALLEST) / (1 - SMALLEST), "uniform").pvalue > 0.001


def test_joint_runs_both_together_or_apart_and_knows_the_start_of_the_chain():
    t_expr, t_pos = draws("joint").T
    both = running(t_expr) & running(t_pos)
    assert likely((t_expr == 0) & (t_pos == 1), 0.25)
    assert likely((t_expr == 1) & (t_pos == 1), 0.05)
    assert likely(both, 0.7)
    equal = both & (t_expr == t_pos)
    assert 0.4 < equal.sum() / both.sum() < 0.75
    assert abs(np.corrcoef(t_expr[both & ~equal], t_pos[both & ~equal])[0, 1]) < 0.1


def test_any_visits_the_states_of_every_question():
    t_expr, t_pos = draws("any").T
    states = {
        "positions from expression": (t_expr == 0) & running(t_pos),
        "their mean": (t_expr == 0) & (t_pos == 1),
        "expression from positions": running(t_expr) & (t_pos == 0),
        "its mean": (t_expr == 1) & (t_pos == 0),
        "both": running(t_expr) & running(t_pos),
        "the start of both": (t_expr == 1) & (t_pos == 1),
    }
    assert sum(state.sum() for state in states.values()) == N
    assert min(state.mean() for state in states.values()) > 0.01
    assert likely((t_expr == 0) & running(t_pos), 0.4 * 0.5)
    assert likely((t_pos == 0), 0.3)


@given(key=st.tuples(*[st.integers(0, 2**40)] * 3), mode=st.sampled_from(MODES), purpose=st.integers(0, 3))
def test_clocks_depend_on_the_key_alone(key, mode, purpose):
    np.random.seed(key[0] % 1000)  # the stream of the process has no say
    first, second = (draw_clocks(mode, keyed_rng(np.array(key), purpose), absent=0.5) for _ in range(2))
    assert first == second
    assert isinstance(first, Clocks)


def test_every_part_of_the_key_matters():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]
    values = {float(keyed_rng(np.array(key), purpose).random()) for key in keys for purpose in range(3)}
    assert len(values) == 15
