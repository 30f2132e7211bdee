"""Finished runs of a comparison: the file that keeps them, and the tables that are made of them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pandas as pd

from alphastomics._disk import naming

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT, FORMAT_VERSION = "alphastomics-comparison", 1
SIZES = ("parameters", "active_parameters", "d_model")
MEASURES = ("n_steps", "train_seconds", "step_seconds", "step_processor_seconds", "train_loss", "validation_loss")
CURVE = ("step", "seconds", "train_loss", "validation_loss")
SPREAD = ("train_loss", "validation_loss")  # measures whose standard deviation is of interest, as that of scores is
NOT_SCORES = ("n_cells", "n_skipped", "n_genes")


class RunFile:
    """Finished runs in a JSON file, which is replaced as a whole after every run.

    Parameters
    ----------
    path
        The file; None keeps runs in memory only.

    Raises
    ------
    ValueError
        If the file is not one of ours, or not whole.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.runs = _read(path)

    def find(self, name: str, seed: int, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished run of that name and seed, if it had exactly these settings."""
        for run in self.runs:
            if (run["configuration"], run["seed"], run["settings"]) == (name, seed, settings):
                return run
        return None

    def add(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a finished run, beside those that others have added meanwhile."""
        plain = as_json(run)
        if self.path is not None and self.path.exists():
            self.runs = _read(self.path)
        self.runs.append(plain)
        if self.path is not None:
            _write(self.path, {"format": FORMAT, "format_version": FORMAT_VERSION, "runs": self.runs})
        return plain


def as_json(values: Any) -> Any:
    """Nested values as they will be read back: numbers that are not finite as None, other objects by their ``repr``."""
    return json.loads(json.dumps(_defined(values), default=repr, allow_nan=False))


def _defined(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(name): _defined(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_defined(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is truncated or not JSON ({error}); delete it, or pass another results=…") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} does not hold a comparison; pass another results=…")
    if content.get("format_version") != FORMAT_VERSION:
        version = content.get("format_version")
        raise ValueError(f"{path} has format version {version}; this package reads {FORMAT_VERSION}")
    runs: list[dict[str, Any]] = content["runs"]
    return runs


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path):
            temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            temporary.replace(path)
    finally:
        with suppress(OSError):  # where a file cannot be, none is left
            temporary.unlink()


def tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """Tables of some runs.

    Parameters
    ----------
    runs
        Runs as :class:`RunFile` keeps them.

    Returns
    -------
    ``runs``: one row per run, the mean of its scores over the held-out slices; ``curves``: one row per point;
    ``summary``: one row per configuration, in the order of its first run, see :func:`alphastomics.tl.compare`.
    """
    flat = pd.DataFrame([_row(run) for run in runs])
    points = [
        pd.DataFrame({"configuration": run["configuration"], "seed": run["seed"]} | run["curve"])
        for run in runs
        if run["curve"]["step"]
    ]
    curves = pd.concat(points, ignore_index=True)
    losses = ["train_loss", "validation_loss"]
    curves[losses] = curves[losses].astype(float)
    for name in SIZES:
        flat[name] = flat[name].astype("Int64")  # baselines have no parameters
    return {"summary": _summary(flat), "runs": flat, "curves": curves}


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    scores = pd.DataFrame(list(run["scores"].values()), dtype=float).mean()
    row = {name: run[name] for name in ("configuration", "seed")} | {"held_out": ", ".join(run["held_out"])}
    row |= {name: _number(run[name]) for name in (*SIZES, *MEASURES)} | {"failed": bool(run["failure"])}
    return row | {str(name): float(value) for name, value in scores.items() if name not in NOT_SCORES}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _summary(flat: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds."""
    groups = flat.groupby("configuration", sort=False)
    plain = {"configuration", "seed", "held_out", "failed", *SIZES, *MEASURES}
    scores = [name for name in flat.columns if name not in plain]
    columns: dict[str, pd.Series] = {"n_seeds": groups.size(), "n_failed": groups["failed"].sum()}
    columns |= {name: groups[name].first() for name in SIZES}
    for name in (*MEASURES, *scores):
        columns[name] = groups[name].mean()
        if name in SPREAD or name in scores:
            columns[f"{name}_sd"] = groups[name].std()
    return pd.DataFrame(columns)
