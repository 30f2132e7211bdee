"""Each loss against its dense float64 formula; blocks, padding and degenerate cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.distance import cdist, pdist
from scipy.special import log_softmax, softmax

from alphastomics.diffusion import distances, losses
from alphastomics.diffusion.losses import (
    aligned_error,
    by_features,
    by_positions,
    distance_error,
    mean_squared_error,
    neighborhood_errors,
)
from largest_tensor import LargestTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SIZES = (11, 7, 2)


def positions(n_dims: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted and true positions of contexts of different sizes, with rubbish where padded, and the mask."""
    generator = torch.Generator().manual_seed(n_dims)
    shape = len(SIZES), max(SIZES), n_dims
    predicted, true = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    rubbish = 50 * torch.randn(shape, generator=generator, dtype=torch.float64)
    predicted, true = (torch.where(mask[..., None], x, rubbish).to(dtype) for x in (predicted, true))
    return predicted, true, mask


def real(x: Tensor, i: int) -> np.ndarray:
    return x[i, : SIZES[i]].detach().double().numpy()


def dense_cross_entropy(logits: np.ndarray, true: np.ndarray, width: float) -> float:
    """Between nearness in the tissue and the given similarity, over the other cells of each cell."""
    closeness, others = -(cdist(true, true) ** 2) / (2 * width**2), ~np.eye(len(true), dtype=bool)
    rows = [-(softmax(closeness[i, others[i]]) * log_softmax(logits[i, others[i]])).sum() for i in range(len(true))]
    return float(np.mean(rows))


def dense_neighbor(feature: np.ndarray, true: np.ndarray, width: float, temperature: float) -> float:
    unit = feature / np.linalg.norm(feature, axis=1, keepdims=True)
    return dense_cross_entropy(unit @ unit.T / temperature, true, width)


def dense_layout(predicted: np.ndarray, true: np.ndarray, width: float) -> float:
    return dense_cross_entropy(-np.log1p(cdist(predicted, predicted) ** 2 / width**2), true, width)


def visit_in_blocks(monkeypatch: pytest.MonkeyPatch, rows: int, mask: Tensor) -> None:
    """Let the pairwise losses of contexts with this mask hold so many rows of the pair matrix in memory."""
    monkeypatch.setattr(losses, "BLOCK", rows)
    monkeypatch.setattr(distances, "ENTRIES", rows * mask.numel())


