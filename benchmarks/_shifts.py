r"""A query as another instrument or another dissection would give it; the reference does not change.

With counts :math:`x_{ig}` of cell i and gene g, and :math:`n_i = \sum_g x_{ig}`:

- ``depth``: :math:`x'_{ig} \sim \text{Binomial}(x_{ig}, .2)`;
- ``gains``: :math:`x'_{ig} \sim \text{Poisson}(a_g e_i x_{ig})` with :math:`\log a_g \sim \mathcal N(0, .8^2)` and
  :math:`\log e_i \sim \mathcal N(0, .3^2)`;
- ``panel``: 60 % of the genes;
- ``ambient``: :math:`x'_{ig} = x_{ig} + \text{Poisson}(.1\, n_i m_g)` with the mean profile m of the query, :math:`\sum_g m_g = 1`;
- ``all``: gains, ambient, depth and panel one after the other;
- ``composition``: all cells of the most frequent cell type and a tenth of the others, which are scored.

``others`` is the unchanged query of ``composition``, in which the same cells are scored. In ``ceilings`` the reference is changed like
the query, so that both come from the same instrument.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from numpy.typing import NDArray

    from benchmarks._data import Fold

DEPTH = 0.2
GAIN_SD, EFFICIENCY_SD = 0.8, 0.3  # of the logarithms
PANEL = 0.6
AMBIENT = 0.1
OVERSAMPLING = 10


def thin(query: AnnData, rng: np.random.Generator) -> AnnData:
    """A share of the molecules."""
    return _with_counts(query, rng.binomial(_counts(query), DEPTH))


def multiply(query: AnnData, rng: np.random.Generator) -> AnnData:
    """Other gains of the genes and efficiencies of the cells."""
    gain = rng.lognormal(sigma=GAIN_SD, size=query.n_vars)
    efficiency = rng.lognormal(sigma=EFFICIENCY_SD, size=(query.n_obs, 1))
    return _with_counts(query, rng.poisson(gain * efficiency * _counts(query)))


def contaminate(query: AnnData, rng: np.random.Generator) -> AnnData:
    """Ambient molecules, from the mean profile of the query."""
    counts = _counts(query)
    profile = counts.sum(0) / counts.sum()
    return _with_counts(query, counts + rng.poisson(AMBIENT * counts.sum(1, keepdims=True) * profile))


def subset_panel(query: AnnData, rng: np.random.Generator) -> AnnData:
    """A share of the genes, in their order."""
    genes = np.sort(rng.permutation(query.n_vars)[: round(PANEL * query.n_vars)])
    return query[:, genes].copy()


CHANGES: dict[str, tuple[Callable[[AnnData, np.random.Generator], AnnData], ...]] = {
    "depth": (thin,),
    "gains": (multiply,),
    "panel": (subset_panel,),
    "ambient": (contaminate,),
    "all": (multiply, contaminate, thin, subset_panel),
}
SHIFTS = (*CHANGES, "others", "composition")


def shifted(fold: Fold, *, seed: int) -> list[Fold]:
    """The fold with each of :data:`SHIFTS`; the last two only if the cell types are known."""
    folds = []
    for name in CHANGES:
        folds.append(replace(fold, name=f"{fold.name}, {name}", query=_changed(fold.query, name, seed=seed)))
    return folds if fold.labels is None else [*folds, *_composition(fold, fold.labels, seed=seed)]


def ceilings(fold: Fold, *, seed: int) -> list[Fold]:
    """The folds of :data:`CHANGES` with a reference that is changed in the same way: same gains of the genes, same panel."""
    return [
        replace(
            fold,
            name=f"{fold.name}, {name}, ceiling",
            reference=_changed(fold.reference, name, seed=seed),
            query=_changed(fold.query, name, seed=seed),
        )
        for name in CHANGES
    ]


def _changed(cells: AnnData, name: str, *, seed: int) -> AnnData:
    """Cells with a change of :data:`CHANGES`; what a change draws for genes does not depend on the number of cells."""
    number = list(CHANGES).index(name)
    for step, change in enumerate(CHANGES[name]):
        cells = change(cells, np.random.default_rng([seed, number, step]))
    return cells


def _composition(fold: Fold, labels: NDArray[np.str_], *, seed: int) -> list[Fold]:
    """The folds ``others`` and ``composition``."""
    types, number = np.unique(labels, return_inverse=True)
    frequent = number == np.bincount(number, minlength=len(types)).argmax()
    others = np.flatnonzero(~frequent)
    kept = np.sort(np.random.default_rng(seed).permutation(others)[: len(others) // OVERSAMPLING])
    cells = np.sort(np.concatenate([np.flatnonzero(frequent), kept]))
    rows = np.isin(fold.order, cells)
    sampled = replace(
        fold,
        name=f"{fold.name}, composition",
        query=fold.query[rows].copy(),
        truth=fold.truth[cells],
        labels=labels[cells],
        order=np.searchsorted(cells, fold.order[rows]),
        scored=np.searchsorted(cells, kept),
    )
    return [replace(fold, name=f"{fold.name}, others", scored=kept), sampled]


def _counts(query: AnnData) -> NDArray[np.int64]:
    x = query.X.toarray() if sparse.issparse(query.X) else np.asarray(query.X)
    return x.astype(np.int64)


def _with_counts(query: AnnData, counts: NDArray[np.int64]) -> AnnData:
    changed = query.copy()
    changed.X = sparse.csr_matrix(counts.astype(np.float32))
    return changed
