r"""Points along a folded chain, by formula: helices and strands on axes side by side, arcs that connect them.

Lengths are in Å. The i-th of the L residues of a segment with direction a lies at

.. math::

    m + 1.5\, u_i\, a + 2.3\, (\cos \tfrac{5 \pi}{9} u_i\; n_1 + \sin \tfrac{5 \pi}{9} u_i\; n_2)
    \quad \text{(helix)}, \qquad
    m + 3.3\, u_i\, a + 0.94\, (-1)^i\, n_2 \quad \text{(strand)}, \qquad u_i = i - \tfrac{L - 1}{2},

with :math:`(n_1, n_2, a)` right-handed, which makes every helix right-handed (Pauling, Corey and Branson 1951), and
consecutive points 3.8 Å apart. The middles m lie on a line along :math:`n_1`, at distances that depend on the kinds of the two
neighbours alone; the directions alternate, and each is turned by 20 degrees from the one before. A loop is an arc of m equal
chords c = 3.8 over the gap g between two ends,

.. math::

    \frac{g}{c} = \frac{\sin (m \varphi / 2)}{\sin (\varphi / 2)}, \qquad 0 < \varphi < \frac{2 \pi}{m},

with the fewest chords that reach 1.5 g, and three at least. Kinds and lengths of the segments decide everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.optimize import brentq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["STRUCTURES", "Backbone", "Kind", "Segment", "lay_backbone"]

Kind = Literal["helix", "strand"]
STRUCTURES = ("helix", "strand", "loop")
BOND = 3.8  # between consecutive alpha carbons
HELIX_RISE, HELIX_TURN, HELIX_RADIUS = 1.5, np.deg2rad(100), 2.3
STRAND_RISE = 3.3
PLEAT = np.sqrt(BOND**2 - STRAND_RISE**2) / 2  # 0.94
HALF_WIDTH = {"helix": 5.0, "strand": 2.4}  # helices pack at 10, strands of a sheet at 4.8
TWIST = np.deg2rad(20)
SLACK, FEWEST_CHORDS = 1.5, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A helix or a strand.

    Parameters
    ----------
    kind
        ``"helix"`` or ``"strand"``.
    length
        Number of residues.
    """

    kind: Kind
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """A chain in space.

    Attributes
    ----------
    points
        Positions of the residues in their order in Å, (n, 3).
    structure
        Number of the structure of each in ``STRUCTURES``, (n,).
    """

    points: Array
    structure: NDArray[np.intp]


def lay_backbone(segments: Sequence[Segment]) -> Backbone:
    """Lay the segments in space and connect them."""
    points: list[Array] = []
    structure: list[int] = []
    middle = 0.0
    for k, segment in enumerate(segments):
        if k:
            middle += HALF_WIDTH[segments[k - 1].kind] + HALF_WIDTH[segment.kind]
        direction = (-1) ** k * np.array([0.0, np.sin(k * TWIST), np.cos(k * TWIST)])
        laid = _segment(segment, direction) + [middle, 0.0, 0.0]
        if k:
            loop = _loop(points[-1][-1], laid[0], onward=-direction)
            points.append(loop)
            structure += [STRUCTURES.index("loop")] * len(loop)
        points.append(laid)
        structure += [STRUCTURES.index(segment.kind)] * segment.length
    return Backbone(points=np.concatenate(points), structure=np.array(structure))


def _segment(segment: Segment, direction: Array) -> Array:
    """Points (L, 3) of a segment about the origin."""
    n_1 = np.array([1.0, 0.0, 0.0])
    n_2 = np.cross(direction, n_1)
    place = np.arange(segment.length)
    u = (place - (segment.length - 1) / 2)[:, None]
    if segment.kind == "strand":
        return STRAND_RISE * u * direction + PLEAT * ((-1.0) ** place)[:, None] * n_2
    around = np.cos(HELIX_TURN * u) * n_1 + np.sin(HELIX_TURN * u) * n_2
    return HELIX_RISE * u * direction + HELIX_RADIUS * around


def _loop(start: Array, end: Array, *, onward: Array) -> Array:
    """Points strictly between two ends, along an arc that leaves the line between them in the direction ``onward``."""
    gap = float(np.linalg.norm(end - start))
    along = (end - start) / gap
    aside = onward - (onward @ along) * along
    aside /= np.linalg.norm(aside)
    n_chords = max(FEWEST_CHORDS, ceil(SLACK * gap / BOND))

    def excess(angle: float) -> float:
        return np.sin(n_chords * angle / 2) / np.sin(angle / 2) - gap / BOND

    angle = brentq(excess, 1e-6, 2 * np.pi / n_chords)
    heading = angle * (np.arange(n_chords - 1) - (n_chords - 1) / 2)  # of each chord but the last, from ``along``
    steps = np.cos(heading)[:, None] * along - np.sin(heading)[:, None] * aside
    return start + BOND * steps.cumsum(0)
