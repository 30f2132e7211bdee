"""Micro-batches of limited size, against counting."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, strategies as st

from alphastomics.train.datamodule import split_batch
from alphastomics.train.memory.fit import largest_fitting

counts = st.integers(1, 500)


@given(contexts=counts, n_cells=counts, cells=st.integers(1, 5000))
def test_a_batch_fits_and_a_step_sees_enough_contexts(contexts: int, n_cells: int, cells: int) -> None:
    if n_cells > cells:
        with pytest.raises(ValueError, match=f"micro_batch_size={cells}"):
            split_batch(contexts, n_cells, cells)
        return
    b, accumulation = split_batch(contexts, n_cells, cells)
    assert b * n_cells <= cells
    assert accumulation == ceil(contexts / b)
    assert contexts <= b * accumulation < contexts + accumulation
    # No smaller number of batches would do.
    assert accumulation == 1 or (accumulation - 1) * (cells // n_cells) < contexts


def test_accumulation_is_rounded_up() -> None:
    """The original rounds down: 10 contexts in batches of 4 became 8."""
    assert split_batch(10, 1000, 4000) == (4, 3)


@given(highest=st.integers(0, 2000), limit=st.integers(0, 2500), tolerance=st.integers(1, 100))
def test_bisection_finds_the_largest_that_fits(highest: int, limit: int, tolerance: int) -> None:
    found = largest_fitting(lambda n: n <= limit, highest, tolerance=tolerance)
    largest = min(highest, limit)
    assert (found > 0) == (largest > 0)
    assert largest - tolerance < found <= largest
