r"""Which clocks run, and where they stand, for each context of a batch.

========================  =============================  =============================
mode                      t_expr                         t_pos
========================  =============================  =============================
``expr_to_pos``           0                              1 (absent) or U(0, 1)
``pos_to_expr``           1 (absent), U(0, 1), or 0      0, or 1 with t_expr 0
``joint``                 U(0, 1), 1, or 0 with t_pos 1  U(0, 1) or 1
``any``                   0, U(0, 1) or 1                0, U(0, 1) or 1
========================  =============================  =============================

The mass on 1 trains the conditional mean, the first step of every chain, and (with ``t_expr`` = 0) the canonical frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mode = Literal["expr_to_pos", "pos_to_expr", "joint", "any"]
MODES: tuple[Mode, ...] = ("expr_to_pos", "pos_to_expr", "joint", "any")

_KIND = 20
FRAME_SHARE = 0.2  # of the contexts of pos_to_expr: those that teach the canonical frame
PLACING, WRITING = 0.25, 0.85  # cumulative shares of the parts of "any"; the rest is joint
SMALLEST = 0.01  # below this the noise is finer than anything a tissue holds


class Clocks(NamedTuple):
    """Clocks of one context."""

    expression: float
    position: float


def keyed_rng(key: NDArray[np.int64], purpose: int) -> np.random.Generator:
    """A generator that depends on (seed, epoch, context) and on the purpose alone, never on the process."""
    return np.random.default_rng([*(int(k) for k in key), purpose])


def spread_kind(key: NDArray[np.int64], purpose: int) -> float:
    """A number in [0, 1) for the context ``key`` = (seed, epoch, index) that decides what kind of state it trains.

    Additive recurrence with the golden ratio: contexts that follow each other in an epoch are spread evenly over the
    kinds, so that a batch of a few contexts holds a fair share of each.
    """
    seed, epoch, index = (int(k) for k in key)
    start = np.random.default_rng([seed, epoch, purpose, _KIND]).random()
    return float((start + index * (np.sqrt(5) - 1) / 2) % 1)


def draw_clocks(
    mode: Mode, rng: np.random.Generator, *, absent: float, smallest: float = SMALLEST, kind: float | None = None
) -> Clocks:
    """Draw the clocks of one context.

    Parameters
    ----------
    mode
        What the model is trained for.
    rng
        Generator of this context.
    absent
        Probability that the modality to be sampled is absent altogether (its clock stands at 1).
    smallest
        Smallest time of a position clock that runs.
    kind
        Uniform number that decides which clocks run; drawn when None.
    """
    drawn, u, v = rng.random(3)
    kind = float(drawn) if kind is None else kind
    t_1, t_2 = float(smallest + (1 - smallest) * u), float(SMALLEST + (1 - SMALLEST) * v)
    if mode == "expr_to_pos":
        return Clocks(0.0, 1.0 if kind < absent else t_1)
    if mode == "pos_to_expr":
        if kind < FRAME_SHARE:
            return Clocks(0.0, 1.0)
        return Clocks(1.0 if kind < FRAME_SHARE + (1 - FRAME_SHARE) * absent else t_2, 0.0)
    if mode == "joint":
        if kind < absent / 2:
            return Clocks(0.0, 1.0)
        return Clocks(1.0, 1.0) if kind < absent * 0.6 else Clocks(t_1 if kind < (1 + absent) / 2 else t_2, t_1)
    part: Mode = "expr_to_pos" if kind < PLACING else "pos_to_expr" if kind < WRITING else "joint"
    return draw_clocks(part, rng, absent=absent, smallest=smallest)
