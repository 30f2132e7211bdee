"""Counts from log-normalized values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from alphastomics.data._checks import (
    check_in_memory,
    check_text,
    expression_key,
    expression_matrix,
    summarize_values,
)
from alphastomics.data._matrix import canonical

if TYPE_CHECKING:
    from anndata import AnnData

SMALLEST = 5  # count that the smallest value of a cell may be, at most
TOLERANCE = 0.05  # difference of a restored count from an integer
TOO_LARGE = 2.0**24  # for a count; larger numbers are integers in 32 bits
SHARE = 0.99  # of the cells whose values must be integers


def restore_counts(
    adata: AnnData, *, layer: str | None = None, key_added: str = "counts", copy: bool = False
) -> AnnData | None:
    r"""Restore counts from their logarithms at a common library size, as of ``scanpy.pp.normalize_total`` and ``scanpy.pp.log1p``.

    .. math:: c_{ig} = m_i\, \frac{e^{x_{ig}} - 1}{\min_{h:\, x_{ih} > 0} (e^{x_{ih}} - 1)}

    with the smallest number :math:`m_i` of molecules, of at most 5, for which all values of cell i are integers: 1 if a gene was counted once
    in this cell. Placement is more accurate from counts than from log-normalized values.

    Parameters
    ----------
    adata
        Cells with log-normalized expression.
    layer
        Layer with this expression; ``X`` when None.
    key_added
        Layer to which the counts are written.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``layers[key_added]``: counts, CSR float32, (n_cells, n_genes).

    Raises
    ------
    KeyError
        If there is no such layer.
    ValueError
        If values are counts already, negative or not finite, or if those of more than 1 % of the cells are not integers after the
        transform, because they were corrected, scaled or smoothed.

    Examples
    --------
    >>> asx.pp.restore_counts(reference)
    >>> asx.pp.restore_counts(query)
    >>> asx.tl.reconstruct(query, reference, layer="counts")
    """
    check_in_memory(adata)
    check_text(key_added, "key_added", "layers")
    where, matrix = expression_key(layer), expression_matrix(adata, layer)
    if summarize_values(matrix).counts:
        raise ValueError(
            f"{where} has counts already; use them as they are, or pass layer=… with log-normalized values"
        )
    values = canonical(matrix)
    if not np.isfinite(values.data).all() or (values.data < 0).any():
        raise ValueError(
            f"{where} has negative, NaN or infinite values, which are not logarithms of counts; pass layer=… with log-normalized values"
        )
    filled = np.flatnonzero(np.diff(values.indptr))
    cell = np.repeat(np.arange(values.shape[0]), np.diff(values.indptr))
    with np.errstate(over="ignore", invalid="ignore"):
        molecules, smallest = np.expm1(values.data), np.ones(values.shape[0])
        smallest[filled] = np.minimum.reduceat(molecules, values.indptr[filled]) if len(filled) else 1.0
        ratio = np.minimum(np.nan_to_num(molecules / smallest[cell], nan=np.inf), TOO_LARGE)
    restored, is_integer = ratio.copy(), np.zeros(values.shape[0], dtype=bool)
    for m in range(SMALLEST, 0, -1):
        wrong = (np.abs(m * ratio - np.rint(m * ratio)) > TOLERANCE) | (ratio == TOO_LARGE)
        is_right = np.bincount(cell, wrong, minlength=len(is_integer)) == 0
        restored, is_integer = np.where(is_right[cell], m * ratio, restored), is_integer | is_right
    if (~is_integer).sum() > (1 - SHARE) * len(is_integer):
        raise ValueError(
            f"the values of {(~is_integer).mean():.0%} of the cells in {where} are not logarithms of counts at a common library size; "
            "corrected, scaled or smoothed values cannot be restored; pass layer=… with log-normalized values, or use raw counts"
        )
    result = adata.copy() if copy else adata
    counts = sp.csr_matrix((np.rint(restored).astype(np.float32), values.indices, values.indptr), shape=values.shape)
    result.layers[key_added] = counts
    return result if copy else None
