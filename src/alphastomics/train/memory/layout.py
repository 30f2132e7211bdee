"""Layout of a batch that fits into memory: cells of a context, cells on a device at once, and recomputed blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from alphastomics.nn import Denoiser, count_parameters
from alphastomics.train.callbacks import GIB
from alphastomics.train.datamodule import check_sizes
from alphastomics.train.defaults import default_batch_size
from alphastomics.train.distributed.devices import count_devices, device_of, resolve_precision, usable_memory
from alphastomics.train.memory.fit import MemoryFitter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.config import Recompute
    from alphastomics.data import CellSource
    from alphastomics.nn import DenoiserConfig
    from alphastomics.train.memory.fit import StepFit

logger = logging.getLogger(__name__)


class BatchLayout(NamedTuple):
    """Cells of a context, of a batch, and on a device at once, and the number of recomputed blocks."""

    context_size: int
    batch_size: int
    micro_batch_size: int
    n_recomputed: int


def fit_batch_layout(
    config: DenoiserConfig,
    source: CellSource,
    *,
    context_size: int | Literal["auto"],
    batch_size: int | None,
    micro_batch_size: int | None,
    budget: float | None,
    recompute: Recompute,
    accelerator: str,
    devices: int | list[int] | str,
    accumulate: bool,
    resumed: Mapping[str, int],
    **arguments: Any,
) -> BatchLayout:
    """Fit contexts and batches into memory, and log the memory of a step.

    Parameters
    ----------
    config
        The network.
    source
        The cells.
    context_size, batch_size, micro_batch_size, recompute, accelerator, devices
        As in :meth:`AlphaSTomics.train`.
    budget
        Usable memory in GiB; None: the free memory.
    accumulate
        Whether gradients are accumulated over several batches.
    resumed
        ``context_size``, ``batch_size`` and ``micro_batch_size`` of the training that is resumed. They are kept, because its position in
        an epoch is a number of batches, and because sums over batches that are divided differently differ by rounding.
    **arguments
        Further arguments of :func:`~alphastomics.train.memory.estimate.estimate_training`.

    Raises
    ------
    ValueError
        If one context does not fit, or an argument is out of range.
    """
    device = device_of(accelerator, devices)
    n_processes = count_devices(accelerator, devices)
    fitter = _make_fitter(config, device, n_processes, budget, recompute, accumulate, arguments)
    largest = max(len(cells.rows) for cells in source.slices)
    if batch_size is None:
        batch_size = resumed.get("batch_size") or default_batch_size(device)
    if micro_batch_size is None:
        micro_batch_size = resumed.get("micro_batch_size")
    if context_size == "auto":
        check_sizes(largest, batch_size, micro_batch_size)
        size = resumed.get("context_size") or fitter.longest(min(largest, micro_batch_size or largest))
        logger.info("Contexts of %s cells (the largest slice has %s).", f"{size:,}", f"{largest:,}")
    else:
        check_sizes(context_size, batch_size, micro_batch_size)
        size = min(context_size, batch_size)
        if min(context_size, largest) > batch_size:
            logger.warning("context_size=%d is reduced to batch_size=%d.", context_size, batch_size)
    micro_batch = max(batch_size, size) if micro_batch_size is None else micro_batch_size
    n_contexts, n_cells = max(1, micro_batch // size), min(size, largest)
    fit = fitter.fit(n_cells, n_contexts)
    _log_fit(fit, fitter, n_cells, n_contexts)
    if fit.n_contexts < n_contexts:
        micro_batch = fit.n_contexts * size
    if resumed.get("micro_batch_size", micro_batch) != micro_batch:
        logger.warning(
            "The training started with micro_batch_size=%d and continues with %d; results differ by rounding.",
            resumed["micro_batch_size"], micro_batch,
        )  # fmt: skip
    return BatchLayout(size, batch_size, micro_batch, fit.n_recomputed)


def fits_in_memory(config: DenoiserConfig, n_cells: int, **arguments: Any) -> bool:
    """Whether a training step with one context of ``n_cells`` cells fits into the free memory, if needed with recompute."""
    device = device_of()
    arguments = {"precision": resolve_precision("auto", device), **arguments}
    return _make_fitter(config, device, count_devices("auto", "auto"), None, "auto", False, arguments).fits(n_cells)


def _make_fitter(
    config: DenoiserConfig,
    device: torch.device,
    n_processes: int,
    budget: float | None,
    recompute: Recompute,
    accumulate: bool,
    arguments: Mapping[str, Any],
) -> MemoryFitter:
    limit = None if budget is None else round(budget * GIB)
    if limit is not None and limit < 1:
        raise ValueError(f"memory_budget={budget} is in GiB and must be positive")
    try:
        available = usable_memory(device, limit, n_processes=n_processes)
    except ValueError as error:
        raise ValueError("the system does not report its memory; pass memory_budget=") from error
    with torch.device("meta"):
        n_parameters = count_parameters(Denoiser(config)).total
    return MemoryFitter(
        config=config,
        n_parameters=n_parameters,
        budget=available,
        recompute=recompute,
        accumulate=accumulate,
        arguments={"device": estimated_device(device.type), **arguments},
    )


def estimated_device(kind: str) -> str:
    """The type of device whose kernels an estimate assumes."""
    return kind if kind == "cuda" else "cpu"


def _log_fit(fit: StepFit, fitter: MemoryFitter, n_cells: int, n_contexts: int) -> None:
    """Log the memory of a step, the usable memory, and how the step was made to fit."""
    bound = f"less than {max(0.01, fitter.bound(n_cells * n_contexts) / GIB):.2f} GiB"
    details = [f"{fitter.budget / GIB:.2f} GiB may be used"]
    if fit.n_contexts < n_contexts:
        details.append(f"{fit.n_contexts} of {n_contexts} contexts at once")
    if fit.n_recomputed:
        details.append(f"{fit.n_recomputed} of {fitter.config.n_layers} blocks are recomputed")
    logger.info("Memory of a step: %s; %s.", fit.estimate or bound, ", ".join(details))
