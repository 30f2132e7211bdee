"""A denoiser whose cells are split over processes against the same denoiser on one: predictions, routings and gradients.

This file is also the program that the processes run, as ``test_parallel.py`` is.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from alphastomics.nn import Denoiser, DenoiserConfig, Routings, balance_losses
from alphastomics.nn.diagnostics import watch_layers
from alphastomics.nn.parallel import SINGLE_PROCESS, SequenceParallel
from alphastomics.nn.random import ContextGenerators, drawing_from
from alphastomics.train import diagnostics
from alphastomics.train.memory.recompute import recompute

if TYPE_CHECKING:
    from torch import Tensor

KINDS: dict[str, dict[str, Any]] = {
    "full": {"gate_type": "elementwise", "bottleneck": 2},
    "three-heads": {"n_heads": 3},  # two processes cannot share them
    "linear": {"attention": "linear", "layer_sharing": "universal"},
    "geometric": {"attention": "geometric", "pair_features": "factorized"},
    "neighbor": {"attention": "neighbor", "n_neighbors": 3, "residual": "hyper", "n_streams": 2},
    "ordered": {
        "attention": "neighbor",
        "n_neighbors": 4,
        "sparse_pairs": "hybrid",
        "sequence": True,
        "pair_features": "factorized",
    },
    "axial": {"attention": "axial"},
    "experts": {"use_moe": True, "moe_top_k": 2, "num_experts": 3, "expert_width": "full"},
}


class Case(NamedTuple):
    kind: str
    n_cells: int
    n_recomputed: int


def cases() -> list[Case]:
    """A number of cells that two and three processes divide, one that neither does, and fewer cells than processes."""
    return [Case(kind, n, n == 7) for kind in KINDS for n in (1, 6, 7)]


def name(case: Case) -> str:
    return f"{case.kind}-N{case.n_cells}"


def network(case: Case) -> Denoiser:
    torch.manual_seed(1)
    config = {"n_heads": 2, "d_model": 12, "n_layers": 2, "dropout": 0.2, "mask_tokens": True} | KINDS[case.kind]
    denoiser = Denoiser(DenoiserConfig(n_genes=4, n_dims=2, n_ranks=3, n_components=2, **config)).double()
    for parameter in denoiser.parameters():  # what starts at 0 would hide what it is multiplied with
        parameter.data += 0.2 * torch.randn_like(parameter)
    return denoiser


def inputs(n: int) -> dict[str, Any]:
    """Three contexts: in their midst of diffusion, with absent positions and padding, and of padding alone."""
    g = torch.Generator().manual_seed(n)
    expression, position, local_density = (torch.randn(3, n, k, generator=g, dtype=torch.float64) for k in (4, 2, 3))
    mask = torch.arange(n) < torch.tensor([n, max(1, n - 2), 0])[:, None]
    return {
        "expression": expression,
        "position": position,
        "t_expr": torch.tensor([0.2, 0.0, 0.1], dtype=torch.float64),
        "t_pos": torch.tensor([0.3, 1.0, 0.6], dtype=torch.float64),
        "mask": mask,
        "observed": torch.rand(3, n, 4, generator=g) < 0.3,
        "masked": (torch.rand(3, n, 4, generator=g) < 0.1, torch.rand(3, n, 2, generator=g) < 0.1),
        "local_density": local_density,
        "sequence": torch.rand(3, n, generator=g, dtype=torch.float64),
    }


def found(case: Case, parallel: SequenceParallel) -> dict[str, Tensor]:
    """What training sees of the network: predictions, losses of them, statistics, and gradients of this process."""
    denoiser, batch = network(case), inputs(case.n_cells)
    mask, position = batch["mask"], batch["position"].requires_grad_()
    routings = Routings()
    generators = ContextGenerators.seeded([3, 4, 5], mask.sum(1).tolist(), torch.device("cpu"))
    with recompute(denoiser.blocks, case.n_recomputed), drawing_from(generators), watch_layers(denoiser) as seen:
        prediction = denoiser(**batch, routings=routings, parallel=parallel)
    real = [part * mask[..., None] for part in (*prediction, denoiser.neighborhood(prediction.latent))]
    loss = sum(part.square().sum() + (part.sum(1) ** 3).sum() for part in real)
    if routings:
        loss = loss + 7 * balance_losses(routings, mask)[:2].sum()
    loss.backward()
    told = {f"prediction-{i}": part.detach() for i, part in enumerate(real)}
    told |= {f"routing-{i}": torch.cat(routing, -1).detach() for i, routing in enumerate(routings)}
    with patch.object(diagnostics, "SINK_CELLS", 3):  # fewer than a process has, or more
        told |= diagnostics.layer_statistics(seen, mask, mask.sum(1).tolist())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in (position, *denoiser.parameters())]
    return told | {"loss": loss.detach(), "gradient": torch.cat([gradient.flatten() for gradient in gradients])}


def in_16_bits(kind: str, parallel: SequenceParallel) -> dict[str, Tensor]:
    """Predictions under autocast, and the gradient of the positions of this process."""
    denoiser = network(Case(kind, 7, 0)).float().eval()
    batch = {
        key: value.float() if torch.is_tensor(value) and value.dtype == torch.float64 else value
        for key, value in inputs(7).items()
    }
    position = batch["position"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        prediction = denoiser(**batch, parallel=parallel)
    real = [part.float() * batch["mask"][..., None] for part in prediction]
    sum(part.square().sum() for part in real).backward()
    return {str(i): part.detach() for i, part in enumerate((*real, position.grad))}


# -- processes ---------------------------------------------------------------------------------------------------------


def work(folder: Path, rank: int, world_size: int) -> None:
    wait = datetime.timedelta(minutes=2)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world_size, timeout=wait
    )
    parallel = SequenceParallel(dist.group.WORLD)
    told = {}
    for case in cases():
        told[name(case)] = found(case, parallel)
        gradient = told[name(case)]["gradient"]
        dist.all_reduce(gradient)  # the mean over the processes, which DDP takes
        gradient /= world_size
    told |= {f"half-{kind}": in_16_bits(kind, parallel) for kind in KINDS}
    torch.save(told, folder / f"{rank}.pt")
    dist.barrier()  # a process that leaves first breaks the connections of the others
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(run_ranks, tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(run_ranks, tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("three"), 3)


# -- what they must find -----------------------------------------------------------------------------------------------


def check(case: Case, ranks: list[dict[str, Tensor]]) -> None:
    expected = found(case, SINGLE_PROCESS)
    for told in ranks:
        assert told.keys() == expected.keys()
        for key, value in told.items():
            wanted = expected[key]
            tolerance = 1e-9 * max(1.0, float(wanted.abs().max())) if value.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(
                value, wanted, atol=tolerance, rtol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
            )


@pytest.mark.parametrize("case", cases(), ids=name)
def test_two_processes_match_one_in_predictions_and_gradients(two, case):
    check(case, [told[name(case)] for told in two])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=name)
def test_three_processes_match_one_in_predictions_and_gradients(three, case):
    check(case, [told[name(case)] for told in three])


@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits_results_agree_to_that_precision(two, kind):
    for told in two:
        for key, expected in in_16_bits(kind, SINGLE_PROCESS).items():
            found = told[f"half-{kind}"][key]
            assert bool(found.isfinite().all())
            if key != "3":  # of the gradient each process has a share
                torch.testing.assert_close(found, expected, atol=3e-2 * float(expected.abs().max()), rtol=0)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
