"""Public dissociated cells with a tissue in which they can be placed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse

from alphastomics._keys import SPATIAL
from alphastomics.datasets._public import Atlas, harmonize, retrieve

if TYPE_CHECKING:
    from os import PathLike

OSMFISH = Atlas(
    name="osmfish_cortex",
    url="https://raw.githubusercontent.com/sunericd/TISSUE/ffc35998004ecf44eaf2aedf774c2f6a2292e7b9/tests/data/",
    contents="3,405 cells of a tissue and 1,000 dissociated cells x 33 genes, 0.4 MB",
    paper="Codeluppi et al. 2018, doi:10.1038/s41592-018-0175-z; Sun et al. 2024, doi:10.1038/s41592-024-02184-y",
    license="MIT (repository TISSUE); that of the original data is not stated",
    units="of the source, not physical",
)
SHA256 = {
    "Spatial_count.txt": "39e75bf727f26662a3f25dc7d4cf52b35bc6ade73fcc33fafe5f21736df87958",
    "Locations.txt": "3297b8e374656088f98cc991432591a74224ea7b3ff72b0999eb590f5f015b06",
    "scRNA_count.txt": "d77d0546fe15c26a5668525f4e3ebfedcfc35be7c83d24933dd4776e3d0916c3",
}

logger = logging.getLogger(__name__)


def osmfish_cortex(path: str | PathLike[str] | None = None) -> tuple[ad.AnnData, ad.AnnData]:
    """Mouse somatosensory cortex by osmFISH (Codeluppi et al. 2018), and dissociated cells of mouse cortex, 33 genes.

    The subset that is distributed with TISSUE (Sun et al. 2024). The dissociated cells were sequenced: a gene has other counts
    in them than in the tissue, some cells have hundreds of times more, and where they were is not known.

    Parameters
    ----------
    path
        A local folder with ``Spatial_count.txt``, ``Locations.txt`` and ``scRNA_count.txt``. By default these are downloaded
        to ``scanpy.settings.datasetdir``, once.

    Returns
    -------
    The tissue, as :func:`seqfish_embryo` without ``obs["cell_type"]``, and the dissociated cells, with counts in ``X`` and
    the genes of the tissue in the same order.

    Raises
    ------
    ConnectionError
        If the download fails.
    FileNotFoundError
        If `path` lacks one of the files.
    ValueError
        If the files do not belong together.
    """
    counts, positions, dissociated = _files(path)
    spatial, where = (pd.read_csv(file, sep="\t") for file in (counts, positions))
    cells = pd.read_csv(dissociated, sep="\t", index_col=0).T
    if len(spatial) != len(where) or set(spatial.columns) != set(cells.columns):
        raise ValueError(
            f"the files have {len(spatial)} cells and {len(where)} positions, or different genes; pass the folder with the files "
            f"of {OSMFISH.url}"
        )
    tissue = _cells(spatial.set_axis([f"cell_{i}" for i in range(len(spatial))]))
    tissue.obsm[SPATIAL] = where[["X", "Y"]].to_numpy(np.float64)
    tissue = harmonize(tissue, OSMFISH)
    query = _cells(cells[spatial.columns])
    query.uns["source"] = dict(tissue.uns["source"])
    return tissue, query


def _files(path: str | PathLike[str] | None) -> list[Path]:
    if path is not None:
        files = [Path(path) / name for name in SHA256]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(
                f"path={str(path)!r} lacks {', '.join(absent)}; leave path out to download {OSMFISH.name}"
            )
        return files
    logger.info(
        "%s: %s from %s, downloaded unless cached; source: %s; license: %s.",
        OSMFISH.name, OSMFISH.contents, OSMFISH.url, OSMFISH.paper, OSMFISH.license,
    )  # fmt: skip
    return retrieve(OSMFISH, SHA256, folder="osmfish")


def _cells(table: pd.DataFrame) -> ad.AnnData:
    """Counts (n_cells, n_genes) as sparse float32."""
    return ad.AnnData(
        X=sparse.csr_matrix(table.to_numpy(np.float32)),
        obs=pd.DataFrame(index=table.index.astype(str)),
        var=pd.DataFrame(index=table.columns.astype(str)),
    )
