r"""Fields of view that are taken for slices: tiles of one section, which adjoin each other and hardly overlap.

With the bounding boxes :math:`[l_i, h_i]` of the slices, :math:`i` adjoins :math:`j` if the gap between both, :math:`\lVert (\max(l_i, l_j) -
\min(h_i, h_j))_+ \rVert`, is at most three spacings, and no other box covers more than a fifth of that of i. Sections have frames of their
own, in which their boxes overlap, or lie on a slide with wider gaps between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_GAP = 3.0  # in spacings
MAX_OVERLAP = 0.2  # share of a box
FEWEST_SLICES = 4


def n_tiles(slices: Sequence[NDArray[np.float64]], spacing: float) -> int:
    """Number of slices, positions (n, D) each, that adjoin another one and overlap with none; 0 for a few slices."""
    if len(slices) < FEWEST_SLICES:
        return 0
    low, high = np.stack([x.min(0) for x in slices]), np.stack([x.max(0) for x in slices])
    shared = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)  # negative: a gap
    gap = np.linalg.norm(np.maximum(-shared, 0.0), axis=2)
    size = np.maximum(high - low, np.finfo(float).tiny)
    overlap = (np.maximum(shared, 0.0) / size[:, None]).prod(2)
    others = ~np.eye(len(slices), dtype=bool)
    adjoins = ((gap <= MAX_GAP * spacing) & others).any(1)
    return int((adjoins & ((overlap * others).max(1) <= MAX_OVERLAP)).sum())
