"""Configurations side by side: a table, curves and a picture in one folder."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from alphastomics._io._atomic import replacing
from alphastomics.cli._files import number, prepare_folder

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData

    from alphastomics.cli._options import ComparisonOptions, SetupOptions

logger = logging.getLogger(__name__)

NAME = "comparison"


def run_comparison(
    input_data: Path, output_dir: Path, seeds: tuple[int, ...], setup: SetupOptions, options: ComparisonOptions
) -> pd.DataFrame:
    """Compare what is not compared yet, and write the table, the runs, their curves and the picture.

    Returns
    -------
    The table, as :func:`alphastomics.tl.compare` returns it.
    """
    from alphastomics import tl
    from alphastomics.cli._cells import read_reference
    from alphastomics.train.distributed.devices import device_of

    device_of(options.accelerator)
    prepare(output_dir)
    adata = read_reference(input_data)
    runs = output_dir / f"{NAME}.json"
    table = tl.compare(adata, seeds=seeds, results=runs, key_added=NAME, **asdict(setup), **options.arguments())
    write(adata, table, output_dir)
    logger.info("The comparison is in %s.", output_dir)
    return table


def prepare(output_dir: Path) -> None:
    """Make the folder; one that holds something else than an earlier comparison is refused.

    Raises
    ------
    NotADirectoryError
        If it is a file.
    FileExistsError
        If it holds other files, and none of a comparison.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise NotADirectoryError(f"{output_dir} is a file; name a folder")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / f"{NAME}.json").is_file():
        raise FileExistsError(f"{output_dir} is not empty and holds no {NAME}.json to continue; name another folder")
    prepare_folder(output_dir)


def write(adata: AnnData, table: pd.DataFrame, output_dir: Path) -> None:
    """Write everything but the runs, which are there already."""
    from matplotlib import pyplot as plt

    from alphastomics.pl import comparison

    with replacing(output_dir / f"{NAME}.csv") as temporary:
        table.to_csv(temporary)
    with replacing(output_dir / f"{NAME}.md") as temporary:
        temporary.write_text(to_markdown(table), encoding="utf-8")
    axes = comparison(adata, key=NAME, show=False)
    assert axes is not None  # as nothing is shown
    figure = axes.flat[0].figure
    with replacing(output_dir / f"{NAME}.png") as temporary:
        figure.savefig(temporary, dpi=150, bbox_inches="tight")
    plt.close(figure)


def to_markdown(table: pd.DataFrame) -> str:
    """The table in Markdown, one line per configuration, a standard deviation behind its mean."""
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
