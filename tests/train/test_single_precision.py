"""Nothing that a device computes in training or sampling has 64 bits, which Apple's GPUs do not support.

There is no such device here. A step of training runs on tensors whose device is such a one and that hold no data; and training and
sampling run on the processor, where only what came there by ``cpu()`` may be widened.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alphastomics.datasets import synthetic_tissue
from alphastomics.diffusion import MaskingConfig
from alphastomics.diffusion.deformation import deform, draw_deformation
from alphastomics.diffusion.samplers import time_grid
from alphastomics.model import AlphaSTomics
from alphastomics.nn import DenoiserConfig
from alphastomics.train.distributed.devices import resolve_precision
from alphastomics.train.memory import estimate as memory
from alphastomics.train.memory.counter import StorageCounter, fake_tensors

DEVICE = "meta"  # "mps" is invalid where PyTorch was built without it
MARK = "came_to_the_processor"
DOUBLE = (torch.float64, torch.complex128)
NETWORKS: dict[str, dict[str, Any]] = {
    "full": {"mask_tokens": True},
    "experts": {"use_moe": True, "residual": "hyper"},
    "linear": {"attention": "linear"},
    "geometric": {"attention": "geometric", "pair_features": "factorized", "rank": 8},
    "axial": {"attention": "axial"},
}


class NoDoubles(StorageCounter):
    """Raises for tensors of 64 bits on the device; returns values for tensors without data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for made in tree_leaves((args, kwargs, result)):  # with what no operation made, such as `torch.tensor`
            if isinstance(made, torch.Tensor) and made.device.type == DEVICE and made.dtype in DOUBLE:
                raise TypeError(f"{func}: {made.dtype} on {DEVICE}")
        return result


@pytest.fixture
def on_device(monkeypatch, autocast_without_data):
    """Run estimated steps on a device without data, and raise for 64 bits there."""

    def run(make_step, **_) -> None:
        with fake_tensors():
            with torch.device(DEVICE):
                step = make_step()
            kept = [*step.module.parameters(), *step.module.buffers(), *step.inputs]
            assert {value.device.type for value in kept} == {DEVICE}
            assert not any(value.dtype in DOUBLE for value in kept)
            with NoDoubles(DEVICE):
                step.run().backward()

    def ones(self: torch.Tensor) -> Any:
        return np.ones(self.shape, dtype=float if self.is_floating_point() else int).tolist()

    monkeypatch.setattr(memory, "estimate_step", run)
    monkeypatch.setattr(torch.Tensor, "tolist", ones)  # which bypasses the modes


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("n_dims", [2, 3])
def test_a_training_step_has_no_float64_on_the_device(network, n_dims):
    config = DenoiserConfig(n_genes=20, n_dims=n_dims, d_model=16, n_layers=1, n_heads=2, **NETWORKS[network])
    masking = MaskingConfig() if config.mask_tokens else None
    memory.estimate_training(config, n_cells=40, n_contexts=2, device=DEVICE, masking=masking)


@pytest.mark.usefixtures("on_device")
def test_contexts_are_deformed_and_times_given_in_32_bits():
    """These are made in 64 bits, by the processor."""
    with fake_tensors(), NoDoubles(DEVICE):
        assert (
            deform(torch.zeros(7, 2, device=DEVICE), draw_deformation(2, 0.2, np.random.default_rng(0))).dtype
            == torch.float32
        )
        assert time_grid(3, device=DEVICE).dtype == torch.float32


class NotWidened(TorchDispatchMode):
    """Refuses to widen tensors of 32 bits that did not come to the processor by ``cpu()``."""

    def __init__(self) -> None:
        super().__init__()
        self.n_widened = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 and result.dtype == torch.float64:
            if not hasattr(args[0], MARK):
                raise TypeError("a tensor of 32 bits is widened where it may be on a device")
            self.n_widened += 1
        return result


@pytest.fixture
def widened(monkeypatch) -> NotWidened:
    original = torch.Tensor.cpu

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = original(self, *args, **kwargs)
        found = found.view(found.shape) if found is self else found  # another tensor, as from another device
        setattr(found, MARK, True)
        return found

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return NotWidened()


@pytest.mark.slow
def test_float64_values_are_prepared_on_the_cpu(widened):
    tissue = synthetic_tissue(n_slices=2, n_cells=60, n_genes=20, random_state=0)
    AlphaSTomics.setup_anndata(tissue, slice_key="slice_id")
    model = AlphaSTomics(tissue, mode="any", d_model=16, n_layers=1, n_heads=2)
    query = tissue[tissue.obs["slice_id"] == "slice_1"].copy()
    with widened:
        model.train(
            max_epochs=1,
            batch_size=60,
            context_size=30,
            accelerator="cpu",
            precision="32-true",
            enable_progress_bar=False,
        )
        model.sample(query, n_samples=2, refine=True)
        model.sample(query, n_steps=2, mode="pos_to_expr")
        model.sample(n_cells=30, n_steps=2, mode="joint")
        model.get_latent_representation(query)
    assert widened.n_widened > 0  # the frame


def test_a_device_without_tiles_and_cuda_has_32_bits(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_precision("auto", torch.device("cpu")) == "32-true"
