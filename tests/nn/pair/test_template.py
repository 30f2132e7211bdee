"""Templates of positions are functions of the distance; templates of all pairs are truncated decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import j0
from scipy.stats import special_ortho_group

from alphastomics.nn.pair import Template
from dense_pairs import DenseTemplate, factorize

dimensions = pytest.mark.parametrize("n_dims", [2, 3])
PROFILE = {2: j0, 3: lambda z: np.sinc(z / np.pi)}


def make(n_dims: int, *, highest: float | None = 1.0, radius: float = 6.0) -> Template:
    torch.manual_seed(0)
    return Template(5, n_dims, radius=radius, highest=highest).double()


def positions(n_dims: int, radius: float = 6.0, n: int = 30) -> torch.Tensor:
    """Positions no two of which are further apart than ``radius``."""
    x = torch.randn(2, n, n_dims, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x / torch.cdist(x, x).amax(dim=(1, 2))[:, None, None] * radius


@dimensions
def test_features_are_those_of_the_formula(n_dims):
    module, x = make(n_dims), positions(n_dims).numpy()
    distance = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)[..., None]
    frequency = np.arange(1, 6) / 5
    a, b = module.squared.detach().numpy(), module.wave.detach().numpy()
    expected = a * distance**2 / 36 + b * PROFILE[n_dims](frequency * distance)
    factors = module(torch.from_numpy(x))
    assert factors.rank == module.rank
    np.testing.assert_allclose(factors.dense().detach(), expected, atol=1e-4)


@dimensions
def test_squared_distance_alone_is_exact_at_rank_d_plus_2(n_dims):
    module, x = make(n_dims, highest=None), positions(n_dims)
    factors = module(x)
    assert factors.rank == module.rank == n_dims + 2
    expected = torch.cdist(x, x).square()[..., None] / 36 * module.squared
    torch.testing.assert_close(factors.dense(), expected)


@dimensions
def test_rotations_and_reflections_change_nothing(n_dims):
    """Bar: 1e-4."""
    module, x = make(n_dims, highest=2.95 if n_dims == 2 else 1.0), positions(n_dims)
    p = module(x).dense().detach()
    for seed in range(5):
        turn = torch.from_numpy(special_ortho_group.rvs(n_dims, random_state=seed))
        turn[0] *= -1
        assert float((module(x @ turn).dense() - p).detach().abs().max()) <= 1e-4
    assert float((module(3 * x @ turn).dense() - module(3 * x).dense()).detach().abs().max()) > 0.01  # beyond the rule


@dimensions
def test_shifts_change_nothing(n_dims):
    module, x = make(n_dims), positions(n_dims)
    torch.testing.assert_close(module(x + 1e3).dense(), module(x).dense(), atol=1e-9, rtol=0)
    single = make(n_dims).float()
    far = (x + 100).float()
    torch.testing.assert_close(single(far).dense(), module(far.double()).dense().float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("highest", "in_2d", "in_3d"), [(1 / 3, 10, 50), (1.0, 16, 128), (3.0, 32, 578)])
def test_ranks_are_those_of_the_documentation(highest, in_2d, in_3d):
    assert make(2, highest=highest).rank == 4 + in_2d
    assert make(3, highest=highest).rank == 5 + in_3d


def test_padded_positions_may_be_anything(mask):
    module, x = make(2), positions(2, n=11)
    changed = x.masked_fill(~mask[..., None], float("nan"))
    p = module(changed, mask).dense()
    torch.testing.assert_close(p, module(x.masked_fill(~mask[..., None], 7.0), mask).dense())
    assert not p[1, ~mask[1]].any()
    torch.testing.assert_close(p[1][mask[1]][:, mask[1]], module(x[1:, mask[1]]).dense()[0])


@dimensions
def test_all_parameters_and_positions_receive_a_gradient(n_dims):
    module, x = make(n_dims), positions(n_dims).requires_grad_()
    module(x).dense().square().sum().backward()
    assert {name for name, parameter in module.named_parameters() if parameter.grad.all()} == {"squared", "wave"}
    assert bool(x.grad.isfinite().all())
    assert bool(x.grad.any())


def test_half_precision_does_not_round_phases():
    module, x = Template(4, 2, highest=2.0), positions(2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = module(x)
    torch.testing.assert_close(rounded.left, module(x).left)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="radius=0"):
        Template(3, 2, radius=0)
    with pytest.raises(ValueError, match="n_dims=1"):
        Template(3, 1)


def test_factorize_is_the_best_approximation(mask):
    p = torch.randn(2, 11, 11, 3, dtype=torch.float64)
    p = p * (mask[:, :, None] & mask[:, None])[..., None]
    rest = (factorize(p, 4, mask).dense() - p).square().sum(dim=(1, 2))
    spectrum = np.linalg.svd(np.moveaxis(p.numpy(), 3, 1), compute_uv=False)
    np.testing.assert_allclose(rest, (spectrum[..., 4:] ** 2).sum(-1), rtol=1e-12)
    torch.testing.assert_close(factorize(p, 11, mask).dense(), p)


def test_a_dense_template_is_a_learned_sum_of_its_channels(mask):
    torch.manual_seed(0)
    module = DenseTemplate(3, 5, rank=11).double()
    template = torch.randn(2, 11, 11, 3, dtype=torch.float64)
    factors = module(template, mask)
    expected = template @ module.weight.mT * (mask[:, :, None] & mask[:, None])[..., None]
    torch.testing.assert_close(factors.dense(), expected)
    assert factors.rank == module.rank == 33
    factors.dense().square().sum().backward()
    assert bool(module.weight.grad.all())


def test_impossible_templates_are_refused():
    with pytest.raises(ValueError, match="2049 cells"):
        factorize(torch.zeros(1, 2049, 2049, 1), 3)
    with pytest.raises(ValueError, match="rank=4"):
        factorize(torch.zeros(1, 3, 3, 1), 4)
