"""Stage 2: slices of one or several folders are merged into one dataset, split, scaled and described by a schema.

Row groups hold cells of one slice along its Hilbert curve. Contexts, which also hold cells of one slice, are shuffled
when they are drawn; shuffling all cells on disk would scatter every slice over all files.

Only files of stage 2 are removed: those that ``metadata.json`` lists, Parquet files with the metadata of this package,
and files with the names of shards in a folder with ``parameters.json``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from alphastomics._io._atomic import TEMPORARY, remove_temporary, write_json
from alphastomics._io._errors import format_names
from alphastomics.data._matrix import Moments
from alphastomics.data.parquet._dataset import FOLDER, METADATA, METADATA_KEY, SPLITS, DatasetInfo
from alphastomics.data.parquet._files import (
    check_written,
    checksum,
    footer_checksum,
    make_folder,
    read_json,
)
from alphastomics.data.preprocess._plan import Plan
from alphastomics.data.preprocess._records import fingerprint
from alphastomics.data.preprocess._shards import STATISTICS, write_shard
from alphastomics.data.preprocess._slice import read_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from alphastomics.config import Stage2Options

logger = logging.getLogger(__name__)

PARAMETERS = "parameters.json"
_STEM = rf"({'|'.join(SPLITS)})(-\d+)?"
SHARD, STATISTICS_NAME = re.compile(rf"{_STEM}\.parquet"), re.compile(rf"{_STEM}{re.escape(STATISTICS)}")


def unfinished_folder(output_dir: Path) -> Path:
    """The folder that holds the files until all of them are written."""
    return output_dir / f"{FOLDER}.tmp"


def check_ownership(output_dir: Path, listed: Collection[str] = ()) -> None:
    """Raise a FileExistsError, which names the file, for files that stage 2 did not write.

    ``listed`` are the names of the files in ``data`` that ``metadata.json`` lists.
    """
    _check_files(output_dir / FOLDER, lambda path: path.is_file() and (path.name in listed or _is_shard(path)))
    unfinished = unfinished_folder(output_dir)
    if _is_parameters(unfinished / PARAMETERS):
        _check_files(unfinished, lambda path: path.name == PARAMETERS or _is_named(path))
    else:  # interrupted before the first file, or after the last
        _check_files(unfinished, lambda path: bool(TEMPORARY.fullmatch(path.name)) or _is_shard(path))


def clear(folder: Path) -> None:
    """Remove a folder after :func:`check_ownership`; ``parameters.json``, which marks a folder of stage 2, is removed last."""
    if folder.is_dir():
        for path in sorted(folder.iterdir(), key=lambda path: path.name == PARAMETERS):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _check_files(folder: Path, is_ours: Callable[[Path], bool]) -> None:
    found = [folder] if folder.is_symlink() or folder.exists() else []
    if folder.is_dir() and not folder.is_symlink():
        found = [path for path in sorted(folder.iterdir()) if path.is_symlink() or not is_ours(path)]
    if found:
        raise FileExistsError(f"{found[0]} is not a file of a dataset; move it, or choose another folder")


def _is_parameters(path: Path) -> bool:
    try:
        values = read_json(path) if path.is_file() else None
    except ValueError:
        return False
    return isinstance(values, dict) and {"stage2", "slices"} <= set(values)


def _is_named(path: Path) -> bool:
    return path.is_file() and any(kind.fullmatch(path.name) for kind in (SHARD, STATISTICS_NAME, TEMPORARY))


def _is_shard(path: Path) -> bool:
    """Whether a file has the name of a shard and the metadata of this package."""
    if not (SHARD.fullmatch(path.name) and path.is_file()):
        return False
    try:
        return METADATA_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def write_dataset(input_dirs: Sequence[Path], output_dir: Path, options: Stage2Options, run: Any = map) -> DatasetInfo:
    """Write a dataset, or return an earlier one of the same slices and parameters.

    ``input_dirs`` are folders that stage 1 has finished; ``run`` applies a function to tasks in order, as ``map`` does.

    Raises
    ------
    FileNotFoundError, ValueError
        If the input cannot be used, or the folder holds another dataset.
    """
    slices = read_slices(input_dirs)
    parameters = all_parameters(options, {each.name: each.record["parameters"] for each in slices})
    earlier = read_earlier(output_dir, parameters)
    if earlier is not None:
        if _is_intact(output_dir, earlier):
            return earlier
        check_ownership(output_dir, [shard.file for shard in earlier.shards])
        logger.warning("The dataset in %s is damaged and is written again.", output_dir)
        clear(output_dir / FOLDER)
        (output_dir / METADATA).unlink()
    plan = Plan(slices, options)
    check_ownership(output_dir)
    unfinished = _start(output_dir, parameters)
    moments, totals, shards = Moments(len(slices[0].genes)), np.zeros(len(slices[0].genes)), []
    tasks = plan.tasks(unfinished)
    for written in tqdm(run(write_shard, tasks), total=len(tasks), desc="Writing files", unit="file"):
        path = unfinished / written.shard.file
        check_written(path)
        shards.append(replace(written.shard, footer=footer_checksum(path)))
        moments.merge(written.moments)
        totals += written.totals
    info = DatasetInfo(
        schema=plan.schema(moments, totals),
        shards=tuple(shards),
        unmeasured={each.name: tuple(each.record["unmeasured"]) for each in slices if each.record["unmeasured"]},
        counts=plan.counts,
        parameters=parameters,
    )
    _finish(output_dir, unfinished)
    info.write(output_dir)
    return info


def all_parameters(options: Stage2Options, slices: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Parameters of a dataset: options of stage 2, and a fingerprint of the parameters of each slice."""
    return {"stage2": options.to_dict(), "slices": {name: fingerprint(made) for name, made in slices.items()}}


