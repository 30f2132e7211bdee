"""The stages, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from alphastomics.data.preprocess._stage1 import SliceTask, begin, end, plan_slices, write_slice
from alphastomics.data.preprocess._stage2 import write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    from alphastomics.data.parquet._dataset import DatasetInfo
    from alphastomics.data.preprocess._options import Stage1Options, Stage2Options

    Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

INTERMEDIATE = "_intermediate_slices"


def stage1(
    input_dir: str | PathLike[str], output_dir: str | PathLike[str], options: Stage1Options, *, run: Run = map
) -> list[SliceTask]:
    """Write every slice of the ``.h5ad`` files of a folder into a file of its own.

    What an earlier call with the same parameters finished is kept.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for the slices.
    options
        Where things are.
    run
        Applies a function to tasks, in order.

    Raises
    ------
    FileNotFoundError, KeyError, ValueError
        If the input cannot be used, or the folder holds slices made with other parameters.
    """
    target = Path(output_dir)
    tasks = plan_slices(Path(input_dir), target, options)
    begin(target, options)
    records = list(tqdm(run(write_slice, tasks), total=len(tasks), desc="Reading slices", unit="slice"))
    end(target, options, tasks, records)
    return tasks


def stage2(
    input_dirs: Sequence[str | PathLike[str]],
    output_dir: str | PathLike[str],
    options: Stage2Options,
    *,
    run: Run = map,
) -> DatasetInfo:
    """Merge slices into one dataset; see :func:`write_dataset`."""
    return write_dataset([Path(folder) for folder in input_dirs], Path(output_dir), options, run)


def preprocess(
    input_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    first: Stage1Options,
    second: Stage2Options,
    *,
    run: Run = map,
) -> DatasetInfo:
    """Both stages; the slices go to ``_intermediate_slices`` of ``output_dir`` and may be deleted afterwards."""
    slices = Path(output_dir) / INTERMEDIATE
    stage1(input_dir, slices, first, run=run)
    return stage2([slices], output_dir, second, run=run)
