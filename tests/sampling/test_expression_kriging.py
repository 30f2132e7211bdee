"""Regression kriging: against dense sums, on fields with and without structure, and what it must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.sampling._completion import MIN_CELLS, _average, krige

N_CELLS, N_KNOWN, N_GENES = 400, 80, 12


@pytest.fixture
def tissue():
    rng = np.random.default_rng(0)
    position = rng.uniform(-2, 2, (N_CELLS, 2))
    waves, phase = rng.standard_normal((2, N_GENES)), rng.uniform(0, 6, N_GENES)
    field = np.sin(position @ waves + phase)
    known = np.sort(rng.permutation(N_CELLS)[:N_KNOWN])
    return torch.from_numpy(position), torch.from_numpy(field), torch.from_numpy(known)


def test_weighted_means_are_dense_sums(tissue):
    position, field, known = (value.numpy() for value in tissue)
    distance = np.linalg.norm(position[:, None] - position[known], axis=-1)
    number = np.argsort(distance, axis=1)[:, :10]
    near = np.take_along_axis(distance, number, axis=1)
    weight = np.exp(-0.5 * (near / (0.7 * near[:, 4:5])) ** 2)
    expected = (weight[..., None] * field[known][number]).sum(1) / weight.sum(1, keepdims=True)
    found = _average(near, number, 0.7, torch.from_numpy(field[known]))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)


def test_a_smooth_residual_is_followed_and_noise_is_not(tissue):
    position, field, known = tissue
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(N_CELLS, N_GENES, generator=generator, dtype=torch.float64)
    followed = krige(position, known, field[known] + 0.2 * noise[known])
    rest = np.setdiff1d(np.arange(N_CELLS), known.numpy())
    assert float((followed - field)[rest].square().mean()) < 0.15 * float(field[rest].square().mean())
    assert float(krige(position, known, noise[known]).square().mean()) < 0.03


def test_genes_have_shares_of_their_own(tissue):
    position, field, known = tissue
    noise = torch.randn(N_CELLS, N_GENES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    half = N_GENES // 2
    mixed = torch.cat([field[:, :half], noise[:, half:]], dim=1)
    found = krige(position, known, mixed[known])
    assert float(found[:, half:].square().mean()) < 0.25 * float(found[:, :half].square().mean())


def test_frame_and_order_do_not_matter(tissue):
    position, field, known = tissue
    expected = krige(position, known, field[known])
    rotation = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    torch.testing.assert_close(krige(3 * position @ rotation + 7, known, field[known]), expected)
    order = torch.randperm(N_CELLS, generator=torch.Generator().manual_seed(1))
    where = torch.argsort(order)[known]
    torch.testing.assert_close(krige(position[order], where, field[known]), expected[order])


def test_a_cell_at_the_place_of_another_is_no_neighbor_of_its_own(tissue):
    position, _, known = tissue
    position[known[1::2]] = position[known[::2]]  # pairs of cells
    noise = torch.randn(N_KNOWN, N_GENES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert float(krige(position, known, noise).square().mean()) < 0.05


def test_few_known_cells_change_nothing(tissue):
    position, field, known = tissue
    assert not bool(krige(position, known[: MIN_CELLS - 1], field[known[: MIN_CELLS - 1]]).any())
    assert bool(krige(position, known[:MIN_CELLS], field[known[:MIN_CELLS]]).any())
