"""Ways to add an update without a larger rank."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn.pair import Distribute, PairFactors, RankMix, TangentStep, make_residual


def error(factors: PairFactors, target: torch.Tensor) -> float:
    return float((factors.dense().permute(0, 3, 1, 2) - target).detach().norm())


def two(n: int = 40, rank: int = 4) -> tuple[PairFactors, PairFactors]:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 1, 3, n, rank, generator=generator, dtype=torch.float64)
    return PairFactors(parts[0], parts[1]), PairFactors(parts[2], parts[3])


def test_a_tangent_step_is_nearly_the_best_approximation():
    """The step of 0.05 of the design: the best of rank R to 1e-3, the sum of the sides far worse than no step."""
    pair, update = two()
    residual = TangentStep(3).double()
    with torch.no_grad():
        residual.step.fill_(0.05)
    target = (pair.left @ pair.right.mT) + 0.05 * (update.left @ update.right.mT)
    best = float(torch.linalg.svdvals(target)[..., 4:].norm())
    assert error(residual(pair, update), target) < best * (1 + 1e-3)
    assert error(pair, target) > 1.02 * best
    naive = PairFactors(pair.left + 0.05**0.5 * update.left, pair.right + 0.05**0.5 * update.right)
    assert error(naive, target) > 5 * best


def test_a_tangent_step_along_the_features_themselves_is_exact():
    pair, _ = two()
    residual = TangentStep(3).double()
    with torch.no_grad():
        residual.step.fill_(0.3)
    torch.testing.assert_close(residual(pair, pair).dense(), 1.3 * pair.dense())


def test_a_tangent_step_does_not_depend_on_the_choice_of_factors():
    pair, update = two()
    residual = TangentStep(3).double()
    with torch.no_grad():
        residual.step.fill_(0.1)
    m = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    inverse = torch.linalg.inv(m).mT
    others = [PairFactors(x.left @ m, x.right @ inverse) for x in (pair, update)]
    torch.testing.assert_close(residual(*others).dense(), residual(pair, update).dense())


@pytest.mark.parametrize("residual", [RankMix(6), TangentStep(3)])
def test_at_first_nothing_changes_but_everything_learns(residual):
    residual = residual.double()
    pair, update = two()
    after = residual(pair, update)
    torch.testing.assert_close(after.left, pair.left, rtol=0, atol=0)
    torch.testing.assert_close(after.right, pair.right, rtol=0, atol=0)
    after.dense().pow(3).sum().backward()
    for parameter in residual.parameters():
        assert bool(parameter.grad.any())


def test_a_mix_combines_the_ranks_of_either_side():
    residual = RankMix(6).double()
    for parameter in residual.parameters():
        torch.nn.init.normal_(parameter)
    pair, update = two()
    after = residual(pair, update)
    stacked = torch.cat([pair.right, update.right], dim=-1)
    mix = torch.cat([torch.eye(4) + residual.keep[1, :4, :4], residual.take[1, :4, :4]])
    torch.testing.assert_close(after.right, torch.einsum("bcnq,qr->bcnr", stacked, mix))


def test_distributing_adds_one_vector_to_all_ranks():
    pair, update = two()
    after = Distribute()(pair, update)
    share = (update.left.sum(-1) + update.right.sum(-1)) / 4
    torch.testing.assert_close(after.left - pair.left, share[..., None].expand(-1, -1, -1, 4))
    torch.testing.assert_close(after.right - pair.right, share[..., None].expand(-1, -1, -1, 4))


def test_residuals_are_made_by_name():
    kinds = {"mix": RankMix, "tangent": TangentStep, "distribute": Distribute}
    for name, kind in kinds.items():
        assert isinstance(make_residual(name, 8, 4), kind)
    with pytest.raises(ValueError, match="pair_residual='plain'"):
        make_residual("plain", 8, 4)
