"""Agreement of expression and position in sampled tissue with real slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._keys import MODALITY_AGREEMENT, SPATIAL
from alphastomics.data._checks import expression_matrix
from alphastomics.metrics import log1p_normalized, median_library_size
from alphastomics.metrics._agreement import PlaceOfExpression
from alphastomics.metrics._matrix import measured_genes
from alphastomics.metrics._position import chance_order
from alphastomics.tl._expression import Transform, scores_counts, shared_genes
from alphastomics.tl._tables import as_table, library_slices, read_coordinates, store

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.tl._tables import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreementJudge:
    """Real slices, ready to judge samples of the same genes.

    Parameters
    ----------
    columns
        The shared genes that all slices of both sides measure, as columns of the sample.
    library_size
        Depth to which cells are brought before logarithms are taken; None for values as they are.
    names
        Names of the real slices.
    expressions, positions
        Their cells, expression on the scale of the scores.
    places
        What each of them says about expression and place.
    random_state
        Seed of the cells from which distances are ranked.
    """

    columns: NDArray[np.int64]
    library_size: float | None
    names: list[str]
    expressions: list[Any]
    positions: list[NDArray[np.float64]]
    places: list[PlaceOfExpression]
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
        n_components: int,
        n_neighbors: int,
        random_state: int,
    ) -> AgreementJudge:
        """Learn from the real slices; see :func:`modality_agreement`."""
        columns, genes = shared_genes(sample, reference)
        matrix, drawn = (expression_matrix(each, layer) for each in (reference, sample))
        counts = scores_counts(matrix, transform)
        slices = slices_with_positions(reference, spatial_key, _key_in(reference, library_key))
        if not slices:
            raise ValueError(f'no cell of the reference has a position in obsm["{spatial_key}"]')
        matrix, drawn = matrix[:, columns[1]], drawn[:, columns[0]]
        pieces = [matrix[cells] for _, cells, _ in slices]
        pieces += [drawn[cells] for _, cells in library_slices(sample, library_key)]
        measured: NDArray[np.bool_] = np.all([measured_genes(piece, genes) for piece in pieces], axis=0)
        pieces = [piece[:, measured] for piece in pieces[: len(slices)]]
        used = np.concatenate([cells for _, cells, _ in slices])
        size = median_library_size(matrix[used][:, measured]) if counts else None
        if size is not None and not np.isfinite(size):
            raise ValueError("every cell of the reference is empty in the genes that both measure; check layer=")
        expressions = [piece if size is None else log1p_normalized(piece, size) for piece in pieces]
        positions = [points for *_, points in slices]
        options = {"n_components": n_components, "n_neighbors": n_neighbors, "random_state": random_state}
        return cls(
            columns=columns[0][measured],
            library_size=size,
            names=[name for name, *_ in slices],
            expressions=expressions,
            positions=positions,
            places=[PlaceOfExpression.fit(*pair, **options) for pair in zip(expressions, positions, strict=True)],
            random_state=random_state,
        )

    def scaled(self, expression: Any) -> Any:
        """Expression of some cells of the sample, all its genes, on the scale of the scores."""
        shared = expression[:, self.columns]
        return shared if self.library_size is None else log1p_normalized(shared, self.library_size)

    def score(self, expression: Any, positions: NDArray[np.float64], *, without: int | None = None) -> float:
        """Mean agreement with the real slices, ``without`` one of them, of scaled expression."""
        judges = [place for number, place in enumerate(self.places) if number != without]
        scores = [judge.agreement(expression, positions, random_state=self.random_state) for judge in judges]
        return float(np.mean(scores)) if scores else float("nan")

    def ceilings(self) -> dict[str, dict[str, float]]:
        """What every real slice scores against the others; nothing where there is but one."""
        if len(self.places) < 2:
            return {}
        return {
            name: {
                "n_cells": len(self.positions[number]),
                MODALITY_AGREEMENT: self.score(self.expressions[number], self.positions[number], without=number),
            }
            for number, name in enumerate(self.names)
        }


def _key_in(reference: AnnData, library_key: str | None) -> str | None:
    """A named key of the sample, or the default where the reference has none of that name."""
    return library_key if library_key in reference.obs else None


def slices_with_positions(
    adata: AnnData, spatial_key: str, library_key: str | None
) -> list[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    """Name, cells and positions of each slice; cells without a position are left out."""
    positions = read_coordinates(adata, spatial_key, "spatial_key")
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
    n_components: int = 30,
    n_neighbors: int = 25,
    transform: Transform = "auto",
    baselines: bool = False,
    key_added: str = MODALITY_AGREEMENT,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Judge a tissue whose expression and positions were sampled together: do the two fit as in real slices?

    There is no true position of a sampled cell. Every real slice gives its expression a place (the mean position of
    the cells that are nearest in expression), and distances between cells are compared with distances between these
    places: see :func:`alphastomics.metrics.modality_agreement`. Frames, units and numbers of cells may differ.

    Parameters
    ----------
    adata
        The sampled tissue. Cells whose position is NaN are left out, here and in the reference.
    reference
        Real slices; genes are matched by name. They should not hold the cells of `adata`.
    spatial_key
        Where positions are in ``obsm`` of both.
    layer
        Where expression is in both; ``X`` when None.
    library_key
        Column of ``obs`` that names the slice of each cell; ``"slice_id"`` if it is there when None, and in a
        reference that lacks the column.
    n_components, n_neighbors
        Principal components of the reference, and its cells that are averaged.
    transform
        ``"log1p"`` at the median library size of the reference, ``"none"`` for values as they are, ``"auto"`` for
        ``"log1p"`` if and only if the values of the reference are non-negative integers.
    baselines
        Add the rows that give the score its meaning: ``chance``, the sample with its positions shuffled; and, under
        the name of each real slice, ``ceiling``, what that slice scores against the others. The latter needs two.
    key_added
        Where the table goes in ``uns``.
    copy
        Whether to return the table instead.
    random_state
        Seed of the decomposition, of the cells from which distances are ranked, and of the baselines.

    Returns
    -------
    None, or the table. Its index is the slice; with `baselines`, the slice and ``sample``, ``chance`` or ``ceiling``
    (level ``tissue``; a column in ``uns``). Columns: ``n_cells``, ``modality_agreement`` (mean over the reference
    slices).

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If no gene is shared, a value is not finite, or a reference slice is too small.
    """
    judge = AgreementJudge.fit(
        adata, reference, spatial_key=spatial_key, layer=layer, library_key=library_key, transform=transform,
        n_components=n_components, n_neighbors=n_neighbors, random_state=random_state,
    )  # fmt: skip
    matrix = expression_matrix(adata, layer)
    rows: Rows = {}
    for name, cells, positions in slices_with_positions(adata, spatial_key, library_key):
        expression = judge.scaled(matrix[cells])
        candidates = {"sample": positions}
        if baselines:
            candidates["chance"] = positions[chance_order(len(cells), random_state)]
        for kind, each in candidates.items():
            rows[name, kind] = {"n_cells": len(cells), MODALITY_AGREEMENT: judge.score(expression, each)}
    if baselines:
        rows |= {(name, "ceiling"): row for name, row in judge.ceilings().items()}
    return store(adata, key_added, as_table(rows, "tissue", keep=baselines), copy=copy)
