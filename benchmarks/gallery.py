"""The figures of ``docs/gallery.md``: held-out slices of real tissues, placed by models of a short training.

Run as ``python -m benchmarks.gallery --model-dir DIR``; models that are in the folder are not trained again.
"""

from __future__ import annotations

import argparse
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _models
from benchmarks._data import Fold, drosophila3d, find_data, labeled_folds, make_fold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anndata import AnnData
    from matplotlib.figure import Figure

    from alphastomics.model import AlphaSTomics

    Figures = Iterator[tuple[str, Figure]]

SEED = 0
MINUTES = {"seqfish": 10, "starmap_mpfc": 4, "drosophila3d": 2}
FOLDS = {"seqfish": "embryo2_z2", "starmap_mpfc": "BZ5"}
GENE = "Ttn"  # of the heart
STRIPES = "ftz"
TITLES = ("true positions", "placed from expression", "confidence")
DPI, COLORS = 80, 256


def main(argv: Sequence[str] | None = None) -> None:
    """Place the slices and save the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gallery", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tissues", nargs="+", choices=MINUTES, default=list(MINUTES))
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--output", type=Path, default=Path("docs/_static/gallery"), help="folder of the figures")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for tissue in options.tissues:
        fold, cells = _fold(tissue, find_data(options.data_dir))
        path = _models.model_path(options.model_dir, tissue, f"gallery_{fold.name}", mode="expr_to_pos", seed=SEED)
        arguments = {"seed": SEED, "minutes": MINUTES[tissue], "mode": "expr_to_pos", "path": path}
        model, _ = _models.train_or_load(fold.reference, **arguments)
        with _models.adapted(model, fold.query):
            for name, figure in DRAW[tissue](model, fold.reference, cells):
                save(figure, options.output / f"{name}.png")


def _fold(tissue: str, folder: Path) -> tuple[Fold, AnnData]:
    """The labeled fold of a tissue, and its query with the true positions."""
    if tissue in FOLDS:
        reference, held_out = labeled_folds(tissue, folder)[FOLDS[tissue]]
        fold = make_fold(FOLDS[tissue], reference, held_out).with_labels()
    else:
        (fold,) = drosophila3d(folder)
    cells = fold.query.copy()
    cells.obsm["spatial"] = fold.truth[fold.order]
    return fold, cells


def draw_embryo(model: AlphaSTomics, reference: AnnData, cells: AnnData) -> Figures:
    """Placement, transferred labels, and a gene that is taken as unmeasured."""
    import alphastomics as asx

    asx.tl.reconstruct(cells, model=model)
    axes = asx.pl.reconstruction(cells, units="field of view", title=TITLES, show=False)
    yield "embryo_placement", _figure(axes)
    asx.tl.transfer_labels(cells, reference, model=model)
    columns = {"annotated cell type": "cell_type", "transferred label": "cell_type_transferred"}
    yield "embryo_labels", _panels(cells, columns, sorted(set(cells.obs["cell_type"])))
    panel = cells[:, cells.var_names != GENE].copy()
    asx.tl.impute(panel, reference, model=model, genes=GENE)
    cells.obs[f"{GENE}, measured"] = np.log1p(cells[:, GENE].X.toarray().ravel())
    cells.obs[f"{GENE}, imputed"] = np.log1p(panel.obsm["imputed"][GENE].to_numpy())
    yield "embryo_gene", _panels(cells, {name: name for name in (f"{GENE}, measured", f"{GENE}, imputed")})


def draw_cortex(model: AlphaSTomics, reference: AnnData, cells: AnnData) -> Figures:
    """Placement, uncertainty, training curve and attention."""
    import alphastomics as asx

    asx.tl.reconstruct(cells, model=model, n_samples=8)
    axes = asx.pl.reconstruction(cells, color="cell_type", units="pixels", title=TITLES, show=False)
    yield "cortex_placement", _figure(axes)
    yield "cortex_uncertainty", _figure(asx.pl.uncertainty(cells, units="pixels", title="", show=False))
    yield "cortex_history", _figure(asx.pl.history(model, show=False))
    asx.tl.attention_maps(model, cells, [0, 1, 2])
    yield "cortex_attention", _figure(asx.pl.attention_maps(cells, show=False))


def draw_drosophila(model: AlphaSTomics, reference: AnnData, cells: AnnData) -> Figures:
    """Placement, colored by a gene that is expressed in stripes."""
    import alphastomics as asx

    asx.tl.reconstruct(cells, model=model)
    style = {"units": "µm", "title": TITLES, "figsize": (12, 3)}
    yield "drosophila_placement", _figure(asx.pl.reconstruction(cells, color=STRIPES, show=False, **style))


DRAW: dict[str, Callable[[AlphaSTomics, AnnData, AnnData], Figures]] = {
    "seqfish": draw_embryo,
    "starmap_mpfc": draw_cortex,
    "drosophila3d": draw_drosophila,
}


def _panels(cells: AnnData, colors: dict[str, str], categories: Sequence[str] | None = None) -> Figure:
    """The true positions, once for each column of ``obs``; categories have the same colors in all panels."""
    import matplotlib.pyplot as plt
    import pandas as pd

    figure, axes = plt.subplots(1, len(colors), figsize=(4.2 * len(colors), 4.2), layout="constrained")
    for ax, (title, column) in zip(axes, colors.items(), strict=True):
        values = cells.obs[column]
        style: dict[str, Any] = {"cmap": "viridis"}
        if categories is not None:
            values, style = pd.Categorical(values, categories=categories).codes, {"cmap": "tab20", "vmin": 0}
            style["vmax"] = len(categories) - 1
        points = ax.scatter(*cells.obsm["spatial"].T, c=values, s=2, linewidths=0, **style)
        ax.set(title=title, aspect="equal", xticks=[], yticks=[])
        if categories is None:
            figure.colorbar(points, ax=ax, label="log1p", shrink=0.6)
    return figure


def _figure(axes: Any) -> Figure:
    """The figure of axes that a function of ``pl`` returns, without a legend of many names."""
    figure = np.ravel(axes)[0].figure
    for legend in figure.legends:
        if len(legend.get_texts()) > 16:
            legend.remove()
    return figure


def save(figure: Figure, path: Path) -> None:
    """Save a figure as a PNG file with a palette, which is small."""
    import matplotlib.pyplot as plt
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(COLORS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
