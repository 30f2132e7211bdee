"""Real tissues as folds: a reference with positions, a query with expression only, and the true positions."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
SHUFFLE_SEED = 0
SPLIT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One fold: positions of the cells of ``query`` are predicted from ``reference``.

    The rows of ``query`` are shuffled and renamed, because names and order of the source depend on the field of view.
    """

    name: str
    reference: ad.AnnData
    """``X``, ``obs["slice_id"]`` and ``obsm["spatial"]``."""
    query: ad.AnnData
    """``X`` and ``obs["slice_id"]`` only."""
    truth: NDArray[np.float64]
    """True positions, in the order of the source."""
    labels: NDArray[np.str_] | None
    """True cell types in the order of the source."""
    order: NDArray[np.intp]
    """Row of the source for each row of ``query``."""
    scored: NDArray[np.intp] | None = None
    """Rows of ``truth`` that are scored; None: all."""
    reference_labels: NDArray[np.str_] | None = None
    """Cell types of ``reference``."""

    def in_source_order(self, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        """Prediction for ``query`` in the order of ``truth``."""
        restored = np.empty_like(np.asarray(predicted, dtype=np.float64))
        restored[self.order] = predicted
        return restored

    def with_labels(self) -> Fold:
        """The fold with the cell types of reference and query in ``obs``, if both have them; else the fold itself."""
        if self.labels is None or self.reference_labels is None:
            return self
        reference, query = self.reference.copy(), self.query.copy()
        reference.obs["cell_type"], query.obs["cell_type"] = self.reference_labels, self.labels[self.order]
        return replace(self, reference=reference, query=query)


def find_data(data_dir: str | None = None) -> Path:
    """Folder of the real data: ``data_dir``, else ``$ALPHASTOMICS_DATA``, else ``../shared/data`` beside the repository.

    Raises
    ------
    FileNotFoundError
        If the folder does not exist.
    """
    given = data_dir or os.environ.get("ALPHASTOMICS_DATA")
    folder = Path(given) if given else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; pass --data-dir or set ALPHASTOMICS_DATA")
    return folder


def make_fold(name: str, reference: ad.AnnData, held_out: ad.AnnData) -> Fold:
    """Separate the input of a method from the truth."""
    order = np.random.default_rng(SHUFFLE_SEED).permutation(held_out.n_obs)
    return Fold(
        name=name,
        reference=_stripped(reference, np.arange(reference.n_obs), "reference", keep_positions=True),
        query=_stripped(held_out, order, "query", keep_positions=False),
        truth=np.array(held_out.obsm["spatial"], dtype=np.float64),
        labels=_labels(held_out),
        order=order,
        reference_labels=_labels(reference),
    )


def _labels(adata: ad.AnnData) -> NDArray[np.str_] | None:
    return adata.obs["cell_type"].astype(str).to_numpy() if "cell_type" in adata.obs else None


def _stripped(adata: ad.AnnData, rows: NDArray[np.intp], prefix: str, *, keep_positions: bool) -> ad.AnnData:
    names = [f"{prefix}_{i}" for i in range(len(rows))]
    bare = ad.AnnData(
        X=adata.X[rows].copy(),
        obs=pd.DataFrame({"slice_id": adata.obs["slice_id"].astype(str).to_numpy()[rows]}, index=names),
        var=pd.DataFrame(index=adata.var_names.astype(str)),
    )
    if keep_positions:
        bare.obsm["spatial"] = np.array(adata.obsm["spatial"], dtype=np.float64)[rows]
    return bare


def labeled_folds(benchmark: str, folder: Path) -> dict[str, tuple[ad.AnnData, ad.AnnData]]:
    """Reference and held-out slice of every fold, with all annotations of the source."""
    if benchmark == "seqfish":
        adata = ad.read_h5ad(folder / "seqfish_mouse_embryo_dev.h5ad")
        name = adata.obs["slice_id"].astype(str).to_numpy()
        return {"embryo2_z2": (adata[np.isin(name, ["embryo1_z2", "embryo1_z5"])], adata[name == "embryo2_z2"])}
    if benchmark == "hypothalamus":
        adata = ad.read_h5ad(folder / "merfish_hypothalamus_dev.h5ad")
        first = (adata.obs["animal"] == "animal1").to_numpy()
        return {"animal7": (adata[first], adata[~first])}
    adata = ad.read_h5ad(folder / "starmap_mpfc.h5ad")
    name = adata.obs["slice_id"].astype(str).to_numpy()
    return {mouse: (adata[name != mouse], adata[name == mouse]) for mouse in ("BZ5", "BZ9", "BZ14")}


def seqfish(folder: Path) -> list[Fold]:
    """Both planes of embryo 1 against one plane of embryo 2."""
    return [make_fold(name, *pair) for name, pair in labeled_folds("seqfish", folder).items()]


def seqfish_reverse(folder: Path) -> list[Fold]:
    """Both planes of embryo 2 against one plane of embryo 1."""
    adata = ad.read_h5ad(folder / "seqfish_mouse_embryo_dev.h5ad")
    name = adata.obs["slice_id"].astype(str)
    return [make_fold("embryo1_z2", adata[name.str.startswith("embryo2")], adata[name == "embryo1_z2"])]


def starmap_mpfc(folder: Path) -> list[Fold]:
    """Each mouse against the other two."""
    return [make_fold(name, *pair) for name, pair in labeled_folds("starmap_mpfc", folder).items()]


def starmap_log(folder: Path) -> list[Fold]:
    """The folds of STARmap with log-normalized values."""
    return [
        replace(fold, reference=_log_normalized(fold.reference), query=_log_normalized(fold.query))
        for fold in starmap_mpfc(folder)
    ]


def _log_normalized(adata: ad.AnnData) -> ad.AnnData:
    """Logarithms of counts at a library size of 10,000."""
    import scanpy as sc

    adata = adata.copy()
    adata.X = adata.X.astype(np.float32)
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    return adata


def hypothalamus(folder: Path) -> list[Fold]:
    """Two sections of one animal against a section of another, at another depth; left and right are alike."""
    return [make_fold(name, *pair) for name, pair in labeled_folds("hypothalamus", folder).items()]


def hypothalamus_sections(folder: Path) -> list[Fold]:
    """One section of an animal against another section of it."""
    adata = ad.read_h5ad(folder / "merfish_hypothalamus_dev.h5ad")
    first, second = (adata[adata.obs["slice_id"] == f"animal1_bregma-0.{depth}"] for depth in ("29", "09"))
    return [make_fold("bregma-0.09", first, second)]


def drosophila3d(folder: Path) -> list[Fold]:
    """A random half of the positions of one embryo against the other half; three dimensions, values are not counts."""
    return _halves(ad.read_h5ad(folder / "drosophila_bdtnp_3d.h5ad"))


def starmap3d(folder: Path) -> list[Fold]:
    """A random half of the cells of a block of visual cortex against the other half; 28 genes, values are not counts."""
    return _halves(ad.read_h5ad(folder / "starmap3d_visual_cortex.h5ad"))


def synthetic(folder: Path) -> list[Fold]:
    """Two simulated slices against a third, for three anatomies, and for the first of them with two mirrored halves."""
    from alphastomics.datasets import synthetic_tissue

    folds = []
    for anatomy in range(3):
        tissue = synthetic_tissue(random_state=anatomy)
        folds.append(make_fold(f"anatomy{anatomy}", *_last_slice(tissue)))
    return [*folds, make_fold("mirrored", *_last_slice(_mirrored(synthetic_tissue(rotate=False, random_state=0))))]


def _last_slice(adata: ad.AnnData) -> tuple[ad.AnnData, ad.AnnData]:
    """All slices but the last, and the last one."""
    last = adata.obs["slice_id"] == adata.obs["slice_id"].iloc[-1]
    return adata[~last], adata[last]


def _mirrored(adata: ad.AnnData) -> ad.AnnData:
    """A tissue that lies on both sides of a plane: every second cell is reflected in it, so that expression does not determine the side."""
    adata = adata.copy()
    x = adata.obsm["spatial"][:, 0]
    adata.obsm["spatial"][:, 0] = (x - x.min()) * np.where(np.arange(adata.n_obs) % 2, -1.0, 1.0)
    return adata


def _halves(adata: ad.AnnData) -> list[Fold]:
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(adata.n_obs)
    half = adata.n_obs // 2
    return [make_fold("half", adata[np.sort(shuffled[:half])], adata[np.sort(shuffled[half:])])]


BENCHMARKS: dict[str, Callable[[Path], list[Fold]]] = {
    "seqfish": seqfish,
    "seqfish_reverse": seqfish_reverse,
    "starmap_mpfc": starmap_mpfc,
    "starmap_log": starmap_log,
    "hypothalamus": hypothalamus,
    "hypothalamus_sections": hypothalamus_sections,
    "drosophila3d": drosophila3d,
    "starmap3d": starmap3d,
    "synthetic": synthetic,
}
