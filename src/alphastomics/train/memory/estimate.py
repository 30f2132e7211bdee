r"""Estimate of the memory of a step without running it.

.. math::

    \text{peak} = \text{parameters} + \text{gradients} + \text{optimizer} + \text{activations}

The code of the training step runs on tensors without data, and :mod:`~alphastomics.train.memory.counter` counts their storages; nothing
is allocated or computed. The most expensive case is assumed: no cell is padding, all positions are absent, and where the step depends on
values, as frame-aligned errors and masks do, every condition is true and every mask is full.

Not included: buffers inside kernels (packed matrices, some MB), uneven load of experts, padding, the masks of masked training,
copies of weights for training on several devices, and everything outside
the step: data, loaders, fragmentation, code. Code outside of PyTorch, such as a k-d tree, must be an operator with a registered
shape (``torch.library.register_fake``).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from alphastomics.data import Batch
from alphastomics.data._draws import Draws
from alphastomics.nn import Denoiser, Experts
from alphastomics.nn._torch_compat import tree_iter
from alphastomics.nn.parallel import SequenceParallel
from alphastomics.train.distributed.devices import AUTOCAST
from alphastomics.train.forward import sequence_of
from alphastomics.train.memory.counter import StorageCounter, fake_tensors
from alphastomics.train.memory.recompute import recompute
from alphastomics.train.plan import TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from alphastomics.nn import DenoiserConfig

MOMENTS, AVERAGE = 2, 1  # copies of the weights in AdamW and in the moving average


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes that a step uses at its peak, by parts whose sum is the peak.

    Parameters
    ----------
    parameters
        Weights and buffers.
    gradients
        Gradients of the weights that exist at the peak.
    optimizer
        Moments of AdamW and moving average of the weights.
    activations
        All other tensors: the batch, tensors saved for the backward pass, temporaries.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        """Sum of the parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in self.__slots__)
        return f"{self.peak / 2**30:.2f} GiB ({parts})"


class Step(NamedTuple):
    """A step to estimate: the network, the tensors that exist before the step, and a function that returns the loss."""

    module: nn.Module
    inputs: Iterable[Tensor]
    run: Callable[[], Any]


def estimate_step(
    make_step: Callable[[], Step],
    *,
    training: bool = True,
    precision: str | int = "32",
    accumulate: bool = False,
    device: str | torch.device = "cpu",
) -> MemoryEstimate:
    """Estimate the peak of a step without running it.

    Parameters
    ----------
    make_step
        Makes the network and its inputs, as tensors without data.
    training
        Whether to include the backward pass, AdamW and the moving average; if not, the step runs without gradients.
    precision
        A key of ``AUTOCAST``, as in :class:`lightning.pytorch.Trainer`.
    accumulate
        Whether gradients of an earlier batch exist at the beginning.
    device
        Device of the step, which determines the kernels of attention.

    Raises
    ------
    NotImplementedError
        If a shape depends on values.
    ValueError
        If the precision is unknown.
    """
    if str(precision) not in AUTOCAST:
        raise ValueError(f"precision={precision!r} cannot be estimated; choose from {', '.join(map(repr, AUTOCAST))}")
    device = torch.device(device)
    dtype, counter = AUTOCAST[str(precision)], StorageCounter(device.type)
    autocast = torch.autocast(device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()
    with fake_tensors():
        with device:
            step = make_step()
            weights = [p for p in step.module.parameters() if p.requires_grad] if training else []
            for weight in weights if accumulate else []:
                weight.grad = torch.zeros_like(weight)
        counter.track(*step.module.parameters(), *step.module.buffers())
        parameters = counter.now
        counter.track(*step.inputs, *(weight.grad for weight in weights if weight.grad is not None))
        with counter:
            with torch.set_grad_enabled(training), autocast:
                result = step.run()
            if training:
                result.backward()
    return _estimate(counter, weights, parameters)


def _estimate(counter: StorageCounter, weights: Sequence[Tensor], parameters: int) -> MemoryEstimate:
    sizes = [weight.nbytes for weight in weights]
    gradients = sum(
        weight.grad.nbytes for weight in weights if weight.grad is not None and counter.at_peak(weight.grad)
    )
    activations = counter.peak - parameters - gradients
    # AdamW needs a root and a quotient of the second moments: on a CPU of one tensor at a time, on a GPU of all at once.
    update = 0 if not sizes else 2 * max(sizes) if counter.device_type == "cpu" else sum(sizes)
    if counter.now + update > counter.peak:
        gradients = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
        activations = counter.now + update - parameters - gradients
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=(MOMENTS + AVERAGE) * sum(sizes),
        activations=activations,
    )