def read_earlier(output_dir: Path, parameters: dict[str, Any]) -> DatasetInfo | None:
    """The dataset in a folder, if any; raises ValueError, which lists the differences, if it has other parameters."""
    if not (output_dir / METADATA).is_file():
        return None
    earlier = DatasetInfo.read(output_dir, check=False)
    if earlier.parameters != parameters:
        raise ValueError(_differences(output_dir, earlier.parameters, parameters))
    return earlier


def check_output(output_dir: Path, parameters: dict[str, Any]) -> None:
    """Check, before slices are read, that a folder can hold a dataset of these parameters.

    Raises ``FileExistsError`` for files of other programs, and ``ValueError`` for another dataset.
    """
    if read_earlier(output_dir, parameters) is None:
        check_ownership(output_dir)


def _start(output_dir: Path, parameters: dict[str, Any]) -> Path:
    """Create the folder of unfinished files, or keep that of an earlier call with the same parameters."""
    unfinished = unfinished_folder(output_dir)
    record = unfinished / PARAMETERS
    make_folder(output_dir)
    remove_temporary(output_dir)
    clear(output_dir / FOLDER)
    if not record.is_file() or read_json(record) != parameters:
        clear(unfinished)
        unfinished.mkdir(parents=True)
        write_json(record, parameters, unique=True)
    return unfinished


def _is_intact(folder: Path, info: DatasetInfo) -> bool:
    files = [(folder / FOLDER / shard.file, shard.sha256) for shard in info.shards]
    return all(path.is_file() and checksum(path) == sha256 for path, sha256 in files)


def _finish(output_dir: Path, unfinished: Path) -> None:
    remove_temporary(unfinished)
    for path in (*unfinished.glob(f"*{STATISTICS}"), unfinished / PARAMETERS):
        path.unlink()
    unfinished.rename(output_dir / FOLDER)


def _differences(folder: Path, earlier: dict[str, Any], now: dict[str, Any]) -> str:
    before, after = earlier.get("stage2", {}), now["stage2"]
    differ = [
        f"{name} was {before.get(name)!r}, is {after[name]!r}" for name in after if before.get(name) != after[name]
    ]
    differ += _differing_slices(earlier.get("slices", {}), now["slices"])
    return f"{folder} holds a dataset made with other parameters ({'; '.join(differ)}); choose another folder, or delete it"


def _differing_slices(before: dict[str, str], after: dict[str, str]) -> list[str]:
    kinds = {
        "new slices": [name for name in after if name not in before],
        "missing slices": [name for name in before if name not in after],
        "slices made with other parameters": [name for name in after if name in before and before[name] != after[name]],
    }
    return [f"{kind}: {format_names(names)}" for kind, names in kinds.items() if names]
