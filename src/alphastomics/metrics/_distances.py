"""Scores that compare distances between cells, computed in chunks of rows without an n_cells × n_cells matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.spatial.distance import cdist, pdist
from scipy.stats import rankdata

from alphastomics._checks import check_counts, check_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

N_ROWS = 2000  # cells whose distances to all others are ranked
CONTACT_SHARE = 0.05
TIE_TOLERANCE = 1e-12  # relative; equal distances may be rounded differently
CHUNK_ENTRIES = 4_000_000  # distances in memory at a time: 32 MB of float64
MAX_CONTACT_CELLS = 8_000  # the distances of all pairs are 256 MB of float64


def check_pair(true: ArrayLike, predicted: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both sets of positions as float64 arrays of one shape, (n_cells, n_dims), or raise ``ValueError``."""
    pair = np.asarray(true, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    if pair[0].ndim != 2 or pair[0].shape != pair[1].shape:
        shapes = " and ".join(str(positions.shape) for positions in pair)
        raise ValueError(f"true and predicted positions must both be of shape (n_cells, n_dims), got {shapes}")
    for name, positions in zip(("true", "predicted"), pair, strict=True):
        n_bad = int((~np.isfinite(positions)).any(axis=1).sum())
        if n_bad:
            raise ValueError(f"{n_bad} {name} positions are not finite; leave these cells out")
    return pair


def row_chunks(n_rows: int, n_columns: int) -> Iterator[slice]:
    """Cut ``n_rows`` rows of ``n_columns`` entries into slices of at most ``CHUNK_ENTRIES`` entries."""
    step = max(1, CHUNK_ENTRIES // max(1, n_columns))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def subsample_cells(n_cells: int, n: int = 4000, seed: int = 0) -> NDArray[np.int64]:
    """Choose the cells on which scores are computed, so that the scores of different programs can be compared.

    Parameters
    ----------
    n_cells
        Number of cells of the slice.
    n
        Number of cells to choose; all of them if the slice has fewer.
    seed
        Seed of the permutation.

    Returns
    -------
    ``sort(default_rng(seed).permutation(n_cells)[:n])``, (min(n, n_cells),).
    """
    check_counts(n=n)
    return np.sort(np.random.default_rng(check_seed(seed)).permutation(n_cells)[:n])


def distance_matrix_mse(true: ArrayLike, predicted: ArrayLike) -> float:
    r"""Mean squared error of the distance matrix, :math:`\frac{1}{n(n-1)} \sum_{i \ne j} (D_{ij} - \hat D_{ij})^2`.

    Invariant under rotation, reflection and shift of either side, not under scale.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, in the units of the truth, (n_cells, n_dims).

    Returns
    -------
    The error, in squared units of the positions, exact over all pairs; NaN for fewer than two cells.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    """
    y, x = check_pair(true, predicted)
    n = len(y)
    if n < 2:
        return float("nan")
    total = 0.0
    for rows in row_chunks(n, n):
        difference = cdist(y[rows], y[rows.start :])
        difference -= cdist(x[rows], x[rows.start :])
        np.square(difference, out=difference)
        width = rows.stop - rows.start
        # The square block on the diagonal contains its pairs twice.
        total += float(difference[:, :width].sum()) + 2 * float(difference[:, width:].sum())
    return total / (n * (n - 1))


def distance_spearman(
    true: ArrayLike,
    predicted: ArrayLike,
    *,
    n_rows: int = N_ROWS,
    random_state: int = 0,
    reduce: Literal["mean", "median"] = "mean",
) -> float:
    """Spearman correlation between rows of the true and of the predicted distance matrix, over random cells.

    The correlation is 1 if the distances from each cell to all others are in the right order. Each row equals
    :func:`scipy.stats.spearmanr` (ties have their average rank; the cell itself, at distance 0, is part of its row), except
    that a constant predicted row scores 0, where scipy returns NaN. A cell whose true row is constant is left out.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, in any unit, (n_cells, n_dims).
    n_rows
        Number of cells whose rows are compared, chosen by :func:`subsample_cells`; every row contains all cells.
    random_state
        Seed of that choice.
    reduce
        ``"mean"`` or ``"median"`` over these cells.

    Returns
    -------
    The correlation, in [−1, 1]; NaN if the truth is a single point or there are fewer than two cells.

    Raises
    ------
    ValueError
        If the shapes differ, a value is not finite, or ``reduce`` is unknown.
    """
    if reduce not in ("mean", "median"):
        raise ValueError(f'reduce must be "mean" or "median", got {reduce!r}')
    rows = spearman_rows(true, predicted, n_rows=n_rows, random_state=random_state)
    if len(rows) == 0:
        return float("nan")
    return float(rows.mean() if reduce == "mean" else np.median(rows))


def spearman_rows(true: ArrayLike, predicted: ArrayLike, *, n_rows: int, random_state: int) -> NDArray[np.float64]:
    """Return the correlations that :func:`distance_spearman` reduces, (at most ``n_rows``,)."""
    y, x = check_pair(true, predicted)
    n = len(y)
    cells = subsample_cells(n, n_rows, random_state)
    correlations = []
    for rows in row_chunks(len(cells), n):
        # The mean of average ranks is always (n + 1) / 2.
        a = _row_ranks(cdist(y[cells[rows]], y)) - (n + 1) / 2
        b = _row_ranks(cdist(x[cells[rows]], x)) - (n + 1) / 2
        norm = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
        correlation = np.divide(np.einsum("ij,ij->i", a, b), norm, out=np.zeros(len(a)), where=norm > 0)
        correlations.append(correlation[a.any(axis=1)])
    return np.concatenate(correlations) if correlations else np.empty(0)


def _row_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank each row from 1, ties averaged; ``rankdata``, which is four times slower, is called for rows with ties only."""
    order = np.argsort(values, axis=1)
    ranks = np.empty_like(values)
    np.put_along_axis(ranks, order, np.arange(1.0, values.shape[1] + 1)[None, :], axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    tied = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if tied.any():
        ranks[tied] = rankdata(values[tied], axis=1)
    return ranks


def contact_precision(true: ArrayLike, predicted: ArrayLike, *, share: float = CONTACT_SHARE) -> float:
    """Precision of predicted contacts: fraction of the predicted closest pairs that are among the true closest pairs.

    A pair is a contact if its distance is at most ``numpy.quantile(distances, share, method="lower")``, ties included.
    Chance is about ``share``, and exactly ``share`` for a prediction that is a single point, if the truth has no ties. Up to
    8,000 cells all pairs are used; beyond, all pairs of the cells ``subsample_cells(n_cells, 8000)``.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, in any unit, (n_cells, n_dims).
    share
        Fraction of the pairs that are contacts, in (0, 1].

    Returns
    -------
    The precision, in [0, 1]; NaN for fewer than two cells.

    Raises
    ------
    ValueError
        If the shapes differ, a value is not finite, or ``share`` is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    y, x = check_pair(true, predicted)
    if len(y) < 2:
        return float("nan")
    if len(y) > MAX_CONTACT_CELLS:
        cells = subsample_cells(len(y), MAX_CONTACT_CELLS)
        y, x = y[cells], x[cells]
    predicted_contacts = _contacts(x, share)
    return float(_contacts(y, share)[predicted_contacts].mean())


def _contacts(positions: NDArray[np.float64], share: float) -> NDArray[np.bool_]:
    distances = pdist(positions)
    nth = int(share * (len(distances) - 1))
    return distances <= np.partition(distances, nth)[nth] * (1 + TIE_TOLERANCE)
