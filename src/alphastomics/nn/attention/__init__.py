"""Attention over the cells of a context: one file per kind, all ``forward(x, geometry, mask)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from alphastomics.config import AttentionKind, GateType
from alphastomics.nn.attention.geometric import GeometricAttention
from alphastomics.nn.attention.grid import GridAttention
from alphastomics.nn.attention.linear import LinearAttention
from alphastomics.nn.attention.local_global import LocalGlobalAttention
from alphastomics.nn.attention.neighbor import NeighborAttention
from alphastomics.nn.attention.softmax import SoftmaxAttention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from alphastomics.nn.geometry import Geometry

__all__ = [
    "Attention",
    "AttentionKind",
    "GateType",
    "GeometricAttention",
    "GridAttention",
    "LinearAttention",
    "LocalGlobalAttention",
    "NeighborAttention",
    "SoftmaxAttention",
    "make_attention",
]


class Attention(Protocol):
    """What every kind of attention can do; the rows of its attention matrix sum to 1."""

    n_heads: int

    def __call__(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """``x`` (B, N, d) to (B, N, d); cells where ``mask`` (B, N) is false are attended by nobody."""
        ...

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates in (0, 1), (B, N, H) or (B, N, d); None where there is no gate."""
        ...

    def weights(self, x: Tensor, rows: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N)."""
        ...

    def received(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Mean attention that each cell receives from the real ones, (B, H, N), without the attention matrix."""
        ...


def make_attention(
    kind: AttentionKind,
    d_model: int,
    n_heads: int,
    *,
    gate_type: GateType = "headwise",
    use_qk_norm: bool = True,
    n_dims: int = 2,
    angle: float = 0.0,
    sequence: bool = False,
    n_pair_channels: int = 0,
) -> nn.Module:
    """Make an attention of one kind, an :class:`Attention`.

    Parameters
    ----------
    kind
        ``"full"`` softmax attention; ``"linear"``; ``"geometric"``: scores fall with distance; ``"neighbor"``: neighbors one
        by one and all cells in sum; ``"axial"``: along the rows and columns of a grid.
    d_model, n_heads
        Width and number of heads.
    gate_type, use_qk_norm
        Of softmax attention; linear attention has neither a gate nor norms.
    n_dims
        D, for geometric and axial attention.
    angle
        By which the axes of the grid are turned, in radians.
    sequence
        Whether cells have an order, for attention over neighbors.
    n_pair_channels
        Channels of the features of pairs, which geometric attention and attention over neighbors read; 0 if there are none.

    Raises
    ------
    ValueError
        If the kind is unknown, or a gate was chosen for linear attention.
    """
    if kind == "linear":
        if gate_type not in ("headwise", "none"):  # the default cannot be told from a choice
            raise ValueError(f"attention='linear' has no gate; leave gate_type={gate_type!r} out or take 'full'")
        return LinearAttention(d_model, n_heads)
    if kind == "full":
        return SoftmaxAttention(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
    if kind == "geometric":
        return GeometricAttention(
            d_model,
            n_heads,
            n_dims=n_dims,
            gate_type=gate_type,
            use_qk_norm=use_qk_norm,
            n_pair_channels=n_pair_channels,
        )
    if kind == "neighbor":
        return LocalGlobalAttention(
            d_model,
            n_heads,
            gate_type=gate_type,
            use_qk_norm=use_qk_norm,
            sequence=sequence,
            n_pair_channels=n_pair_channels,
        )
    if kind == "axial":
        return GridAttention(d_model, n_heads, n_dims=n_dims, angle=angle, gate_type=gate_type, use_qk_norm=use_qk_norm)
    raise ValueError(f"attention={kind!r} is unknown; choose 'full', 'linear', 'geometric', 'neighbor' or 'axial'")
