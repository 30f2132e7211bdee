"""Draws of the network in training: the same for a context, whatever it is batched with and padded to."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn import Experts
from alphastomics.nn.random import ContextGenerators, Dropout, drawing_again, drawing_for_cells, drawing_from, normal

CPU = torch.device("cpu")


def generators(seeds, n_cells) -> ContextGenerators:
    return ContextGenerators.seeded(seeds, n_cells, CPU)


def test_a_context_draws_the_same_in_any_batch_and_any_padding():
    dropout = Dropout(0.4)
    x = torch.ones(3, 9, 5)
    with drawing_from(generators([7, 8, 9], [9, 4, 6])):
        together = [dropout(x), dropout(x)]
    with drawing_from(generators([9, 8], [6, 4])):
        shorter = [dropout(torch.ones(2, 7, 5)) for _ in range(2)]
    for all_three, two in zip(together, shorter, strict=True):
        assert torch.equal(all_three[2, :6], two[0, :6])
        assert torch.equal(all_three[1, :4], two[1, :4])
    assert not torch.equal(*together)
    assert not torch.equal(together[0][0, :4], together[0][1, :4])


def test_a_part_of_the_cells_draws_their_share_of_the_whole():
    """The first four of seven cells, and the rest with padding; also when blocks are run again."""
    x, dropout = torch.ones(2, 4, 3), Dropout(0.5)
    with drawing_from(generators([7, 8], [7, 3])):
        whole = [dropout(torch.ones(2, 7, 3)) for _ in range(2)]
    for start in (0, 4):
        with drawing_from(generators([7, 8], [7, 3])), drawing_for_cells(start):
            again = drawing_again()
            own = [dropout(x), dropout(x)]
        with again:
            repeated = [dropout(x), dropout(x)]
        for part, second, every in zip(own, repeated, whole, strict=True):
            assert torch.equal(part, second)
            assert torch.equal(part[:, : 7 - start], every[:, start : start + 4])


def test_dropout_keeps_the_mean():
    with drawing_from(generators([1], [2000])):
        found = Dropout(0.3)(torch.ones(1, 2000, 50))
    assert found.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float((found == 0).float().mean()) == pytest.approx(0.3, abs=0.01)


def test_dropout_does_nothing_outside_of_training_or_at_rate_0():
    x = torch.ones(1, 4, 2)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_without_generators_pytorch_draws():
    x = torch.ones(2, 30, 4)
    torch.manual_seed(3)
    found = Dropout(0.5)(x)
    torch.manual_seed(3)
    assert torch.equal(found, torch.nn.functional.dropout(x, 0.5))


def test_noise_depends_on_real_cells_only():
    with drawing_from(generators([5, 6], [3, 2])):
        every = normal((2, 4, 3), None, torch.float64, CPU)
    with drawing_from(generators([5, 6], [3, 2])):
        real = normal((2, 4, 3), torch.tensor([0, 1, 2, 4, 5]), torch.float64, CPU)
    assert torch.equal(every[[0, 1, 2, 4, 5]], real)
    assert not bool(every[[3, 6, 7]].any())
    assert bool(real.any())


def test_experts_draw_the_same_noise_for_a_context_alone():
    torch.manual_seed(0)
    experts, x = Experts(8, 16, num_experts=4, top_k=2), torch.randn(2, 9, 8)
    mask = torch.arange(9) < torch.tensor([9, 5])[:, None]
    with drawing_from(generators([3, 4], [9, 5])):
        together = experts(x, mask)[1].probability[1, :5]
    with drawing_from(generators([4], [5])):
        alone = experts(x[1:, :5])[1].probability[0]
    torch.testing.assert_close(together, alone)


def test_recomputed_draws_restore_the_generators():
    dropout, x = Dropout(0.5), torch.ones(1, 50, 4)
    with drawing_from(generators([2], [50])):
        first = dropout(x)
        again = drawing_again()
        second = dropout(x)
        with again:
            assert torch.equal(dropout(x), second)
        third = dropout(x)
    with drawing_from(generators([2], [50])):
        assert all(torch.equal(dropout(x), expected) for expected in (first, second, third))
