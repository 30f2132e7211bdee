"""Forward and backward time of the mixture of experts compared with plain loops.

All loops use the same weights, router and choices. ``loop over experts`` gathers the cells of each expert once;
``loop over choices and experts`` does so for every rank of choice, like published implementations;
``loop over separate experts`` is the first with separate weight tensors per expert, which avoids the
gradients of stacked weights. Time is measured in one process in alternation: on one
thread (processor time), which measures the arithmetic, and on all threads (wall time), which includes the overhead of
many small products. The allocator keeps memory between passes. Run as ``python -m benchmarks.experts``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_fresh_process
from benchmarks._report import machine, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from alphastomics.nn import Experts

RESULT = Path(__file__).parent / "results" / "experts.json"
BATCHED = "batched"
SIZES = {"cells": 1024, "width": 128, "experts": 8, "top_k": 2}
# glibc keeps freed memory, as other allocators do, instead of asking the kernel for new pages in every pass.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
EXPERT_WIDTHS = ("split", "full")


def one_expert(module: Experts, e: int, x: Tensor) -> Tensor:
    """Expert ``e`` of cells (M, d)."""
    import torch.nn.functional as F

    hidden = F.gelu(x @ module.weight_1[e] + module.bias_1[e])
    return hidden @ module.weight_2[e] + module.bias_2[e]


def loop_over_experts(module: Experts, x: Tensor) -> Tensor:
    """Each expert once."""
    _, expert, weight = module.route(x)
    y = x.new_zeros(x.shape)
    for e in range(module.num_experts):
        cells, rank = (expert == e).nonzero(as_tuple=True)
        if len(cells):
            y = y.index_add(0, cells, weight[cells, rank, None] * one_expert(module, e, x[cells]))
    return y


def loop_over_choices(module: Experts, x: Tensor) -> Tensor:
    """Loop over ranks of choice and experts."""
    _, expert, weight = module.route(x)
    y = x.new_zeros(x.shape)
    for rank in range(module.top_k):
        for e in range(module.num_experts):
            cells = (expert[:, rank] == e).nonzero()[:, 0]
            if len(cells):
                y = y.index_add(0, cells, weight[cells, rank, None] * one_expert(module, e, x[cells]))
    return y


def separate(module: Experts) -> list[list[Tensor]]:
    """Weights and biases of each expert as tensors of its own."""
    stacked = (module.weight_1, module.bias_1, module.weight_2, module.bias_2)
    return [[part.detach().clone().requires_grad_() for part in parts] for parts in zip(*stacked, strict=True)]


def loop_over_separate(module: Experts, experts: list[list[Tensor]], x: Tensor) -> Tensor:
    """Each expert once, with weights of its own."""
    import torch
    import torch.nn.functional as F

    _, expert, weight = module.route(x)
    y = x.new_zeros(x.shape)
    for e, (w_1, b_1, w_2, b_2) in enumerate(experts):
        cells, rank = (expert == e).nonzero(as_tuple=True)
        if len(cells):
            hidden = F.gelu(torch.addmm(b_1, x[cells], w_1))
            y = y.index_add(0, cells, weight[cells, rank, None] * torch.addmm(b_2, hidden, w_2))
    return y


def batched(module: Experts, x: Tensor) -> Tensor:
    """All experts at once."""
    return module(x[None])[0][0]


def methods_of(module: Experts) -> dict[str, Callable[[Tensor], Tensor]]:
    """Output of the experts for cells, by method."""
    return {
        BATCHED: partial(batched, module),
        "loop over experts": partial(loop_over_experts, module),
        "loop over choices and experts": partial(loop_over_choices, module),
        "loop over separate experts": partial(loop_over_separate, module, separate(module)),
    }


def measure(size: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every pass, methods alternating, after a check that they agree."""
    import torch

    from alphastomics.nn import Experts

    torch.manual_seed(0)
    seconds: dict[str, dict[str, list[float]]] = {}
    for width, threads in product(EXPERT_WIDTHS, sorted({1, torch.get_num_threads()})):
        torch.set_num_threads(threads)
        clock = (
            time.process_time if threads == 1 else time.perf_counter
        )  # processor time does not depend on other programs
        module = Experts(size.width, 4 * size.width, num_experts=size.experts, top_k=size.top_k, width=width).eval()
        x = torch.randn(size.cells, size.width, requires_grad=True)
        methods = methods_of(module)
        for method in methods.values():
            torch.testing.assert_close(method(x), batched(module, x), atol=1e-4, rtol=1e-4)
        timed: dict[str, list[float]] = {name: [] for name in methods}
        seconds[f"{width}, threads: {threads}"] = timed
        for repeat in range(size.repeats + 3):
            for name, method in methods.items():
                start = clock()
                method(x).square().sum().backward()
                if repeat >= 3:  # the first rounds warm up
                    timed[name].append(clock() - start)
    return {"seconds": seconds, "machine": machine()}


def compare(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over repeats of the time of each loop over that of the batched experts."""
    return {
        name: statistics.median(a / b for a, b in zip(values, seconds[BATCHED], strict=True))
        for name, values in seconds.items()
        if name != BATCHED
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in a fresh process and print the ratios."""
    options = parse(argv)
    if options.measure:
        print(json.dumps(measure(options)))
        return
    parameters = {name: getattr(options, name) for name in (*SIZES, "repeats")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in parameters.items()]
    found = in_fresh_process("benchmarks.experts", "--measure", *flags, environment=KEEP_MEMORY)
    ratios = {setting: compare(seconds) for setting, seconds in found["seconds"].items()}
    content = {
        "benchmark": "experts",
        "parameters": parameters,
        "ratios": ratios,
        "seconds": found["seconds"],
        "versions": versions(),
        "machine": found["machine"],
    }
    write_json(options.output, content)
    for setting, seconds in found["seconds"].items():
        for name, values in seconds.items():
            print(f"{setting}, {name}: {1000 * statistics.median(values):.1f} ms")
        for name, ratio in ratios[setting].items():
            print(f"{setting}, {name} / {BATCHED}: time {ratio:.2f}")


if __name__ == "__main__":
    main()
