"""Stage 2: slices of one or several folders into one dataset, divided, scaled and described.

Row groups hold cells of one slice along its Hilbert curve. What contexts need at random is drawn when they are cut: the
order of contexts, and which cells of a slice come together. A shuffle of all cells, once and for all, would scatter every
slice over all files, and a context, which is made of cells of one slice, would have to read all of them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from alphastomics.data._matrix import Moments
from alphastomics.data.parquet._dataset import FOLDER, METADATA, DatasetInfo
from alphastomics.data.parquet._files import (
    TEMPORARY,
    check_written,
    checksum,
    footer_checksum,
    make_folder,
    read_json,
    sweep,
    write_json,
)
from alphastomics.data.preprocess._ownership import BEGUN, check_ownership, clear, unfinished_folder
from alphastomics.data.preprocess._plan import Plan
from alphastomics.data.preprocess._read_slices import read_slices
from alphastomics.data.preprocess._shards import NOTE, write_shard
from alphastomics.data.preprocess._stage1 import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from alphastomics.data.preprocess._options import Stage2Options

logger = logging.getLogger(__name__)

N_NAMES = 5


def write_dataset(input_dirs: Sequence[Path], output_dir: Path, options: Stage2Options, run: Any = map) -> DatasetInfo:
    """Write a dataset, or give the one that is there if it was made of the same with the same parameters.

    Parameters
    ----------
    input_dirs
        Folders that stage 1 has finished.
    output_dir
        Where ``data`` and ``metadata.json`` go.
    options
        Of the stage.
    run
        Applies a function to tasks, in order: ``map``, or that of a cluster.

    Raises
    ------
    FileNotFoundError, ValueError
        If the input cannot be used, or the folder holds another dataset.
    """
    slices = read_slices(input_dirs)
    parameters = all_parameters(options, {each.name: each.record["parameters"] for each in slices})
    earlier = read_earlier(output_dir, parameters)
    if earlier is not None:
        if _is_whole(output_dir, earlier):
            return earlier
        check_ownership(output_dir, [shard.file for shard in earlier.shards])
        logger.warning("The dataset in %s is damaged, and is made again.", output_dir)
        clear(output_dir / FOLDER)
        (output_dir / METADATA).unlink()
    plan = Plan(slices, options)
    check_ownership(output_dir)
    unfinished = _begin(output_dir, parameters)
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
    _end(output_dir, unfinished)
    info.write(output_dir)
    return info


def all_parameters(options: Stage2Options, slices: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """All that decides a dataset: options, and what stage 1 says of how every slice was made."""
    return {"stage2": options.to_dict(), "slices": {name: fingerprint(made) for name, made in slices.items()}}


def read_earlier(output_dir: Path, parameters: dict[str, Any]) -> DatasetInfo | None:
    """The dataset that is in a folder, if any.

    Raises
    ------
    ValueError
        If it is another; the message says in what.
    """
    if not (output_dir / METADATA).is_file():
        return None
    earlier = DatasetInfo.read(output_dir, check=False)
    if earlier.parameters != parameters:
        raise ValueError(_differences(output_dir, earlier.parameters, parameters))
    return earlier


def check_output(output_dir: Path, parameters: dict[str, Any]) -> None:
    """Refuse a folder to which no dataset of these parameters can go, without reading a slice.

    Raises
    ------
    FileExistsError
        If files of others are in its way.
    ValueError
        If another dataset is there.
    """
    if read_earlier(output_dir, parameters) is None:
        check_ownership(output_dir)


def _begin(output_dir: Path, parameters: dict[str, Any]) -> Path:
    """A folder for files, with those that an earlier call with the same parameters finished."""
    unfinished = unfinished_folder(output_dir)
    begun = unfinished / BEGUN
    make_folder(output_dir)
    sweep(output_dir)
    clear(output_dir / FOLDER)
    if not begun.is_file() or read_json(begun) != parameters:
        clear(unfinished)
        unfinished.mkdir(parents=True)
        write_json(begun, parameters)
    return unfinished


def _is_whole(folder: Path, info: DatasetInfo) -> bool:
    files = [(folder / FOLDER / shard.file, shard.sha256) for shard in info.shards]
    return all(path.is_file() and checksum(path) == sha256 for path, sha256 in files)


def _end(output_dir: Path, unfinished: Path) -> None:
    for note in (*unfinished.glob(f"*{NOTE}"), *unfinished.glob(f"*{TEMPORARY}"), unfinished / BEGUN):
        note.unlink()
    unfinished.rename(output_dir / FOLDER)


def _differences(folder: Path, earlier: dict[str, Any], now: dict[str, Any]) -> str:
    before, after = earlier.get("stage2", {}), now["stage2"]
    differ = [
        f"{name} was {before.get(name)!r}, is {after[name]!r}" for name in after if before.get(name) != after[name]
    ]
    differ += _differing_slices(earlier.get("slices", {}), now["slices"])
    return (
        f"{folder} holds a dataset made with other parameters ({'; '.join(differ)}); name another folder, or delete it"
    )


def _differing_slices(before: dict[str, str], after: dict[str, str]) -> list[str]:
    kinds = {
        "slices it lacks": [name for name in after if name not in before],
        "slices that are not there now": [name for name in before if name not in after],
        "slices that were made otherwise": [name for name in after if name in before and before[name] != after[name]],
    }
    return [
        f"{what}: {', '.join(map(repr, names[:N_NAMES]))}{', …' if len(names) > N_NAMES else ''}"
        for what, names in kinds.items()
        if names
    ]
