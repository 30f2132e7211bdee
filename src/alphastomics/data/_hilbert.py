r"""Order of cells along a Hilbert curve: cells that are near in it are near in the tissue, and mostly the other way round.

With b bits per axis the curve visits the :math:`2^{bD}` cubes of a grid so that consecutive cubes touch. The number of a
cube is found axis by axis from the highest bit down (Skilling 2004, AIP Conf. Proc. 707:381): where a bit is set the lower
bits of the first axis are turned over, else they are exchanged with those of the first axis; a Gray code of what is left,
its bits interleaved, is the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_BITS = 62  # of a number, in all axes
AXIS_BITS = 20  # of an axis: a millionth of the tissue


def hilbert_order(position: NDArray[np.floating]) -> NDArray[np.int64]:
    """Order of cells along the curve through the cube around them.

    Parameters
    ----------
    position
        (N, D), finite, D at most 8.

    Returns
    -------
    Row numbers (N,); cells in one cube of the finest grid keep their order.
    """
    n, n_dims = position.shape
    if n == 0:
        return np.empty(0, dtype=np.int64)
    bits = min(AXIS_BITS, KEY_BITS // n_dims)
    low = position.min(axis=0)
    extent = float((position.max(axis=0) - low).max())
    cubes = 2**bits - 1
    x = np.zeros((n, n_dims)) if extent == 0 else (position - low) / extent
    return np.argsort(hilbert_number(np.minimum(x * cubes, cubes).astype(np.uint64), bits), kind="stable")


def hilbert_number(cube: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Numbers (N,) of cubes (N, D), whose coordinates have ``bits`` bits."""
    x = [axis.copy() for axis in cube.T]
    for bit in range(bits - 1, 0, -1):
        below = np.uint64((1 << bit) - 1)
        for axis in x:
            is_set = (axis >> np.uint64(bit)) & np.uint64(1) == 1
            exchanged = np.where(is_set, np.uint64(0), (x[0] ^ axis) & below)
            x[0] ^= np.where(is_set, below, exchanged)
            axis ^= exchanged
    return _interleaved(_gray(x, bits), bits)


def _gray(x: list[NDArray[np.uint64]], bits: int) -> list[NDArray[np.uint64]]:
    """Gray code of the axes, in place."""
    for before, axis in zip(x, x[1:], strict=False):
        axis ^= before
    turned = np.zeros_like(x[0])
    for bit in range(bits - 1, 0, -1):
        is_set = (x[-1] >> np.uint64(bit)) & np.uint64(1) == 1
        turned ^= np.where(is_set, np.uint64((1 << bit) - 1), np.uint64(0))
    for axis in x:
        axis ^= turned
    return x


def _interleaved(x: list[NDArray[np.uint64]], bits: int) -> NDArray[np.uint64]:
    """One number of the bits of all axes, highest bits first, the first axis before the others."""
    number = np.zeros_like(x[0])
    for bit in range(bits - 1, -1, -1):
        for axis in x:
            number = (number << np.uint64(1)) | ((axis >> np.uint64(bit)) & np.uint64(1))
    return number
