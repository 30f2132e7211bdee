r"""Which clocks run, and where they stand, for each context of a batch.

========================  =============================  =============================
mode                      t_expr                         t_pos
========================  =============================  =============================
``expr_to_pos``           0                              1 (absent) or U(0, 1)
``pos_to_expr``           1 (absent) or U(0, 1)          0
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

SMALLEST = 0.01  # below this the noise is finer than anything a tissue holds


class Clocks(NamedTuple):
    """Clocks of one context."""

    expression: float
    position: float


def keyed_rng(key: NDArray[np.int64], purpose: int) -> np.random.Generator:
    """A generator that depends on (seed, epoch, context) and on the purpose alone, never on the process."""
    return np.random.default_rng([*(int(k) for k in key), purpose])


def draw_clocks(mode: Mode, rng: np.random.Generator, *, absent: float, smallest: float = SMALLEST) -> Clocks:
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
    """
    kind, u, v = rng.random(3)
    t_1, t_2 = float(smallest + (1 - smallest) * u), float(SMALLEST + (1 - SMALLEST) * v)
    if mode == "expr_to_pos":
        return Clocks(0.0, 1.0 if kind < absent else t_1)
    if mode == "pos_to_expr":
        return Clocks(1.0 if kind < absent else t_2, 0.0)
    if mode == "joint":
        if kind < absent / 2:
            return Clocks(0.0, 1.0)
        return Clocks(1.0, 1.0) if kind < absent * 0.6 else Clocks(t_1 if kind < (1 + absent) / 2 else t_2, t_1)
    part: Mode = "expr_to_pos" if kind < 0.4 else "pos_to_expr" if kind < 0.7 else "joint"
    return draw_clocks(part, rng, absent=absent, smallest=smallest)
