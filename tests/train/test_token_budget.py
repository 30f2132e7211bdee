"""Batches under a budget, against counting."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import pytest
from hypothesis import given, strategies as st

from alphastomics.train.curriculum import BatchPlan, TokenBudget, largest_fitting

counts = st.integers(1, 500)


@given(contexts=counts, n_cells=counts, cells=st.integers(1, 5000), n_devices=st.integers(1, 9))
def test_a_batch_fits_and_a_step_sees_enough_contexts(contexts: int, n_cells: int, cells: int, n_devices: int) -> None:
    budget = TokenBudget(contexts_per_step=contexts, cells=cells, n_devices=n_devices)
    if n_cells > cells:
        with pytest.raises(ValueError, match=f"{cells:,} cells"):
            budget.plan(n_cells)
        return
    b, accumulation = budget.plan(n_cells)
    assert b * n_cells <= cells
    assert accumulation == ceil(contexts / (b * n_devices))
    assert contexts <= b * accumulation * n_devices < contexts + accumulation * n_devices
    # No smaller number of batches would do.
    assert accumulation == 1 or (accumulation - 1) * (cells // n_cells) * n_devices < contexts


def test_accumulation_is_rounded_up() -> None:
    """The original rounds down: 10 contexts in batches of 4 became 8."""
    assert TokenBudget(contexts_per_step=10, cells=4000).plan(1000) == BatchPlan(contexts=4, accumulation=3)


@given(contexts=counts, n_cells=counts, memory=st.integers(1, 10**7))
def test_a_quadratic_network_is_filled_by_bisection(contexts: int, n_cells: int, memory: int) -> None:
    asked: list[int] = []

    def fits(b: int, n: int) -> bool:
        asked.append(b)
        return b * n**2 + 100 * n <= memory

    budget = TokenBudget(contexts_per_step=contexts, fits=fits)
    largest = max((b for b in range(1, contexts + 1) if b * n_cells**2 + 100 * n_cells <= memory), default=0)
    if not largest:
        with pytest.raises(ValueError, match=f"{n_cells:,} cells"):
            budget.plan(n_cells)
    else:
        assert budget.plan(n_cells).accumulation == ceil(contexts / largest)
        assert budget.plan(n_cells).contexts <= largest
    assert len(asked) <= 3 * (2 + log2(contexts))


def test_what_fits_at_once_is_asked_for_once() -> None:
    asked: list[int] = []
    budget = TokenBudget(contexts_per_step=64, fits=lambda b, _: not asked.append(b))
    assert budget.plan(100) == BatchPlan(contexts=64, accumulation=1)
    assert asked == [64]


@given(highest=st.integers(0, 2000), limit=st.integers(0, 2500), tolerance=st.integers(1, 100))
def test_bisection_finds_the_largest_that_fits(highest: int, limit: int, tolerance: int) -> None:
    found = largest_fitting(lambda n: n <= limit, highest, tolerance=tolerance)
    largest = min(highest, limit)
    assert (found > 0) == (largest > 0)
    assert largest - tolerance < found <= largest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "cells"),
        ({"cells": 10, "fits": lambda b, n: True}, "cells"),
        ({"cells": 0}, "cells=0"),
        ({"cells": 10, "contexts_per_step": 0}, "contexts_per_step=0"),
        ({"cells": 10, "n_devices": 0}, "n_devices=0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudget(**({"contexts_per_step": 8} | arguments))
