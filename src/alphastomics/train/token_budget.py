r"""How many contexts a device takes at once, and how often gradients are accumulated before a step.

.. math::

    B_{\max} = \lfloor T / N \rfloor, \qquad A = \lceil B_{\text{eff}} / (W B_{\max}) \rceil, \qquad
    B = \lceil B_{\text{eff}} / (W A) \rceil

T cells fit on one device, a context holds N, a step of the optimiser is to see :math:`B_{\text{eff}}` contexts on W
devices. T is one number for networks whose memory grows with the cells alone. For others :math:`B_{\max}` is found by
bisection, with an estimate of what fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Fits = Callable[[int, int], bool]  # contexts on a device and cells of each -> whether memory is enough


class BatchPlan(NamedTuple):
    """What a step of the optimiser is made of.

    Attributes
    ----------
    contexts
        B, contexts on each device at once.
    accumulation
        A, number of such batches before a step.
    """

    contexts: int
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """Batches for any length of the contexts; give ``cells`` or ``fits``.

    Parameters
    ----------
    contexts_per_step
        B_eff.
    cells
        T, cells that one device holds at once, for networks that are linear in memory.
    fits
        Whether some contexts of some cells fit on a device, for other networks.
    n_devices
        W.

    Raises
    ------
    ValueError
        If a number is not positive, or not exactly one of ``cells`` and ``fits`` is given.
    """

    contexts_per_step: int
    cells: int | None = None
    fits: Fits | None = None
    n_devices: int = 1

    def __post_init__(self) -> None:
        if (self.cells is None) == (self.fits is None):
            raise ValueError("give cells, for a network that is linear in memory, or fits, for another")
        for name in ("contexts_per_step", "cells", "n_devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    def plan(self, n_cells: int) -> BatchPlan:
        """Contexts at once and accumulation for contexts of ``n_cells`` cells.

        A step sees at least B_eff contexts, and fewer than one more on each device for every batch.

        Raises
        ------
        ValueError
            If one context is too much.
        """
        share = -(-self.contexts_per_step // self.n_devices)
        largest = self._largest(n_cells, share)
        if not largest:
            remedy = f"contexts of {self.cells:,} cells would fit" if self.cells else "take shorter contexts"
            raise ValueError(f"One context of {n_cells:,} cells is too much for a device: {remedy}")
        accumulation = -(-share // largest)
        return BatchPlan(-(-share // accumulation), accumulation)

    def _largest(self, n_cells: int, share: int) -> int:
        if self.cells is not None:
            return min(share, self.cells // n_cells)
        assert self.fits is not None
        fits = self.fits
        return share if fits(share, n_cells) else largest_fitting(lambda b: fits(b, n_cells), share - 1)


def largest_fitting(fits: Callable[[int], bool], highest: int, *, tolerance: int = 1) -> int:
    """The largest of 1, ..., ``highest`` that fits, by bisection; 0 if none does.

    Parameters
    ----------
    fits
        Whether a number fits; with a number every smaller one must.
    highest
        The largest number that is asked for.
    tolerance
        The answer fits, and is less than so much below the largest number that does.
    """
    low, high = 0, highest + 1  # low fits, high does not
    while high - low > tolerance or (low == 0 and high > 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
