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
from typing import TYPE_CHECKING, Any, NamedTuple

from alphastomics.train.callbacks import GIB
from alphastomics.train.memory.estimate import MemoryEstimate, estimate_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from alphastomics.config import Recompute
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
