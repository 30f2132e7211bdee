"""Attention over the cells of a context: one file per kind, all ``forward(x, geometry, mask)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from alphastomics.nn.attention.linear import LinearAttention
from alphastomics.nn.attention.softmax import GateType, SoftmaxAttention

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.geometry import Geometry

__all__ = ["Attention", "AttentionKind", "GateType", "LinearAttention", "SoftmaxAttention", "make_attention"]

AttentionKind = Literal["full", "linear"]


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
    kind: AttentionKind, d_model: int, n_heads: int, *, gate_type: GateType = "headwise", use_qk_norm: bool = True
) -> SoftmaxAttention | LinearAttention:
    """Make an attention of one kind.

    Parameters
    ----------
    kind
        ``"full"`` or ``"linear"``.
    d_model, n_heads
        Width and number of heads.
    gate_type, use_qk_norm
        Of softmax attention; linear attention has neither a gate nor norms.

    Raises
    ------
    ValueError
        If the kind is unknown, or a gate was chosen for linear attention.
    """
    if kind == "full":
        return SoftmaxAttention(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
    if kind != "linear":
        raise ValueError(f"attention={kind!r} is unknown; choose 'full' or 'linear'")
    if gate_type not in ("headwise", "none"):  # the default cannot be told from a choice
        raise ValueError(f"attention='linear' has no gate; leave gate_type={gate_type!r} out or take 'full'")
    return LinearAttention(d_model, n_heads)