LOSSES = {
    "mean_squared": mean_squared_error,
    "aligned": aligned_error,
    "distance": distance_error,
    "neighbor": lambda predicted, true, mask: neighborhood_errors([by_features(predicted, 0.3)], true, mask)[0],
    "layout": lambda predicted, true, mask: neighborhood_errors([by_positions(predicted, 0.3)], true, mask)[0],
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
PAIRWISE = ["distance", "neighbor", "layout"]
CROSS_ENTROPIES = (LOSSES["neighbor"], LOSSES["layout"])


@pytest.mark.parametrize("n_dims", [2, 3])
def test_losses_match_the_formulas(n_dims):
    predicted, true, mask = positions(n_dims)
    for i in range(len(SIZES)):
        x, y = real(predicted, i), real(true, i)
        centered_x, centered_y = x - x.mean(0), y - y.mean(0)
        moved = centered_y @ orthogonal_procrustes(centered_y, centered_x)[0] + x.mean(0)
        expected = {
            "mean_squared": np.mean((x - y) ** 2),
            "aligned": np.mean((x - moved) ** 2),
            "distance": np.mean((pdist(x) - pdist(y)) ** 2),
            "neighbor": dense_neighbor(x, y, 0.3, 0.1),
            "layout": dense_layout(x, y, 0.3),
        }
        for name, value in expected.items():
            tolerance = 1e-5 if LOSSES[name] in CROSS_ENTROPIES else 1e-9  # the former compute in single precision
            assert float(LOSSES[name](predicted, true, mask)[i]) == pytest.approx(value, rel=tolerance, abs=1e-6)


def test_temperature_and_width_match_the_formula(monkeypatch):
    monkeypatch.setattr("alphastomics.diffusion.losses.TEMPERATURE", 0.5)
    predicted, true, mask = positions(3)
    actual = neighborhood_errors([by_features(predicted, 1.5)], true, mask)[0, 0]
    assert float(actual) == pytest.approx(dense_neighbor(real(predicted, 0), real(true, 0), 1.5, 0.5), rel=1e-5)


@pytest.mark.parametrize("rows", [1000, 3])
def test_several_neighborhoods_have_the_errors_of_each_alone(rows, monkeypatch):
    predicted, true, mask = positions(2)
    visit_in_blocks(monkeypatch, rows, mask)
    chosen = [
        by_features(predicted, 0.3),
        by_features(-true, 0.3),
        by_positions(predicted, 0.3),
        by_positions(true, 0.7),
    ]
    together = neighborhood_errors(chosen, true, mask)
    for error, one in zip(together, chosen, strict=True):
        torch.testing.assert_close(error, neighborhood_errors([one], true, mask)[0], rtol=1e-6, atol=1e-6)


def test_unmeasured_genes():
    predicted, true, mask = positions(5)
    measured = torch.rand(len(SIZES), 5) < 0.6
    measured[2] = False
    actual = mean_squared_error(predicted, true, mask, features=measured)
    for i in range(2):
        error = (real(predicted, i) - real(true, i))[:, measured[i].numpy()]
        assert float(actual[i]) == pytest.approx(np.mean(error**2))
    assert float(actual[2]) == 0


def test_small_weights_of_features_do_not_change_the_mean():
    ones = torch.ones(1, 3, 1, dtype=torch.float64)
    error = mean_squared_error(ones, 0 * ones, torch.ones(1, 3, dtype=torch.bool), features=torch.full((1, 1), 0.01))
    torch.testing.assert_close(error, torch.ones(1, dtype=torch.float64))


def test_chosen_entries():
    predicted, true, mask = positions(5)
    entries = torch.rand(predicted.shape, generator=torch.Generator().manual_seed(4)) < 0.5
    entries[2] = False
    actual = mean_squared_error(predicted, true, mask, entries=entries)
    for i in range(2):
        squared = (real(predicted, i) - real(true, i)) ** 2
        assert float(actual[i]) == pytest.approx(np.mean(squared[entries[i, : len(squared)].numpy()]))
    assert float(actual[2]) == 0


@every_loss
def test_padding_changes_nothing(loss):
    predicted, true, mask = (x.float() if x.is_floating_point() else x for x in positions())
    together = loss(predicted, true, mask)
    for i, n in enumerate(SIZES):
        alone = loss(predicted[i : i + 1, :n], true[i : i + 1, :n], mask[i : i + 1, :n])
        assert float(alone) == pytest.approx(float(together[i]), abs=1e-5)


@every_loss
def test_padding_receives_no_gradient(loss):
    predicted, true, mask = positions()
    predicted.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(predicted, true, mask).sum(), predicted)
    assert not bool(gradient[~mask].any())
    assert bool(gradient[mask].isfinite().all())
    assert bool((gradient[0].abs().sum(-1) > 0).all())


@every_loss
@pytest.mark.parametrize("case", ["equal", "coincident", "one cell", "no cell"])
def test_values_and_gradients_are_finite_where_formulas_divide_by_zero(loss, case):
    predicted, true, mask = (x[:1] for x in positions(dtype=torch.float32))
    if case == "equal":
        predicted = true.clone()
    elif case == "coincident":
        predicted, true = torch.ones_like(predicted), true.clone()
        true[:, 1] = true[:, 0]
    else:
        mask = mask & (torch.arange(mask.shape[1]) < int(case == "one cell"))
    predicted.requires_grad_()
    value = loss(predicted, true, mask)
    (gradient,) = torch.autograd.grad(value.sum(), predicted)
    value = value.detach()
    assert bool(value.isfinite().all())
    assert bool(gradient.isfinite().all())
    if case == "equal" and loss not in CROSS_ENTROPIES:
        assert float(value) == pytest.approx(0, abs=1e-10)
    if case in ("one cell", "no cell") and loss in (distance_error, *CROSS_ENTROPIES):
        assert float(value) == 0


