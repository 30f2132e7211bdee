"""Agreement of expression and positions of sampled cells with real slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._checks import check_counts
from alphastomics._keys import MODALITY_AGREEMENT, SPATIAL
from alphastomics.config import SetupConfig
from alphastomics.data._checks import check_in_memory, expression_matrix
from alphastomics.metrics import log1p_normalized, median_library_size
from alphastomics.metrics._agreement import N_COMPONENTS, N_NEIGHBORS, PositionRegressor
from alphastomics.metrics._matrix import measured_genes
from alphastomics.metrics._position import chance_order
from alphastomics.tl._expression import needs_log1p, shared_genes
from alphastomics.tl._tables import as_table, library_slices, read_coordinates, store

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import Transform
    from alphastomics.tl._tables import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementScorer:
    """Real slices that score samples of the same genes.

    Parameters
    ----------
    columns
        Columns of the sample with the shared genes that all slices measure, (n_genes,).
    library_size
        Library size to which counts are scaled before log1p; None for untransformed values.
    names, expressions, positions
        Name, transformed expression (n_cells, n_genes) and positions (n_cells, n_dims) of each real slice.
    regressors
        Regression of positions on expression for each real slice.
    random_state
        Seed of the cells whose distances are ranked.
    """

    columns: NDArray[np.int64]
    library_size: float | None
    names: list[str]
    expressions: list[Any]
    positions: list[NDArray[np.float64]]
    regressors: list[PositionRegressor]
    random_state: int

    @classmethod
    def fit(
        cls,
        sample: AnnData,
        reference: AnnData,
        *,
        spatial_key: str,
        layer: str | None,
        library_key: str | None,
        transform: str,
        n_components: int = N_COMPONENTS,
        n_neighbors: int = N_NEIGHBORS,
        random_state: int,
        expression_layer: str | None = None,
        argument: str = "spatial_key",
    ) -> AgreementScorer:
        """Fit the regressions; see :func:`modality_agreement`.

        ``expression_layer`` is another layer of the sample that is scored, and ``argument`` sets the key of the positions, for errors.
        """
        check_counts(n_components=n_components, n_neighbors=n_neighbors)
        columns, genes = shared_genes(sample, reference)
        matrix = expression_matrix(reference, layer)
        sampled = [expression_matrix(sample, layer)]
        sampled += [] if expression_layer is None else [expression_matrix(sample, expression_layer)]
        counts = needs_log1p(matrix, transform)
        slices = slices_with_positions(reference, spatial_key, _key_in(reference, library_key), argument)
        if not slices:
            raise ValueError(
                f'no cell of the reference has a position in obsm["{spatial_key}"]; pass another {argument}=…'
            )
        matrix = matrix[:, columns[1]]
        pieces = [matrix[cells] for _, cells, _ in slices]
        scored = [x[cells][:, columns[0]] for x in sampled for _, cells in library_slices(sample, library_key)]
        measured: NDArray[np.bool_] = np.all([measured_genes(piece, genes) for piece in pieces + scored], axis=0)
        pieces = [piece[:, measured] for piece in pieces]
        used = np.concatenate([cells for _, cells, _ in slices])
        size = median_library_size(matrix[used][:, measured]) if counts else None
        if size is not None and not np.isfinite(size):
            raise ValueError("all counts of the shared genes in the reference are 0; check layer=…")
        expressions = [piece if size is None else log1p_normalized(piece, size) for piece in pieces]
        positions = [points for *_, points in slices]
        options = {"n_components": n_components, "n_neighbors": n_neighbors, "random_state": random_state}
        return cls(
            columns=columns[0][measured],
            library_size=size,
            names=[name for name, *_ in slices],
            expressions=expressions,
            positions=positions,
            regressors=[PositionRegressor.fit(*pair, **options) for pair in zip(expressions, positions, strict=True)],
            random_state=random_state,
        )

    def scaled(self, expression: Any) -> Any:
        """Expression of cells of the sample, (n, n_sample_genes), restricted to the shared genes and transformed."""
        shared = expression[:, self.columns]
        return shared if self.library_size is None else log1p_normalized(shared, self.library_size)

    def score(self, expression: Any, positions: NDArray[np.float64], *, without: int | None = None) -> float:
        """Mean agreement of transformed expression and positions with the real slices, except slice ``without``."""
        others = [regressor for number, regressor in enumerate(self.regressors) if number != without]
        scores = [regressor.agreement(expression, positions, random_state=self.random_state) for regressor in others]
        return float(np.mean(scores)) if scores else float("nan")

    def ceilings(self) -> dict[str, dict[str, float]]:
        """Score of each real slice against the others; empty for a single slice."""
        if len(self.regressors) < 2:
            return {}
        return {
            name: {
                "n_cells": len(self.positions[number]),
                MODALITY_AGREEMENT: self.score(self.expressions[number], self.positions[number], without=number),
            }
            for number, name in enumerate(self.names)
        }


def _key_in(reference: AnnData, library_key: str | None) -> str | None:
    """The key of the sample, or None (the default) if the reference has no such column."""
    return library_key if library_key in reference.obs else None


def slices_with_positions(
    adata: AnnData, spatial_key: str, library_key: str | None, argument: str = "spatial_key"
) -> list[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    """Name, rows (n,) and positions (n, n_dims) of each slice, without cells whose position is NaN."""
    positions = read_coordinates(adata, spatial_key, argument)
    slices = [
        (name, cells[~np.isnan(positions[cells]).any(axis=1)]) for name, cells in library_slices(adata, library_key)
    ]
    return [(name, cells, positions[cells]) for name, cells in slices if len(cells)]


def modality_agreement(
    adata: AnnData,
    reference: AnnData,
    *,
    spatial_key: str = SPATIAL,
    layer: str | None = None,
    library_key: str | None = None,
    n_components: int = N_COMPONENTS,
    n_neighbors: int = N_NEIGHBORS,
    transform: Transform = SetupConfig.transform,
    baselines: bool = False,
    key_added: str = MODALITY_AGREEMENT,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Score whether expression and positions of jointly sampled cells fit together as in real slices.

    A sampled cell has no true position. Instead, each real slice predicts a position from its expression (the mean position
    of its nearest neighbors in expression space), and distances between cells are compared with distances between these
    predictions; see :func:`alphastomics.metrics.modality_agreement`. Frames, units and numbers of cells may differ.

    Parameters
    ----------
    adata
        Sampled cells. Cells whose position is NaN are left out.
    reference
        Real slices, which should not contain the cells of `adata`. Genes are matched by name.
    spatial_key
        Key of ``obsm`` with the positions in both, (n_cells, n_dims).
    layer
        Layer with the expression in both; ``X`` when None.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``"slice_id"``; without such a column all cells form one
        slice.
    n_components
        Number of principal components of the reference.
    n_neighbors
        Number of nearest neighbors whose positions are averaged.
    transform
        ``"log1p"`` at the median library size of the reference, ``"none"`` for untransformed values, ``"auto"`` for
        ``"log1p"`` if the values of the reference are counts.
    baselines
        Add rows for the baselines ``chance``, the sample with permuted positions, and ``ceiling``, the score of each real
        slice against the others (with at least two).
    key_added
        Key of ``uns`` for the table.
    copy
        Return the table instead of writing it to `adata`.
    random_state
        Seed of the decomposition, of the cells whose distances are ranked, and of the baselines.

    Returns
    -------
    None, or the table. It is indexed by ``slice`` or, with `baselines`, by ``slice`` and ``tissue`` (``sample``, ``chance`` or
    ``ceiling``; a column in ``uns``). Its columns are ``n_cells`` and ``modality_agreement`` (mean over the real slices).

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If no gene is shared, a value is not finite, or a real slice is too small.

    Examples
    --------
    >>> sampled = model.sample(mode="joint", n_cells=2000)
    >>> asx.tl.modality_agreement(sampled, held_out, baselines=True, copy=True)
    """
    check_in_memory(adata)
    check_in_memory(reference, "reference")
    scorer = AgreementScorer.fit(
        adata, reference, spatial_key=spatial_key, layer=layer, library_key=library_key, transform=transform,
        n_components=n_components, n_neighbors=n_neighbors, random_state=random_state,
    )  # fmt: skip
    matrix = expression_matrix(adata, layer)
    rows: Rows = {}
    for name, cells, positions in slices_with_positions(adata, spatial_key, library_key):
        expression = scorer.scaled(matrix[cells])
        candidates = {"sample": positions}
        if baselines:
            candidates["chance"] = positions[chance_order(len(cells), random_state)]
        for kind, each in candidates.items():
            rows[name, kind] = {"n_cells": len(cells), MODALITY_AGREEMENT: scorer.score(expression, each)}
    if baselines:
        rows |= {(name, "ceiling"): row for name, row in scorer.ceilings().items()}
    return store(adata, key_added, as_table(rows, "tissue", keep=baselines), copy=copy)
