"""The command line: ``alphastomics demo | reconstruct | preprocess | stage1 | stage2 | train | sample | test | extract | provenance | compare | upload``.

Importing this module imports no PyTorch; every command imports what it needs.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path  # noqa: TC003  read at run time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.types import ExistingFile  # noqa: TC002

from alphastomics import __version__, _keys
from alphastomics.cli._config import HEADER, fill, resolved
from alphastomics.cli._datasets import preprocess, stage1, stage2, upload
from alphastomics.cli._options import (
    GLOBAL,
    ComparisonOptions,
    DemoOptions,
    FitOptions,
    ReconstructOptions,
    SetupOptions,
)
from alphastomics.cli._output import USER_ERRORS, messages, print_error
from alphastomics.cli._query import SAMPLED, EmbeddingOptions, QueryOptions, SampleOptions, check_checkpoint
from alphastomics.cli._reconstruct import RECONSTRUCTED, run_reconstruction
from alphastomics.cli._run import RunOptions, SourceOptions
from alphastomics.config import RunConfig, SamplingConfig

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
INTERRUPTED = 130  # as shells return it
# cyclopts passes errors and results on to `main`.
PASS_ON: dict[str, Any] = {"exit_on_error": False, "print_error": False, "result_action": "return_value"}


@app.command
def demo(
    *,
    output_dir: Path,
    seed: int = RunConfig.seed,
    options: DemoOptions = DemoOptions(),
) -> None:
    """Simulate a tissue of three slices, train on two, place the cells of the third, and score the result.

    Exits with status 1 if regression on the 25 nearest cells scores higher.

    Parameters
    ----------
    output_dir
        Folder for ``report.html``, ``reconstruction.png``, ``scores.json`` and ``reconstruction.h5ad``.
    seed
        Seed of the tissue, the initial weights and all random numbers of training.
    """
    from alphastomics.cli._compare import check_scores, run_demo
    from alphastomics.cli._output import to_text

    table = run_demo(output_dir, options, seed)
    if table is not None:
        sys.stdout.write(to_text(table))
        check_scores(table, output_dir)


@app.command
def reconstruct(
    query: ExistingFile,
    reference: ExistingFile | None = None,
    *,
    checkpoint: Annotated[str | None, Parameter(validator=check_checkpoint)] = None,
    output: Path = RECONSTRUCTED,
    model_dir: Path | None = None,
    seed: int = RunConfig.seed,
    setup: SetupOptions = SetupOptions(),
    options: ReconstructOptions = ReconstructOptions(),
) -> None:
    """Predict the positions of cells from their expression: training, placement and writing in one command.

    Writes the query with positions in ``obsm["spatial_reconstructed"]``, and what belongs to them. Its own positions are not read, except
    without ``--reference`` and ``--checkpoint``: then cells with positions are trained on, and cells whose position is NaN are placed.
    Trains on one device; ``train`` and ``sample`` use several.

    Parameters
    ----------
    query
        Cells to place: an ``.h5ad`` or ``.parquet`` file.
    reference
        Cells with positions to train on: an ``.h5ad`` or ``.parquet`` file.
    checkpoint
        A trained model to use instead of a reference, as in ``sample``.
    output
        ``.h5ad`` file to write. An existing file of the default name is not replaced.
    model_dir
        Folder for the trained model, which later places further cells with ``--checkpoint``. By default it is not kept.
    seed
        Seed of training and sampling.
    """
    cells = run_reconstruction(
        query,
        reference=reference,
        checkpoint=checkpoint,
        output=output,
        model_dir=model_dir,
        setup=setup,
        options=options,
        seed=seed,
    )
    logger.info('%d cells are in %s; their positions are in obsm["%s"].', cells.n_obs, output, _keys.RECONSTRUCTED)


app.command(preprocess)
app.command(stage1)
app.command(stage2)


@app.command(config=fill)
def train(
    *,
    config: ExistingFile | None = None,
    print_config: Annotated[bool, Parameter(negative=())] = False,
    run: RunOptions = RunOptions(),
    source: SourceOptions = SourceOptions(),
    setup: SetupOptions = SetupOptions(),
    options: FitOptions = FitOptions(),
) -> None:
    """Train a model on cells with expression and positions.

    Writes ``config.yaml``, ``checkpoints/model``, ``checkpoints/last.ckpt`` and ``logs/metrics.csv`` to
    ``OUTPUT_DIR/EXP_NAME``.

    Parameters
    ----------
    config
        YAML file with options; command-line flags take precedence.
    print_config
        Print the resulting configuration as YAML and exit. The data need not exist.
    """
    if not print_config:
        if run.resume is not None:
            run.checkpoint(check_free=False)  # an error if there is no run, whose configuration names the data
        source.check()
    chosen = resolved(options, run, source, setup)
    if print_config:
        sys.stdout.write(HEADER + chosen.to_yaml())
        return
    from alphastomics.cli._train import run_training

    run_training(chosen, run, source, setup, options)


@app.command
def sample(
    *,
    query: QueryOptions,
    output: Path = SAMPLED,
    options: SampleOptions = SampleOptions(),
) -> None:
    """Sample positions of cells from their expression, expression from positions, or whole slices.

    The modality that is sampled is never read from the cells, except with ``--inpaint``.

    Parameters
    ----------
    output
        ``.h5ad`` or ``.parquet`` file to write. An existing file of the default name is not replaced.
    """
    from alphastomics.cli._cells import draw_slices, sample_cells, slice_sizes, use_layer_as_x, write_tissue
    from alphastomics.cli._output import prepare_file
    from alphastomics.cli._query import PARQUET, TISSUES, check_sample, check_suffix

    check_suffix(output, TISSUES)
    check_sample(query, output, options.mode, options.n_cells)
    prepare_file(output)
    flag = f"--sample-mode {options.mode}"
    if options.mode == "joint" and query.has_cells:
        model, cells = query.read([options.mode], flag, positions=False, expression=False)
        sizes = slice_sizes(cells, model.schema)
        logger.info(
            "%s sets the number of cells, %d in %d slice%s; its values are not used.",
            query.origin, sum(sizes), len(sizes), "s" * (len(sizes) > 1),
        )  # fmt: skip
        tissue = draw_slices(model, sizes, **vars(options))
    elif options.mode == "joint":
        model = query.load([options.mode], flag)
        tissue = model.sample(**vars(options))
    else:
        reads = {
            "positions": options.inpaint or options.mode == "pos_to_expr",
            "expression": options.inpaint or options.mode == "expr_to_pos",
        }
        model, cells = query.read([options.mode], flag, **reads)
        if output.suffix == PARQUET:
            use_layer_as_x(cells, model.schema)
        tissue = sample_cells(model, cells, **vars(options))
    position_key = options.key_added if options.mode == "expr_to_pos" else model.schema.position_key
    write_tissue(tissue, output, model.schema, position_key)
    logger.info("%d cells are in %s.", tissue.n_obs, output)


@app.command(name="test")
def score(
    *,
    query: QueryOptions,
    output: Path | None = None,
    seed: int = SamplingConfig.random_state,
) -> None:
    """Place the cells of every slice without reading their positions, and score the result against the true positions.

    Parameters
    ----------
    output
        JSON file for the scores.
    seed
        Seed of the placement and of the baselines.
    """
    from alphastomics.cli._output import prepare_file, to_text
    from alphastomics.cli._scores import score_model, warn_if_trained, write_scores

    if output is not None:
        prepare_file(output)
    model, cells = query.read(["expr_to_pos"], "test", positions=True)
    warn_if_trained(model, cells)
    table = score_model(model, cells, random_state=seed)
    sys.stdout.write(to_text(table))
    if output is not None:
        write_scores(output, table)


@app.command
def extract(
    *,
    query: QueryOptions,
    output: Path,
    options: EmbeddingOptions = EmbeddingOptions(),
) -> None:
    """Embed cells from their expression, the cells of their slice, and optionally their positions.

    Parameters
    ----------
    output
        File to write. ``.npz``: arrays ``latent`` (cells, width) and ``obs_names``. ``.parquet``: columns ``cell_id``,
        ``slice_id`` and ``embedding``. ``.h5ad``: ``obs``, ``obsm["X_alphastomics"]`` and its provenance.
    """
    from alphastomics.cli._cells import embed_cells, write_latent
    from alphastomics.cli._output import prepare_file
    from alphastomics.cli._query import EMBEDDINGS, check_suffix

    check_suffix(output, EMBEDDINGS)
    prepare_file(output)
    modes = ["pos_to_expr"] if options.use_positions else []
    model, cells = query.read(modes, "--use-positions", positions=options.use_positions)
    write_latent(cells, embed_cells(model, cells, **options.arguments()), output, model, **options.arguments())
    logger.info("Embeddings of %d cells are in %s.", cells.n_obs, output)


@app.command
def provenance(input_data: ExistingFile, *, key: str | None = None) -> None:
    """Print how a result was made: model, parameters, seeds and versions.

    Parameters
    ----------
    input_data
        ``.h5ad`` file with a result of ``sample``, ``extract`` or ``alphastomics.tl.reconstruct``.
    key
        Entry of ``uns``. By default all entries with a provenance.
    """
    from anndata import AnnData

    from alphastomics.data._h5ad import read_uns
    from alphastomics.tl import provenance as describe

    sys.stdout.write(f"{describe(AnnData(uns=read_uns(input_data)), key)}\n")


@app.command
def compare(
    *,
    input_data: ExistingFile,
    output_dir: Annotated[Path, Parameter(alias="--output")],
    setup: SetupOptions = SetupOptions(),
    options: ComparisonOptions = ComparisonOptions(),
) -> None:
    """Train several configurations with several seeds, and score each on held-out slices.

    Writes ``comparison.csv`` and ``comparison.md`` (the table), ``comparison.png`` (curves and scores) and
    ``comparison.json`` (every run). Run the same command again to resume after an interruption.

    Parameters
    ----------
    input_data
        Cells with expression and positions: an ``.h5ad`` or ``.parquet`` file.
    output_dir
        Folder for the comparison: a new one, or that of an earlier comparison.
    """
    from alphastomics.cli._compare import run_comparison
    from alphastomics.cli._output import to_text

    table = run_comparison(input_data, output_dir, setup, options)
    sys.stdout.write(to_text(table.astype(float)))


app.command(upload)


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    traceback: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run a command.

    Parameters
    ----------
    traceback
        Show the traceback of an error.
    """
    try:
        with messages():
            app(tokens, **PASS_ON)
    except KeyboardInterrupt:
        return INTERRUPTED
    except USER_ERRORS as error:
        if traceback:
            raise
        print_error(error)
        return 1
    return 0


def _expand_home(token: str) -> str:
    """Expand ``~`` in ``--flag=~/x``, as shells do in ``--flag ~/x``."""
    name, equals, value = token.partition("=")
    return name + equals + os.path.expanduser(value) if name.startswith("--") else token


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments; those of the process when None.

    Returns
    -------
    Exit status: 0, 1 after an error, 2 for an invalid command line, 130 after Ctrl-C.
    """
    # OpenMP threads wait for each other in a busy loop. If another program uses the cores too, training becomes up to fifty
    # times slower; threads that sleep sooner cost less than a fifth otherwise. torch, which reads this, is not imported yet.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    try:
        return app.meta([_expand_home(token) for token in (sys.argv[1:] if argv is None else argv)], **PASS_ON) or 0
    except CycloptsError as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