@pytest.mark.parametrize("block", [3, 1024])
def test_gradient_of_the_distance_loss_matches_the_formula(monkeypatch, block):
    predicted, true, mask = positions(3)
    visit_in_blocks(monkeypatch, block, mask)
    predicted.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distance_error(x, true, mask), predicted)


def test_gradient_of_the_distance_loss_matches_autograd():
    predicted, true, mask = (x[:1, : SIZES[0]] for x in positions())
    predicted.requires_grad_()
    pairs = torch.triu_indices(SIZES[0], SIZES[0], offset=1)
    d_hat, d = ((x[0, pairs[0]] - x[0, pairs[1]]).norm(dim=-1) for x in (predicted, true))
    (expected,) = torch.autograd.grad(7 * ((d_hat - d) ** 2).mean(), predicted)
    (actual,) = torch.autograd.grad(7 * distance_error(predicted, true, mask).sum(), predicted)
    torch.testing.assert_close(actual, expected)


def test_gradient_of_the_aligned_loss_needs_none_of_the_rotation():
    """At the best rotation the derivative with respect to it is zero: finite differences see it turn."""
    predicted, true, mask = positions()
    predicted.requires_grad_()
    gradient = torch.autograd.grad(aligned_error(predicted, true, mask)[0], predicted)[0][0]
    step = 1e-5
    for cell, axis in ((0, 0), (3, 1), (10, 0)):
        values = []
        for sign in (-1, 1):
            moved = predicted.detach().clone()
            moved[0, cell, axis] += sign * step
            values.append(float(aligned_error(moved, true, mask)[0]))
        assert float(gradient[cell, axis]) == pytest.approx((values[1] - values[0]) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("block", [1, 4, 11])
def test_blocks_change_nothing(monkeypatch, name, block):
    predicted, true, mask = positions()
    predicted.requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        value = LOSSES[name](predicted, true, mask)
        return value.detach(), torch.autograd.grad(value.sum(), predicted)[0]

    expected = run()
    visit_in_blocks(monkeypatch, block, mask)
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PAIRWISE)
def test_the_pair_matrix_is_never_whole(monkeypatch, name):
    n, block = 256, 16
    predicted, true, mask = torch.randn(1, n, 2, requires_grad=True), torch.randn(1, n, 2), torch.ones(1, n) > 0
    visit_in_blocks(monkeypatch, block, mask)
    with LargestTensor() as largest:
        LOSSES[name](predicted, true, mask).sum().backward()
    assert block * n <= largest.entries <= 2 * block * n


def test_distances_of_near_points_far_from_the_origin_are_exact():
    """The expansion |x|^2 - 2xy + |y|^2 is wrong by more than such distances."""
    generator = torch.Generator().manual_seed(0)
    near = 1e-4 * torch.randn(1, 60, 2, generator=generator, dtype=torch.float64) + 4
    predicted, true, mask = near.float(), torch.zeros(1, 60, 2), torch.ones(1, 60) > 0
    expected = np.mean(pdist(predicted[0].double().numpy()) ** 2)
    assert float(distance_error(predicted, true, mask)) == pytest.approx(expected, rel=1e-5)
    wrong = torch.cdist(predicted, predicted, compute_mode="use_mm_for_euclid_dist")
    assert float((wrong**2).sum() / (60 * 59)) != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("name", ["aligned", "distance", "layout"])
def test_position_losses_do_not_depend_on_the_frame(name):
    predicted, true, mask = positions(3)
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    moved = true @ torch.from_numpy(turn * [-1, 1, 1]) + 9
    torch.testing.assert_close(LOSSES[name](predicted, moved, mask), LOSSES[name](predicted, true, mask))


@every_loss
def test_autocast_changes_no_loss_of_positions(loss: Callable[..., Tensor]):
    predicted, true, mask = positions(dtype=torch.float32)
    expected = loss(predicted, true, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(predicted, true, mask)
    tolerance = 2e-2 if loss is LOSSES["neighbor"] else 1e-5  # similarities may be rounded, positions may not
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
