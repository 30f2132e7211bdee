"""Two processes that accumulate two batches each have the gradients of one batch of everything.

This file is also the program that the processes run: ``python test_accumulation.py FOLDER RANK``.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from alphastomics.data import Augmentation, Batch, ContextDataset, collate
from alphastomics.data._batch import empty_context
from alphastomics.diffusion.losses import mean_squared_error
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train import MODES, TrainingPlan

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.slow

LIMIT = 300  # seconds
WORLD_SIZE, N_BATCHES = 2, 2


PLAIN = "squared error"  # beside the modes: the denoiser alone, in float64
TOLERANCE = {PLAIN: 1e-12} | dict.fromkeys(MODES, 5e-6)  # of the largest gradient; float32 rounds batches otherwise


class Loss(nn.Module):
    """Losses of each context, normalized by the plan, as a module for DDP to wrap."""

    def __init__(self, plan: TrainingPlan, kind: str) -> None:
        super().__init__()
        self.plan, self.plain = plan, kind == PLAIN
        if self.plain:
            self.double()

    def forward(self, batch: Batch) -> Tensor:
        objective, count = self.plan.objective, batch.mask.any(1).float().sum()
        if dist.is_initialized():
            dist.all_reduce(count)
            count = count / WORLD_SIZE
        return objective.total(self.squared_errors(batch) if self.plain else objective.losses(batch), batch, count)

    def squared_errors(self, batch: Batch) -> dict[str, Tensor]:
        x_expr, x_pos, t = batch.expression.double(), batch.position.double(), torch.full((len(batch.mask),), 0.5)
        found = self.plan.module(x_expr, x_pos, t.double(), t.double(), batch.mask)
        return {
            "expression": mean_squared_error(found.expression, x_expr, batch.mask),
            "aligned": mean_squared_error(found.position, x_pos, batch.mask),
        }


def mode_of(kind: str) -> dict[str, Any]:
    return {} if kind == PLAIN else {"mode": kind}


def gradients(plan: TrainingPlan) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in plan.module.named_parameters() if p.grad is not None}


# -- what the processes do ---------------------------------------------------------------------------------------------


def accumulate(problem: dict[str, Any], kind: str, rank: int) -> dict[str, Tensor]:
    module = Denoiser(DenoiserConfig(**problem["config"]))
    module.load_state_dict(problem["weights"])
    plan = TrainingPlan(module, spacing=problem["spacing"], **mode_of(kind))
    model = DistributedDataParallel(Loss(plan, kind), find_unused_parameters=True)
    for i, batches in enumerate(problem["batches"]):
        with nullcontext() if i == N_BATCHES - 1 else model.no_sync():
            (model(Batch(**batches[rank])) / N_BATCHES).backward()
    return gradients(plan)


def work(folder: Path, rank: int) -> None:
    wait = datetime.timedelta(seconds=LIMIT / 2)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD_SIZE, timeout=wait)
    problem = torch.load(folder / "problem.pt", weights_only=True)
    torch.save({kind: accumulate(problem, kind, rank) for kind in TOLERANCE}, folder / f"{rank}.pt")
    dist.barrier()  # a process that leaves first breaks the connections of the other
    dist.destroy_process_group()


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def contexts(source):
    """Six contexts of 90, 70 and 40 cells."""
    dataset = ContextDataset(source, context_size=100, seed=0, augmentation=Augmentation(), targets=True)
    found = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        found += [dataset[i] for i in range(len(dataset))]
    assert len({len(context.rows) for context in found}) == 3
    return found


@pytest.fixture
def results(contexts, make_plan, tmp_path) -> list[dict[str, dict[str, Tensor]]]:
    """Gradients of both processes, of all kinds of losses; the second has one context of padding in each of its batches."""
    plan = make_plan()
    first = contexts[0]
    nothing = empty_context(first.expression.shape[1], 2, first.local_density.shape[1], np.array([0, 0, 9]))
    batches = [[collate(contexts[i : i + 2])._asdict(), collate([contexts[i + 2], nothing])._asdict()] for i in (0, 3)]
    config = {field.name: getattr(plan.module.config, field.name) for field in fields(DenoiserConfig)}
    problem = {
        "config": config,
        "weights": plan.module.state_dict(),
        "spacing": plan.objective.spacing,
        "batches": batches,
    }
    torch.save(problem, tmp_path / "problem.pt")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(rank)], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        assert [process.wait(timeout=LIMIT) for process in processes] == [0] * WORLD_SIZE
    finally:
        for process in processes:
            process.kill()
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


def test_accumulation_on_two_processes_has_the_gradients_of_the_full_batch(results, contexts, make_plan):
    """To 1e-6 (bar 24), although contexts, batches and processes have unequal numbers of cells."""
    batch = collate(contexts)
    for kind, tolerance in TOLERANCE.items():
        plan = make_plan(**mode_of(kind))
        Loss(plan, kind)(batch).backward()
        expected = gradients(plan)
        largest = max(float(grad.abs().max()) for grad in expected.values())
        assert len(expected) > 20
        for found in results:
            assert found[kind].keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(found[kind][name], grad, atol=tolerance * largest, rtol=0)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
