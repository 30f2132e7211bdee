"""Triangle multiplication on factors against the sum over all triangles, value and gradient."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn.pair import PairFactors, TriangleMultiplication

directions = pytest.mark.parametrize("direction", ["outgoing", "incoming"])


def make(direction: str, c: int = 8) -> TriangleMultiplication:
    torch.manual_seed(0)
    module = TriangleMultiplication(c, direction).double()
    with torch.no_grad():
        module.gates.weight *= 3  # gates that are far from equal
    return module


def triangles(module: TriangleMultiplication, p: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The equations of the module, context by context, over its real cells."""
    out = torch.zeros_like(p)
    for context, cells in enumerate(mask):
        real = cells.nonzero()[:, 0]
        q = p[context][real][:, real]
        q = q / (q.square().mean((0, 1)) + 1e-6).sqrt()
        summary = torch.cat([torch.einsum("iic->ic", q), q.mean(1), q.mean(0)], dim=-1)
        g, w, h = (summary @ module.gates.weight.mT + module.gates.bias).sigmoid().chunk(3, dim=-1)
        other = q[..., [-1, *range(q.shape[-1] - 1)]]
        term = "kc,ikc,jkc->ijc" if module.direction == "outgoing" else "kc,kic,kjc->ijc"
        z = torch.einsum(term, w, q, other) / len(real)
        z = z / (z.square().mean((0, 1)) + 1e-6).sqrt()
        update = g[:, None] * h[None] * z
        out[context] = torch.zeros_like(p[context]).index_put((real[:, None], real[None]), update)
    return out


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, of, retain_graph=True)])


@directions
@pytest.mark.parametrize("padded", [False, True])
def test_update_is_the_sum_over_all_triangles(direction, padded, make_factors, mask, difference):
    """Bar: 1e-12 in double precision, value and gradient; 1e-5 in single precision."""
    module, mask = make(direction), mask if padded else torch.ones_like(mask)
    left, right = (x.requires_grad_() for x in make_factors()[:2])
    factors = PairFactors.masked(left, right, mask)
    inputs = (left, right, *module.parameters())
    weight = torch.randn(2, 11, 11, 8, dtype=torch.float64)

    expected = triangles(module, factors.dense(), mask)
    actual = module(factors).dense()
    assert difference(actual, expected) <= 1e-12
    grads = [gradients((value * weight).sum(), *inputs) for value in (actual, expected)]
    assert difference(*grads) <= 1e-12

    single = module.float()
    halves = [x.detach().float().requires_grad_() for x in (left, right)]
    value = single(PairFactors.masked(*halves, mask)).dense()
    assert difference(value, expected) <= 1e-5
    grad = gradients((value * weight).sum(), *halves, *single.parameters())
    assert difference(grad, grads[1]) <= 1e-5


@directions
def test_the_rank_stays(direction, make_factors):
    for rank in (1, 3, 5):
        assert make(direction)(make_factors(rank=rank)).rank == rank


@directions
def test_update_does_not_depend_on_the_choice_of_factors(direction, make_factors):
    module, factors = make(direction), make_factors()
    m = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    other = PairFactors(factors.left @ m, factors.right @ torch.linalg.inv(m).mT)
    torch.testing.assert_close(module(other).dense(), module(factors).dense())


def test_directions_are_different_functions(make_factors, difference):
    factors = make_factors()
    assert difference(make("outgoing")(factors).dense(), make("incoming")(factors).dense()) > 0.1


def test_incoming_is_outgoing_of_the_transpose(make_factors):
    outgoing, factors = make("outgoing"), make_factors()
    incoming = TriangleMultiplication(8, "incoming").double()
    swap = torch.cat([torch.arange(8), torch.arange(16, 24), torch.arange(8, 16)])  # row and column means
    incoming.load_state_dict({"gates.weight": outgoing.gates.weight[:, swap], "gates.bias": outgoing.gates.bias})
    torch.testing.assert_close(incoming(factors).dense(), outgoing(factors.transposed()).dense())


def test_sums_over_cells_keep_their_precision_under_autocast(make_factors):
    module = make("outgoing").float()
    factors = PairFactors(*(x.float() for x in make_factors(n=2000)[:2]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = module(factors)
    exact = module(factors)
    assert float((rounded.left - exact.left).detach().norm() / exact.left.detach().norm()) < 2e-2


def test_unknown_directions_raise():
    with pytest.raises(ValueError, match="direction='sideways'"):
        TriangleMultiplication(8, "sideways")
