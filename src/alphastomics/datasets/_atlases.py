"""Which public atlases there are, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BDTNP_SHA256", "DROSOPHILA", "MERFISH", "SEQFISH", "SLIDESEQ", "Atlas"]

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
    """What is downloaded, and which of its columns mean what.

    Without ``slice_column`` all cells are the slice ``name``; several animals (``animal_column``) are never one slice.
    """

    name: str
    url: str
    contents: str
    paper: str
    licence: str
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
    licence="CC BY 4.0 (study idr0138)",
    units="of the source, not physical",
    cell_type_column="celltype_mapped_refined",
)
MERFISH = Atlas(
    name="merfish_hypothalamus",
    url=SQUIDPY_URL + "merfish.h5ad",
    squidpy_name="merfish",
    contents="73,655 cells x 161 genes and control probes, size not stated by the source",
    paper="Moffitt et al. 2018, doi:10.1126/science.aau5324",
    licence="CC0 1.0 (doi:10.5061/dryad.8t8s248)",
    units="micrometre",
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
    licence="not stated by the source",
    units="of the source, not physical",
    cell_type_column="cluster",
)
DROSOPHILA = Atlas(
    name="drosophila_embryo",
    url=BDTNP_URL,
    contents="3,039 cells x 84 genes, 2.4 MB",
    paper="Fowlkes et al. 2008, doi:10.1016/j.cell.2008.01.053; Nitzan et al. 2019, doi:10.1038/s41586-019-1773-3",
    licence="BSD-3-Clause (repository novosparc)",
    units="micrometre",
)
