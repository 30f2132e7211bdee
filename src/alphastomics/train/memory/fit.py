r"""Memory that runs out in the midst of a training, of a GPU or of the machine: what is said, and what is let go.

What of a training fits into memory: contexts at once, recomputed blocks, and the length of a context.

.. math::

    c^\star &= \max \{c : \operatorname{peak}(N, c, 0) \le M\} \\
    k^\star &= \min \{k : \operatorname{peak}(N, 1, k) \le M\} \;\;\text{if } c^\star = 0, \qquad
    N^\star = \max \{N : \operatorname{peak}(N, 1, D) \le M\}

c contexts of N cells are on a device at once, k of D blocks are recomputed, M bytes may be used. Contexts that wait for
their turn cost no time, recomputed blocks do; so blocks are recomputed only where one context does not fit. An estimate
takes seconds, for which a small training shall not wait. There none is made if

.. math:: 40\,P + c N \big(1000\,(G + D d) + 10^5\big) \le M,

where P is the number of parameters, G of genes and d the width.

The contexts of a training: how long they are, how they grow, and how many of them a device holds.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from alphastomics._io._errors import describe_error
from alphastomics.nn import Denoiser, count_parameters
from alphastomics.train.curriculum import LengthCurriculum, LengthSchedule, largest_fitting
from alphastomics.train.datamodule import check_sizes
from alphastomics.train.distributed.devices import count_devices, device_of, memory_budget, resolve_precision
from alphastomics.train.memory.estimate import AUTOCAST, MemoryEstimate, estimate_training
from alphastomics.train.memory.recompute import RecomputePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.config import GrowthKind, Recompute
    from alphastomics.data import CellSource
    from alphastomics.nn import DenoiserConfig
    from alphastomics.train import ContextDataModule
    from alphastomics.train.memory.estimate import MemoryEstimate

WORDS = ("out of memory", "outofmemoryerror", "can't allocate memory", "not enough memory")  # of PyTorch, on any device


class NotEnoughMemoryError(torch.OutOfMemoryError, MemoryError):
    """The memory was not enough for a step of training; the message says what takes less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)


