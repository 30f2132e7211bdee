r"""Sum of attention over neighbors and linear attention over all cells.

.. math::

    y = \operatorname{Neighbor}(x) + \operatorname{Linear}(x), \qquad
    A = \tfrac12 \big(A^{\text{near}} + A^{\text{all}}\big)

:class:`~alphastomics.nn.attention.neighbor.NeighborAttention` represents local structure, which has high rank, and
:class:`~alphastomics.nn.LinearAttention` long-range structure. If positions are absent, cells have no neighbors in space, and
only the second term exchanges information between cells. Time and memory are linear in N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from alphastomics.config import NetworkConfig
from alphastomics.nn.attention.linear import LinearAttention
from alphastomics.nn.attention.neighbor import NeighborAttention

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import GateType
    from alphastomics.nn.geometry import Geometry


class LocalGlobalAttention(nn.Module):
    """Sum of attention over neighbors and linear attention over all cells.

    Parameters
    ----------
    d_model, n_heads
        Width and number of heads of both.
    gate_type, use_qk_norm, sequence, n_pair_channels
        As in :class:`~alphastomics.nn.attention.neighbor.NeighborAttention`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_type: GateType = NetworkConfig.gate_type,
        use_qk_norm: bool = NetworkConfig.use_qk_norm,
        sequence: bool = False,
        n_pair_channels: int = 0,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.near = NeighborAttention(
            d_model,
            n_heads,
            gate_type=gate_type,
            use_qk_norm=use_qk_norm,
            sequence=sequence,
            n_pair_channels=n_pair_channels,
        )
        self.all = LinearAttention(d_model, n_heads)

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, d) to (B, N, d), 0 for padding; see :class:`~alphastomics.nn.Attention`.

        ``geometry`` is that of attention over neighbors.
        """
        y = self.near(x, geometry, mask) + self.all(x, geometry, mask)
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates in (0, 1) of the attention over neighbors."""
        return self.near.gates(x)

    def weights(self, x: Tensor, rows: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:
        """Rows (R,) of the mean of both attention matrices, (B, H, R, N)."""
        neighbor, linear = (part.weights(x, rows, geometry, mask) for part in (self.near, self.all))
        return (neighbor + linear) / 2

    def received(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:
        """Mean attention that each cell receives from real cells, (B, H, N)."""
        neighbor, linear = (part.received(x, geometry, mask) for part in (self.near, self.all))
        return (neighbor + linear) / 2
