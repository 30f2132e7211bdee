"""A simulated tissue, from training to picture, and a verdict."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from alphastomics import _keys
from alphastomics._io._atomic import replacing
from alphastomics._rank import is_first, quiet_unless_first
from alphastomics.cli._files import prepare_folder, write_h5ad, write_json

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData

    from alphastomics.cli._options import ModelOptions, PlanOptions, TrainingOptions

logger = logging.getLogger(__name__)

LONGEST = 300.0  # seconds: who runs a demo waits for it
OURS, REGRESSION = "AlphaSTomics", "25-NN regression"
NAMES = {"prediction": OURS, "chance": "chance", "oracle": "oracle within type"}


def run_demo(
    output_dir: Path, model: ModelOptions, training: TrainingOptions, plan: PlanOptions, seed: int
) -> pd.DataFrame | None:
    """Train on two slices of a synthetic tissue, place the cells of the third, and write what came out.

    Returns
    -------
    Scores, one row for each of the model, the regression, chance and oracle; None in all but the first of several processes,
    which only train.

    Raises
    ------
    ValueError
        If more than five minutes of training are asked for.
    """
    from alphastomics import datasets, tl
    from alphastomics.train import seconds_of

    if (seconds_of(training.max_time) or 0) > LONGEST:
        raise ValueError(f"The demo trains for at most {LONGEST:.0f} s; lower max_time=…")
    quiet_unless_first()
    training.check_device()
    prepare_folder(output_dir)
    tissue = datasets.synthetic_tissue(random_state=seed)
    asked = (tissue.obs[_keys.SLICE] == tissue.obs[_keys.SLICE].cat.categories[-1]).to_numpy()
    query, reference = tissue[asked].copy(), tissue[~asked].copy()
    truth = dict(query.obsm)
    del query.obsm
    trained = _train(reference, model, training, plan, seed)
    if not is_first():
        return None
    tl.reconstruct(query, model=trained, random_state=seed)
    query.obsm.update(truth)
    table = score(query, reference)
    write(query, table, output_dir)
    return table


def _train(reference: AnnData, model: ModelOptions, training: TrainingOptions, plan: PlanOptions, seed: int) -> Any:
    from alphastomics.cli._options import SetupOptions
    from alphastomics.cli._train import fit

    setup = SetupOptions(slice_key=_keys.SLICE, cell_type_key=_keys.CELL_TYPE)
    return fit(reference, setup, model, training, plan, seed)


def score(query: AnnData, reference: AnnData) -> pd.DataFrame:
    """Score the reconstruction beside what it must beat and what bounds it."""
    import pandas as pd

    from alphastomics.cli._query import knn_positions
    from alphastomics.tl import evaluate

    table = evaluate(query, cell_type_key=_keys.CELL_TYPE, baselines=True).droplevel("slice").rename(index=NAMES)
    # A copy without expression: the regression is scored like everything else, and not kept.
    other = query[:, :0].copy()
    other.obsm["knn"] = knn_positions(query, reference)
    regression = evaluate(other, prediction="knn").set_axis([REGRESSION])
    return pd.concat([table.iloc[:1], regression, table.iloc[1:]]).rename_axis("positions")


def write(query: AnnData, table: pd.DataFrame, output_dir: Path) -> None:
    """Write the picture, the scores and the cells."""
    from matplotlib import pyplot as plt

    from alphastomics.pl import reconstruction

    axes = reconstruction(query, show=False)
    assert axes is not None  # as nothing is shown
    figure = axes.flat[0].figure
    with replacing(output_dir / "reconstruction.png") as temporary:
        figure.savefig(temporary, dpi=150, bbox_inches="tight")
    plt.close(figure)
    write_json(output_dir / "scores.json", table.to_dict(orient="index"))
    write_h5ad(output_dir / "reconstruction.h5ad", query)


def check_verdict(table: pd.DataFrame, output_dir: Path) -> None:
    """Refuse to call a demo a success that a regression wins.

    Raises
    ------
    RuntimeError
        If the distance Spearman of the regression is not exceeded.
    """
    ours, regression = (float(table.loc[name, "distance_spearman"]) for name in (OURS, REGRESSION))
    if not ours > regression:
        raise RuntimeError(
            f"The demo failed: distance Spearman {ours:.3f}, and {regression:.3f} by {REGRESSION}. "
            f"Train longer (max_time=…), and look at {output_dir / 'reconstruction.png'}"
        )
