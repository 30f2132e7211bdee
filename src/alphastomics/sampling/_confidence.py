r"""Confidence of a query cell: does the reference have cells like it?

A kind of cells that the reference lacks is placed like any other. Such cells have neighbors in expression among the cells of their
slice, but not among those of the reference. With reference cells S that are searched, reference cells C that are held out of the
search, and the cells Q of a slice of the query, for all cells i of :math:`A = C \cup Q`

.. math::

    r_i = \log \frac{d_k(i, S)}{d_m(i, A)}, \qquad
    s_i = \frac{1}{\lvert N_i \rvert} \sum_{j \in N_i} r_j, \qquad
    c_i = \frac{1 + \#\{j \in C : s_j \ge s_i\}}{1 + \lvert C \rvert} \quad \text{for } i \in Q .

:math:`d_k(i, S)` is the distance from i to the k-th nearest other cell of S, between the directions of the principal components of
standardized expression of all cells, and :math:`N_i` are the cell i and its nearest cells in A. The ratio compares two densities:
cells with few transcripts, or of a variable kind, are far from all others, and do not have a larger ratio. The mean uses that a kind
which is missing is missing for all of its cells.

**Calibration.** C and Q enter s alike. If their cells are exchangeable, c is a conformal p-value,

.. math:: P(c_i \le \alpha) \le \alpha \quad \text{for every } \alpha

(Vovk et al. 2005, Algorithmic Learning in a Random World; for s that depends on the cells to test, Marandon et al. 2024,
Ann. Statist. 52:157), and nearly uniform in [0, 1].

**Shift.** Another specimen or instrument differs in all cell types. The median difference of the cells of Q from the nearest cells of
S, beyond that of the cells of C, is first subtracted from the standardized expression of Q, for each gene up to half a standard
deviation. The rest makes all cells less similar to the reference, and the values smaller.

**Depth.** Where the query has fewer counts in a cell than the reference, counts of the reference are removed at random until the
median library sizes agree; where it has more, counts of the query. After both steps the bound holds approximately.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from alphastomics.data._fit_schema import floor_scale
from alphastomics.data._schema import CLIP
from alphastomics.data._values import LARGEST_COUNT
from alphastomics.sampling._cells import ROWS, content_order, evenly_spaced_indices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from alphastomics.data import CellSource

    Array = NDArray[np.float32]

MAX_SEARCHED, MAX_HELD_OUT = 4096, 1024  # cells
HELD_OUT_SHARE = 0.2  # of a small reference
MAX_GENES = 1024
MIN_CELLS = 50  # of the reference, below which confidence means little
N_COMPONENTS = 12
SEARCHED_RANK, OWN_RANK = 5, 30  # k and m
N_SMOOTHED = 100  # nearest cells in N; a rarer kind is more difficult to find
MAX_BLOCK = 4096  # cells of a query that are compared with each other
N_MATCHED = 15  # nearest cells from which the shift of a query is measured
MAX_SHIFT = 0.5  # that is removed, standard deviations of a gene
PRIOR_CELLS = 100  # by which the shift of few cells is shrunken
MAX_DIFFERENCE = 2.0  # of the mean of a gene, standard deviations, above which values are on another scale
EPSILON = 1e-6  # against division by 0, for cells of equal expression
UNMATCHED = 0.05  # confidence below which a cell is counted as one that the reference lacks
MIN_REPORTED = 50  # cells, below which their share is mostly chance
MAX_COMPARED = 8  # slices of a query that are compared as a whole


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConfidenceCells:
    """Expression of reference cells, with which a query is compared.

    In user units where the schema takes a logarithm, else in network units.

    Parameters
    ----------
    searched, held_out
        Expression of S and C, (M, K) and (L, K).
    genes
        Numbers of the K genes in the schema, ascending.
    """

    searched: NDArray[np.float32]
    held_out: NDArray[np.float32]
    genes: NDArray[np.float32]

    @property
    def has_counts(self) -> bool:
        """Whether all values are non-negative integers that float32 stores exactly."""
        return all(
            bool(((x >= 0) & (x <= LARGEST_COUNT) & (x == np.trunc(x))).all()) for x in (self.searched, self.held_out)
        )

    def is_valid(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shapes match each other and the number of genes."""
        k = len(self.genes)
        return (
            self.genes.shape == (k,)
            and 0 < k <= MAX_GENES
            and self.searched.shape == (len(self.searched), k)
            and self.held_out.shape == (len(self.held_out), k)
            and 0 < len(self.searched) <= MAX_SEARCHED
            and 0 < len(self.held_out) <= MAX_HELD_OUT
            and bool((np.diff(self.genes) > 0).all())
            and bool(((self.genes >= 0) & (self.genes < n_genes)).all())
        )


