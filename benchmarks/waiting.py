"""Share of a training step spent waiting for data.

Simulated counts of several slices as a dataset on disk and in memory, trained with default arguments. Waiting is the time that the
training loop spends in the iterator of the loader. Converting a batch to network units, on the CPU here and on a GPU
elsewhere, counts as work. Run as ``python -m benchmarks.waiting``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._report import machine, markdown, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RESULT = Path(__file__).parent / "results" / "waiting.json"
WARM = 10  # steps that are not counted


class Stopwatch:
    """Wraps the iterator of a loader and records when each batch was returned and how long it took."""

    def __init__(self, iterate: Any) -> None:
        self._iterate = iterate
        self.waits: list[float] = []
        self.times: list[float] = []

    def __call__(self, loader: Any) -> Iterator[Any]:
        """Batches of the loader."""
        batches = self._iterate(loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            end = time.perf_counter()
            if batch is None:
                return
            self.waits.append(end - start)
            self.times.append(end)
            yield batch

    def share(self) -> float:
        """Fraction of the time after a warmup."""
        return sum(self.waits[WARM + 1 :]) / (self.times[-1] - self.times[WARM])


def train(model: Any, steps: int) -> dict[str, float]:
    """Train with the defaults; return the fraction of waiting and the milliseconds per step."""
    from alphastomics.data._loaders import ContextLoader

    before = ContextLoader.__iter__
    watch = Stopwatch(before)
    ContextLoader.__iter__ = lambda loader: watch(loader)  # type: ignore[method-assign]
    try:
        model.train(max_steps=steps + WARM, enable_progress_bar=False)
    finally:
        ContextLoader.__iter__ = before  # type: ignore[method-assign]
    return {
        "waiting": watch.share(),
        "milliseconds": 1000 * (watch.times[-1] - watch.times[WARM]) / (len(watch.times) - WARM - 1),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train with cells in memory and with cells of a dataset."""
    import anndata as ad

    from alphastomics.model import AlphaSTomics
    from benchmarks.loading import make_files

    make_files(folder, n_slices=options.slices, n_cells=options.cells, n_genes=options.genes)
    found = {}
    streamed = AlphaSTomics.from_parquet(folder / "dataset", buffer_size=options.cells // 5, mode=options.mode)
    found["from disk"] = train(streamed, options.steps)
    cells = ad.read_h5ad(folder / "all.h5ad")
    AlphaSTomics.setup_anndata(cells, slice_key="slice_id")
    found["in memory"] = train(AlphaSTomics(cells, mode=options.mode), options.steps)
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.waiting", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=50_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--mode", default="any")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and print the fractions."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), options)
    parameters = {name: value for name, value in vars(options).items() if name != "output"}
    content = {"benchmark": "waiting", "parameters": parameters, "training": found}
    write_json(options.output, content | {"versions": versions(), "machine": machine()})
    rows = [[name, f"{each['waiting']:.1%}", f"{each['milliseconds']:.0f}"] for name, each in found.items()]
    print(markdown([["cells", "waiting", "ms a step"], *rows]))


if __name__ == "__main__":
    main()
