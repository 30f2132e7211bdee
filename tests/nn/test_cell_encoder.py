"""The embedding of a cell alone: its equation, and that it depends on no other cell."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def test_the_embedding_is_that_of_its_equation(make_denoiser, make_inputs):
    """Against dense computation in float64."""
    denoiser, x = make_denoiser().double(), make_inputs().expression.double()
    denoiser.weigh_genes(torch.arange(1.0, 10.0))
    weights = [layer for layer in denoiser.cell_encoder.modules() if isinstance(layer, torch.nn.Linear)]
    h = x * denoiser.gene_weight
    for layer in weights[:2]:
        h = h @ layer.weight.T + layer.bias
        h = F.gelu((h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, correction=0) + 1e-5).sqrt())
    expected = h @ weights[2].weight.T + weights[2].bias
    torch.testing.assert_close(denoiser.cell_neighborhood(x), expected)


def test_no_cell_changes_the_embedding_of_another(make_denoiser, make_inputs):
    denoiser, x = make_denoiser(), make_inputs().expression
    together = denoiser.cell_neighborhood(x)
    torch.testing.assert_close(together[:, 3:4], denoiser.cell_neighborhood(x[:, 3:4]))
    assert together.std(1).min() > 0
