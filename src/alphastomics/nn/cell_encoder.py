r"""Neighborhood embedding of a cell alone: an MLP of its expression, which does not attend to other cells.

.. math:: g_i = W_3\, \phi(W_2\, \phi(W_1 (w \odot x_i))), \qquad \phi = \operatorname{GELU} \circ \operatorname{LayerNorm}

with the weights w of the genes (:meth:`alphastomics.nn.Denoiser.weigh_genes`). It is trained by the contrastive loss of the neighborhood
embedding f of the blocks (:func:`alphastomics.diffusion.losses.by_features`). Attention relates f to the other cells of a context;
g has other errors, so that both together determine the neighbors of a cell more accurately than f alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.config import DenoiserConfig

WIDTH = 2  # of the hidden layers, in widths of the network


class CellEncoder(nn.Module):
    """The MLP; see the equation of the module.

    Parameters
    ----------
    config
        Architecture of the network to which it belongs.
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        d = WIDTH * config.d_model
        self.layers = nn.Sequential(*_hidden(config.n_genes, d), *_hidden(d, d), nn.Linear(d, config.n_latent))

    def forward(self, weighted: Tensor) -> Tensor:
        """Map weighted expression (B, N, G) to (B, N, n_latent)."""
        return self.layers(weighted)


def _hidden(n_in: int, n_out: int) -> tuple[nn.Module, ...]:
    return nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.GELU()