def fit_confidence_cells(source: CellSource) -> ConfidenceCells | None:
    """Choose cells at random from all slices of a reference; None if it has fewer than 50 cells."""
    rows = np.random.default_rng(0).permutation(np.concatenate([cells.rows for cells in source.slices]))
    genes = np.flatnonzero(np.all([source.measured_in(i) for i in range(len(source.slices))], axis=0))
    if len(rows) < MIN_CELLS or not len(genes):
        return None
    if len(genes) > MAX_GENES:
        scale = np.asarray(source.schema.gene_scale)[genes]
        genes = np.sort(genes[np.argsort(-scale, kind="stable")[:MAX_GENES]])
    n_held_out = min(MAX_HELD_OUT, round(HELD_OUT_SHARE * len(rows)))
    held_out, searched = rows[:n_held_out], rows[n_held_out : n_held_out + MAX_SEARCHED]
    return ConfidenceCells(
        searched=read_values(source, np.sort(searched), genes),
        held_out=read_values(source, np.sort(held_out), genes),
        genes=genes.astype(np.float32),
    )


def check_min_confidence(min_confidence: float, cells: ConfidenceCells | None) -> None:
    """Raise ``ValueError`` for a smallest confidence above 0 if the reference gives none."""
    if min_confidence and cells is None:
        raise ValueError(
            f"min_confidence={min_confidence} requires a confidence, which a reference of few cells does not give; leave it out"
        )


