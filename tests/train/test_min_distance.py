"""The loss of the minimum-distance network: what is judged, in which units, and what it depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.nn import MinDistanceNetwork
from alphastomics.train.losses import HIGHEST, LOWEST, PURPOSE, RIM, min_distance_losses
from alphastomics.train.timesteps import keyed_rng


class Recorder(torch.nn.Module):
    """Returns the given prediction, and keeps its inputs."""

    n_neighbors = 12

    def __init__(self, answer=lambda y: y) -> None:
        super().__init__()
        self.answer, self.seen = answer, []

    def forward(self, y, r, neighbors):
        self.seen.append((y, float(r), neighbors))
        return self.answer(y)


@pytest.fixture
def grids(make_batch):
    """A batch whose neighborhoods are lattices of spacing 0.1, of different sizes, one of them empty."""
    batch = make_batch(n_epochs=1)
    axis = 0.1 * (torch.arange(21.0) - 10)
    lattice = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    patch = torch.full((3, len(lattice), 2), torch.nan)
    patch[0] = lattice
    patch[1, :400] = lattice[:400]
    return batch._replace(patch=patch)


def test_the_network_works_in_units_of_the_spacing(grids):
    network = Recorder()
    min_distance_losses(network, grids, 0.1, 0)
    for (y, r, neighbors), key, n in zip(network.seen, grids.key, (441, 400), strict=False):
        rng = keyed_rng(key.numpy(), PURPOSE)
        expected_r = np.exp(rng.uniform(np.log(LOWEST), np.log(HIGHEST)))
        noise = rng.standard_normal((n, 2), dtype=np.float32)
        assert r == pytest.approx(expected_r)
        x = grids.patch[0, :n] / 0.1
        torch.testing.assert_close(y, x + r * torch.from_numpy(noise), atol=1e-4, rtol=1e-4)
        assert neighbors.shape == (n, 12)


def test_copying_the_input_costs_one_and_the_truth_nothing(grids):
    """The loss is in units of the noise, and covers cells that have all their neighbors."""
    network = Recorder()
    losses = min_distance_losses(network, grids, 0.1, 0)
    x = grids.patch[0] / 0.1
    y, r, _ = network.seen[0]
    inner = x.norm(dim=1) < x.norm(dim=1).max() - RIM - r
    assert 2 < int(inner.sum()) < len(x)
    assert float(losses[0]) == pytest.approx(float((((y - x) / r)[inner] ** 2).mean()), rel=1e-3)
    assert float(losses[0]) == pytest.approx(1, abs=0.3)

    def rim_only(y):
        return torch.where(inner[:, None], x, y + 100) if len(y) == len(x) else y

    assert float(min_distance_losses(Recorder(rim_only), grids, 0.1, 0)[0]) == pytest.approx(0, abs=1e-6)


def test_without_enough_cells_there_is_no_loss(grids):
    assert float(min_distance_losses(Recorder(), grids, 0.1, 0)[2]) == 0
    assert min_distance_losses(Recorder(), grids, 10.0, 0).tolist() == [0, 0, 0]
    nothing = grids._replace(patch=grids.patch[:, :0])
    assert min_distance_losses(Recorder(), nothing, 0.1, 0).tolist() == [0, 0, 0]


def test_it_depends_on_the_key_and_not_on_the_batch(grids):
    torch.manual_seed(0)
    network = MinDistanceNetwork()
    together = min_distance_losses(network, grids, 0.1, 0).detach()
    for i, n in enumerate((441, 400, 0)):
        alone = grids._replace(patch=grids.patch[i : i + 1, :n], key=grids.key[i : i + 1])
        torch.testing.assert_close(min_distance_losses(network, alone, 0.1, 0).detach()[0], together[i])
    assert not torch.equal(min_distance_losses(network, grids, 0.1, 1).detach(), together)
    other = grids._replace(key=grids.key + 1)
    assert not torch.equal(min_distance_losses(network, other, 0.1, 0).detach(), together)
