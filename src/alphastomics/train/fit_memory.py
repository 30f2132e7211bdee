r"""What of a training fits into memory: contexts at once, recomputed blocks, and the length of a context.

.. math::

    c^\star &= \max \{c : \operatorname{peak}(N, c, 0) \le M\} \\
    k^\star &= \min \{k : \operatorname{peak}(N, 1, k) \le M\} \;\;\text{if } c^\star = 0, \qquad
    N^\star = \max \{N : \operatorname{peak}(N, 1, D) \le M\}

c contexts of N cells are on a device at once, k of D blocks are recomputed, M bytes may be used. Contexts that wait for
their turn cost no time, recomputed blocks do; so blocks are recomputed only where one context does not fit. An estimate
takes seconds, for which a small training shall not wait. There none is made if

.. math:: 40\,P + c N \big(1000\,(G + D d) + 10^5\big) \le M,

where P is the number of parameters, G of genes and d the width.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from alphastomics.train.memory import AUTOCAST, MemoryEstimate, estimate_training
from alphastomics.train.recompute import RecomputePolicy
from alphastomics.train.token_budget import largest_fitting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.nn import DenoiserConfig

logger = logging.getLogger(__name__)

Recompute = Literal["auto", "none", "all"] | int

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
        Of :func:`~alphastomics.train.memory.estimate_training`: the precision, the device, the plan.

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
