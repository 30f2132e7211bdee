r"""Attention whose scores fall with distance, in one call of flash attention.

.. math::

    s_{ij} = w_L \Big( \frac{q_i \cdot k_j}{\sqrt{d_h}} + b_{ij} \Big)
    - \frac{\tau}{2 \lambda^2} \lVert x_i - x_j \rVert^2, \qquad
    o_i = \sum_j \operatorname*{softmax}_j(s_{ij})\, v_j

per head: invariant point attention (Jumper et al. 2021, algorithm 22) for cells without frames, invariant to rigid motions and
reflections. :math:`\lambda` is the learned length of a head, initially log-spaced over the heads; :math:`\tau` is the trust in
positions. :math:`w_L = \sqrt{1/2}`, or :math:`\sqrt{1/3}` with pair features :math:`p_{ijc} = \sum_r L_{icr} R_{jcr}`, whose bias is

.. math:: b_{ij} = \sum_r u_{ir} u'_{jr}, \qquad u_{ir} = \sum_c w_c L_{icr}, \quad u'_{jr} = \sum_c w'_c R_{jcr} .

All terms are further columns of q, k and v (Flash-IPA, Liu et al. 2025; FlashBias, Wu et al. 2025). With
:math:`y_i = \sqrt{\tau}\, x_i / \lambda`,

.. math::

    Q_i = [\,w_L q_i / \sqrt{d_h},\; y_i,\; 1,\; w_L u_i\,], \quad
    K_j = [\,k_j,\; y_j,\; -\tfrac12 \lVert y_j \rVert^2,\; u'_j\,], \quad
    V_j = [\,v_j,\; u'_j\,]

the output is :math:`\operatorname{softmax}(Q K^\top) V`; :math:`\lVert y_i \rVert^2`, the same for all keys, is left out. From the
further columns of the output follows :math:`\sum_j A_{ij} \sum_r L_{icr} u'_{jr}` for each cell.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.config import NetworkConfig
from alphastomics.nn.attention.softmax import BLOCK, SoftmaxAttention
from alphastomics.nn.geometry import at_least_32_bits
from alphastomics.nn.pair.triangle import MASKED_SCORE
from alphastomics.nn.parallel import attend_to_all

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import GateType
    from alphastomics.nn.geometry import Geometry, Pairs

LENGTHS = 0.05, 2.0  # initial lengths of the first and the last head, in model units
UNIT = 2.0**8  # unit of squares in 16 bits, since float16 overflows at 65504


class PairColumns(nn.Module):
    """Bias from pair features, and their mean under attention, computed from R columns of their factors.

    Parameters
    ----------
    n_heads
        H.
    n_channels
        C.
    """

    def __init__(self, n_heads: int, n_channels: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(n_heads, n_channels) / n_channels**0.5)
        self.right = nn.Parameter(torch.randn(n_heads, n_channels) / n_channels**0.5)

    def columns(self, pairs: Pairs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Factors u and u' of the bias, (B, H, N, R)."""
        left = torch.einsum("hc,bcnr->bhnr", self.left.to(dtype), pairs.left.to(dtype))
        return left, torch.einsum("hc,bcnr->bhnr", self.right.to(dtype), pairs.right.to(dtype))

    def read(self, pairs: Pairs, mixed: Tensor) -> Tensor:
        """Mean of the features under attention, (B, N, H C), from the mean of u' in ``mixed`` (B, H, N, >= R)."""
        left = pairs.left.to(mixed.dtype)
        return torch.einsum("bhnr,bcnr->bnhc", mixed[..., : left.shape[-1]], left).flatten(-2)


