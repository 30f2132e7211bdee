"""Time and peak memory of one denoiser call and of a plain transformer encoder with the same width, depth and heads.

The plain network is ``nn.TransformerEncoder`` (pre-norm, feed-forward networks of four times the width) on given embeddings;
the denoiser also reads genes and predicts positions. PyTorch runs the encoder with a fused inference path that
stores the whole attention matrix (``encoder``), or with the path of training (``encoder, no fast path``); both are measured.
Time is measured in one process in alternation, memory in a new process for each network, minus the peak after imports.
Run as ``python -m benchmarks.denoiser_speed``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_fresh_process, peak_bytes
from benchmarks._report import machine, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

RESULT = Path(__file__).parent / "results" / "denoiser_speed.json"
DENOISER = "denoiser"
NETWORKS = (DENOISER, "encoder", "encoder, no fast path")
SIZES = {"cells": 7661, "genes": 351, "dims": 2, "width": 128, "layers": 4, "heads": 4}


def build_denoiser(d_model: int, n_layers: int, n_heads: int, n_genes: int, n_dims: int) -> nn.Module:
    """The default denoiser of the given size."""
    from alphastomics.nn import Denoiser, DenoiserConfig

    config = DenoiserConfig(n_genes=n_genes, n_dims=n_dims, d_model=d_model, n_layers=n_layers, n_heads=n_heads)
    return Denoiser(config)


def build_encoder(d_model: int, n_layers: int, n_heads: int) -> nn.Module:
    """The plain transformer."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        d_model, n_heads, dim_feedforward=4 * d_model, dropout=0.0, norm_first=True, batch_first=True
    )
    return nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)


def build_call(network: str, size: argparse.Namespace) -> Callable[[], object]:
    """A function that calls a network on random input."""
    import torch

    if network == DENOISER:
        model = build_denoiser(size.width, size.layers, size.heads, size.genes, size.dims).eval()
        expression, position = torch.randn(1, size.cells, size.genes), torch.randn(1, size.cells, size.dims)
        call = partial(model, expression, position, torch.zeros(1), torch.full((1,), 0.5), predict=("position",))
        fast = True
    else:
        model = build_encoder(size.width, size.layers, size.heads).eval()
        call = partial(model, torch.randn(1, size.cells, size.width))
        fast = network == "encoder"

    def timed() -> object:
        torch.backends.mha.set_fastpath_enabled(fast)
        with torch.inference_mode():
            return call()

    return timed


def measure_time(size: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every call, networks alternating, so that other programs affect all networks equally."""
    import torch

    torch.manual_seed(0)
    calls = {network: build_call(network, size) for network in NETWORKS}
    seconds: dict[str, list[float]] = {network: [] for network in NETWORKS}
    for repeat in range(size.repeats + 1):
        for network, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                seconds[network].append(time.perf_counter() - start)
    return {"seconds": seconds, "machine": machine()}


def measure_memory(network: str, size: argparse.Namespace) -> dict[str, Any]:
    """Bytes that one network and one call of it add to the peak after imports."""
    import torch  # noqa: F401

    if network == DENOISER:
        import alphastomics.nn  # noqa: F401
    before = peak_bytes()
    build_call(network, size)()
    return {"bytes": peak_bytes() - before}


def compare(seconds: dict[str, list[float]], memory: dict[str, int]) -> dict[str, dict[str, float]]:
    """Median over repeats of the ratio of times, and the ratio of memory, of the denoiser to each encoder."""
    return {
        network: {
            "time_ratio": statistics.median(a / b for a, b in zip(seconds[DENOISER], seconds[network], strict=True)),
            "memory_ratio": memory[DENOISER] / memory[network],
        }
        for network in NETWORKS
        if network != DENOISER
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.denoiser_speed", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=("time", *NETWORKS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure in fresh processes and print the ratios."""
    options = parse(argv)
    if options.measure is not None:
        found = measure_time(options) if options.measure == "time" else measure_memory(options.measure, options)
        print(json.dumps(found))
        return
    size = [f"--{name}={getattr(options, name)}" for name in (*SIZES, "repeats")]
    module = "benchmarks.denoiser_speed"
    timed = in_fresh_process(module, "--measure", "time", *size)
    memory = {network: in_fresh_process(module, "--measure", network, *size)["bytes"] for network in NETWORKS}
    ratios = compare(timed["seconds"], memory)
    content = {
        "benchmark": "denoiser_speed",
        "parameters": {name: getattr(options, name) for name in (*SIZES, "repeats")},
        "ratios": ratios,
        "seconds": timed["seconds"],
        "peak_bytes": memory,
        "versions": versions(),
        "machine": timed["machine"],
    }
    write_json(options.output, content)
    for network in NETWORKS:
        print(f"{network}: {statistics.median(timed['seconds'][network]):.2f} s, {memory[network] / 2**20:.0f} MiB")
    for network, ratio in ratios.items():
        print(f"denoiser / {network}: time {ratio['time_ratio']:.2f}, peak memory {ratio['memory_ratio']:.2f}")


if __name__ == "__main__":
    main()
