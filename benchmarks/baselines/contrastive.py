"""Contrastive embedding: spatial neighbors have similar embeddings, and a cell is placed by its neighbors in the embedding.

An MLP embeds the cells on a sphere. Within a context of one slice, the softmax of cosine similarities is fitted
to a Gaussian kernel of spatial distance (soft InfoNCE, as in STEM and CellContrast):
L = -Σ_ij P_ij log softmax_j(z_i·z_j / τ), P_ij ∝ exp(-|x_i - x_j|² / 2w²), j ≠ i.
A cell is placed at the mean position of the reference cells nearest to it in the embedding.

Frames: training uses distances within a slice and needs no common frame; the mean position uses the frame of the largest
reference slice (:func:`._features.common_frame`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.baselines._features import (
    common_frame,
    expression_features,
    is_counts,
    nearest,
    principal_components,
    slice_rows,
)
from benchmarks.baselines._training import Perceptron, apply, spread, train_on_slices

if TYPE_CHECKING:
    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

PARAMETERS: dict[str, Any] = {
    "scale": False,
    "n_hidden": 256,
    "n_embedding": 32,
    "n_layers": 3,
    "dropout": 0.1,
    "gene_dropout_counts": 0.5,
    "gene_dropout_other": 0.1,
    "context_size": 512,
    "n_epochs": 40,
    "min_steps": 500,
    "learning_rate": 1e-3,
    "weight_decay": 1e-2,
    "temperature": 0.1,
    "kernel_width": 0.1,
    "n_neighbors": 10,
}


def soft_info_nce(
    embedding: torch.Tensor, positions: torch.Tensor, *, width: float, temperature: float
) -> torch.Tensor:
    """Cross-entropy between a Gaussian kernel of spatial distance and the softmax of similarities, own pair excluded."""
    itself = torch.eye(len(embedding), dtype=torch.bool)
    squared = torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist").square()
    target = (-squared / (2 * width**2)).masked_fill(itself, -torch.inf).softmax(dim=1)
    similarity = (embedding @ embedding.T / temperature).masked_fill(itself, -torch.inf)
    log_probability = similarity.log_softmax(dim=1).masked_fill(itself, 0.0)
    return -(target * log_probability).sum(dim=1).mean()


def contrastive_knn(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """Mean position of the nearest reference cells in a contrastive embedding of the genes."""
    return place(reference, query, seed=seed, **PARAMETERS)


def place(reference: AnnData, query: AnnData, *, seed: int, **p: Any) -> NDArray[np.float64]:
    """As :func:`contrastive_knn`, with other parameters."""
    ref, new = expression_features(reference, query, scale=p["scale"])
    frame = common_frame(reference, principal_components(ref, new)[0])
    rows = slice_rows(reference)
    width = p["kernel_width"] * spread(frame, rows)

    def loss(output: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        unit = torch.nn.functional.normalize(output, dim=1)
        return soft_info_nce(unit, positions, width=width, temperature=p["temperature"])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Perceptron(
            ref.shape[1], p["n_hidden"], p["n_embedding"], n_layers=p["n_layers"], dropout=p["dropout"]
        )
        training = {key: p[key] for key in ("n_epochs", "min_steps", "context_size", "learning_rate", "weight_decay")}
        training["gene_dropout"] = p["gene_dropout_counts" if is_counts(reference.X) else "gene_dropout_other"]
        train_on_slices(network, ref, frame, rows, loss, seed=seed, **training)
    z_ref, z_new = (_unit(apply(network, x)) for x in (ref, new))
    return frame[nearest(z_ref, z_new, n_neighbors=p["n_neighbors"])].mean(axis=1)


def _unit(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return z / ((z**2).sum(axis=1, keepdims=True) ** 0.5)
