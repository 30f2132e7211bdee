"""Public atlases, with positions, slices and cell types under the default keys of this package."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse

from alphastomics._io._errors import describe_error
from alphastomics._keys import CELL_TYPE, SLICE, SPATIAL
from alphastomics._labels import label_name, label_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

SQUIDPY_URL = "https://exampledata.scverse.org/squidpy/"
BDTNP_URL = (
    "https://raw.githubusercontent.com/rajewsky-lab/novosparc/a3c9f3d76e59c7a601cfcd0e211630e2458d79a3"
    "/novosparc/datasets/bdtnp/"
)
BDTNP_SHA256 = {
    "dge.txt": "54f92f3e20e392f23b39b87d5b8d19a2158fed761f1ce7a0a5b7fb4ec176d388",
    "geometry.txt": "7db4e560581020bf647df915d39941f8ec3d472c351883aeff836d7aa6069762",
}


@dataclass(frozen=True, kw_only=True)
class Atlas:
    """Source of an atlas and its columns; without ``slice_column`` all cells form the slice ``name``."""

    name: str
    url: str
    contents: str
    paper: str
    license: str
    units: str
    squidpy_name: str | None = None
    slice_column: str | None = None
    animal_column: str | None = None
    cell_type_column: str | None = None
    control_prefix: str | None = None


SEQFISH = Atlas(
    name="seqfish_embryo",
    url=SQUIDPY_URL + "seqfish.h5ad",
    squidpy_name="seqfish",
    contents="19,416 cells x 351 genes, size not stated by the source",
    paper="Lohoff et al. 2022, doi:10.1038/s41587-021-01006-2",
    license="CC BY 4.0 (study idr0138)",
    units="of the source, not physical",
    cell_type_column="celltype_mapped_refined",
)
MERFISH = Atlas(
    name="merfish_hypothalamus",
    url=SQUIDPY_URL + "merfish.h5ad",
    squidpy_name="merfish",
    contents="73,655 cells x 161 genes and control probes, size not stated by the source",
    paper="Moffitt et al. 2018, doi:10.1126/science.aau5324",
    license="CC0 1.0 (doi:10.5061/dryad.8t8s248)",
    units="micrometer",
    slice_column="Bregma",
    animal_column="Animal_ID",
    cell_type_column="Cell_class",
    control_prefix="Blank",
)
SLIDESEQ = Atlas(
    name="slideseqv2_hippocampus",
    url=SQUIDPY_URL + "slideseqv2.h5ad",
    squidpy_name="slideseqv2",
    contents="41,786 beads x 4,000 genes, size not stated by the source",
    paper="Stickels et al. 2021, doi:10.1038/s41587-020-0739-1",
    license="not stated by the source",
    units="of the source, not physical",
    cell_type_column="cluster",
)
DROSOPHILA = Atlas(
    name="drosophila_embryo",
    url=BDTNP_URL,
    contents="3,039 cells x 84 genes, 2.4 MB",
    paper="Fowlkes et al. 2008, doi:10.1016/j.cell.2008.01.053; Nitzan et al. 2019, doi:10.1038/s41586-019-1773-3",
    license="BSD-3-Clause (repository novosparc)",
    units="micrometer",
)


__all__ = ["drosophila_embryo", "merfish_hypothalamus", "seqfish_embryo", "slideseqv2_hippocampus"]

logger = logging.getLogger(__name__)


def seqfish_embryo(path: str | PathLike[str] | None = None) -> ad.AnnData:
    """Mouse embryo at E8.5 by seqFISH (Lohoff et al. 2022), 2D, one slice, labeled.

    Parameters
    ----------
    path
        A local ``.h5ad`` file: that of :func:`squidpy.datasets.seqfish`, or any other with
        ``obsm["spatial"]`` and a column ``celltype_mapped_refined`` or ``cell_type``; a column ``slice_id`` is kept.
        By default the file is downloaded by squidpy to ``scanpy.settings.datasetdir``, once.

    Returns
    -------
    An :class:`~anndata.AnnData` with

    - ``X``: values as distributed, CSR float32;
    - ``obsm["spatial"]``: positions in the units of the source, float64, (n_cells, 2);
    - ``obs["slice_id"]``, ``obs["cell_type"]``: categorical;
    - ``uns["source"]``: name, URL, paper, license and units.

    Raises
    ------
    ConnectionError
        If the download fails.
    FileNotFoundError
        If `path` does not exist.
    KeyError
        If the file lacks the positions or the cell types.
    """
    return _load(SEQFISH, path)


def merfish_hypothalamus(path: str | PathLike[str] | None = None) -> ad.AnnData:
    """Preoptic region of the mouse hypothalamus by MERFISH (Moffitt et al. 2018), 2D, serial sections, labeled.

    Each section is a slice, named by its position along the anterior-posterior axis (``bregma_-9``). Control probes
    (``Blank*``) and genes that were not measured in all cells are left out; the latter are logged.

    Parameters
    ----------
    path
        A local ``.h5ad`` file: that of :func:`squidpy.datasets.merfish`, or any other with
        ``obsm["spatial"]`` and columns ``Bregma`` (or ``slice_id``) and ``Cell_class`` (or ``cell_type``).
        By default the file is downloaded by squidpy to ``scanpy.settings.datasetdir``, once.

    Returns
    -------
    As :func:`seqfish_embryo`; positions in micrometers.

    Raises
    ------
    ConnectionError
        If the download fails.
    FileNotFoundError
        If `path` does not exist.
    KeyError
        If the file lacks the positions, the sections or the cell types.
    """
    return _load(MERFISH, path)


def slideseqv2_hippocampus(path: str | PathLike[str] | None = None) -> ad.AnnData:
    """Mouse hippocampus by Slide-seqV2 (Stickels et al. 2021), 2D, one slice of beads, labeled.

    Parameters
    ----------
    path
        A local ``.h5ad`` file: that of :func:`squidpy.datasets.slideseqv2`, or any other with
        ``obsm["spatial"]`` and a column ``cluster`` or ``cell_type``; a column ``slice_id`` is kept.
        By default the file is downloaded by squidpy to ``scanpy.settings.datasetdir``, once.

    Returns
    -------
    As :func:`seqfish_embryo`; a bead may contain more than one cell.

    Raises
    ------
    ConnectionError
        If the download fails.
    FileNotFoundError
        If `path` does not exist.
    KeyError
        If the file lacks the positions or the cell types.
    """
    return _load(SLIDESEQ, path)


def drosophila_embryo(path: str | PathLike[str] | None = None) -> ad.AnnData:
    """Virtual embryo of *Drosophila* at stage 5 (Fowlkes et al. 2008), 3D, one slice, without labels.

    Half of the surface of the blastoderm, averaged over many embryos. Positions are easy to predict from these smooth
    averages. Values are expression levels, not counts.

    Parameters
    ----------
    path
        A local ``.h5ad`` file with ``obsm["spatial"]``. By default two text files are downloaded from the repository of
        novoSpaRc (Nitzan et al. 2019) to ``scanpy.settings.datasetdir``, once.

    Returns
    -------
    As :func:`seqfish_embryo`, without ``obs["cell_type"]``; positions in micrometers, of shape (3039, 3).

    Raises
    ------
    ConnectionError
        If the download fails.
    FileNotFoundError
        If `path` does not exist.
    KeyError
        If the file lacks the positions.
    """
    return _load(DROSOPHILA, path)


def _load(atlas: Atlas, path: str | PathLike[str] | None) -> ad.AnnData:
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"path={str(path)!r} does not exist; leave path out to download {atlas.name}")
        try:
            adata = ad.read_h5ad(path)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(
                f"path={str(path)!r} cannot be read as .h5ad ({describe_error(error)}); pass another file, or leave path out to "
                f"download {atlas.name}"
            ) from error
        return harmonize(adata, atlas)
    logger.info(
        "%s: %s from %s, downloaded unless cached; source: %s; license: %s.",
        atlas.name, atlas.contents, atlas.url, atlas.paper, atlas.license,
    )  # fmt: skip
    adata = _from_novosparc(atlas) if atlas.squidpy_name is None else _from_squidpy(atlas, atlas.squidpy_name)
    return harmonize(adata, atlas)


@contextmanager
def _fetching(atlas: Atlas) -> Iterator[None]:
    """Raise errors of the download as ConnectionError; reading the file is outside, so its errors are unchanged."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ExceptionGroup) as error:
        raise ConnectionError(
            f"{atlas.name} could not be downloaded from {atlas.url} ({error}); "
            f"download it by other means and pass the file: datasets.{atlas.name}(path=…)"
        ) from error


