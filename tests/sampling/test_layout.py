from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from alphastomics.sampling._layout import refine_layout


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbors(x: torch.Tensor, k: int = 10) -> torch.Tensor:
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    return distance.topk(k, largest=False).indices


def preserved(true: torch.Tensor, predicted: torch.Tensor) -> float:
    pairs = zip(neighbors(true).tolist(), neighbors(predicted).tolist(), strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / (10 * len(true))


@pytest.fixture
def folded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A square whose halves lie on each other in the mean, and an embedding that separates them."""
    true = torch.rand(600, 2, generator=generator()) * 2 - 1
    mean = torch.stack([true[:, 0].abs() * 0.1, true[:, 1]], dim=1)
    waves = torch.randn(2, 32, generator=generator(1)) * 2
    return true, mean, F.normalize(torch.cat([(true @ waves).sin(), (true @ waves).cos()], dim=1), dim=1)


def test_cells_find_the_neighbors_of_their_embedding(folded):
    true, mean, feature = folded
    refined = refine_layout(mean, feature, generator())
    assert preserved(true, refined) > 1.3 * preserved(true, mean)
    assert float((refined - mean).square().sum(1).mean().sqrt()) < 0.5


def test_permuting_cells_permutes_the_layout_up_to_the_sampled_rows(folded):
    _, mean, feature = folded
    order = torch.randperm(len(mean), generator=generator(2))
    # 600 cells are fewer than the rows of an iteration: the sample is all of them, in some order.
    torch.testing.assert_close(
        refine_layout(mean[order], feature[order], generator()), refine_layout(mean, feature, generator())[order],
        atol=1e-3, rtol=0,
    )  # fmt: skip


def test_the_mean_is_left_alone(folded):
    _, mean, feature = folded
    before = mean.clone()
    assert not torch.equal(refine_layout(mean, feature, generator()), before)
    assert torch.equal(mean, before)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_few_cells(n):
    mean, feature = torch.randn(n, 3, generator=generator()), torch.zeros(n, 4)
    assert bool(refine_layout(mean, feature, generator()).isfinite().all())


def test_cells_on_one_spot_stay_finite():
    mean, feature = torch.zeros(50, 2), F.normalize(torch.randn(50, 8, generator=generator()), dim=1)
    assert bool(refine_layout(mean, feature, generator()).isfinite().all())