def estimate_training(
    config: DenoiserConfig,
    *,
    n_cells: int,
    n_contexts: int = 1,
    precision: str | int = "32",
    n_recomputed: int = 0,
    accumulate: bool = False,
    device: str | torch.device = "cpu",
    group_size: int = 1,
    **arguments: Any,
) -> MemoryEstimate:
    """Estimate a step of :class:`~alphastomics.train.TrainingPlan`.

    Parameters
    ----------
    config
        The network.
    n_cells, n_contexts
        N and B.
    precision, accumulate, device
        As in :func:`estimate_step`.
    n_recomputed
        Number of blocks that are recomputed, see :func:`~alphastomics.train.memory.recompute.recompute`.
    group_size
        Number of processes that share a context; the estimate is for one of them.
    **arguments
        Arguments of the plan.
    """

    def make_step() -> Step:
        plan = TrainingPlan(Denoiser(config), **arguments)
        plan.module.apply(_balance_experts)
        objective = plan.objective
        objective.parallel = SimulatedProcesses(group_size)
        batch = _full_batch(config, n_contexts, n_cells, targets=objective.mode != "expr_to_pos")

        def run() -> Tensor:
            with recompute(plan.module.blocks, n_recomputed):
                return objective.total(objective.losses(batch), batch)

        return Step(plan, [value for value in tree_iter(batch) if isinstance(value, Tensor)], run)

    return estimate_step(make_step, precision=precision, accumulate=accumulate, device=device)


def estimate_inference(
    config: DenoiserConfig,
    *,
    n_cells: int,
    device: str | torch.device = "cpu",
) -> MemoryEstimate:
    """Estimate a call of the denoiser for one context in sampling, which is in 32 bits; arguments as in :func:`estimate_training`."""

    def make_step() -> Step:
        module = Denoiser(config).eval()
        module.apply(_balance_experts)
        batch = _full_batch(config, 1, n_cells, targets=True)
        inputs = (batch.expression, batch.position, batch.dropout, batch.dropout)  # timesteps have the shape of dropout
        sequence = sequence_of(batch.sequence)
        return Step(module, inputs, lambda: module(*inputs, local_density=batch.local_density, sequence=sequence))

    return estimate_step(make_step, training=False, device=device)


class SimulatedProcesses(SequenceParallel):
    """Replaces the group of processes in an estimate: the others send tensors of the shape of the local one."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size

    def gather(self, x: Tensor, n_cells: int | None = None, dim: int = 1) -> Tensor:
        """Concatenate the local tensor with itself for every process."""
        whole = x if self.world_size == 1 else torch.cat([x] * self.world_size, dim)
        return whole if n_cells is None else whole.narrow(dim, 0, n_cells)


def _full_batch(config: DenoiserConfig, b: int, n: int, *, targets: bool) -> Batch:
    """A batch without padding, all of whose positions are absent."""
    g, d = config.n_genes, config.n_dims
    return Batch(
        expression=torch.zeros(b, n, g),
        position=torch.zeros(b, n, d),
        mask=torch.ones(b, n, dtype=torch.bool),
        measured=torch.ones(b, g, dtype=torch.bool),
        present=torch.ones(b, g, dtype=torch.bool),
        dropout=torch.zeros(b),
        target=torch.zeros(b, n, g if targets else 0),
        local_density=torch.zeros(b, n, config.n_ranks if targets else 0),
        sequence=torch.zeros(b, n, int(config.sequence)),
        cell_type=torch.zeros(b, n, dtype=torch.int64),
        center=torch.zeros(b, d),
        slice_index=torch.zeros(b, dtype=torch.int64),
        rows=torch.zeros(b, n, dtype=torch.int64),
        key=torch.zeros(b, 3, dtype=torch.int64),
        draws=Draws(
            t_expr=torch.zeros(b),
            t_pos=torch.ones(b),
            noise=torch.zeros(b, n, g if targets else 0),
            observed=torch.zeros(b, n, g if targets else 0, dtype=torch.bool),
            hidden_type=torch.zeros(b, 0, dtype=torch.bool),
            absent=torch.arange(b),
            given=torch.zeros(0, dtype=torch.int64),
            deformation=None,
            placed=(True,) * b,
            n_cells=(n,) * b,
            key=np.zeros((b, 3), dtype=np.int64),
        ),
    )


def _balance_experts(part: nn.Module) -> None:
    """Assign equally many cells to each expert, because the real assignment depends on values."""
    if not isinstance(part, Experts):
        return
    n_experts, top_k = part.num_experts, part.top_k

    def lay_out(slot: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        counts = [-(-len(slot) // n_experts)] * n_experts
        place = torch.arange(len(slot), device=slot.device)
        return (torch.arange(sum(counts), device=slot.device) // top_k), place, counts

    part._lay_out = lay_out  # type: ignore[method-assign]
