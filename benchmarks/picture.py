"""The picture of the README: a held-out section of the seqFISH mouse embryo, true and placed.

The model is that of ``python -m benchmarks.unseen`` with the same ``--model-dir``, trained if it is not there. Run as
``python -m benchmarks.picture --model-dir DIR``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import _models
from benchmarks._data import find_data, labeled_folds, make_fold

if TYPE_CHECKING:
    from collections.abc import Sequence

TISSUE, FOLD = "seqfish", "embryo2_z2"
COLOR = "cell_type"


def main(argv: Sequence[str] | None = None) -> None:
    """Place the section and save the figure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.picture", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--output", type=Path, default=Path("docs/_static/reconstruction.png"))
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    import alphastomics as asx

    reference, held_out = labeled_folds(TISSUE, find_data(options.data_dir))[FOLD]
    fold = make_fold(FOLD, reference, held_out)
    path = _models.model_path(options.model_dir, TISSUE, FOLD, mode=_models.MODE, seed=0)
    model, _ = _models.obtain_model(fold, seed=0, minutes=None, path=path)
    cells = fold.query.copy()
    with _models.adapted(model, cells):
        asx.tl.reconstruct(cells, model=model)
    cells.obsm["spatial"] = fold.truth[fold.order]
    cells.obs[COLOR] = np.asarray(held_out.obs["cell_type"])[fold.order]
    titles = ("true positions", "placed from expression", "confidence")
    axes = asx.pl.reconstruction(cells, color=COLOR, title=titles, units="field of view", figsize=(12, 4.2), show=False)
    figure = np.ravel(axes)[0].figure
    for legend in figure.legends:  # 22 cell types
        legend.remove()
    figure.savefig(options.output, dpi=90, bbox_inches="tight")


if __name__ == "__main__":
    main()