def measure_confidence(cells: ConfidenceCells, source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Confidence c (N,) of the cells ``rows`` of one slice of a query, in an order that depends on their expression alone.

    NaN if the query has none of the genes of ``cells``.
    """
    confidence = np.full(len(rows), np.nan)
    for block, searched, held_out, query in standardized_blocks(cells, source, rows):
        s = scores(searched, np.concatenate([held_out, query]))
        confidence[block] = p_values(s[: len(held_out)], s[len(held_out) :])
    return confidence


def unmatched_share(confidence: NDArray[np.float64]) -> float:
    """Share of the cells with a confidence below :data:`UNMATCHED`, which is also its expected value; 0 for few cells."""
    finite = confidence[np.isfinite(confidence)]
    return float((finite < UNMATCHED).mean()) if len(finite) >= MIN_REPORTED else 0.0


def compare_query(cells: ConfidenceCells, source: CellSource) -> float:
    """Share of unmatched cells in a sample of the cells of a query, whose order makes no difference."""
    chosen = [source.slices[i].rows for i in evenly_spaced_indices(len(source.slices), MAX_COMPARED)]
    ordered = [content_order(source, rows) for rows in chosen]
    sampled = [rows[evenly_spaced_indices(len(rows), MAX_BLOCK)] for rows in ordered]
    return unmatched_share(np.concatenate([measure_confidence(cells, source, rows) for rows in sampled]))


def standardized_blocks(
    cells: ConfidenceCells, source: CellSource, rows: NDArray[np.int64]
) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Blocks of the cells ``rows``, with standardized expression of the cells S, C and of the block.

    Depth and shift are removed. Nothing if the query has none of the genes of ``cells``.
    """
    genes = cells.genes.astype(np.int64)
    measured = source.measured[genes]
    if not measured.any():
        return
    query = read_values(source, rows, genes[measured])
    searched, held_out = cells.searched[:, measured], cells.held_out[:, measured]
    is_log, thins = source.schema.transform == "log1p", source.has_counts and cells.has_counts
    n_blocks = -(-len(rows) // MAX_BLOCK)
    for block in (slice(number, None, n_blocks) for number in range(n_blocks)):
        parts = [searched, held_out, query[block]]
        if thins:
            parts = _equal_depth(*parts)
        if is_log:
            parts = _normalize(parts)
        parts = [_standardize(parts[0], part) for part in parts]
        yield block, parts[0], parts[1], remove_shift(*parts)


def check_values(cells: ConfidenceCells, source: CellSource) -> None:
    """Warn if values that are not counts have another size than those of the reference; their kind is compared by the source."""
    if source.schema.transform == "log1p":
        return
    genes = cells.genes.astype(np.int64)
    values = read_values(source, evenly_spaced_indices(source.n_cells, ROWS), genes[source.measured[genes]])
    difference = float(np.median(np.abs(values.mean(0)))) if values.size else 0.0
    if difference > MAX_DIFFERENCE:
        warnings.warn(
            f"The values of these cells are on another scale: the mean of a gene differs from the reference by {difference:.2g} standard "
            "deviations (median over genes). They are used as they are; transform them as the reference was.",
            UserWarning,
            stacklevel=4,
        )


def read_values(source: CellSource, rows: NDArray[np.int64], genes: NDArray[np.int64]) -> Array:
    """Expression (n, K) of cells: user units, before the logarithm, or network units without one."""
    is_log = source.schema.transform == "log1p"
    blocks = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    return np.concatenate(
        [(source.values(block)[0] if is_log else source.expression(block))[:, genes] for block in blocks]
    )


def scores(searched: Array, compared: Array) -> NDArray[np.float64]:
    """Scores s (n,) of the cells A, (n, K), against the cells S, (M, K), from standardized expression."""
    x, y = directions(searched, compared)
    m, n_smoothed = min(OWN_RANK, len(y) - 1), min(N_SMOOTHED, len(y) - 1)
    outer = nearest_rows(x, y, SEARCHED_RANK)[0][:, -1]
    inner, index = NearestNeighbors(n_neighbors=n_smoothed, algorithm="brute").fit(y).kneighbors()
    ratio = np.log((outer + EPSILON) / (inner[:, m - 1] + EPSILON))
    return (ratio + ratio[index].sum(1)) / (1 + n_smoothed)


def remove_shift(searched: Array, held_out: Array, query: Array) -> Array:
    """Standardized expression of the query, (N, K), without the median difference from the nearest cells of S, (M, K)."""
    x, y = directions(searched, np.concatenate([held_out, query]))
    index = nearest_rows(x, y, N_MATCHED)[1]
    # The neighbors of the held-out cells differ from them, too: towards frequent cell states. Medians are not changed by the
    # cells of a kind that the reference lacks.
    own, expected = (
        np.median(part - np.mean([searched[rank] for rank in nearest.T], axis=0), axis=0)
        for part, nearest in ((query, index[len(held_out) :]), (held_out, index[: len(held_out)]))
    )
    shift = np.clip(own - expected, -MAX_SHIFT, MAX_SHIFT) * (len(query) / (len(query) + PRIOR_CELLS))
    return query - shift.astype(np.float32)


def directions(searched: Array, compared: Array) -> tuple[Array, Array]:
    """Unit vectors (M, d) and (n, d) in principal components of all cells."""
    everything = np.concatenate([searched, compared])
    pca = PCA(min(N_COMPONENTS, *everything.shape), svd_solver="covariance_eigh")
    x, y = np.split(normalize(pca.fit_transform(everything)), [len(searched)])
    return x, y


def nearest_rows(x: Array, y: Array, k: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Distance to, and number of, the k nearest rows of x for every row of y."""
    return NearestNeighbors(n_neighbors=min(k, len(x)), algorithm="brute").fit(x).kneighbors(y)


def p_values(held_out: NDArray[np.float64], tested: NDArray[np.float64]) -> NDArray[np.float64]:
    """Conformal p-values (n,) of the scores ``tested`` (n,), given those of held-out cells (L,)."""
    below = np.searchsorted(np.sort(held_out), tested, side="left")
    return (1 + len(held_out) - below) / (1 + len(held_out))


def _equal_depth(searched: Array, held_out: Array, query: Array) -> list[Array]:
    """Remove counts at random until the median library sizes of reference and query are equal."""
    rng = np.random.default_rng(0)
    reference, own = (median_depth(x) for x in (np.concatenate([searched, held_out]), query))
    if not reference or not own or reference == own:
        return [searched, held_out, query]
    if own < reference:
        return [*(_thin(x, own / reference, rng) for x in (searched, held_out)), query]
    return [searched, held_out, _thin(query, reference / own, rng)]


def _thin(counts: Array, share: float, rng: np.random.Generator) -> Array:
    """Keep each count with the probability ``share``."""
    return rng.binomial(counts.astype(np.int64), share).astype(np.float32)


def median_depth(counts: Array) -> float:
    """Median library size of the cells that have counts, 0 without such cells."""
    size = counts.sum(1, dtype=np.float64)
    return float(np.median(size[size > 0])) if size.any() else 0.0


def _normalize(parts: list[Array]) -> list[Array]:
    """Logarithm of counts (n, K) at the median library size of the searched cells, the first of the parts."""
    target = np.float32(median_depth(parts[0]) or 1.0)
    return [np.log1p(x * (target / np.maximum(x.sum(1, keepdims=True), 1.0))).astype(np.float32) for x in parts]


def _standardize(reference: Array, x: Array) -> Array:
    """Expression x (n, K) with the means and standard deviations of the genes of a reference (M, K)."""
    return np.clip((x - reference.mean(0)) / floor_scale(reference.std(0)), -CLIP, CLIP)