def free_traceback_frames(error: BaseException) -> None:
    """Free what the frames hold in which memory ran out: the model is to be used after them."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


logger = logging.getLogger(__name__)

PER_PARAMETER, PER_VALUE, PER_CELL = 40, 1000, 100_000  # bytes of the bound
LARGE = 8192  # cells at once, from where on an estimate takes no longer than a few steps


class Fit(NamedTuple):
    """A step that fits.

    Attributes
    ----------
    n_contexts
        Contexts that are on the device at once.
    n_recomputed
        Blocks that are recomputed.
    estimate
        Its memory; None where a bound on it was enough, or nothing could be said.
    """

    n_contexts: int
    n_recomputed: int
    estimate: MemoryEstimate | None


def recomputed_blocks(recompute: Recompute, n_blocks: int) -> int | None:
    """Number of blocks that an argument asks for; None for ``"auto"``.

    Raises
    ------
    ValueError
        If it is none of ``"auto"``, ``"none"``, ``"all"`` and the numbers up to that of the blocks.
    """
    if isinstance(recompute, str) and recompute in ("auto", "none", "all"):
        return {"auto": None, "none": 0, "all": n_blocks}[recompute]
    if isinstance(recompute, bool) or not isinstance(recompute, int) or not 0 <= recompute <= n_blocks:
        raise ValueError(f"recompute={recompute!r} is none of 'auto', 'none', 'all' and the numbers 0 to {n_blocks}")
    return recompute


@dataclass(frozen=True, kw_only=True)
class MemoryFitter:
    """Fits the steps of a training into memory.

    Parameters
    ----------
    config
        The network.
    n_parameters
        P.
    budget
        M, in bytes.
    recompute
        Which blocks are recomputed: ``"none"``, ``"all"``, a number of them, or ``"auto"``, as few as possible.
    accumulate
        Whether gradients of several batches are added up in any case.
    arguments
        Of :func:`~alphastomics.train.memory.estimate.estimate_training`: the precision, the device, the plan.

    Raises
    ------
    ValueError
        If ``recompute`` makes no sense.
    """

    config: DenoiserConfig
    n_parameters: int
    budget: int
    recompute: Recompute = "auto"
    accumulate: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recomputed_blocks(self.recompute, self.config.n_layers)

    @cached_property
    def _estimates(self) -> dict[tuple[int, int, int, bool], MemoryEstimate]:
        return {}

    @property
    def _fixed(self) -> int | None:
        return recomputed_blocks(self.recompute, self.config.n_layers)

    @property
    def _most(self) -> int:
        return self.config.n_layers if self._fixed is None else self._fixed

    def bound(self, n_cells: int) -> int:
        """Bytes that a step with so many cells on the device does not exceed."""
        values = self.config.n_genes + self.config.n_layers * self.config.d_model
        return PER_PARAMETER * self.n_parameters + n_cells * (PER_VALUE * values + PER_CELL)

    def estimate(self, n_cells: int, n_contexts: int, k: int, *, in_parts: bool = False) -> MemoryEstimate:
        """Estimate a step, once; ``in_parts`` where a batch takes more than these contexts."""
        accumulate = self.accumulate or in_parts
        key = (n_cells, n_contexts, k, accumulate)
        if key not in self._estimates:
            self._estimates[key] = estimate_training(
                self.config,
                n_cells=n_cells,
                n_contexts=n_contexts,
                n_recomputed=k,
                accumulate=accumulate,
                **self.arguments,
            )
        return self._estimates[key]

    def fits(self, n_cells: int) -> bool:
        """Whether a step with one context of ``n_cells`` fits, with as many blocks recomputed as may be."""
        if self.bound(n_cells) <= self.budget or not self._can_estimate(n_cells, 1, self._most):
            return True
        return self._peak(n_cells, self._most) <= self.budget

    def longest(self, n_cells: int) -> int:
        """The longest context that fits, up to ``n_cells``, to a part in 64 of it.

        Raises
        ------
        ValueError
            If not even one cell does.
        """
        if self.fits(n_cells):
            return n_cells
        k = self._most
        found = self._policy.longest(lambda n, _: self._peak(n, k), n_cells)
        if not found:
            raise ValueError(self._refusal(n_cells, k))
        return found

    def fit(self, n_cells: int, n_contexts: int) -> Fit:
        """Contexts at once, up to ``n_contexts``, and recomputed blocks for contexts of ``n_cells`` cells.

        Raises
        ------
        ValueError
            If one context is too much; the message says how many cells would fit.
        """
        k = self._fixed or 0
        small = self.bound(n_cells * n_contexts) <= self.budget
        if (small and n_cells * n_contexts <= LARGE) or not self._can_estimate(n_cells, n_contexts, k):
            return Fit(n_contexts, k, None)

        def fits(c: int) -> bool:
            return self.estimate(n_cells, c, k, in_parts=c < n_contexts).peak <= self.budget

        found = n_contexts if fits(n_contexts) else largest_fitting(fits, n_contexts - 1)
        if found:
            return Fit(found, k, self.estimate(n_cells, found, k, in_parts=found < n_contexts))
        if self._fixed is not None:
            raise ValueError(self._refusal(n_cells, k))
        in_parts = n_contexts > 1
        try:
            k = self._policy.choose(lambda n, k: self.estimate(n, 1, k, in_parts=in_parts).peak, n_cells)
        except ValueError as error:
            raise ValueError(f"{error}{_REMEDY}") from None
        return Fit(1, k, self.estimate(n_cells, 1, k, in_parts=in_parts))

    @property
    def _policy(self) -> RecomputePolicy:
        return RecomputePolicy(n_blocks=self.config.n_layers, budget=self.budget)

    def _peak(self, n_cells: int, k: int) -> int:
        return self.estimate(n_cells, 1, k).peak

    def _can_estimate(self, n_cells: int, n_contexts: int, k: int) -> bool:
        """Whether there is an estimate of a step like this."""
        if str(self.arguments.get("precision", "32")) not in AUTOCAST:
            logger.warning("The memory of a step in precision=%s is not known.", self.arguments["precision"])
            return False
        try:
            self.estimate(n_cells, n_contexts, k)
        except (ImportError, NotImplementedError) as error:
            logger.warning("The memory of a step is not known: %s.", error)
            return False
        return True

    def _refusal(self, n_cells: int, k: int) -> str:
        would = self._policy.longest(lambda n, _: self._peak(n, k), n_cells)
        return (
            f"A context of {n_cells:,} cells needs {self._peak(n_cells, k) / 2**30:.2f} GiB with {k} of "
            f"{self.config.n_layers} blocks recomputed, and {self.budget / 2**30:.2f} GiB may be used: "
            + (f"{would:,} cells would fit" if would else "not even one cell would fit")
            + _REMEDY
        )


_REMEDY = "; pass context_size= with fewer cells, or 'auto', or say by memory_budget= that more may be used"


GIB = 2**30


class BatchLayout(NamedTuple):
    """What is cut, and what a step is made of.

    Attributes
    ----------
    context_size, batch_size, micro_batch_size
        Cells of a context, of a step of the optimizer, and on a device at once.
    n_recomputed
        Blocks that are recomputed.
    """

    context_size: int
    batch_size: int
    micro_batch_size: int
    n_recomputed: int


def fit_batch_layout(
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
    resumed: Mapping[str, int],
    **arguments: Any,
) -> BatchLayout:
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
    resumed
        ``context_size`` and ``micro_batch_size`` of the training that is resumed, whatever memory is free now: batches that are
        divided otherwise have other sums, and begin elsewhere.
    **arguments
        Of :func:`~alphastomics.train.memory.estimate.estimate_training`.

    Raises
    ------
    ValueError
        If one context is too much, or an argument makes no sense.
    """
    fitter = _fitter(module, budget, recompute, accelerator, devices, accumulate, arguments)
    largest = max(len(cells.rows) for cells in source.slices)
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
            logger.warning("context_size=%d is cut to batch_size=%d.", context_size, batch_size)
    at_once = max(batch_size, size) if micro_batch_size is None else micro_batch_size
    n_contexts, n_cells = max(1, at_once // size), min(size, largest)
    fit = fitter.fit(n_cells, n_contexts)
    _tell(fit, fitter, n_cells, n_contexts)
    if fit.n_contexts < n_contexts:
        at_once = fit.n_contexts * size
    if resumed.get("micro_batch_size", at_once) != at_once:
        logger.warning(
            "The training was begun with micro_batch_size=%d and goes on with %d: to the same end, but not to the same bytes.",
            resumed["micro_batch_size"], at_once,
        )  # fmt: skip
    return BatchLayout(size, batch_size, at_once, fit.n_recomputed)


def out_of_memory_error(
    contexts: BatchLayout, estimate: MemoryEstimate | None, error: BaseException
) -> NotEnoughMemoryError:
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
        f"smaller micro_batch_size=, a smaller context_size=, or a memory_budget= below what is free (it was: {describe_error(error)}); "
        "estimate_memory() tells what each would take; a training with a checkpoint goes on where it was with resume='last'"
    )


def fits_in_memory(config: DenoiserConfig, n_cells: int, **arguments: Any) -> bool:
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
    kind: GrowthKind | None,
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
