"""Sampling and embedding of cells whose slices may measure different genes, and writing of the results.

In a dataset slices may measure different genes, which an AnnData cannot represent. Slices of a dataset are therefore passed to
the model in groups that measure the same genes. The result is the same, because slices are never in one context.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alphastomics import _keys
from alphastomics._labels import label_names
from alphastomics.cli._query import H5AD, PARQUET

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics


class Panel(NamedTuple):
    """Cells that measure the same genes.

    Attributes
    ----------
    rows
        Indices among all cells, ascending.
    cells
        The cells, with the genes that they measure.
    """

    rows: NDArray[np.int64]
    cells: AnnData


def panels(cells: AnnData, slice_key: str | None) -> list[Panel]:
    """Group cells by the genes that their slices measure; one group if that is not recorded."""
    import pandas as pd

    key, measured = slice_key or _keys.SLICE, cells.varm.get(_keys.MEASURED_IN)
    names = label_names(cells.obs[key]) if key in cells.obs else None
    if not isinstance(measured, pd.DataFrame) or names is None or not set(names) <= set(measured):
        return [Panel(np.arange(cells.n_obs), cells)]
    slices_by_genes: dict[bytes, list[str]] = {}
    for name in measured:
        slices_by_genes.setdefault(measured[name].to_numpy(dtype=bool).tobytes(), []).append(name)
    groups = []
    for slices in slices_by_genes.values():
        rows = np.flatnonzero(np.isin(names, slices))
        if not len(rows):
            continue
        genes = measured[slices[0]].to_numpy(dtype=bool)
        part = cells[rows, genes].copy()
        del part.varm[_keys.MEASURED_IN]
        groups.append(Panel(rows, part))
    return groups


def sample_cells(model: AlphaSTomics, cells: AnnData, **arguments: Any) -> AnnData:
    """Sample with :meth:`~alphastomics.model.AlphaSTomics.sample`, slices that measure the same genes together.

    Genes that a slice does not measure are 0 in ``X``, as in the input, unless they were sampled; genes that none of the
    slices measures are left out.
    """
    if arguments["mode"] == "pos_to_expr" and not arguments["inpaint"]:  # no gene is read
        return model.sample(cells, **arguments)
    groups = panels(cells, model.schema.slice_key)
    parts = [model.sample(part, **arguments) for _, part in groups]
    if len(parts) == 1:
        return parts[0]
    tissue = _in_order(parts, [rows for rows, _ in groups])
    tied = arguments.get("key_added", _keys.RECONSTRUCTED) + _keys.TIED_SUFFIX
    if tied in tissue.obs:  # some groups have no such cells, and lack the column
        tissue.obs[tied] = tissue.obs[tied].fillna(False).astype(bool)
    if arguments["mode"] == "expr_to_pos":
        genes = cells.var_names.isin(tissue.var_names)
        tissue = tissue[:, cells.var_names[genes]].copy()
        tissue.varm[_keys.MEASURED_IN] = cells.varm[_keys.MEASURED_IN][genes]
    return tissue


def slice_sizes(cells: AnnData, schema: TissueSchema) -> list[int]:
    """Number of cells of each slice by name; all cells form one slice if there are no names."""
    from alphastomics.data._slices import slice_rows

    key = schema.slice_key or _keys.SLICE
    return [len(rows) for _, rows in slice_rows(cells, key if key in cells.obs else None, missing=True)]


def draw_slices(
    model: AlphaSTomics, sizes: Sequence[int], *, n_samples: int, random_state: int, **arguments: Any
) -> AnnData:
    """Sample new slices with these numbers of cells, each ``n_samples`` times, under unique names."""
    import anndata as ad

    seeds = [
        random_state,
        *(int(np.random.SeedSequence([random_state, i]).generate_state(1)[0]) for i in range(1, len(sizes))),
    ]
    parts = [
        model.sample(**arguments | {"n_cells": size, "n_samples": n_samples, "random_state": seed})
        for size, seed in zip(sizes, seeds, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    key = model.schema.slice_key or _keys.SLICE
    for i, part in enumerate(parts):
        part.obs[key] = part.obs[key].cat.rename_categories(lambda name, i=i: f"sample_{i * n_samples + int(name[7:])}")
    tissue = ad.concat(parts, join="outer", merge="same", uns_merge="same", index_unique="-")
    tissue.uns[_keys.PROVENANCE]["params"] |= {"random_state": random_state, "n_cells": repr(list(sizes))}
    return tissue


def _in_order(parts: Sequence[AnnData], rows: Sequence[NDArray[np.int64]]) -> AnnData:
    """Samples of all cells in order, from samples of the cells in ``rows``."""
    import anndata as ad

    n_draws = [part.n_obs // len(here) for part, here in zip(parts, rows, strict=True)]
    cell = np.concatenate([np.tile(here, n) for here, n in zip(rows, n_draws, strict=True)])
    draw = np.concatenate([np.repeat(np.arange(n), len(here)) for here, n in zip(rows, n_draws, strict=True)])
    combined = ad.concat(list(parts), join="outer", merge="unique", uns_merge="same", fill_value=0)
    return combined[np.lexsort((cell, draw))].copy()


def embed_cells(model: AlphaSTomics, cells: AnnData, **arguments: Any) -> NDArray[np.float32]:
    """Embed with :meth:`~alphastomics.model.AlphaSTomics.get_latent_representation`, in the same groups."""
    groups = panels(cells, model.schema.slice_key)
    parts = [model.get_latent_representation(part, **arguments) for _, part in groups]
    latent = np.empty((cells.n_obs, parts[0].shape[1]), dtype=np.float32)
    for (rows, _), part in zip(groups, parts, strict=True):
        latent[rows] = part
    return latent


def use_layer_as_x(cells: AnnData, schema: TissueSchema) -> None:
    """Copy the layer of the model to ``X``, the only matrix that Parquet holds."""
    if schema.layer is not None and schema.layer in cells.layers:
        cells.X = cells.layers[schema.layer]


def write_tissue(tissue: AnnData, path: Path, schema: TissueSchema, position_key: str) -> None:
    """Write sampled cells, whose positions are in ``obsm[position_key]``, in the format of the suffix."""
    from alphastomics.cli._output import write_h5ad
    from alphastomics.data import write_parquet

    if path.suffix == PARQUET:
        keys = {"slice_key": schema.slice_key or _keys.SLICE, "cell_type_key": schema.cell_type_key or _keys.CELL_TYPE}
        write_parquet(tissue, path, position_key=position_key, **keys)
        return
    write_h5ad(path, tissue)


def write_latent(
    cells: AnnData, latent: NDArray[np.float32], path: Path, model: AlphaSTomics, **arguments: Any
) -> None:
    """Write embeddings (n_cells, width) in the format of the suffix; AnnData includes the provenance with ``arguments``."""
    import anndata as ad

    from alphastomics._io._atomic import replacing
    from alphastomics._provenance import result_record
    from alphastomics.cli._output import write_h5ad
    from alphastomics.data.parquet._write import write_embedding

    if path.suffix == PARQUET:
        write_embedding(cells, latent, path, slice_key=model.schema.slice_key or _keys.SLICE)
        return
    if path.suffix == H5AD:
        record = result_record(model, "get_latent_representation", arguments)
        write_h5ad(path, ad.AnnData(obs=cells.obs, obsm={_keys.LATENT: latent}, uns={_keys.LATENT: record}))
        return
    image = BytesIO()  # an archive on disk that cannot be closed raises a second error
    np.savez_compressed(image, latent=latent, obs_names=cells.obs_names.to_numpy(dtype=str))
    with replacing(path) as temporary:
        temporary.write_bytes(image.getvalue())  # a view of the buffer crashes Python's collector (gh-111049)
