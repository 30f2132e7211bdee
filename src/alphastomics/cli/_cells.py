"""Cells that a command is asked about: from a file or a dataset to what a model reads.

An AnnData cannot say that one of its slices lacks a gene that another measures, which a dataset can. Slices of a dataset are
therefore given to the model together only where they measure the same genes, which changes nothing else: a model never
looks at two slices at once.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alphastomics import _keys

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics

H5AD, PARQUET, TENSORS, ARRAYS = ".h5ad", ".parquet", ".pt", ".npz"
INPUTS, TISSUES, EMBEDDINGS = (H5AD, PARQUET, TENSORS), (H5AD, PARQUET), (ARRAYS, PARQUET, H5AD)


class Panel(NamedTuple):
    """Cells that measure the same genes.

    Attributes
    ----------
    rows
        Where they are among all cells, ascending.
    cells
        They, with the genes that they measure.
    """

    rows: NDArray[np.int64]
    cells: AnnData


def check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    """Complain about a file whose name does not end as that of a file which the command reads or writes."""
    if path.suffix not in suffixes:
        listed = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise ValueError(f"{path} must end in {listed}, which says what it is")


def read_dataset(data_dir: Path, split: str) -> AnnData:
    """Cells of a split of a dataset; see :func:`alphastomics.data.read_dataset`."""
    from alphastomics.data import read_dataset

    return read_dataset(data_dir, split)


def read_file(path: Path, schema: TissueSchema, **reads: bool) -> AnnData:
    """Cells of a file, with the keys of a model; ``reads`` as of ``fit_query``.

    Raises
    ------
    ValueError
        If it is not what its suffix says.
    """
    from alphastomics.cli._query import fit_query
    from alphastomics.cli._tensors import read_tensors
    from alphastomics.data import read_parquet
    from alphastomics.data._h5ad import read_h5ad

    if path.suffix == H5AD:
        cells = read_h5ad(path)
    else:
        cells = with_keys(read_parquet(path) if path.suffix == PARQUET else read_tensors(path, schema.genes), schema)
    return fit_query(cells, path, schema, **reads)


def read_reference(path: Path) -> AnnData:
    """Cells of a file to train on, under the keys that the file has.

    Raises
    ------
    ValueError
        If it is not what its suffix says, or its slices do not measure the same genes.
    """
    from alphastomics.data import read_parquet
    from alphastomics.data._h5ad import read_h5ad

    if path.suffix != PARQUET:
        return read_h5ad(path)
    cells = read_parquet(path)
    if _keys.MEASURED_IN in cells.varm:
        raise ValueError(
            f"{path} has slices that do not measure the same genes; train on a dataset of them with --data-dir, or on a "
            "file of the genes that all of them measure"
        )
    return cells


def read_split(data_dir: Path, split: str, schema: TissueSchema, **reads: bool) -> AnnData:
    """Cells of a split of a dataset, with the keys of a model; ``reads`` as of ``fit_query``.

    Raises
    ------
    ValueError
        If the model reads counts and the dataset has none.
    """
    from alphastomics.cli._query import fit_query
    from alphastomics.data.parquet._dataset import DatasetInfo

    if schema.transform == "log1p" and DatasetInfo.read(data_dir, check=False).schema.transform != "log1p":
        raise ValueError(
            f"{data_dir} holds values that are transformed already, and this model reads counts; make the dataset without "
            "--skip-log-normalize"
        )
    return fit_query(with_keys(read_dataset(data_dir, split), schema), data_dir, schema, **reads)


def with_keys(cells: AnnData, schema: TissueSchema) -> AnnData:
    """Put what was read under the keys of a model: ``obs``, ``obsm`` and ``layers``; a model in 2D reads x and y."""
    names = {_keys.SLICE: schema.slice_key, _keys.CELL_TYPE: schema.cell_type_key}
    names = {name: key for name, key in names.items() if key not in (None, name) and name in cells.obs}
    cells.obs = cells.obs.drop(columns=[key for key in names.values() if key in cells.obs]).rename(columns=names)
    if _keys.SPATIAL in cells.obsm:
        cells.obsm[schema.position_key] = cells.obsm.pop(_keys.SPATIAL)[:, : schema.n_dims]
    if schema.layer is not None:
        cells.layers[schema.layer] = cells.X
    return cells


def panels(cells: AnnData, slice_key: str | None) -> list[Panel]:
    """Divide cells by the genes that their slices measure, where it is known what these are."""
    import pandas as pd

    key, measured = slice_key or _keys.SLICE, cells.varm.get(_keys.MEASURED_IN)
    names = cells.obs[key].astype(str).to_numpy() if key in cells.obs else None
    if not isinstance(measured, pd.DataFrame) or names is None or not set(names) <= set(measured):
        return [Panel(np.arange(cells.n_obs), cells)]
    kinds: dict[bytes, list[str]] = {}
    for name in measured:
        kinds.setdefault(measured[name].to_numpy(dtype=bool).tobytes(), []).append(name)
    divided = []
    for slices in kinds.values():
        rows = np.flatnonzero(np.isin(names, slices))
        if not len(rows):
            continue
        genes = measured[slices[0]].to_numpy(dtype=bool)
        part = cells[rows, genes].copy()
        del part.varm[_keys.MEASURED_IN]
        divided.append(Panel(rows, part))
    return divided


def sample_cells(model: AlphaSTomics, cells: AnnData, **arguments: Any) -> AnnData:
    """Sample as :meth:`~alphastomics.model.AlphaSTomics.sample` does, slices that measure the same genes together.

    Genes that a slice does not measure are 0 in ``X``, as in what was read, unless they were sampled.
    """
    if arguments["mode"] == "pos_to_expr" and not arguments["inpaint"]:  # no gene is read
        return model.sample(cells, **arguments)
    divided = panels(cells, model.schema.slice_key)
    parts = [model.sample(part, **arguments) for _, part in divided]
    if len(parts) == 1:
        return parts[0]
    tissue = _in_order(parts, [rows for rows, _ in divided])
    if arguments["mode"] == "expr_to_pos":
        tissue = tissue[:, cells.var_names].copy()
        tissue.varm[_keys.MEASURED_IN] = cells.varm[_keys.MEASURED_IN]
    return tissue


def slice_sizes(cells: AnnData, schema: TissueSchema) -> list[int]:
    """Numbers of cells of the slices, by name; one where none are named."""
    from alphastomics.data._slices import slice_rows

    key = schema.slice_key or _keys.SLICE
    return [len(rows) for _, rows in slice_rows(cells, key if key in cells.obs else None, missing=True)]


def draw_slices(
    model: AlphaSTomics, sizes: Sequence[int], *, n_samples: int, random_state: int, **arguments: Any
) -> AnnData:
    """Draw new slices of these numbers of cells, each ``n_samples`` times; all slices have names of their own."""
    import anndata as ad

    seeds = [
        random_state,
        *(int(np.random.SeedSequence([random_state, i]).generate_state(1)[0]) for i in range(1, len(sizes))),
    ]
    parts = [
        model.sample(n_cells=size, n_samples=n_samples, random_state=seed, **arguments)
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
    """Draws of all cells, one after the other, of those of the cells in ``rows``."""
    import anndata as ad

    n_draws = [part.n_obs // len(here) for part, here in zip(parts, rows, strict=True)]
    cell = np.concatenate([np.tile(here, n) for here, n in zip(rows, n_draws, strict=True)])
    draw = np.concatenate([np.repeat(np.arange(n), len(here)) for here, n in zip(rows, n_draws, strict=True)])
    whole = ad.concat(list(parts), join="outer", merge="unique", uns_merge="same", fill_value=0)
    return whole[np.lexsort((cell, draw))].copy()


def embed_cells(model: AlphaSTomics, cells: AnnData, **arguments: Any) -> NDArray[np.float32]:
    """Embed as :meth:`~alphastomics.model.AlphaSTomics.get_latent_representation` does, likewise."""
    divided = panels(cells, model.schema.slice_key)
    parts = [model.get_latent_representation(part, **arguments) for _, part in divided]
    latent = np.empty((cells.n_obs, parts[0].shape[1]), dtype=np.float32)
    for (rows, _), part in zip(divided, parts, strict=True):
        latent[rows] = part
    return latent


def use_values_that_are_read(cells: AnnData, schema: TissueSchema) -> None:
    """Make the layer of the model ``X``: Parquet has one matrix, and other values in it would be taken for these."""
    if schema.layer is not None and schema.layer in cells.layers:
        cells.X = cells.layers[schema.layer]


def write_tissue(tissue: AnnData, path: Path, schema: TissueSchema) -> None:
    """Write sampled cells as the suffix says."""
    from alphastomics.cli._files import write_h5ad
    from alphastomics.data import write_parquet

    if path.suffix == PARQUET:
        keys = {"slice_key": schema.slice_key or _keys.SLICE, "cell_type_key": schema.cell_type_key or _keys.CELL_TYPE}
        write_parquet(tissue, path, position_key=schema.position_key, **keys)
        return
    write_h5ad(path, tissue)


def write_latent(
    cells: AnnData, latent: NDArray[np.float32], path: Path, model: AlphaSTomics, **arguments: Any
) -> None:
    """Write embeddings (n_cells, width) as the suffix says; AnnData says too how they were made, with these arguments."""
    import anndata as ad

    from alphastomics._io._atomic import replacing
    from alphastomics._provenance import result_record
    from alphastomics.cli._files import write_h5ad
    from alphastomics.data.parquet._write import write_embedding

    if path.suffix == PARQUET:
        write_embedding(cells, latent, path, slice_key=model.schema.slice_key or _keys.SLICE)
        return
    if path.suffix == H5AD:
        record = result_record(model, "get_latent_representation", arguments)
        write_h5ad(path, ad.AnnData(obs=cells.obs, obsm={_keys.LATENT: latent}, uns={_keys.LATENT: record}))
        return
    image = BytesIO()  # an archive that cannot be closed complains a second time
    np.savez_compressed(image, latent=latent, obs_names=cells.obs_names.to_numpy(dtype=str))
    with replacing(path) as temporary:
        temporary.write_bytes(image.getvalue())  # a view of the buffer crashes Python's collector (gh-111049)
