"""Is it a diffusion, or a regression in a diffusion's clothes? A probe on a tiny trained network.

Given a noisy context, the estimate of the clean positions must be nearer to the truth than the noisy positions
themselves (copying the input) and than the estimate without any positions (ignoring the input). Published denoisers
fail it: their estimate does not improve as the noise falls.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from alphastomics.data import AnnDataSource, Augmentation, ContextDataset, collate, fit_schema
from alphastomics.datasets import synthetic_tissue
from alphastomics.diffusion.geometry import align, center, kabsch, rotate
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train import TrainingPlan
from rotations import random_rotation

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.data import Batch

pytestmark = pytest.mark.slow

N_CELLS, N_GENES, N_STEPS, LR = 150, 60, 1000, 3e-3


@pytest.fixture(scope="module")
def source() -> AnnDataSource:
    adata = synthetic_tissue(n_slices=3, n_cells=N_CELLS, n_genes=N_GENES, random_state=0)
    return AnnDataSource(adata, fit_schema(adata), positions=True)


@pytest.fixture(scope="module")
def batch(source) -> Batch:
    """The training slices, whole, with all their genes, under keys that training never saw."""
    dataset = ContextDataset(source, context_size=N_CELLS, seed=1)
    return collate([dataset[i] for i in range(len(dataset))])


@pytest.fixture(scope="module")
def plan(source) -> TrainingPlan:
    """Forty seconds of one core."""
    torch.manual_seed(0)
    module = Denoiser(DenoiserConfig(n_genes=N_GENES, n_dims=2, d_model=64, n_layers=2, n_heads=4))
    plan = TrainingPlan(module, mode="expr_to_pos")
    dataset = ContextDataset(source, context_size=N_CELLS, seed=0, augmentation=Augmentation(gene_dropout=0.2))
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99), weight_decay=0.02)
    for step in range(N_STEPS):
        dataset.set_epoch(step)
        batch = collate([dataset[i] for i in range(len(dataset))])
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / N_STEPS))
        loss = plan.objective.total(plan.objective.losses(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return plan.eval()


def noisy(plan: TrainingPlan, x: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """z_t and t at sigma / alpha = ``ratio``."""
    process = plan.objective.diffusion.position
    t = torch.full((len(x),), process.schedule.time_of_ratio(ratio))
    epsilon = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return process.noise(x, t, center(epsilon)), t


@torch.no_grad()
def estimate(plan: TrainingPlan, batch: Batch, z: Tensor, t: Tensor) -> Tensor:
    output = plan.module(batch.expression, z, torch.zeros_like(t), t, predict=("position",)).position
    return plan.objective.clean_position(output, z, t, batch.mask)


def aligned_rmse(x_0: Tensor, x: Tensor) -> float:
    return float(((align(x_0, x) - x) ** 2).mean().sqrt())


@torch.no_grad()
def errors(plan: TrainingPlan, batch: Batch, ratio: float, *, deformed: bool) -> tuple[float, float, float]:
    """Of the estimate, of copying the input, and of ignoring it."""
    x, mean = plan.objective.canonical(batch, batch.mask), plan.objective.conditional_mean(batch.expression, batch.mask)
    if deformed:
        x = plan.objective.deformed(x, torch.full((len(x),), 0.5), batch, 0)
        x = rotate(x, kabsch(x, mean))
    z, t = noisy(plan, x, ratio)
    alpha = plan.objective.diffusion.position.coefficients(t, z)[0]
    return aligned_rmse(estimate(plan, batch, z, t), x), aligned_rmse(z / alpha, x), aligned_rmse(mean, x)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0])
def test_neither_copying_nor_ignoring_the_input_is_as_good(plan, batch, ratio):
    """Judged on the training slices in a shape that was never seen, as in training."""
    found, copied, ignored = errors(plan, batch, ratio, deformed=True)
    assert found <= 0.9 * min(copied, ignored), (found, copied, ignored)


def test_less_noise_means_less_error(plan, batch):
    found = [errors(plan, batch, ratio, deformed=True)[0] for ratio in (0.1, 0.3, 1.0, 3.0)]
    assert found == sorted(found)
    assert found[0] < 0.5 * found[2]


@torch.no_grad()
def framed_estimate(plan: TrainingPlan, batch: Batch, z: Tensor, t: Tensor) -> Tensor:
    """The estimate for noisy positions in any frame: into the canonical frame, denoised there, and back."""
    turn = kabsch(z, plan.objective.conditional_mean(batch.expression, batch.mask))
    return rotate(estimate(plan, batch, rotate(z, turn), t), turn.mT)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("reflect", [False, True])
def test_the_estimate_turns_with_the_noisy_positions(plan, batch, ratio, reflect):
    """Exactly, by way of the canonical frame; the network alone has learned one frame and does not."""
    z, t = noisy(plan, plan.objective.canonical(batch, batch.mask), ratio)
    turn = random_rotation(2, torch.Generator().manual_seed(3))
    if (torch.linalg.det(turn) < 0) != reflect:
        turn[0] *= -1
    expected = framed_estimate(plan, batch, z, t) @ turn
    actual = framed_estimate(plan, batch, z @ turn, t)
    assert float((actual - expected).norm() / expected.norm()) < 1e-3
    alone = estimate(plan, batch, z @ turn, t)
    assert float((alone - expected).norm() / expected.norm()) > 0.05
