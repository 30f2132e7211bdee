r"""Sizes that fit into memory: contexts on a device at once, recomputed blocks, and the length of a context.

.. math::

    c^\star &= \max \{c : \operatorname{peak}(N, c, 0) \le M\} \\
    k^\star &= \min \{k : \operatorname{peak}(N, 1, k) \le M\} \;\;\text{if } c^\star = 0, \qquad
    N^\star = \max \{N : \operatorname{peak}(N, 1, D) \le M\}

c contexts of N cells are on a device at once, k of D blocks are recomputed, and M bytes may be used. Fewer contexts at once cost
no time, but recomputed blocks do; blocks are therefore recomputed only if a single context does not fit. All three are found by
bisection; the peak decreases with k, but not linearly. An estimate takes seconds. For few cells it is omitted if

.. math:: 40\,P + c N \big(1000\,(G + D d) + 10^5\big) \le M,

where P is the number of parameters, G the number of genes and d the width.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from alphastomics.nn import Denoiser, count_parameters
from alphastomics.train.callbacks import GIB
from alphastomics.train.datamodule import check_sizes
from alphastomics.train.defaults import default_batch_size
from alphastomics.train.distributed.devices import count_devices, device_of, resolve_precision, usable_memory
from alphastomics.train.memory.estimate import MemoryEstimate, estimate_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from alphastomics.config import Recompute
    from alphastomics.data import CellSource
    from alphastomics.nn import DenoiserConfig

logger = logging.getLogger(__name__)

PER_PARAMETER, PER_VALUE, PER_CELL = 40, 1000, 100_000  # bytes of the bound
COARSE = 64  # the longest context that fits is found to within 1 / COARSE of the one that does not
LARGE = 8192  # cells on a device above which an estimate takes no longer than a few steps
REMEDY = "; pass context_size= with fewer cells, context_size='auto', or a larger memory_budget="


class StepFit(NamedTuple):
    """A step that fits: contexts on the device at once, recomputed blocks, and the estimate, None if there is none."""

    n_contexts: int
    n_recomputed: int
    estimate: MemoryEstimate | None


class BatchLayout(NamedTuple):
    """Cells of a context, of a batch, and on a device at once, and the number of recomputed blocks."""

    context_size: int
    batch_size: int
    micro_batch_size: int
    n_recomputed: int


def recomputed_blocks(recompute: Recompute, n_blocks: int) -> int | None:
    """Number of blocks for the argument ``recompute``, None for ``"auto"``; raises ``ValueError`` if it is invalid."""
    if isinstance(recompute, str) and recompute in ("auto", "none", "all"):
        return {"auto": None, "none": 0, "all": n_blocks}[recompute]
    if isinstance(recompute, bool) or not isinstance(recompute, int) or not 0 <= recompute <= n_blocks:
        raise ValueError(
            f"recompute={recompute!r} is invalid; choose 'auto', 'none', 'all' or a number from 0 to {n_blocks}"
        )
    return recompute


def largest_fitting(fits: Callable[[int], bool], highest: int, *, tolerance: int = 1) -> int:
    """The largest of 1, ..., ``highest`` that fits, by bisection; 0 if none does.

    If a number fits, all smaller ones must fit. The result is less than ``tolerance`` below the largest number that fits.
    """
    low, high = 0, highest + 1  # low fits, high does not
    while high - low > tolerance or (low == 0 and high > 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
        Whether gradients are accumulated over several batches even if a batch is not divided.
    arguments
        Further arguments of :func:`~alphastomics.train.memory.estimate.estimate_training`.

    Raises
    ------
    ValueError
        If ``recompute`` is invalid.
    """

    config: DenoiserConfig
    n_parameters: int
    budget: int
    recompute: Recompute = "auto"
    accumulate: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recomputed_blocks(self.recompute, self.config.n_layers)

    def bound(self, n_cells: int) -> int:
        """Upper bound of the bytes of a step with ``n_cells`` cells on the device."""
        values = self.config.n_genes + self.config.n_layers * self.config.d_model
        return PER_PARAMETER * self.n_parameters + n_cells * (PER_VALUE * values + PER_CELL)

    def estimate(self, n_cells: int, n_contexts: int, k: int, *, in_parts: bool = False) -> MemoryEstimate:
        """Estimate a step (cached); ``in_parts``: a batch has more contexts than these, so gradients are accumulated."""
        accumulate = self.accumulate or in_parts
        key = (n_cells, n_contexts, k, accumulate)
        if key not in self._estimates:
            sizes: dict[str, Any] = {"n_cells": n_cells, "n_contexts": n_contexts, "n_recomputed": k}
            self._estimates[key] = estimate_training(self.config, **sizes, accumulate=accumulate, **self.arguments)
        return self._estimates[key]

    def fits(self, n_cells: int) -> bool:
        """Whether one context of ``n_cells`` cells fits with as many recomputed blocks as allowed."""
        if self.bound(n_cells) <= self.budget or not self._can_estimate(n_cells, 1, self._max_recomputed):
            return True
        return self._peak(n_cells, self._max_recomputed) <= self.budget

    def longest(self, n_cells: int) -> int:
        """The longest context that fits, up to ``n_cells`` and to within 1/64 of it; raises ``ValueError`` if none does."""
        found = n_cells if self.fits(n_cells) else self._longest_with(self._max_recomputed, n_cells)
        if not found:
            raise ValueError(self._too_long(n_cells, self._max_recomputed))
        return found

    def fit(self, n_cells: int, n_contexts: int) -> StepFit:
        """Contexts at once, up to ``n_contexts``, and recomputed blocks for contexts of ``n_cells`` cells.

        Raises ``ValueError`` if one context does not fit, with the number of cells that would.
        """
        k = self._fixed or 0
        small = self.bound(n_cells * n_contexts) <= self.budget
        if (small and n_cells * n_contexts <= LARGE) or not self._can_estimate(n_cells, n_contexts, k):
            return StepFit(n_contexts, k, None)

        def fits(c: int) -> bool:
            return self.estimate(n_cells, c, k, in_parts=c < n_contexts).peak <= self.budget

        found = n_contexts if fits(n_contexts) else largest_fitting(fits, n_contexts - 1)
        if not found:
            found, k = 1, self._fewest_recomputed(n_cells, in_parts=n_contexts > 1)
        return StepFit(found, k, self.estimate(n_cells, found, k, in_parts=found < n_contexts))

    @cached_property
    def _estimates(self) -> dict[tuple[int, int, int, bool], MemoryEstimate]:
        return {}

    @property
    def _fixed(self) -> int | None:
        """Number of blocks to recompute; None: as few as possible."""
        return recomputed_blocks(self.recompute, self.config.n_layers)

    @property
    def _max_recomputed(self) -> int:
        return self.config.n_layers if self._fixed is None else self._fixed

    def _fewest_recomputed(self, n_cells: int, *, in_parts: bool) -> int:
        """The smallest number of recomputed blocks with which one context fits, at least 1; raises ``ValueError`` if none does."""
        most = self.config.n_layers
        if self._fixed is not None:
            raise ValueError(self._too_long(n_cells, self._fixed))
        n_fitting = largest_fitting(lambda n: self._peak(n_cells, most + 1 - n, in_parts) <= self.budget, most)
        if not n_fitting:
            raise ValueError(self._too_long(n_cells, most, in_parts))
        return most + 1 - n_fitting

    def _peak(self, n_cells: int, k: int, in_parts: bool = False) -> int:
        return self.estimate(n_cells, 1, k, in_parts=in_parts).peak

    def _longest_with(self, k: int, n_cells: int, in_parts: bool = False) -> int:
        """The largest number of cells below ``n_cells`` that fits with ``k`` recomputed blocks, to within 1/64; 0 if none."""
        tolerance = max(1, n_cells // COARSE)
        return largest_fitting(lambda n: self._peak(n, k, in_parts) <= self.budget, n_cells - 1, tolerance=tolerance)

    def _can_estimate(self, n_cells: int, n_contexts: int, k: int) -> bool:
        """Whether the memory of such a step can be estimated; logs a warning if not."""
        try:
            self.estimate(n_cells, n_contexts, k)
        except (ImportError, NotImplementedError) as error:
            logger.warning("The memory of a step is not checked: %s.", error)
            return False
        return True

    def _too_long(self, n_cells: int, k: int, in_parts: bool = False) -> str:
        longest = self._longest_with(k, n_cells, in_parts)
        return (
            f"A context of {n_cells:,} cells needs {self._peak(n_cells, k, in_parts) / GIB:.2f} GiB with {k} of {self.config.n_layers} "
            f"blocks recomputed, and {self.budget / GIB:.2f} GiB may be used: "
            + (f"{longest:,} cells would fit" if longest else "not even one cell would fit")
            + REMEDY
        )


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
    fitter = _make_fitter(config, budget, recompute, accelerator, devices, accumulate, arguments)
    largest = max(len(cells.rows) for cells in source.slices)
    if batch_size is None:
        batch_size = resumed.get("batch_size") or default_batch_size(device_of(accelerator, devices))
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
    arguments = {"precision": resolve_precision("auto", device_of()), **arguments}
    return _make_fitter(config, None, "auto", "auto", "auto", False, arguments).fits(n_cells)


def _make_fitter(
    config: DenoiserConfig,
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
    n_processes = count_devices(accelerator, devices)
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
