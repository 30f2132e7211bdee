"""The Hilbert curve: every cube once, consecutive cubes touch, and rows of a tissue in its order are compact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alphastomics.data._order import hilbert_number, hilbert_order


@pytest.mark.parametrize(("n_dims", "bits"), [(1, 5), (2, 1), (2, 5), (3, 1), (3, 3), (4, 2)])
def test_every_cube_is_visited_once_and_consecutive_ones_touch(n_dims, bits):
    grid = np.array(list(itertools.product(range(2**bits), repeat=n_dims)), dtype=np.uint64)
    number = hilbert_number(grid, bits)
    assert sorted(number.tolist()) == list(range(2 ** (n_dims * bits)))
    steps = np.abs(np.diff(grid[np.argsort(number)].astype(np.int64), axis=0)).sum(axis=1)
    assert (steps == 1).all()


@pytest.mark.parametrize("n_dims", [2, 3])
def test_pieces_of_the_order_are_compact(n_dims):
    position = np.random.default_rng(0).random((4096, n_dims)) * [1000.0, 600.0, 300.0][:n_dims] - 50
    order = hilbert_order(position)
    assert sorted(order.tolist()) == list(range(4096))
    pieces = position[order].reshape(16, 256, n_dims)
    within = pieces.var(axis=1).sum(axis=1)
    assert within.mean() < 0.25 * position.var(axis=0).sum()  # 1 in random order


def test_shift_and_unit_do_not_matter():
    position = np.random.default_rng(1).random((500, 2))
    np.testing.assert_array_equal(hilbert_order(position), hilbert_order(8 * position + 1024))


def test_cells_in_one_place_keep_their_order():
    np.testing.assert_array_equal(hilbert_order(np.zeros((5, 2))), np.arange(5))
    assert hilbert_order(np.empty((0, 2))).shape == (0,)