def _from_squidpy(atlas: Atlas, name: str) -> ad.AnnData:
    import squidpy as sq

    fetch = getattr(sq.datasets, name)
    with _fetching(atlas):
        return fetch()


def _from_novosparc(atlas: Atlas) -> ad.AnnData:
    files = retrieve(atlas, BDTNP_SHA256, folder="bdtnp")
    expression, positions = (pd.read_csv(file, sep=r"\s+") for file in files)
    # Positions are those of the whole embryo; the half with expression comes first.
    return ad.AnnData(
        X=expression.to_numpy(np.float32),
        obs=pd.DataFrame(index=[f"cell_{i}" for i in range(len(expression))]),
        var=pd.DataFrame(index=list(expression.columns)),
        obsm={SPATIAL: positions.to_numpy(np.float64)[: len(expression)]},
    )


def retrieve(atlas: Atlas, sha256: Mapping[str, str], *, folder: str) -> list[Path]:
    """Files below the address of an atlas, by name and checksum, downloaded once to a folder of ``scanpy.settings.datasetdir``."""
    import pooch
    from scanpy import settings

    path = Path(settings.datasetdir) / folder
    with _fetching(atlas):
        return [
            Path(pooch.retrieve(atlas.url + name, known_hash=f"sha256:{value}", fname=name, path=path))
            for name, value in sha256.items()
        ]


