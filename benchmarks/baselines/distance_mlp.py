"""Distance regression: an MLP whose outputs reproduce the distances between the cells of a slice.

L = mean over pairs i ≠ j of one slice of (|y_i - y_j| - |x_i - x_j|)², expression in, coordinates y out.

Frames: no common frame is needed, because the loss uses distances within a slice; the output frame is arbitrary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.baselines._features import expression_features, is_counts, slice_rows
from benchmarks.baselines._training import Perceptron, apply, spread, train_on_slices

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

PARAMETERS: dict[str, Any] = {
    "scale": False,
    "n_hidden": 256,
    "n_layers": 3,
    "dropout": 0.1,
    "gene_dropout_counts": 0.5,
    "gene_dropout_other": 0.1,
    "context_size": 512,
    "n_epochs": 40,
    "min_steps": 500,
    "learning_rate": 1e-3,
    "weight_decay": 1e-2,
}


def distance_loss(output: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the pairwise distances."""
    return (torch.pdist(output) - torch.pdist(positions)).square().mean()


def distance_mlp(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """Read-out of a three-layer perceptron trained on the distance matrices of the reference slices."""
    return place(reference, query, seed=seed, **PARAMETERS)


def place(reference: AnnData, query: AnnData, *, seed: int, **p: Any) -> NDArray[np.float64]:
    """As :func:`distance_mlp`, with other parameters."""
    ref, new = expression_features(reference, query, scale=p["scale"])
    positions = np.asarray(reference.obsm["spatial"], dtype=np.float64)
    rows = slice_rows(reference)
    scale = spread(positions, rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Perceptron(
            ref.shape[1], p["n_hidden"], positions.shape[1], n_layers=p["n_layers"], dropout=p["dropout"]
        )
        training = {key: p[key] for key in ("n_epochs", "min_steps", "context_size", "learning_rate", "weight_decay")}
        training["gene_dropout"] = p["gene_dropout_counts" if is_counts(reference.X) else "gene_dropout_other"]
        train_on_slices(network, ref, positions / scale, rows, distance_loss, seed=seed, **training)
    return apply(network, new) * scale
