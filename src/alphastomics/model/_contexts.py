"""The contexts of a training: how long they are, how they grow, and how many of them a device holds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from alphastomics._disk import reason
from alphastomics.nn import Denoiser, count_parameters
from alphastomics.train.datamodule import check_sizes
from alphastomics.train.devices import count_devices, device_of
from alphastomics.train.fit_memory import Fit, MemoryFitter, Recompute
from alphastomics.train.length_schedule import LengthCurriculum, LengthSchedule, ScheduleKind
from alphastomics.train.out_of_memory import NotEnoughMemoryError
from alphastomics.train.precision import memory_budget, resolve_precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.data import CellSource
    from alphastomics.nn import DenoiserConfig
    from alphastomics.train import ContextDataModule
    from alphastomics.train.memory import MemoryEstimate

logger = logging.getLogger(__name__)

GIB = 2**30


class Contexts(NamedTuple):
    """What is cut, and what a step is made of.

    Attributes
    ----------
    context_size, batch_size, micro_batch_size
        Cells of a context, of a step of the optimiser, and on a device at once.
    n_recomputed
        Blocks that are recomputed.
    """

    context_size: int
    batch_size: int
    micro_batch_size: int
    n_recomputed: int


def fit_contexts(
    module: Denoiser,
    source: CellSource,
    *,
    context_size: int | Literal["auto"],
    batch_size: int,
    micro_batch_size: int | None,
    budget: float | None,
    recompute: Recompute,
    accelerator: str,
    devices: int | list[int] | str,
    accumulate: bool,
    kept: Mapping[str, int],
    **arguments: Any,
) -> Contexts:
    """Fit contexts into memory, and say in the log what they take.

    Parameters
    ----------
    module
        The network.
    source
        The cells.
    context_size, batch_size, micro_batch_size, recompute, accelerator, devices
        As in :meth:`AlphaSTomics.train`.
    budget
        GiB that may be used; None takes what is free.
    accumulate
        Whether gradients of several batches are added up.
    kept
        ``context_size`` and ``micro_batch_size`` of the training that is resumed, whatever memory is free now: batches that are
        divided otherwise have other sums, and begin elsewhere.
    **arguments
        Of :func:`~alphastomics.train.memory.estimate_training`.

    Raises
    ------
    ValueError
        If one context is too much, or an argument makes no sense.
    """
    fitter = _fitter(module, budget, recompute, accelerator, devices, accumulate, arguments)
    largest = max(len(cells.rows) for cells in source.slices)
    if micro_batch_size is None:
        micro_batch_size = kept.get("micro_batch_size")
    if context_size == "auto":
        check_sizes(largest, batch_size, micro_batch_size)
        size = kept.get("context_size") or fitter.longest(min(largest, micro_batch_size or largest))
        logger.info("Contexts of %s cells (the largest slice has %s).", f"{size:,}", f"{largest:,}")
    else:
        check_sizes(context_size, batch_size, micro_batch_size)
        size = min(context_size, batch_size)
        if min(context_size, largest) > batch_size:
            logger.warning("context_size=%d is cut to batch_size=%d.", context_size, batch_size)
    at_once = max(batch_size, size) if micro_batch_size is None else micro_batch_size
    n_contexts, n_cells = max(1, at_once // size), min(size, largest)
    fit = fitter.fit(n_cells, n_contexts)
    _tell(fit, fitter, n_cells, n_contexts)
    if fit.n_contexts < n_contexts:
        at_once = fit.n_contexts * size
    if kept.get("micro_batch_size", at_once) != at_once:
        logger.warning(
            "The training was begun with micro_batch_size=%d and goes on with %d: to the same end, but not to the same bytes.",
            kept["micro_batch_size"], at_once,
        )  # fmt: skip
    return Contexts(size, batch_size, at_once, fit.n_recomputed)


def out_of_memory(contexts: Contexts, estimate: MemoryEstimate | None, error: BaseException) -> NotEnoughMemoryError:
    """What is said when memory runs out all the same.

    Parameters
    ----------
    contexts
        What a step was made of.
    estimate
        What it was estimated to take; None where it cannot be.
    error
        What PyTorch says.
    """
    size, at_once = contexts.context_size, contexts.micro_batch_size
    told = "" if estimate is None else f", estimated to take {estimate}"
    return NotEnoughMemoryError(
        f"Memory ran out in a step with contexts of {size:,} cells and {at_once:,} cells at once{told}. Take recompute='all', a "
        f"smaller micro_batch_size=, a smaller context_size=, or a memory_budget= below what is free (it was: {reason(error)}); "
        "estimate_memory() tells what each would take; a training with a checkpoint goes on where it was with resume='last'"
    )


def fits_whole(config: DenoiserConfig, n_cells: int, **arguments: Any) -> bool:
    """Whether a step of training with a context of ``n_cells`` fits into the free memory, if need be with recompute."""
    with torch.random.fork_rng(devices=[]):
        module = Denoiser(config)
    arguments = {"precision": resolve_precision("auto"), **arguments}
    return _fitter(module, None, "auto", "auto", "auto", False, arguments).fits(n_cells)


def _fitter(
    module: Denoiser,
    budget: float | None,
    recompute: Recompute,
    accelerator: str,
    devices: int | list[int] | str,
    accumulate: bool,
    arguments: Mapping[str, Any],
) -> MemoryFitter:
    device = device_of(accelerator, devices)
    limit = None if budget is None else round(budget * GIB)
    if limit is not None and limit < 1:
        raise ValueError(f"memory_budget={budget} is in GiB and must be positive")
    return MemoryFitter(
        config=module.config,
        n_parameters=count_parameters(module).total,
        budget=memory_budget(device, limit, n_processes=count_devices(accelerator, devices)),
        recompute=recompute,
        accumulate=accumulate,
        arguments={"device": estimated_device(device.type), **arguments},
    )


def estimated_device(kind: str) -> str:
    """The kind of device whose kernels an estimate knows."""
    return kind if kind == "cuda" else "cpu"


def _tell(fit: Fit, fitter: MemoryFitter, n_cells: int, n_contexts: int) -> None:
    """One line: what a step takes, what may be used, and what was done about it."""
    needed = (
        f"{fit.estimate}"
        if fit.estimate
        else f"less than {max(0.01, fitter.bound(n_cells * n_contexts) / GIB):.2f} GiB"
    )
    done = [f"{fitter.budget / GIB:.2f} GiB may be used"]
    if fit.n_contexts < n_contexts:
        done.append(f"{fit.n_contexts} of {n_contexts} contexts at once")
    if fit.n_recomputed:
        done.append(f"{fit.n_recomputed} of {fitter.config.n_layers} blocks are recomputed")
    logger.info("Memory of a step: %s; %s.", needed, ", ".join(done))


def make_curriculum(
    datamodule: ContextDataModule,
    *,
    kind: ScheduleKind | None,
    shortest: int,
    warmup: int,
    growth: int | None,
    n_steps: int | None,
) -> LengthCurriculum | None:
    """A curriculum over the length of contexts, where one is asked for.

    Parameters
    ----------
    datamodule
        Its contexts are the longest.
    kind
        How they grow; None where they do not.
    shortest, warmup, growth
        ``shortest_context``, ``growth_warmup`` and ``growth_steps`` of :meth:`AlphaSTomics.train`.
    n_steps
        Steps of the whole training; None where only time ends it.

    Raises
    ------
    ValueError
        If it is not said how fast they grow, or they cannot.
    """
    if kind is None:
        if warmup or growth is not None:
            raise ValueError("growth_warmup and growth_steps are for contexts that grow; pass context_growth= as well")
        return None
    dataset = datamodule.train_set
    if shortest > dataset.context_size:
        raise ValueError(
            f"shortest_context={shortest} is longer than the longest context, context_size={dataset.context_size}"
        )
    if growth is None:
        if n_steps is None:
            raise ValueError(
                "growth_steps= must say how fast contexts grow, because max_time= tells no number of steps"
            )
        growth = max(0, n_steps // 2 - warmup)
    longest = min(dataset.context_size, dataset.largest_slice)
    schedule = LengthSchedule(shortest=min(shortest, longest), longest=longest, warmup=warmup, growth=growth, kind=kind)
    logger.info(
        "Contexts grow from %d to %d cells (%s) in %d steps.", schedule.shortest, longest, kind, warmup + growth
    )
    return LengthCurriculum(schedule, datamodule.set_context_size)
