"""Results of a comparison: finished runs in a JSON file, and their tables."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from alphastomics._io._atomic import write_json
from alphastomics._io._json import to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT, FORMAT_VERSION = "alphastomics-comparison", 1
SIZES = ("parameters", "active_parameters", "d_model")
LOSSES = ("train_loss", "validation_loss")
MEASURES = ("n_steps", "train_seconds", "step_seconds", "step_processor_seconds", *LOSSES)
CURVE = ("step", "seconds", *LOSSES)
NOT_SCORES = ("n_cells", "n_skipped", "n_genes")


class RunFile:
    """Finished runs in a JSON file, which is replaced atomically after every run.

    Parameters
    ----------
    path
        The file; None keeps runs in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.runs = path, list[dict[str, Any]]()
        if path is not None:
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder; pass the path of a file as results=…")
            path.parent.mkdir(parents=True, exist_ok=True)
        self._read()

    def find(self, name: str, seed: int, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished run with this name, seed and settings, if any."""
        key = (name, seed, settings)
        return next((run for run in self.runs if (run["configuration"], run["seed"], run["settings"]) == key), None)

    def add(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Append a finished run, after reading runs that other processes appended since."""
        added: dict[str, Any] = as_json(run)
        self._read()
        self.runs.append(added)
        if self.path is not None:
            write_json(self.path, {"format": FORMAT, "format_version": FORMAT_VERSION, "runs": self.runs})
        return added

    def _read(self) -> None:
        path = self.path
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path} is truncated or not JSON ({error}); delete it, or pass another results=…"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not the file of a comparison; pass another results=…")
        if (found := content.get("format_version")) != FORMAT_VERSION:
            raise ValueError(f"{path} has format version {found}, not {FORMAT_VERSION}; pass another results=…")
        self.runs = content["runs"]


def as_json(values: Any) -> Any:
    """Values as JSON returns them: non-finite numbers as None, other objects as their ``repr``."""
    return json.loads(json.dumps(to_plain(values), default=repr, allow_nan=False))


def make_tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """Tables of runs: ``summary`` by configuration, ``runs``, and ``curves``; see :func:`alphastomics.tl.compare`."""
    flat = pd.DataFrame([_row(run) for run in runs])
    points = [
        {"configuration": run["configuration"], "seed": run["seed"]} | dict(zip(CURVE, values, strict=True))
        for run in runs
        for values in zip(*(run["curve"][name] for name in CURVE), strict=True)
    ]
    curves = pd.DataFrame(points, columns=["configuration", "seed", *CURVE])
    curves[list(LOSSES)] = curves[list(LOSSES)].astype(float)
    for name in SIZES:
        flat[name] = flat[name].astype("Int64")  # baselines have no parameters
    return {"summary": _summary(flat), "runs": flat, "curves": curves}


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    """One run, with the mean of its scores over the held-out slices."""
    scores = pd.DataFrame(list(run["scores"].values()), dtype=float).mean()
    row = {name: run[name] for name in ("configuration", "seed")} | {"held_out": ", ".join(run["held_out"])}
    row |= {name: math.nan if run[name] is None else run[name] for name in (*SIZES, *MEASURES)}
    row |= {"failed": bool(run["failure"])}
    return row | {str(name): float(value) for name, value in scores.items() if name not in NOT_SCORES}


def _summary(flat: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds, configurations in the order of their first run."""
    groups = flat.groupby("configuration", sort=False)
    other = {"configuration", "seed", "held_out", "failed", *SIZES, *MEASURES}
    scores = [name for name in flat.columns if name not in other]
    columns: dict[str, pd.Series] = {"n_seeds": groups.size(), "n_failed": groups["failed"].sum()}
    columns |= {name: groups[name].first() for name in SIZES}
    for name in (*MEASURES, *scores):
        columns[name] = groups[name].mean()
        if name in LOSSES or name in scores:
            columns[f"{name}_sd"] = groups[name].std()
    return pd.DataFrame(columns)