def harmonize(adata: ad.AnnData, atlas: Atlas) -> ad.AnnData:
    """Positions, slices, labels, measured genes and source under the default keys."""
    if SPATIAL not in adata.obsm:
        raise KeyError(f'obsm["spatial"] is missing; pass a file of {atlas.name} with positions')
    obs = adata.obs
    slices = label_names(obs[SLICE]) if SLICE in obs else _slice_names(obs, atlas)
    obs[SLICE] = pd.Categorical(slices)
    if CELL_TYPE in obs or atlas.cell_type_column is not None:
        labels = _column(obs, CELL_TYPE, atlas.cell_type_column, atlas).astype("category")
        obs[CELL_TYPE] = labels.cat.rename_categories(label_name)
    adata.X = sparse.csr_matrix(adata.X, dtype=np.float32)
    adata = _measured(adata, atlas)
    adata.obsm[SPATIAL] = np.asarray(adata.obsm[SPATIAL], dtype=np.float64)
    described = {
        "name": atlas.name,
        "url": atlas.url,
        "paper": atlas.paper,
        "license": atlas.license,
        "units": atlas.units,
    }
    adata.uns.setdefault("source", described)
    logger.info("%s: %d cells, %d genes, %d slices.", atlas.name, *adata.shape, adata.obs[SLICE].nunique())
    return adata


def _column(obs: pd.DataFrame, name: str, source: str | None, atlas: Atlas) -> pd.Series:
    for column in (name, source):
        if column in obs:
            return obs[column]
    raise KeyError(
        f'obs["{source}"] is missing from the file of {atlas.name}; rename the column to "{name}" or "{source}"'
    )


def _slice_names(obs: pd.DataFrame, atlas: Atlas) -> list[str]:
    if atlas.slice_column is None:
        return [atlas.name] * len(obs)
    column = _column(obs, SLICE, atlas.slice_column, atlas)
    names = [f"{atlas.slice_column.lower()}_{value:g}" for value in column.astype(float)]
    if atlas.animal_column in obs and obs[atlas.animal_column].nunique() > 1:
        names = [f"animal_{animal}_{name}" for animal, name in zip(obs[atlas.animal_column], names, strict=True)]
    return names


def _measured(adata: ad.AnnData, atlas: Atlas) -> ad.AnnData:
    """Remove control probes and genes with non-finite values."""
    finite = np.ones(adata.n_vars, dtype=bool)
    finite[adata.X.indices[~np.isfinite(adata.X.data)]] = False
    if not finite.all():
        logger.info(
            "%s: genes that were not measured in all cells are left out: %s.",
            atlas.name,
            list(adata.var_names[~finite]),
        )
    control = np.zeros(adata.n_vars, dtype=bool)
    if atlas.control_prefix is not None:
        control = adata.var_names.str.startswith(atlas.control_prefix)
    keep = finite & ~control
    return adata if keep.all() else adata[:, keep].copy()