class GeometricAttention(SoftmaxAttention):
    """Multi-head attention over the cells of a context whose scores fall with distance.

    Parameters
    ----------
    d_model, n_heads, gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`; gates act on o alone.
    n_dims
        D.
    n_pair_channels
        C, channels of the pair features; 0 without them.

    Raises
    ------
    ValueError
        If d is not a multiple of H, or ``gate_type`` is unknown.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_dims: int,
        gate_type: GateType = NetworkConfig.gate_type,
        use_qk_norm: bool = NetworkConfig.use_qk_norm,
        n_pair_channels: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
        self.n_dims = n_dims
        self.content = (1 / 3 if n_pair_channels else 1 / 2) ** 0.5  # w_L
        self.log_length = nn.Parameter(torch.linspace(math.log(LENGTHS[0]), math.log(LENGTHS[1]), n_heads))
        self.pair_columns = PairColumns(n_heads, n_pair_channels) if n_pair_channels else None
        self.seen = nn.Linear(n_heads * n_pair_channels, d_model, bias=False) if n_pair_channels else None

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map ``x`` (B, N, d) to (B, N, d), 0 for padding; see :class:`~alphastomics.nn.Attention`.

        ``geometry`` has positions, and pair features if there are channels for them.

        Raises
        ------
        ValueError
            If pair features are missing, or positions have another number of dimensions.
        """
        b, n, _ = x.shape
        q, k, v = self.columns(x, geometry, mask)
        with torch.autocast(x.device.type, enabled=False):  # precision is chosen in columns()
            mixed = attend_to_all(q, k, v, geometry.parallel, scale=1.0)
            pairs = None
            if self.pair_columns is not None:
                read = mixed[..., self.d_head :].to(at_least_32_bits(x.dtype))
                pairs = self.pair_columns.read(self._pairs(geometry), read).to(x.dtype)
        o = mixed[..., : self.d_head].transpose(1, 2)  # (B, N, H, d_h)
        gates = self.gates(x)
        if gates is not None:
            o = o * gates.view(b, n, self.n_heads, -1)
        y = self.out(o.flatten(-2))
        if self.seen is not None:
            y = y + self.seen(pairs)
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def columns(
        self, x: Tensor, geometry: Geometry, mask: Tensor | None, *, exact: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V, each (B, H, N, F), in the precision of v, or in at least 32 bits if ``exact``.

        In 16 bits lengths and positions have no gradient, which would be rounding errors.
        """
        q, k, v = self.heads(x)
        wide = at_least_32_bits(x.dtype)
        dtype = wide if exact else v.dtype
        padding = None if mask is None else ~mask[:, None, :, None]
        with torch.autocast(x.device.type, enabled=False):
            scale = geometry.trusted(x)[:, None, None, None].sqrt()
            position = self._in_lengths(x, geometry, mask)
            y, z = scale * position, scale * position  # of queries and of keys
            if dtype.itemsize == 2:
                y, z = y.detach() + 0.0 * y, z.detach() + 0.0 * z  # a gradient of 0 instead of none
            near = _distance_columns(y, z, padding, dtype)
            k = k if padding is None else k.masked_fill(padding, 0.0)
            queries, keys = [self.content / self.d_head**0.5 * q.to(wide), near[0]], [k.to(wide), near[1]]
            values = [v.to(wide)]
            if self.pair_columns is not None:
                left, right = self.pair_columns.columns(self._pairs(geometry), wide)
                right = right if padding is None else right.masked_fill(padding, 0.0)
                queries, keys, values = [*queries, self.content * left], [*keys, right], [*values, right]
            width = sum(part.shape[-1] for part in keys)
            width += -width % 8  # for fast kernels
            q, k, v = (_joined(parts, width).to(dtype) for parts in (queries, keys, values))
        return q, k, v

    def _in_lengths(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Tensor:
        """Positions (B, H, N, D) in units of the length of the head."""
        position = geometry.centered(x, mask, self.n_dims)
        return position[:, None] * (-self.log_length.to(position.dtype)).exp()[:, None, None]

    def _pairs(self, geometry: Geometry) -> Pairs:
        if geometry.pairs is None:
            raise ValueError("this attention reads pair features, and geometry.pairs is None; take n_pair_channels=0")
        return geometry.pairs

    def weights(  # type: ignore[override]
        self, x: Tensor, rows: Tensor, geometry: Geometry, mask: Tensor | None = None
    ) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N)."""
        q, k, _ = self.columns(x, geometry, mask, exact=True)
        with torch.autocast(x.device.type, enabled=False):
            return (q[:, :, rows] @ k.mT).softmax(dim=-1)

    def received(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Mean attention that each cell receives from real cells, (B, H, N), computed in blocks of rows."""
        q, k, _ = self.columns(x, geometry, mask, exact=True)
        b, h, n, _ = q.shape
        real = torch.ones(b, n, dtype=q.dtype, device=q.device) if mask is None else mask.to(q.dtype)
        total = q.new_zeros(b, h, n)
        with torch.autocast(x.device.type, enabled=False):
            for rows in torch.arange(n, device=q.device).split(max(1, BLOCK // (b * h * n))):
                total += torch.einsum("br,bhrn->bhn", real[:, rows], (q[:, :, rows] @ k.mT).softmax(dim=-1))
        return total / real.sum(dim=1)[:, None, None].clamp_min(1)


def _distance_columns(y: Tensor, z: Tensor, padding: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    r"""Columns of Q and K whose product is :math:`y_i \cdot z_j - |z_j|^2 / 2`, and -1e4 for padding, where z is 0.

    For a ``dtype`` of 16 bits, y and z are rounded to sums of two such numbers. All four products of the parts are computed, and
    the square of the rounded z is split into three parts: rounding moves points by a fraction of 2^-17, and distances are
    exactly those between the moved points.
    """
    queries, keys, unit = [y], [z], 1.0
    if dtype.itemsize == 2:
        (y_1, y_2), (z_1, z_2) = _parts(y, dtype, 2), _parts(z, dtype, 2)
        queries, keys, z, unit = [y_1, y_1, y_2, y_2], [z_1, z_2, z_1, z_2], z_1 + z_2, UNIT
    square = -0.5 * z.square().sum(dim=-1, keepdim=True)
    if padding is not None:
        square = square.masked_fill(padding, MASKED_SCORE)
    squares = _parts(square / unit, dtype, 3) if dtype.itemsize == 2 else [square]
    units = [torch.full_like(square, unit)] * len(squares)
    return torch.cat([*queries, *units], dim=-1), torch.cat([*keys, *squares], dim=-1)


def _parts(x: Tensor, dtype: torch.dtype, n: int) -> list[Tensor]:
    """Split ``x`` into ``n`` parts that ``dtype`` represents exactly, the largest first."""
    parts = []
    for _ in range(n):
        parts.append(x.to(dtype).to(x.dtype))
        x = x - parts[-1]
    return parts


def _joined(parts: list[Tensor], width: int) -> Tensor:
    """Columns side by side, (B, H, N, width), with zeros at the end.

    Q, K and V need equal widths for the CPU kernel that does not form the N x N matrix.
    """
    joined = torch.cat(parts, dim=-1)
    return F.pad(joined, (0, width - joined.shape[-1]))
