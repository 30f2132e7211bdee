"""The commands ``demo``, which compares a model with a regression, and ``compare``, which compares configurations."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from alphastomics import _keys
from alphastomics._io._atomic import replacing, write_json, write_text
from alphastomics._io._json import to_plain
from alphastomics._rank import is_first, quiet_unless_first
from alphastomics.cli._output import number, prepare_folder, write_figure, write_h5ad
from alphastomics.cli._report import write_report
from alphastomics.config import PLACING_MODES, SetupConfig

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData

    from alphastomics.cli._options import ComparisonOptions, FitOptions, SetupOptions

logger = logging.getLogger(__name__)

MAX_SECONDS = 300.0  # of training in a demo
MODEL, REGRESSION = "AlphaSTomics", "25-NN regression"
ROWS = {"prediction": MODEL, "chance": "chance", "oracle": "oracle within type"}
NAME = "comparison"
DEMO_FILES = {
    "reconstruction.png": "the figure above",
    "scores.json": "the scores above",
    "reconstruction.h5ad": "the placed cells, with true and predicted positions in obsm",
}


def run_demo(output_dir: Path, options: FitOptions, seed: int) -> pd.DataFrame | None:
    """Train on two slices of a synthetic tissue, place the cells of the third, and write the result.

    Returns
    -------
    Scores, one row each for the model, the regression, chance and the oracle. None in all processes but the first, which only
    train.

    Raises
    ------
    ValueError
        If the training would take more than five minutes, or the mode does not place cells.
    """
    from alphastomics import datasets, tl
    from alphastomics.cli._train import check_device, fit
    from alphastomics.train import seconds_of

    if options.mode not in PLACING_MODES:
        raise ValueError(f"The demo places cells, which mode={options.mode!r} cannot; pass mode='expr_to_pos' or 'any'")
    if (seconds_of(options.max_time) or 0) > MAX_SECONDS:
        raise ValueError(f"The demo trains for at most {MAX_SECONDS:.0f} s; lower max_time=…")
    quiet_unless_first()
    check_device(options)
    prepare_folder(output_dir)
    tissue = datasets.synthetic_tissue(random_state=seed)
    last = (tissue.obs[_keys.SLICE] == tissue.obs[_keys.SLICE].cat.categories[-1]).to_numpy()
    query, reference = tissue[last].copy(), tissue[~last].copy()
    truth = dict(query.obsm)
    del query.obsm
    setup = SetupConfig(slice_key=_keys.SLICE, cell_type_key=_keys.CELL_TYPE)
    model = fit(reference, setup, options, seed)
    if not is_first():
        return None
    tl.reconstruct(query, model=model, random_state=seed)
    query.obsm.update(truth)
    table = score_demo(query, reference)
    write_demo(query, table, output_dir)
    return table


def score_demo(query: AnnData, reference: AnnData) -> pd.DataFrame:
    """Score the reconstruction, the regression, and the baselines chance and oracle."""
    import pandas as pd

    from alphastomics.cli._scores import knn_positions
    from alphastomics.tl import evaluate

    table = evaluate(query, cell_type_key=_keys.CELL_TYPE, baselines=True).droplevel("slice").rename(index=ROWS)
    # A copy without expression: the regression is scored in the same way and not kept.
    other = query[:, :0].copy()
    other.obsm["knn"] = knn_positions(query, reference)
    regression = evaluate(other, prediction="knn").set_axis([REGRESSION])
    return pd.concat([table.iloc[:1], regression, table.iloc[1:]]).rename_axis("positions")


def write_demo(query: AnnData, table: pd.DataFrame, output_dir: Path) -> None:
    """Write the figure, the scores, the cells, and a report, and log their paths."""
    from alphastomics.pl import reconstruction

    write_figure(output_dir / "reconstruction.png", reconstruction(query, show=False))
    write_json(output_dir / "scores.json", to_plain(table.to_dict(orient="index")))
    write_h5ad(output_dir / "reconstruction.h5ad", query)
    write_report(
        output_dir / "report.html",
        "AlphaSTomics demo",
        text=f"A simulated tissue has three slices. A model was trained on two of them, and placed the {query.n_obs:,} cells of the "
        "third from their expression alone. Its placement is compared with a regression on the 25 nearest cells in expression, with "
        "chance, and with cells that are permuted within their types (oracle).",
        figure=output_dir / "reconstruction.png",
        scores=table,
        record=query.uns[_keys.RECONSTRUCTED],
        files=DEMO_FILES,
    )
    for name in ("report.html", *DEMO_FILES):
        logger.info("Written: %s", output_dir / name)


def check_scores(table: pd.DataFrame, output_dir: Path) -> None:
    """Raise ``RuntimeError`` unless the distance Spearman of the model is higher than that of the regression."""
    model, regression = (float(table.loc[name, "distance_spearman"]) for name in (MODEL, REGRESSION))
    if not model > regression:
        raise RuntimeError(
            f"{MODEL} did not score higher than {REGRESSION}: distance Spearman is {model:.3f} and {regression:.3f}. Train longer "
            f"(--max-time) and inspect {output_dir / 'reconstruction.png'}"
        )


def run_comparison(input_data: Path, output_dir: Path, setup: SetupOptions, options: ComparisonOptions) -> pd.DataFrame:
    """Train the runs that are missing, and write the table, the runs and the figure.

    Returns
    -------
    The table, as :func:`alphastomics.tl.compare` returns it.
    """
    from alphastomics import tl
    from alphastomics.cli._query import read_reference
    from alphastomics.train.distributed.devices import device_of

    device_of(options.accelerator)
    prepare_comparison(output_dir)
    adata = read_reference(input_data)
    runs = output_dir / f"{NAME}.json"
    table = tl.compare(adata, results=runs, key_added=NAME, **vars(setup), **vars(options))
    write_comparison(adata, table, output_dir)
    logger.info("The comparison is in %s.", output_dir)
    return table


def prepare_comparison(output_dir: Path) -> None:
    """Make the folder, and check that it is empty or contains an earlier comparison."""
    if output_dir.exists() and not output_dir.is_dir():
        raise NotADirectoryError(f"{output_dir} is a file; pass a folder")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / f"{NAME}.json").is_file():
        raise FileExistsError(f"{output_dir} is not empty and has no {NAME}.json to continue; pass another folder")
    prepare_folder(output_dir)


def write_comparison(adata: AnnData, table: pd.DataFrame, output_dir: Path) -> None:
    """Write the table and the figure."""
    from alphastomics.pl import comparison

    with replacing(output_dir / f"{NAME}.csv") as temporary:
        table.to_csv(temporary)
    write_text(output_dir / f"{NAME}.md", to_markdown(table))
    write_figure(output_dir / f"{NAME}.png", comparison(adata, key=NAME, show=False))


def to_markdown(table: pd.DataFrame) -> str:
    """The table in Markdown, one line per configuration, with means ± standard deviations."""
    import pandas as pd

    names = [name for name in table.columns if not name.endswith("_sd")]

    def cell(configuration: str, name: str) -> str:
        value = table.loc[configuration, name]
        if pd.isna(value):
            return "–"
        sd = table.loc[configuration, f"{name}_sd"] if f"{name}_sd" in table else None
        return number(float(value)) + ("" if sd is None or pd.isna(sd) else f" ± {sd:.2g}")

    lines = [["configuration", *names], ["---"] * (1 + len(names))]
    lines += [[str(row), *(cell(row, name) for name in names)] for row in table.index]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
