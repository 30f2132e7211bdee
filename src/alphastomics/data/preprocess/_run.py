"""Entry points of preprocessing: both stages, and each alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from alphastomics.data.preprocess._plan import split_slices
from alphastomics.data.preprocess._records import check_slice_folder, finish_stage1, start_stage1
from alphastomics.data.preprocess._stage1 import plan_slices, write_slice
from alphastomics.data.preprocess._stage2 import all_parameters, check_output, write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    from alphastomics.config import Stage1Options, Stage2Options
    from alphastomics.data._schema import TissueSchema
    from alphastomics.data.preprocess._records import SliceTask

    Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

INTERMEDIATE = "_intermediate_slices"


def stage1(
    input_dir: str | PathLike[str], output_dir: str | PathLike[str], options: Stage1Options, *, run: Run = map
) -> int:
    """Write every slice of the ``.h5ad`` files of a folder to a separate file.

    Slices that an earlier call with the same parameters wrote are kept.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for the slices.
    options
        Genes and keys of the input.
    run
        Applies a function to tasks and returns the results in order: ``map``, or the object that :func:`dask_cluster` yields.

    Returns
    -------
    Number of slices.

    Raises
    ------
    FileNotFoundError, KeyError, ValueError
        If the input is invalid, or the folder contains slices made with other parameters.
    """
    target = Path(output_dir).absolute()  # workers of a cluster have other working directories
    tasks = plan_slices(Path(input_dir).absolute(), target, options)
    return _write_slices(tasks, target, options, run)


def _write_slices(tasks: Sequence[SliceTask], target: Path, options: Stage1Options, run: Run) -> int:
    start_stage1(target, options)
    records = list(tqdm(run(write_slice, tasks), total=len(tasks), desc="Reading slices", unit="slice"))
    finish_stage1(target, options, tasks, records)
    return len(tasks)


def stage2(
    input_dirs: Sequence[str | PathLike[str]],
    output_dir: str | PathLike[str],
    options: Stage2Options,
    *,
    run: Run = map,
) -> TissueSchema:
    """Merge slices into one dataset.

    Parameters
    ----------
    input_dirs
        Folders written by :func:`stage1`.
    output_dir
        Folder for ``data`` and ``metadata.json``.
    options
        How the dataset is split and scaled.
    run
        Applies a function to tasks and returns the results in order: ``map``, or the object that :func:`dask_cluster` yields.

    Returns
    -------
    The schema, fitted to the cells of the training set.

    Raises
    ------
    FileNotFoundError, ValueError
        If the slices cannot be merged, or the folder contains another dataset.
    """
    folders = [Path(folder).absolute() for folder in input_dirs]
    return write_dataset(folders, Path(output_dir).absolute(), options, run).schema


def preprocess(
    input_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    first: Stage1Options,
    second: Stage2Options,
    *,
    run: Run = map,
) -> TissueSchema:
    """Convert the ``.h5ad`` files of a folder to a dataset: :func:`stage1`, then :func:`stage2`.

    Slices are written to ``output_dir/_intermediate_slices``, which may be deleted afterwards.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for ``data`` and ``metadata.json``.
    first, second
        Options of the stages.
    run
        Applies a function to tasks and returns the results in order: ``map``, or the object that :func:`dask_cluster` yields.

    Returns
    -------
    The schema, fitted to the cells of the training set.

    Raises
    ------
    FileNotFoundError, KeyError, ValueError
        As in :func:`stage1` and :func:`stage2`.
    """
    target = Path(output_dir).absolute()
    slices = target / INTERMEDIATE
    tasks = plan_slices(Path(input_dir).absolute(), slices, first)
    # Errors of stage 2 are raised before stage 1 begins, which may take hours.
    check_slice_folder(slices, first)
    raw = sorted((task.raw for task in tasks), key=lambda each: each.name)
    split_slices([each.name for each in raw], [len(each.rows) for each in raw], [each.animal for each in raw], second)
    check_output(target, all_parameters(second, {task.raw.name: task.parameters for task in tasks}))
    _write_slices(tasks, slices, first, run)
    return stage2([slices], target, second, run=run)
