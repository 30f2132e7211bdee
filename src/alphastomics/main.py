"""The command line: ``alphastomics demo | preprocess | stage1 | stage2 | train | sample | test | extract | provenance | compare | upload``.

Importing this module imports neither torch nor the library; every command imports what it needs.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.types import ExistingDirectory, ExistingFile, PositiveInt  # noqa: TC002

from alphastomics import __version__
from alphastomics.cli._config import NULLS, fill, resolved
from alphastomics.cli._console import USER_ERRORS, messages, print_error
from alphastomics.cli._options import (
    GLOBAL,
    SEVERAL,
    ComparisonOptions,
    DemoModelOptions,
    DemoTrainingOptions,
    ModelOptions,
    PlanOptions,
    QueryOptions,
    SetupOptions,
    TrainingOptions,
)
from alphastomics.cli._preprocess import ClusterOptions, DatasetOptions, SliceOptions, UploadOptions
from alphastomics.cli._run import RunOptions, SourceOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("alphastomics")  # not __name__, which is "__main__" in a program

app = App(
    name="alphastomics",
    suppress_keyboard_interrupt=False,
    help="Learn the joint distribution of expression and position of the cells of a tissue, and sample from it.",
    version=__version__,
)
app.meta.group_parameters = GLOBAL
# Errors and exit codes are settled in `main`.
INTERRUPTED = 130  # by the custom of shells
PLAIN: dict[str, Any] = {"exit_on_error": False, "print_error": False, "result_action": "return_value"}


@app.command
def demo(
    *,
    output_dir: Path,
    seed: int = 0,
    model: DemoModelOptions = DemoModelOptions(),
    training: DemoTrainingOptions = DemoTrainingOptions(),
    plan: PlanOptions = PlanOptions(),
) -> None:
    """Simulate a tissue of three slices, train on two, place the cells of the third, and show what came out.

    Ends with an error if regression on the 25 nearest cells does better.

    Parameters
    ----------
    output_dir
        Folder for ``reconstruction.png``, ``scores.json`` and ``reconstruction.h5ad``.
    seed
        Decides the tissue, the first weights and every draw.
    """
    from alphastomics.cli._demo import check_verdict, run_demo
    from alphastomics.cli._files import to_text

    table = run_demo(output_dir, model, training, plan, seed)
    if table is not None:
        sys.stdout.write(to_text(table))
        check_verdict(table, output_dir)


@app.command
def preprocess(
    *,
    input_dir: ExistingDirectory,
    output_dir: Path,
    seed: int = 0,
    slices: SliceOptions = SliceOptions(),
    dataset: DatasetOptions = DatasetOptions(),
    cluster: ClusterOptions = ClusterOptions(),
) -> None:
    """Make a dataset of a folder of .h5ad files: both stages, one after the other.

    What an interrupted call finished is kept.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for ``data`` and ``metadata.json``; the slices in ``_intermediate_slices`` may be deleted afterwards.
    seed
        Decides the split.
    """
    from alphastomics.cli._files import check_readable
    from alphastomics.data.preprocess import preprocess as both

    check_readable(input_dir)
    first, second = slices.options(), dataset.options(seed)
    with cluster.run() as run:
        schema = both(input_dir, output_dir, first, second, run=run)
    logger.info("%s is in %s.", schema, output_dir)


@app.command
def stage1(
    *,
    input_dir: ExistingDirectory,
    output_dir: Path,
    slices: SliceOptions = SliceOptions(),
    cluster: ClusterOptions = ClusterOptions(),
) -> None:
    """Write every slice of a folder of .h5ad files into a file of its own.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for the slices.
    """
    from alphastomics.cli._files import check_readable
    from alphastomics.data.preprocess import stage1 as first

    check_readable(input_dir)
    options = slices.options()
    with cluster.run() as run:
        n_slices = first(input_dir, output_dir, options, run=run)
    logger.info("%d slices are in %s.", n_slices, output_dir)


@app.command
def stage2(
    *,
    input_dirs: Annotated[list[ExistingDirectory], SEVERAL],
    output_dir: Path,
    seed: int = 0,
    dataset: DatasetOptions = DatasetOptions(),
    cluster: ClusterOptions = ClusterOptions(),
) -> None:
    """Merge slices that stage1 has written into one dataset.

    Parameters
    ----------
    input_dirs
        Folders of slices.
    output_dir
        Folder for ``data`` and ``metadata.json``.
    seed
        Decides the split.
    """
    from alphastomics.cli._files import check_readable
    from alphastomics.data.preprocess import stage2 as second

    for folder in input_dirs:
        check_readable(folder)
    options = dataset.options(seed)
    with cluster.run() as run:
        schema = second(input_dirs, output_dir, options, run=run)
    logger.info("%s is in %s.", schema, output_dir)


@app.command(config=fill)
def train(
    *,
    config: ExistingFile | None = None,
    print_config: Annotated[bool, Parameter(negative=())] = False,
    seed: int = 0,
    run: RunOptions = RunOptions(),
    source: SourceOptions = SourceOptions(),
    setup: SetupOptions = SetupOptions(),
    model: ModelOptions = ModelOptions(),
    training: TrainingOptions = TrainingOptions(),
    plan: PlanOptions = PlanOptions(),
) -> None:
    """Train a model on cells with expression and positions.

    Writes ``config.yaml``, ``checkpoints/model``, ``checkpoints/last.ckpt`` and ``logs/metrics.csv`` in
    ``OUTPUT_DIR/EXP_NAME``.

    Parameters
    ----------
    config
        YAML file with options; what is given here as well counts.
    print_config
        Print the options that all of this makes, as such a file, and do nothing else; the data need not be there.
    seed
        Decides the first weights and every draw.
    """
    if not print_config:
        if run.resume is not None:
            run.checkpoint(claim=False)  # without a run there is no telling what it was trained on
        source.check()
    won = resolved(seed, run, source, setup, model, training, plan)
    if print_config:
        sys.stdout.write(NULLS + won.to_yaml())
        return
    from alphastomics.cli._train import run_training

    run_training(won, source, run, setup, model, training, plan, seed)


@app.command
def sample(
    *,
    query: QueryOptions,
    output: Path = Path("sampled.h5ad"),
    sample_mode: Literal["expr_to_pos", "pos_to_expr", "joint"] = "expr_to_pos",
    n_steps: PositiveInt = 30,
    n_samples: PositiveInt = 1,
    reduce: Literal["medoid", "mean"] | None = None,
    sampler: Literal["ddpm", "ddim", "dpm++2m"] | None = None,
    n_views: PositiveInt = 1,
    refine: bool = False,
    inpaint: bool = False,
    n_cells: PositiveInt | None = None,
    seed: int = 0,
) -> None:
    """Sample positions of cells from their expression, their expression from positions, or whole tissues.

    What is sampled is never read from the cells, except with ``--inpaint``.

    Parameters
    ----------
    output
        ``.h5ad`` or ``.parquet`` file to write; the default is written where it is not there yet.
    sample_mode
        ``expr_to_pos``: positions of cells from their expression; ``pos_to_expr``: the other way round; ``joint``: new
        slices of ``--n-cells`` cells, or of as many as those of the input have.
    n_steps
        Calls of the network per draw; 1 gives the conditional mean.
    n_samples
        Number of draws.
    reduce
        ``medoid``: the draw nearest to all others; ``mean``: the mean. All draws when not given.
    sampler
        Reverse step; when not given dpm++2m, and ddpm where positions are known.
    n_views
        Random subsets of genes and cells over which the conditional mean is averaged.
    refine
        Move the cells of the conditional mean towards those that resemble them in the neighborhood embedding.
    inpaint
        Hold what the cells have of the modality that is sampled; sample what is NaN.
    n_cells
        Number of cells of a slice that is drawn as a whole, in the place of an input.
    seed
        Decides every draw.
    """
    from alphastomics.cli._cells import (
        PARQUET,
        TISSUES,
        check_suffix,
        draw_slices,
        sample_cells,
        slice_sizes,
        use_values_that_are_read,
        write_tissue,
    )
    from alphastomics.cli._files import prepare_file
    from alphastomics.cli._query import check_sample

    check_suffix(output, TISSUES)
    check_sample(query, output, sample_mode, n_cells)
    prepare_file(output)
    drawn: dict[str, Any] = {
        "mode": sample_mode,
        "inpaint": inpaint,
        "n_steps": n_steps,
        "n_samples": n_samples,
        "reduce": reduce,
        "sampler": sampler,
        "n_views": n_views,
        "refine": refine,
        "random_state": seed,
    }
    flag = f"--sample-mode {sample_mode}"
    if sample_mode == "joint" and n_cells is not None:
        model = query.load([sample_mode], flag)
        tissue = model.sample(n_cells=n_cells, **drawn)
    elif sample_mode == "joint":
        model, cells = query.read([sample_mode], flag, positions=False, expression=False)
        sizes = slice_sizes(cells, model.schema)
        logger.info(
            "%s says only how many cells to draw, %d in %d slice%s; its values are not read.",
            query.origin, sum(sizes), len(sizes), "s" * (len(sizes) > 1),
        )  # fmt: skip
        tissue = draw_slices(model, sizes, **drawn)
    else:
        reads = {
            "positions": inpaint or sample_mode == "pos_to_expr",
            "expression": inpaint or sample_mode == "expr_to_pos",
        }
        model, cells = query.read([sample_mode], flag, **reads)
        if output.suffix == PARQUET:
            use_values_that_are_read(cells, model.schema)
        tissue = sample_cells(model, cells, **drawn)
    write_tissue(tissue, output, model.schema)
    logger.info("%d cells are in %s.", tissue.n_obs, output)


@app.command(name="test")
def score(
    *,
    query: QueryOptions,
    output: Path | None = None,
    n_samples: PositiveInt = 1,
    n_steps: PositiveInt | None = None,
    seed: int = 0,
) -> None:
    """Place the cells of every slice without reading their positions, and score the result against these.

    Parameters
    ----------
    output
        JSON file for the scores.
    n_samples
        Number of draws; their medoid is scored.
    n_steps
        Calls of the network per draw: 1 for a single draw and 25 for several when not given.
    seed
        Decides every draw and the baselines.
    """
    from alphastomics.cli._files import prepare_file, to_text
    from alphastomics.cli._query import score_model, write_scores

    if output is not None:
        prepare_file(output)
    table = score_model(
        *query.read(["expr_to_pos"], "test", positions=True), n_samples=n_samples, n_steps=n_steps, seed=seed
    )
    sys.stdout.write(to_text(table))
    if output is not None:
        write_scores(output, table)


@app.command
def extract(
    *,
    query: QueryOptions,
    output: Path,
    layer: Literal["encoder", "transformer", "all"] = "transformer",
    use_positions: bool = False,
) -> None:
    """Embed cells by their expression, by the cells of their slice, and by their positions where these are used.

    Parameters
    ----------
    output
        File to write: ``.npz``, the arrays ``latent``, (cells, width), and ``obs_names``; ``.parquet``, the columns
        ``cell_id``, ``slice_id`` and ``embedding``; ``.h5ad``, ``obs``, ``obsm["X_alphastomics"]`` and how it was made.
    layer
        ``encoder``: the cell alone; ``transformer``: after the last block; ``all``: both side by side.
    use_positions
        Whether the model sees where the cells lie; if not, positions are never read.
    """
    from alphastomics.cli._cells import EMBEDDINGS, check_suffix, embed_cells, write_latent
    from alphastomics.cli._files import prepare_file

    check_suffix(output, EMBEDDINGS)
    prepare_file(output)
    model, cells = query.read(["pos_to_expr"] if use_positions else [], "--use-positions", positions=use_positions)
    how: dict[str, Any] = {"layer": layer, "use_positions": use_positions}
    write_latent(cells, embed_cells(model, cells, **how), output, model, **how)
    logger.info("Embeddings of %d cells are in %s.", cells.n_obs, output)


@app.command
def provenance(*, input_data: ExistingFile, key: str | None = None) -> None:
    """Tell how a result was made: by which model, with which parameters, seeds and versions.

    Parameters
    ----------
    input_data
        ``.h5ad`` file that ``sample`` or ``extract`` wrote, or with what ``alphastomics.tl.reconstruct`` wrote.
    key
        Which entry of ``uns``; all that tell of it when not given.
    """
    from anndata import AnnData

    from alphastomics.data._h5ad import read_uns
    from alphastomics.tl import provenance as tell

    sys.stdout.write(f"{tell(AnnData(uns=read_uns(input_data)), key)}\n")


@app.command
def compare(
    *,
    input_data: ExistingFile,
    output_dir: Annotated[Path, Parameter(alias="--output")],
    seeds: Annotated[tuple[int, ...], SEVERAL] = (0, 1, 2),
    setup: SetupOptions = SetupOptions(),
    options: ComparisonOptions = ComparisonOptions(),
) -> None:
    """Train linear and gated attention, dense and with experts, and variants of them, and score each on held-out slices.

    Writes ``comparison.csv`` and ``comparison.md`` (the table), ``comparison.png`` (curves and scores) and
    ``comparison.json`` (every run). The same command continues what was interrupted.

    Parameters
    ----------
    input_data
        Cells with expression and positions, an ``.h5ad`` or ``.parquet`` file.
    output_dir
        Folder for the comparison, new or that of an earlier one.
    seeds
        Seeds, one training of every configuration for each.
    """
    from alphastomics.cli._compare import run_comparison
    from alphastomics.cli._files import to_text

    table = run_comparison(input_data, output_dir, seeds, setup, options)
    sys.stdout.write(to_text(table.astype(float)))


@app.command
def upload(*, data_dir: ExistingDirectory, repo_id: str, options: UploadOptions = UploadOptions()) -> None:
    """Upload a dataset to the Hugging Face Hub; the same command continues what was interrupted.

    The token is that of ``hf auth login`` or of the environment variable ``HF_TOKEN``.

    Parameters
    ----------
    data_dir
        Folder that ``preprocess`` wrote.
    repo_id
        ``organization/name``.
    """
    from alphastomics.data.hub import upload as run

    done = run(data_dir, repo_id, private=options.private, license=options.license, overwrite=options.overwrite)
    logger.info("%d files were sent; the dataset is at %s.", len(done.files), done.url)


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    traceback: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run a command.

    Parameters
    ----------
    traceback
        Show where an error arose.
    """
    try:
        with messages():
            app(tokens, **PLAIN)
    except KeyboardInterrupt:
        return INTERRUPTED
    except USER_ERRORS as error:
        if traceback:
            raise
        print_error(error)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments; those of the process when None.

    Returns
    -------
    Exit status: 0, 1 after an error, 2 for a command line that makes no sense, 130 after Ctrl-C.
    """
    # OpenMP's threads wait for each other in a busy loop. Where another program needs the cores too, that brings training to
    # a standstill (fiftyfold on two cores); threads that go to sleep sooner cost less than a fifth where none does.
    # torch, which reads this, is not imported yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    try:
        return app.meta(sys.argv[1:] if argv is None else list(argv), **PLAIN) or 0
    except CycloptsError as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
