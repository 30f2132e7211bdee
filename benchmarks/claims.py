"""Claims of the specification of long contexts compared with measurements.

Each claim compares a reference with its replacement, at the sizes of the specification. Memory is the peak of a
forward and a backward pass in a new process, minus the peak before it; time is measured in one process in alternation; operations
are counted on tensors without data.

- ``factors`` (537 times less memory): triangle multiplication on a tensor of all pairs, and on factors of rank 2;
- ``chunked loss`` (16): the loss of all distances with autograd, and in blocks with its gradient in closed form;
- ``sparse pairs`` (120; by arithmetic 128): attention with features of all pairs, and of the edges to 32 neighbors;
- ``axial`` (24 times fewer operations): triangle attention and axial attention on factors; full attention and grid attention over
  cells;
- ``mixed precision`` (half the memory, 2 to 3 times the speed): the denoiser in 32 bits, and in bfloat16;
- ``sharing`` (12, 6 and 4 times fewer weights): twelve blocks, and one, two, or one for every four; for all weights, and for
  those that can be shared, without norms and their dependence on the timesteps.

Run as ``python -m benchmarks.claims``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import RETURN_MEMORY, in_fresh_process, peak_bytes
from benchmarks._report import machine, markdown, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[], object]

RESULT = Path(__file__).parent / "results" / "claims.json"

# claim -> (quantity, ratio by the specification, ratio by arithmetic)
CLAIMS: dict[str, tuple[str, float, float]] = {
    "factors": ("memory", 537, 1024 / 2 / 2),
    "chunked loss": ("memory", 16, 1024 / 64),
    "sparse pairs": ("memory", 120, 4096 / 32),
    "axial pairs": ("operations", 24, 2048),
    "axial cells": ("operations", 24, 2048 / (2 * 46)),
    "mixed precision memory": ("memory", 2, 2),
    "mixed precision time": ("time", 2, 1),
}
SHARING = {"universal": 12, "alternating": 6, "block": 4}


def factors(*, reference: bool) -> Call:
    """Outgoing and incoming triangles, N = 1024, C = 128, R = 2."""
    import torch

    from alphastomics.nn.pair import PairFactors, TriangleMultiplication

    n, c, r = 1024, 128, 2
    outgoing, incoming = TriangleMultiplication(c, "outgoing"), TriangleMultiplication(c, "incoming")
    shapes = [(1, n, n, c)] if reference else [(1, c, n, r)] * 2

    def call() -> None:
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        if reference:
            incoming(outgoing(inputs[0])).square().sum().backward()
            return
        z = incoming(outgoing(PairFactors(*inputs, None)))
        (z.left.square().sum() + z.right.square().sum()).backward()

    return call


def chunked_loss(*, reference: bool) -> Call:
    """Squared differences of distances, N = 1024, in blocks of 64 rows."""
    import torch

    from alphastomics.diffusion import distances

    n = 1024
    distances.ENTRIES = 64 * n

    def call() -> None:
        x, y, mask = torch.randn(1, n, 3, requires_grad=True), torch.randn(1, n, 3), torch.ones(1, n, dtype=torch.bool)
        if reference:
            predicted, true = ((z[:, :, None] - z[:, None]).square().sum(-1).add(1e-12).sqrt() for z in (x, y))
            pairs = (mask[:, :, None] & mask[:, None]).float()
            ((predicted - true).square() * pairs).sum().div(n * (n - 1)).backward()
        else:
            distances.distance_loss(x, y, mask).sum().backward()

    return call


def sparse_pairs(*, reference: bool) -> Call:
    """Attention with features of distances, N = 4096, 32 neighbors."""
    import torch

    from alphastomics.nn.attention.neighbor import NeighborAttention
    from alphastomics.nn.geometry import Geometry
    from alphastomics.nn.neighbors import neighbor_pairs

    n, d, n_heads, bumps = 4096, 128, 4, 16
    attention = NeighborAttention(d, n_heads)
    position = torch.rand(1, n, 2)
    centers = torch.linspace(-5, 1, bumps)

    def call() -> None:
        x = torch.randn(1, n, d, requires_grad=True)
        if not reference:
            attention(x, Geometry(position, neighbors=neighbor_pairs(position, k=32))).square().sum().backward()
            return
        q, k, v = attention.heads(x)
        distance = (position[:, :, None] - position[:, None]).square().sum(-1).add(1e-5).log() / 2
        features = torch.exp(-((distance[..., None] - centers) ** 2))
        bias = attention.edge(features).permute(0, 3, 1, 2)
        weights = (q @ k.transpose(-1, -2) / attention.d_head**0.5 + bias).softmax(-1)
        (weights @ v).square().sum().backward()

    return call


def axial_pairs(*, reference: bool) -> Call:
    """Attention on pair features of rank 4, N = 2048, C = 32."""
    import torch

    from alphastomics.nn.pair import AxialAttention, PairFactors, TriangleAttention

    n, c, r = 2048, 32, 4
    module = TriangleAttention(c, 4, "starting") if reference else AxialAttention(c, 4)
    return lambda: module(PairFactors(torch.randn(1, c, n, r), torch.randn(1, c, n, r), None))


def axial_cells(*, reference: bool) -> Call:
    """Attention over cells, N = 2048."""
    import torch

    from alphastomics.nn.attention.grid import GridAttention
    from alphastomics.nn.attention.softmax import SoftmaxAttention
    from alphastomics.nn.geometry import Geometry

    n, d = 2048, 128
    if reference:
        full = SoftmaxAttention(d, 4)
        return lambda: full(torch.randn(1, n, d))
    grid = GridAttention(d, 4, n_dims=2)
    return lambda: grid(torch.randn(1, n, d), Geometry(torch.rand(1, n, 2)))


def mixed_precision(*, reference: bool) -> Call:
    """The default denoiser, N = 4096, 350 genes."""
    import torch

    from alphastomics.nn import Denoiser, DenoiserConfig

    n, g = 4096, 350
    module = Denoiser(DenoiserConfig(n_genes=g, n_dims=2))
    inputs = torch.randn(1, n, g), torch.randn(1, n, 2), torch.full((1,), 0.5), torch.full((1,), 0.5)

    def call() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not reference):
            output = module(*inputs)
        (output.expression.float().square().mean() + output.position.float().square().mean()).backward()
        module.zero_grad()

    return call


CALLS: dict[str, Callable[..., Call]] = {
    "factors": factors,
    "chunked loss": chunked_loss,
    "sparse pairs": sparse_pairs,
    "axial pairs": axial_pairs,
    "axial cells": axial_cells,
    "mixed precision memory": mixed_precision,
    "mixed precision time": mixed_precision,
}


def memory(claim: str, *, reference: bool) -> dict[str, Any]:
    """Bytes that a call adds to the peak memory of a new process."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    call = CALLS[claim](reference=reference)
    torch.randn(64, 64, requires_grad=True).square().sum().backward()  # allocates what every first gradient needs
    before = peak_bytes()
    call()
    return {"value": peak_bytes() - before}


