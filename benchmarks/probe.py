"""Use of the noisy input by a trained network.

At noise-to-signal ratios .1, .3 and 1 the aligned root-mean-square error of the estimate of x0 is compared with the
smaller error of two trivial estimates: the noisy positions themselves, and the estimate without positions (t = 1). A ratio below 1
means that the network uses both. The relative error after rotating the input by 90 degrees shows whether the estimate follows. Run as
``python -m benchmarks.probe --model-dir DIR``. The network is probed on the held-out slice, and on each reference slice in its own
shape, which the network has memorized, and deformed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _models
from benchmarks._data import BENCHMARKS, DEFAULT_MINUTES, find_data
from benchmarks._report import machine, versions, write_json
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics

RATIOS = (0.1, 0.3, 1.0)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="seqfish", help="benchmark whose first fold is used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="training time; the default depends on the benchmark")
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--output", type=Path, default=RESULTS / "probe.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.minutes = options.minutes or DEFAULT_MINUTES[options.benchmark]
    return options


def probe(model: AlphaSTomics, cells: AnnData, truth: NDArray[np.float64], *, seed: int) -> dict[str, dict[str, float]]:
    """Errors at every ratio for one slice, relative to those of trivial predictions."""
    import torch

    from alphastomics.config._sampling import MAX_CONTEXT
    from alphastomics.data import AnnDataSource
    from alphastomics.diffusion.geometry import align, center, kabsch
    from alphastomics.sampling import PositionSampler
    from alphastomics.sampling._cells import content_order, encode_cells

    cells = cells.copy()
    cells.obsm.clear()
    source = AnnDataSource(cells, model.schema, positions=False)
    rows = content_order(source, np.arange(cells.n_obs))
    device = model.module.device
    encoded = encode_cells(model.module, source, rows, max_context=MAX_CONTEXT)
    positions = PositionSampler(model._make_sampler(), encoded)
    mean, process = positions.mean, model.diffusion.position
    x = center(torch.from_numpy(truth[rows] / model.schema.scale).float()[None].to(device))
    x = x @ kabsch(x, mean)

    def error(estimate: Any) -> float:
        return float(((estimate - align(x, estimate)) ** 2).sum(-1).mean().sqrt())

    def estimate(z: torch.Tensor) -> torch.Tensor:
        return positions.estimate(z, t, positions.estimate_posterior(z, t))

    generator = torch.Generator().manual_seed(seed)
    quarter_turn = torch.eye(x.shape[-1], device=device)
    quarter_turn[:2, :2] = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    found = {}
    for ratio in RATIOS:
        t = torch.full((1,), process.schedule.time_of_ratio(ratio), device=device)
        z = process.noise(x, t, center(torch.randn(x.shape, generator=generator).to(device)))
        denoised = estimate(z)
        trivial = {"copying": error(z / process.schedule.alpha(t)), "without positions": error(mean)}
        # The sampler's denoising function: whatever frame z comes in, it is turned to the canonical one and back.
        back = kabsch(z @ quarter_turn, mean)
        turned = estimate(z @ quarter_turn @ back) @ back.transpose(-1, -2)
        reference = estimate(z @ kabsch(z, mean)) @ kabsch(z, mean).transpose(-1, -2)
        follow = (turned - reference @ quarter_turn).norm() / reference.norm()
        found[str(ratio)] = {
            **trivial,
            "estimate": error(denoised),
            "over the better": error(denoised) / min(trivial.values()),
            "turning": float(follow),
        }
    return found


def reshaped(position: NDArray[np.float64], scale: float, *, seed: int) -> NDArray[np.float64]:
    """Positions with a new deformation of the kind that is used in training."""
    import torch

    from alphastomics.diffusion.deformation import deform
    from alphastomics.train import PlanConfig

    x = torch.from_numpy((position - position.mean(axis=0)) / scale)
    return deform(x, PlanConfig().deformation, np.random.default_rng([seed, len(x)])).numpy() * scale


def main(argv: Sequence[str] | None = None) -> None:
    """Probe the reference slices and the held-out one."""
    options = parse(argv)
    fold = BENCHMARKS[options.benchmark](find_data(options.data_dir))[0]
    path = _models.model_path(options.model_dir, options.benchmark, fold.name, mode=_models.MODE, seed=options.seed)
    model, _ = _models.obtain_model(fold, seed=options.seed, minutes=options.minutes, path=path)
    slices = {"held out": (fold.query, fold.truth[fold.order])}
    for name in model.schema.slices:
        cells = fold.reference[fold.reference.obs["slice_id"].astype(str) == name]
        position = np.asarray(cells.obsm["spatial"])
        slices[f"reference {name}"] = (cells, position)
        slices[f"reference {name}, in a new shape"] = (cells, reshaped(position, model.schema.scale, seed=options.seed))
    report = {name: probe(model, cells, truth, seed=options.seed) for name, (cells, truth) in slices.items()}
    write_json(
        options.output,
        {"benchmark": "probe", "tissue": options.benchmark, "seed": options.seed, "model": _models.fingerprint(model),
         "training": _models.training_parameters(options.minutes), "probe": report, "versions": versions(),
         "machine": machine()},
    )  # fmt: skip
    for name, levels in report.items():
        for ratio, line in levels.items():
            print(f"{name}, sigma/alpha {ratio}: " + ", ".join(f"{key} {value:.3f}" for key, value in line.items()))


if __name__ == "__main__":
    main()
