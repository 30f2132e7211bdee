"""The command ``reconstruct``: from files to a query with positions. Importing this module imports no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphastomics._io._errors import check_folder
from alphastomics.cli._output import prepare_file, write_h5ad
from alphastomics.cli._query import H5AD, PARQUET, QueryOptions, check_suffix, read_reference
from alphastomics.config import PlacementConfig, SetupConfig, TrainerConfig
from alphastomics.config._setting import flag, settings_of

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics.cli._options import ReconstructOptions, SetupOptions

RECONSTRUCTED = Path("reconstructed.h5ad")
OF_A_MODEL = {*settings_of(PlacementConfig), "n_samples", "adapt", "accelerator"}  # options beside --checkpoint


def check_reconstruction(
    reference: Path | None, checkpoint: str | None, output: Path, model_dir: Path | None, arguments: dict[str, Any]
) -> None:
    """Check that the options agree, and that the files can be written.

    Raises
    ------
    FileExistsError
        If the default of ``output``, or ``model_dir``, exists.
    ValueError
        If an option has no effect beside another.
    """
    if checkpoint is not None:
        if reference is not None:
            raise ValueError("--reference and --checkpoint exclude each other; pass one of them")
        unused = [flag(name) for name in arguments if name not in OF_A_MODEL]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} cannot change a trained model; leave it out, or pass --reference instead of --checkpoint"
            )
    check_suffix(output, (H5AD,))
    if output == RECONSTRUCTED and output.is_file():
        raise FileExistsError(f"{output} exists; pass another file to --output")
    if model_dir is not None:
        if model_dir.exists():
            raise FileExistsError(f"{model_dir} exists; pass another folder to --model-dir")
        check_folder(model_dir)
    prepare_file(output)


def run_reconstruction(
    query: Path,
    *,
    reference: Path | None,
    checkpoint: str | None,
    output: Path,
    model_dir: Path | None,
    setup: SetupOptions,
    options: ReconstructOptions,
    seed: int,
) -> AnnData:
    """Place the cells of a file, and write them.

    Raises
    ------
    KeyError, OSError, ValueError
        If the files or options are invalid; raised before any training.
    """
    chosen = options.changed() | {
        name: value for name, value in vars(setup).items() if value != getattr(SetupConfig, name)
    }
    check_reconstruction(reference, checkpoint, output, model_dir, chosen)
    from alphastomics import tl

    if checkpoint is not None:
        accelerator = chosen.pop("accelerator", TrainerConfig.accelerator)
        source = QueryOptions(checkpoint=checkpoint, input_data=query, accelerator=accelerator)
        trained, cells = source.read(["expr_to_pos"], "reconstruct", positions=False)
        known = None
    else:
        check_suffix(query, (H5AD, PARQUET))
        trained, cells = None, read_reference(query)
        known = None if reference is None else read_reference(reference)
        chosen["devices"] = 1
    model: Any = tl.reconstruct(cells, known, model=trained, return_model=True, random_state=seed, **chosen)
    if model_dir is not None:
        model.save(model_dir)
    write_h5ad(output, cells)
    return cells