def seconds(claim: str, repeats: int) -> dict[str, Any]:
    """Seconds of the reference and of its replacement, measured alternately."""
    import torch

    torch.manual_seed(0)
    calls = {reference: CALLS[claim](reference=reference) for reference in (True, False)}
    taken: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for reference, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                taken[reference].append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(taken[True], taken[False], strict=True))
    return {"ratio": ratio, "reference": taken[True], "replacement": taken[False], "machine": machine()}


def operations(claim: str, *, reference: bool) -> dict[str, Any]:
    """Multiplications and additions of matrix products, times two, in a forward pass."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    count = FlopCounterMode(display=False)
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # other kernels are not counted on processors
        call = CALLS[claim](reference=reference)
        with count:
            call()
    return {"value": count.get_total_flops()}


def sharing() -> dict[str, dict[str, float]]:
    """Ratio of the weights of twelve blocks to those with sharing: of all weights, and of those that can be shared."""
    from alphastomics.nn import DenoiserConfig
    from alphastomics.nn.block import Block
    from alphastomics.nn.sharing import LayerStack

    def ratio(kind: Any, own: tuple[str, ...]) -> float:
        make = lambda: Block(DenoiserConfig(n_genes=1, n_dims=2))
        return LayerStack(make, 12, sharing=kind, block_size=4, unshared=own).compression_ratio

    return {kind: {"all": ratio(kind, Block.UNSHARED), "shared": ratio(kind, ())} for kind in SHARING}


def measure(claim: str, repeats: int) -> dict[str, Any]:
    """Measure one claim, reference and replacement in separate processes."""
    kind, specification, arithmetic = CLAIMS[claim]
    if kind == "time":
        found = in_fresh_process("benchmarks.claims", "--measure", claim, "--repeats", repeats)
    else:
        sides = {
            side: in_fresh_process("benchmarks.claims", "--measure", claim, "--side", side, environment=RETURN_MEMORY)[
                "value"
            ]
            for side in ("reference", "replacement")
        }
        found = {"ratio": sides["reference"] / sides["replacement"], **sides}
    return {"of": kind, "specification": specification, "arithmetic": arithmetic, **found}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=CLAIMS, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("reference", "replacement"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the claims; write and print them."""
    options = parse(argv)
    if options.measure is not None:
        claim, reference = options.measure, options.side == "reference"
        if CLAIMS[claim][0] == "time":
            found = seconds(claim, options.repeats)
        else:
            found = (memory if CLAIMS[claim][0] == "memory" else operations)(claim, reference=reference)
        print(json.dumps(found))
        return
    claims = {claim: measure(claim, options.repeats) for claim in options.claims}
    shared = sharing()
    content = {"benchmark": "claims", "claims": claims, "sharing": {"specification": SHARING, "measured": shared}}
    write_json(options.output, {**content, "versions": versions(), "machine": machine()})
    lines = [["claim", "of", "specification", "arithmetic", "measured"]]
    for claim, found in claims.items():
        lines.append(
            [
                claim,
                found["of"],
                *(f"{found[key]:.0f}" for key in ("specification", "arithmetic")),
                f"{found['ratio']:.1f}",
            ]
        )
    for kind, ratio in SHARING.items():
        lines.append(
            [f"sharing {kind}", "weights", str(ratio), f"{shared[kind]['shared']:.0f}", f"{shared[kind]['all']:.1f}"]
        )
    print(markdown(lines))


if __name__ == "__main__":
    main()
