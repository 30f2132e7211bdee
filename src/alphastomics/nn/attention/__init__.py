"""Attention over the cells of a context; every kind has the interface :class:`Attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from alphastomics.nn.attention.geometric import GeometricAttention
from alphastomics.nn.attention.grid import GridAttention
from alphastomics.nn.attention.linear import LinearAttention
from alphastomics.nn.attention.local_global import LocalGlobalAttention
from alphastomics.nn.attention.neighbor import NeighborAttention
from alphastomics.nn.attention.softmax import KEY_STRIDE, SoftmaxAttention
from alphastomics.nn.pair.features import N_CHANNELS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from alphastomics.nn.config import DenoiserConfig
    from alphastomics.nn.geometry import Geometry

__all__ = [
    "Attention",
    "GeometricAttention",
    "GridAttention",
    "LinearAttention",
    "LocalGlobalAttention",
    "NeighborAttention",
    "SoftmaxAttention",
    "make_attention",
]


class Attention(Protocol):
    """Interface of every kind of attention; the rows of its attention matrix sum to 1."""

    n_heads: int

    def __call__(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, d) to (B, N, d); no cell attends to cells where ``mask`` (B, N) is false."""
        ...

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates in (0, 1), (B, N, H) or (B, N, H d_h); None without gates."""
        ...

    def weights(self, x: Tensor, rows: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N)."""
        ...

    def received(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Mean attention that each cell receives from real cells, (B, H, N), without forming the attention matrix."""
        ...


def make_attention(config: DenoiserConfig, *, angle: float = 0.0) -> nn.Module:
    """Make the attention of a network, see :class:`Attention`.

    Parameters
    ----------
    config
        Architecture; ``attention`` is ``"full"``, ``"linear"``, ``"geometric"`` (scores fall with distance), ``"neighbor"``
        (softmax attention to neighbors, linear attention to all cells) or ``"axial"`` (along the rows and columns of a grid).
    angle
        Angle in radians by which the grid of axial attention is turned.

    Raises
    ------
    ValueError
        If ``gate_type`` is chosen for linear attention, which has no gate.
    """
    sizes = (config.d_model, config.n_heads)
    gates: dict[str, Any] = {"gate_type": config.gate_type, "use_qk_norm": config.use_qk_norm}
    n_pair_channels = 0 if config.pair_features is None else N_CHANNELS
    match config.attention:
        case "linear":
            if config.gate_type not in ("headwise", "none"):  # the default is permitted
                raise ValueError(f"gate_type={config.gate_type!r} has no effect on attention='linear'; leave it out")
            return LinearAttention(*sizes)
        case "full":
            return SoftmaxAttention(*sizes, key_stride=KEY_STRIDE, **gates)
        case "geometric":
            return GeometricAttention(*sizes, n_dims=config.n_dims, n_pair_channels=n_pair_channels, **gates)
        case "neighbor":
            return LocalGlobalAttention(*sizes, sequence=config.sequence, n_pair_channels=n_pair_channels, **gates)
        case "axial":
            return GridAttention(*sizes, n_dims=config.n_dims, angle=angle, **gates)
