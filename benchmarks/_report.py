"""Results of a run: the machine, a JSON file that survives interruptions, a table."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PACKAGES = ("alphastomics", "anndata", "numpy", "POT", "scikit-learn", "scipy", "scvi-tools", "torch")
IDENTITY = ("method", "fold", "seed")


def versions() -> dict[str, str | None]:
    """Versions of Python and of packages that could change a score; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, threads, and the GPU if torch is imported and finds one."""
    description: dict[str, Any] = {"cpu": _cpu_model(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        description["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            description["gpu"] = torch.cuda.get_device_name()
    return description


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
        try:
            json.dump(content, file, indent=1)
            file.write("\n")
        except BaseException:
            file.close()
            temporary.unlink()
            raise
    temporary.chmod(0o644)
    temporary.replace(path)


class Results:
    """Finished runs of one benchmark, kept in a JSON file that is rewritten after every run.

    Parameters
    ----------
    path
        The file; its runs are read.
    header
        Values above the entries, such as the name of the benchmark.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, dict(header)
        self.entries: list[dict[str, Any]] = json.loads(path.read_text())["entries"] if path.is_file() else []

    def find(self, parameters: Mapping[str, Any], **identity: Any) -> dict[str, Any] | None:
        """The finished run of this method, fold and seed with these parameters, if any."""
        parameters = json.loads(json.dumps(parameters))
        for entry in self.entries:
            if all(entry[key] == value for key, value in identity.items()) and entry["parameters"] == parameters:
                return entry
        return None

    def add(self, *, parameters: Mapping[str, Any], scores: Mapping[str, Any], **fields: Any) -> None:
        """Add a finished run, replacing one of the same method, fold and seed, and write the file."""
        entry = {**fields, "parameters": dict(parameters), "scores": dict(scores)}
        entry |= {"versions": versions(), "machine": machine()}
        self.entries = [old for old in self.entries if any(old[key] != entry[key] for key in IDENTITY)]
        self.entries.append(entry)
        self.write()

    def write(self, **summary: Any) -> None:
        """Write the header, ``summary`` and all entries."""
        write_json(self.path, {**self.header, **summary, "entries": self.entries})


def summarize(
    entries: Iterable[Mapping[str, Any]], methods: Sequence[str], folds: Sequence[str], seeds: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Mean over folds of every seed, then mean and standard deviation over seeds; a seed without all folds is left out.

    Returns
    -------
    method -> ``n_seeds``, ``seconds`` (mean of a run) and, for every score, ``[mean, sd]``, sd None for a single seed.
    """
    found = {(e["method"], e["fold"], e["seed"]): e for e in entries}
    summary: dict[str, dict[str, Any]] = {}
    for method in methods:
        runs = [[found.get((method, fold, seed)) for fold in folds] for seed in seeds]
        complete = [[run for run in row if run is not None] for row in runs if None not in row]
        if not complete:
            continue
        line: dict[str, Any] = {"n_seeds": len(complete)}
        line["seconds"] = float(np.mean([run["seconds"] for row in complete for run in row]))
        for score in complete[0][0]["scores"]:
            means = [float(np.mean([run["scores"][score] for run in row])) for row in complete]
            line[score] = [float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else None]
        summary[method] = line
    return summary


def mean_sd(mean: float, sd: float | None, form: str = ".3f") -> str:
    """Mean ± standard deviation, or the mean alone without one."""
    return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:.{form[-2]}f}"


def table(summary: Mapping[str, Mapping[str, Any]], scores: Sequence[str]) -> str:
    """The summary as a Markdown table, one line per method."""
    lines = [["method", *scores, "seconds", "seeds"]]
    for method, line in summary.items():
        cells = [mean_sd(*line[score]) if score in line else "" for score in scores]
        lines.append([method, *cells, f"{line['seconds']:.0f}", str(line["n_seeds"])])
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is the header."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    rows.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(rows)
