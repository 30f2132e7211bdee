r"""What the blocks of a denoiser may know of where cells lie: the noisy positions, and nothing that is cleaner.

.. math::

    g = \big(z^{pos},\; \tau = 1 - t_{pos},\; s,\; \mathcal N(z^{pos}, s),\; p(h^0, z^{pos}, s)\big)

:math:`\mathcal N` are neighbors among the noisy positions, found anew at every call: along a chain of samples they follow the
cells to their places. Where positions are absent :math:`\tau = 0`, and nothing of them is left. A masked coordinate is read as
0, the center, as the embedding of positions reads it; a cell with a masked coordinate has no neighbors in space and is
nobody's. A context of padding alone lies nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from alphastomics.nn.geometry import Geometry
from alphastomics.nn.neighbors import neighbor_pairs, union
from alphastomics.nn.pair.features import PairFeatures

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.config import DenoiserConfig


class Surroundings(nn.Module):
    """Geometry of a batch, as far as the attention of a network reads it.

    Parameters
    ----------
    config
        The network.
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.pairs: PairFeatures | None = None
        if config.pair_features is not None:
            self.pairs = PairFeatures(config)

    def forward(
        self,
        h: Tensor,
        t_pos: Tensor,
        mask: Tensor | None = None,
        *,
        position: Tensor | None = None,
        masked: Tensor | None = None,
        sequence: Tensor | None = None,
    ) -> Geometry | None:
        """Look around.

        Parameters
        ----------
        h
            Summed embeddings (B, N, d).
        t_pos
            Clock of the positions (B,).
        mask
            Real cells (B, N); None when all are.
        position
            Noisy positions (B, N, D); None when they are absent in all contexts.
        masked
            Masked coordinates (B, N, D); None when there are none.
        sequence
            An index (B, N) that orders the cells, where the network reads one.

        Returns
        -------
        None where attention reads nothing of it.

        Raises
        ------
        ValueError
            If the network reads an order and there is none.
        """
        config = self.config
        if config.attention in ("full", "linear"):
            return None
        if config.reads_sequence and sequence is None:
            raise ValueError("this network reads an order of the cells, and there is none; pass sequence=")
        real = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device) if mask is None else mask
        located = real.any(dim=1) & (t_pos < 1) & (position is not None)
        known = real & located[:, None]
        if position is None:
            position = torch.zeros(*h.shape[:2], config.n_dims, device=h.device)
        position = position.masked_fill(~known[..., None], 0.0)
        if masked is not None:
            position, known = position.masked_fill(masked, 0.0), known & ~masked.any(dim=-1)
        geometry = Geometry(
            position=position,
            trust=torch.where(located, 1 - t_pos, 0.0),
            sequence=None if sequence is None else sequence.masked_fill(~real, 0),
        )
        if config.attention == "neighbor":
            near = noisy_neighbors(
                position.detach(), known, geometry.sequence, real, config.n_neighbors, config.sparse_pairs
            )
            geometry = geometry._replace(neighbors=near)
        return geometry if self.pairs is None else geometry._replace(pairs=self.pairs(h, geometry, mask))


# An operator, because a search tree is none: where tensors have no data, its result has a shape all the same.
@torch.library.custom_op(
    "alphastomics::noisy_neighbors",
    mutates_args=(),
    schema="(Tensor position, Tensor known, Tensor? sequence, Tensor real, int k, str kind) -> Tensor",
)
def noisy_neighbors(
    position: Tensor, known: Tensor, sequence: Tensor | None, real: Tensor, k: int, kind: str
) -> Tensor:
    """Neighbors (B, N, k) as :func:`~alphastomics.nn.neighbors.neighbor_pairs` finds them, of cells in several states.

    Parameters
    ----------
    position
        Finite positions (B, N, D).
    known
        Cells (B, N) whose position counts: they are neighbors in space.
    sequence
        An index (B, N); None when no neighbors are sought along it.
    real
        Cells (B, N) that are no padding: they are neighbors in the order.
    k
        Number of neighbors.
    kind
        ``"coordinate"``, ``"sequence"`` or ``"hybrid"``: half of them in space and the rest in the order.
    """
    near = {"coordinate": k, "sequence": 0, "hybrid": k // 2}[kind]
    found = []
    if near:
        found.append(neighbor_pairs(position, known, k=near))
    if near < k:
        found.append(neighbor_pairs(position, real, k=k - near, kind="sequence", sequence=sequence))
    if len(found) == 1:
        return found[0]
    return union([rows.flatten(0, 1) for rows in found]).view(*real.shape, k)


@noisy_neighbors.register_fake
def _(position: Tensor, known: Tensor, sequence: Tensor | None, real: Tensor, k: int, kind: str) -> Tensor:
    return known.new_empty(*known.shape, k, dtype=torch.int64)
