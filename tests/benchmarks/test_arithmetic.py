from __future__ import annotations

import json

import pytest
import torch
from benchmarks._data import ROOT
from benchmarks.arithmetic import Size, split_table, tables
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train import TrainingPlan
from alphastomics.train.memory.estimate import _full_batch
from benchmarks import arithmetic

SIZES = [
    Size(width=16, layers=1, heads=2, genes=7),
    Size(width=64, layers=3, heads=4, genes=50, dims=3),
    Size(width=128, layers=2, heads=2, genes=900),
]


def network(size: Size) -> Denoiser:
    return Denoiser(
        DenoiserConfig(
            n_genes=size.genes, n_dims=size.dims, d_model=size.width, n_layers=size.layers, n_heads=size.heads
        )
    )


@pytest.mark.parametrize("size", SIZES)
def test_weights_match_the_network(size):
    assert size.n_parameters == sum(p.numel() for p in network(size).parameters())


@pytest.mark.parametrize(("size", "n_cells"), [(SIZES[1], 128), (SIZES[2], 128), (SIZES[2], 512)])
def test_operations_match_a_step(size, n_cells):
    """Attention by plain products: PyTorch counts no others on processors. Expression with half of the noise
    at given positions, for which the frame is needed; where that takes more than 128 cells they are taken in parts, of which PyTorch counts little.
    """
    plan = TrainingPlan(network(size), mode="any")
    batch = _full_batch(plan.module.config, 1, n_cells, targets=True)
    sampled = {"t_expr": torch.full((1,), 0.5), "t_pos": torch.zeros(1), "placed": (False,)}
    draws = batch.draws._replace(**sampled, absent=batch.draws.given, given=batch.draws.absent)
    batch = batch._replace(draws=draws)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        plan.objective.total(plan.objective.losses(batch), batch).backward()
    assert counter.get_total_flops() / n_cells == pytest.approx(size.flops(n_cells), rel=0.05)


def test_the_figures_of_the_page_match_the_command():
    page = (ROOT / "docs" / "arithmetic.md").read_text()
    for table in tables():
        assert table in page


@pytest.mark.slow
def test_the_memory_of_shared_contexts_matches_the_command():
    assert split_table() in (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.slow
def test_bytes_on_disk_are_measured(tmp_path):
    arithmetic.main(["--measure", "--cells", "500", "--genes", "20", "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["disk"]["non_zero_per_cell"] < 20
    assert found["disk"]["bytes_per_cell"] > found["disk"]["non_zero_per_cell"]
