"""Records of stage 1: a file for each slice, and an overview of the folder, ``stage1.json``."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alphastomics._io._atomic import remove_temporary, write_json
from alphastomics._io._errors import format_names
from alphastomics.data._values import Evidence
from alphastomics.data.parquet._files import check_written, make_folder, read_json
from alphastomics.data.parquet._read import UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from alphastomics.config import Stage1Options
    from alphastomics.data._values import ValueKind
    from alphastomics.data.preprocess._h5ad import RawSlice

logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "alphastomics-slices", 4
OVERVIEW = "stage1.json"
_RECORD = {
    "slice": str,
    "parameters": dict,
    "n_cells": int,
    "n_values": int,
    "evidence": dict,
    "totals": list,
    "labels": list,
    "unmeasured": list,
    "checksums": list,
}
_OVERVIEW = {"options": dict, "n_dims": int}
_FINISHED = _OVERVIEW | {"genes": list, "slices": list}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceTask:
    """Writing of one slice.

    ``number`` is its position in the :func:`natural_order` of names, ``target`` the file without its suffix, and
    ``options`` are those of the stage, with all genes.
    """

    number: int
    raw: RawSlice
    target: Path
    options: Stage1Options

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that determines the result."""
        source = self.raw.path.stat()
        return {
            "options": fingerprint(self.options.to_dict()),
            "source": [self.raw.path.name, source.st_size, source.st_mtime_ns],
            "slice": self.raw.name,
            "number": self.number,
        }


def fingerprint(values: Any) -> str:
    """Short hash of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_overview(folder: Path, *, finished: bool = True) -> dict[str, Any]:
    """Read the overview of a folder.

    Raises ``FileNotFoundError`` if it is missing, or with ``finished`` if stage 1 has not finished, and ``ValueError``
    if it is damaged, or of another version or program.
    """
    path = folder / OVERVIEW
    missing = f"{folder} has no finished slices; run alphastomics stage1 --output-dir {folder}"
    if not path.is_file():
        raise FileNotFoundError(missing)
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe slices of AlphaSTomics; move it, or choose another folder")
    if values.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} was written by another version of alphastomics; delete {folder} and run stage1 again")
    if finished and "slices" not in values:
        raise FileNotFoundError(missing)
    entries = values.get("slices", [])
    whole = isinstance(entries, list) and all(_has(entry, {"file": str, "slice": str}) for entry in entries)
    whole = whole and _has(values, _FINISHED if finished else _OVERVIEW) and bool(entries or not finished)
    if not whole or not _has(values["options"], {"log_normalize": bool}):
        raise ValueError(f"{path} is damaged; delete the folder {folder} and run stage1 again")
    return values


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a slice; raises FileNotFoundError if it is missing, ValueError if it is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run stage1 again")
    record = read_json(path)
    if not _has(record, _RECORD) or "animal" not in record:
        raise ValueError(f"{path} is damaged; delete it and run the same command again")
    values: dict[str, Any] = record
    return values


def joint_kind(records: Iterable[dict[str, Any]]) -> ValueKind:
    """Kind of the values of all slices together; those of a few cells may be 0 and 1 among counts."""
    joint = Evidence()
    for record in records:
        joint.merge(Evidence(**record["evidence"]))
    return joint.kind


def _has(values: Any, kinds: dict[str, type]) -> bool:
    return isinstance(values, dict) and all(isinstance(values.get(name), kind) for name, kind in kinds.items())


def check_slice_folder(output_dir: Path, options: Stage1Options) -> None:
    """Check that a folder can hold slices of these parameters.

    Raises ``FileExistsError`` for other files with the names of slices, and ``ValueError``, which lists the
    differences, for slices made with other parameters.
    """
    if not (output_dir / OVERVIEW).is_file():
        if foreign := sorted(output_dir.glob("[0-9]" * 5 + ".*")):
            raise FileExistsError(f"{foreign[0]} was not written by stage1; move it, or choose another folder")
        return
    earlier, now = read_overview(output_dir, finished=False)["options"], options.to_dict()
    differ = [name for name in now if earlier.get(name) != now[name]]
    if differ:
        listed = "; ".join(
            f"{name} was {truncate(repr(earlier.get(name)))}, is {truncate(repr(now[name]))}" for name in differ
        )
        raise ValueError(
            f"{output_dir} holds slices made with other parameters ({listed}); choose another folder, or delete it"
        )


def start_stage1(output_dir: Path, options: Stage1Options) -> None:
    """Start stage 1 in a folder: check it with :func:`check_slice_folder`, and write the overview."""
    check_slice_folder(output_dir, options)
    make_folder(output_dir)
    remove_temporary(output_dir)
    write_json(output_dir / OVERVIEW, _overview(options), unique=True)


def finish_stage1(
    output_dir: Path, options: Stage1Options, tasks: Sequence[SliceTask], records: Sequence[dict[str, Any]]
) -> None:
    """Finish stage 1: write the overview with all slices."""
    genes = tasks[0].options.genes
    assert genes is not None  # set by plan_slices
    for task in tasks:
        check_written(task.target.with_suffix(".json"))
    remove_temporary(output_dir)  # of workers that were killed
    files = [{"file": task.target.name, "slice": record["slice"]} for task, record in zip(tasks, records, strict=True)]
    write_json(output_dir / OVERVIEW, _overview(options) | {"genes": list(genes), "slices": files}, unique=True)
    for record in records:
        if names := record["unmeasured"]:
            logger.warning(UNMEASURED, record["slice"], len(names), format_names(names))
    if options.log_normalize and joint_kind(records) != "counts":
        others = [record["slice"] for record in records if joint_kind([record]) != "counts"]
        logger.warning(
            "Values of %d slices, the first of them %r, are not counts but are log-transformed as counts; "
            "pass --skip-log-normalize if they are already transformed.",
            len(others),
            others[0],
        )


def _overview(options: Stage1Options) -> dict[str, Any]:
    n_dims = 3 if options.position_is_3d or options.z_spacing else 2
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "options": options.to_dict(), "n_dims": n_dims}


def truncate(text: str) -> str:
    """Text of limited length."""
    return text if len(text) <= 60 else text[:57] + "…"
