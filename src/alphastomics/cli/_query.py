r"""Whether a model can read some cells: asked before hours of work, and answered with the name of the file.

Scores of a model on cells whose positions are known.

What a regression per cell achieves: the mean position of the most similar reference cells.

.. math:: \hat x_i = \frac{1}{k} \sum_{j \in \mathcal N_k(i)} x_j

with the neighbors found in principal components of :math:`\log(1 + \cdot)` of counts at the median library size. Every
reference slice has its own frame, and a mean over two frames means nothing. The slices are therefore first moved into
the frame of the first one: each is rigidly aligned to the positions that the same regression on the first slice gives
its cells. No label and no position of the query is used.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics.cli._files import write_json
from alphastomics.metrics import rigid_align

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.cli._options import QueryOptions
    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics

    Array = NDArray[np.float64]

logger = logging.getLogger(__name__)


SAMPLED = Path("sampled.h5ad")


def check_sample(query: QueryOptions, output: Path, sample_mode: str, n_cells: int | None) -> None:
    """Refuse options of ``sample`` that contradict each other, and to replace a file that nobody named.

    Raises
    ------
    FileExistsError
        If ``output`` is the default and there.
    ValueError
        If the number of cells is not said, said twice, or said where it is not needed.
    """
    joint = sample_mode == "joint"
    if n_cells is not None and not joint:
        raise ValueError("--n-cells is for --sample-mode joint; here the input says how many cells there are")
    if n_cells is not None and query.names_cells:
        raise ValueError("--n-cells and the input both say how many cells to draw; leave --n-cells out, or the input")
    if joint and n_cells is None and not query.names_cells:
        raise ValueError(
            "--sample-mode joint draws new slices; say by --n-cells how many cells they have, or by --input-data or "
            "--data-dir, as many as there"
        )
    if output == SAMPLED and output.is_file():
        raise FileExistsError(f"{output} is there already; name a file with --output")


def check_mode(model: AlphaSTomics, wanted: Sequence[str], flag: str) -> None:
    """Refuse a model that was not made for what a flag asks of it."""
    if model.mode not in ("any", *wanted):
        raise ValueError(
            f"{flag} asks for what this model has never seen: it was trained with --mode {model.mode}; train one with --mode "
            f"{wanted[0]}, or --mode any"
        )


def fit_query(cells: AnnData, path: Path, schema: TissueSchema, *, positions: bool, expression: bool = True) -> AnnData:
    """Cells as a model reads them.

    Parameters
    ----------
    cells
        They, under the keys of the model; changed in place.
    path
        Where they come from.
    schema
        That of the model.
    positions
        Whether the model reads where they lie, and their slices with that.
    expression
        Whether it reads their expression.

    Raises
    ------
    KeyError
        If the positions or the layer are missing.
    ValueError
        If too few genes are there, or positions have other dimensions.
    """
    if expression:
        _check_genes(cells, path, schema)
    if positions:
        _name_slice(cells, path, schema)
        _check_positions(cells, path, schema)
    return cells


def _check_genes(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    from alphastomics.data._checks import check_genes

    if schema.layer is not None and schema.layer not in cells.layers:
        found = ", ".join(map(repr, cells.layers.keys())) or "nothing"
        raise KeyError(
            f'{path}: layers["{schema.layer}"] is missing (found: {found}); store there what the reference of this model '
            "has there"
        )
    try:
        names = check_genes(cells.var_names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    n_missing = len(set(schema.genes).difference(names))
    if 2 * n_missing > schema.n_genes:
        raise ValueError(
            f"{path}: {n_missing} of the {schema.n_genes} genes of this model are missing, more than half (it has "
            f"{', '.join(map(repr, schema.genes[:3]))}, …; the file {', '.join(map(repr, names[:3]))}, …); use the same "
            "names of genes, or train a model on the genes that are shared"
        )


def _check_positions(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    key, n_dims = schema.position_key, schema.n_dims
    if key not in cells.obsm:
        found = ", ".join(map(repr, cells.obsm.keys())) or "nothing"
        raise KeyError(
            f'{path}: obsm["{key}"] is missing (found: {found}); store the positions where the reference of this model has '
            "them"
        )
    position = cells.obsm[key]
    if position.ndim == 2 and position.shape[1] == 3 and n_dims == 2:
        cells.obsm[key] = np.asarray(position)[:, :2]  # as of a dataset
    elif position.ndim == 2 and position.shape[1] < n_dims:
        raise ValueError(
            f'{path}: obsm["{key}"] has {position.shape[1]} coordinates, and this model is of {n_dims} dimensions; take a '
            f"model that was trained in {position.shape[1]}, or cells with {n_dims} coordinates"
        )


def _name_slice(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    """A file that names no slices is one, as it is to ``preprocess``."""
    import pandas as pd

    key = schema.slice_key
    if key is None or key in cells.obs:
        return
    cells.obs[key] = pd.Categorical(np.repeat(path.stem, cells.n_obs))
    logger.info('%s has no obs["%s"]: its cells are one slice, %r.', path, key, path.stem)


def score_model(model: AlphaSTomics, cells: AnnData, *, n_samples: int, n_steps: int | None, seed: int) -> pd.DataFrame:
    """Place the cells of every slice and compare; a table as :func:`alphastomics.tl.evaluate` gives with baselines.

    Raises
    ------
    KeyError
        If the true positions are missing.
    """
    import pandas as pd

    from alphastomics.cli._cells import panels

    options: dict[str, Any] = {"n_samples": n_samples, "n_steps": n_steps, "seed": seed}
    tables = [_score(model, part, **options) for _, part in panels(cells, model.schema.slice_key)]
    return tables[0] if len(tables) == 1 else pd.concat(tables).sort_index(level=0, sort_remaining=False, kind="stable")


def _score(model: AlphaSTomics, cells: AnnData, *, n_samples: int, n_steps: int | None, seed: int) -> pd.DataFrame:
    from alphastomics import tl

    schema = model.schema
    if schema.position_key not in cells.obsm:
        found = ", ".join(map(repr, cells.obsm.keys())) or "nothing"
        raise KeyError(
            f'obsm["{schema.position_key}"] is missing (found: {found}); store the true positions where the reference '
            "of this model has them"
        )
    tl.reconstruct(cells, model=model, n_samples=n_samples, n_steps=n_steps, random_state=seed)

    def there(key: str | None) -> str | None:
        return key if key in cells.obs else None

    return tl.evaluate(
        cells,
        truth=schema.position_key,
        library_key=there(schema.slice_key),
        cell_type_key=there(schema.cell_type_key),
        baselines=True,
        random_state=seed,
    )


def write_scores(path: Path, table: pd.DataFrame) -> None:
    """Write the scores of every slice as JSON."""
    write_json(path, {name: part.droplevel(0).to_dict(orient="index") for name, part in table.groupby(level=0)})


def knn_positions(
    query: AnnData,
    reference: AnnData,
    *,
    position_key: str = "spatial",
    slice_key: str = "slice_id",
    n_neighbors: int = 25,
    n_components: int = 30,
) -> Array:
    """Place the cells of a query by regression.

    Parameters
    ----------
    query
        Counts of the cells to place.
    reference
        Counts and positions of cells with the same genes.
    position_key
        Key of ``obsm`` with the positions of the reference.
    slice_key
        Column of ``obs`` with the slices of the reference.
    n_neighbors
        k, at most the cells of a slice.
    n_components
        Number of principal components, those of the reference.

    Returns
    -------
    Positions, (n_cells, n_dims), in the units of the reference and the frame of its first slice.
    """
    counts = [np.asarray(part.X.toarray(), dtype=np.float64) for part in (reference, query)]
    median = np.median(counts[0].sum(axis=1))
    expression = [np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * median) for x in counts]
    pca = PCA(min(n_components, *expression[0].shape), svd_solver="covariance_eigh").fit(expression[0])
    known, asked = (pca.transform(x) for x in expression)
    positions = np.array(reference.obsm[position_key], dtype=np.float64)
    names = reference.obs[slice_key].to_numpy(dtype=str)
    first, *others = (np.flatnonzero(names == name) for name in np.unique(names))
    anchor = KNeighborsRegressor(min(n_neighbors, len(first))).fit(known[first], positions[first])
    for rows in others:
        positions[rows] = rigid_align(positions[rows], anchor.predict(known[rows]))[0]
    return KNeighborsRegressor(min(n_neighbors, len(positions))).fit(known, positions).predict(asked)
