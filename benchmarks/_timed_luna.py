"""Seconds of a training step of LUNA (Yu et al. 2025), with its released code on the path; the last line of output is JSON.

Run as ``python benchmarks/_timed_luna.py LUNA_FOLDER CELLS GENES STEPS``. A step is that of its ``training_step`` with default settings: noise,
network, loss, the loss for the log, backward pass and AdamW, for two contexts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

WARM = 3  # steps that are not counted

sys.modules["wandb"] = SimpleNamespace(run=None)  # type: ignore[assignment]  # it logs only within a run


def seconds_of(folder: Path, n_cells: int, n_genes: int, n_steps: int) -> float:
    """Median seconds of a step with two contexts of ``n_cells`` cells."""
    from metrics.loss_function import LossFunction
    from models.model import Model
    from utils.data.dataholder import DataHolder
    from utils.diffusion_model.diffusion.noise_model import NoiseModel

    config, training = (
        yaml.safe_load((folder / "configs" / name / "default.yaml").read_text()) for name in ("model", "train")
    )
    network = Model(
        input_dims={"node_features_dimensions": n_genes, "diffusion_time_dimensions": 1},
        n_layers=config["n_layers"],
        hidden_mlp_dims=config["hidden_mlp_dims"],
        hidden_dims=config["hidden_dims"],
        output_dims={"node_features_dimensions": n_genes, "diffusion_time_dimensions": 0},
    )
    noise, loss = NoiseModel(SimpleNamespace(model=SimpleNamespace(**config))), LossFunction()
    rate, decay = float(training["lr"]), float(training["weight_decay"])
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, amsgrad=True, weight_decay=decay)
    position = torch.randn(2, n_cells, 2)
    cells = DataHolder(
        positions=position - position.mean(1, keepdim=True),
        node_features=torch.randn(2, n_cells, n_genes),
        diffusion_time=None,
        node_mask=torch.ones(2, n_cells, dtype=torch.bool),
    )
    seconds = []
    for _ in range(WARM + n_steps):
        start = time.perf_counter()
        prediction = network(noise.apply_noise(cells).copy())
        value, _ = loss(masked_pred=prediction, masked_true=cells, log=True)
        loss.log_epoch_metrics()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM:])


if __name__ == "__main__":
    print(json.dumps({"seconds": seconds_of(Path(sys.argv[1]), *map(int, sys.argv[2:]))}))
