"""Time and peak memory of the placement of a section, by its number of cells.

Two simulated sections with the same number of cells, the first one as reference and the second one as query. The stages run one after
the other, in a new process for each size, with one thread and default settings except for the number of training steps:

- ``setup``: reading of the file, ``setup_anndata``, an untrained model;
- ``training``: a fixed number of steps, which is less than a training for use;
- ``statistics``: the training of a second network for a fourth of the steps, at the beginning of ``model.train()``, and the fit of
  statistics at its end;
- ``adaptation``: ``model.adapt(query)``, with at most 30 % of the steps;
- ``placement``: ``model.sample(query)``;
- ``evaluation``: ``tl.evaluate(query)``.

``processor`` is the processor time of a stage and ``seconds`` its wall time; with one thread, both are nearly equal on an idle machine, and
other programs on the machine change only the latter. ``peak`` is the peak resident memory of the process up to the end of a stage, and
``imports`` that before the file is read. Run as ``python -m benchmarks.size``, which prints the table of ``docs/arithmetic.md``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import ONE_THREAD, in_fresh_process, peak_bytes
from benchmarks._report import Results
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RESULT = RESULTS / "size.json"
SIZES = (1_000, 10_000, 100_000, 500_000)
STAGES = ("setup", "training", "statistics", "adaptation", "placement", "evaluation")
METHOD, SEED = "alphastomics", 0
GIB = 2**30


def make_sections(n_cells: int, n_genes: int, path: Path) -> None:
    """Write two simulated sections to a file."""
    import alphastomics as asx

    tissue = asx.datasets.synthetic_tissue(n_slices=2, n_cells=n_cells, n_genes=n_genes, random_state=SEED)
    tissue.write_h5ad(path)


class Stages:
    """Processor and wall time of every stage, and the peak memory of the process up to its end."""

    def __init__(self) -> None:
        self.processor: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measure the code of a ``with`` statement, without the stages that are measured in it."""
        inner = [sum(clock.values()) for clock in (self.processor, self.seconds)]
        start = time.process_time(), time.perf_counter()
        yield
        end = time.process_time(), time.perf_counter()
        for i, clock in enumerate((self.processor, self.seconds)):
            nested = sum(clock.values()) - inner[i]
            clock[stage] = clock.get(stage, 0.0) + end[i] - start[i] - nested
        self.peak[stage] = peak_bytes()


def measure(path: Path, n_steps: int) -> dict[str, Any]:
    """Run all stages on the sections in a file."""
    import anndata as ad

    import alphastomics as asx

    evaluate = asx.tl.evaluate  # imports what it needs, as does the class
    stages = Stages()

    from alphastomics.train import session

    cross_fit = session.cross_fit

    def measured(*args: Any, **kwargs: Any) -> Any:
        with stages.measure("statistics"):
            return cross_fit(*args, **kwargs)

    session.cross_fit = measured

    class Model(asx.model.AlphaSTomics):  # type: ignore[misc]
        def _fit_draws(self, *args: Any) -> None:
            with stages.measure("statistics"):
                super()._fit_draws(*args)

        def _fit_statistics(self, *args: Any) -> None:
            with stages.measure("statistics"):
                super()._fit_statistics(*args)

    imports = peak_bytes()
    with stages.measure("setup"):
        tissue = ad.read_h5ad(path)
        first = tissue.obs["slice_id"] == "slice_0"
        reference, query = tissue[first].copy(), tissue[~first].copy()
        del tissue
        Model.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
        model = Model(reference, mode="expr_to_pos", random_state=SEED)
    with stages.measure("training"):
        model.train(max_steps=n_steps, enable_progress_bar=False)
    with stages.measure("adaptation"):
        model.adapt(query)
    with stages.measure("placement"):
        query.obsm["spatial_reconstructed"] = model.sample(query).obsm["spatial_reconstructed"]
    with stages.measure("evaluation"):
        evaluate(query)
    found = {"processor": stages.processor, "seconds": stages.seconds, "peak": stages.peak}
    ordered = {name: {stage: values[stage] for stage in STAGES} for name, values in found.items()}
    return {**ordered, "imports": imports, "n_steps": model.trainings_[-1]["n_steps"]}


def run(n_cells: int, n_genes: int, n_steps: int) -> dict[str, Any]:
    """Simulate sections and measure all stages, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sections.h5ad"
        common = ("--genes", n_genes, "--steps", n_steps, "--file", file)
        in_fresh_process("benchmarks.size", "--make", n_cells, *common)
        return in_fresh_process("benchmarks.size", "--measure", *common, environment=ONE_THREAD)


def size_table(path: Path = RESULT) -> str:
    """The measured sizes as a Markdown table, below a line with what was measured; empty without measurements."""
    if not path.is_file():
        return ""
    entries = json.loads(path.read_text())["entries"]
    entries = sorted(entries, key=lambda entry: int(entry["fold"]))
    steps, genes = entries[0]["parameters"]["steps"], entries[0]["parameters"]["genes"]
    head = ["cells of each section", "setup", f"{steps} training steps", *STAGES[2:], "sum", "peak memory"]
    lines = ["| " + " | ".join(head) + " |", "| ---: |" + " ---: |" * (len(head) - 1)]
    for entry in entries:
        seconds, peak = entry["scores"]["processor"], max(entry["scores"]["peak"].values())
        times = [_time(seconds[stage]) for stage in STAGES] + [_time(sum(seconds.values()))]
        lines.append(f"| {int(entry['fold']):,} | " + " | ".join(times) + f" | {peak / GIB:.2f} GiB |")
    return f"{genes} genes, one thread of {entries[0]['machine']['cpu']}:\n\n" + "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.size", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", type=int, default=list(SIZES), help="cells of each of both sections")
    parser.add_argument("--genes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--make", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the sizes that are not finished, and print the table."""
    options = parse(argv)
    if options.make is not None:
        make_sections(options.make, options.genes, options.file)
        print(json.dumps({"n_cells": options.make}))
        return
    if options.measure:
        print(json.dumps(measure(options.file, options.steps)))
        return
    results = Results(options.output, {"benchmark": "size"})
    parameters = {"genes": options.genes, "steps": options.steps}
    for n_cells in options.cells:
        identity = {"method": METHOD, "fold": str(n_cells), "seed": SEED}
        if results.find(parameters, **identity) is None:
            scores = run(n_cells, options.genes, options.steps)
            results.add(parameters=parameters, scores=scores, seconds=sum(scores["seconds"].values()), **identity)
    print(size_table(options.output))


if __name__ == "__main__":
    main()
