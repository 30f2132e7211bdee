r"""Attention whose scores fall with distance: invariant point attention in one call of flash attention.

.. math::

    s_{ij} = w_L \Big( \frac{q_i \cdot k_j}{\sqrt{d_h}} + b_{ij} \Big)
    - \frac{\tau}{2 P} \sum_{p=1}^{P} \Big\lVert \frac{x_i - x_j}{\lambda} + T_i a_{ip} - T_j b_{jp} \Big\rVert^2, \qquad
    o_i = \sum_j \operatorname*{softmax}_j(s_{ij})\, v_j

per head (Jumper et al. 2021, algorithm 22). :math:`\lambda` is the learned length of a head, initially log-spaced over the heads;
:math:`\tau` is the trust in positions. Without frames there are no points and P = 1: the last term is
:math:`\tau \lVert x_i - x_j \rVert^2 / 2 \lambda^2`, invariant to rigid motions and reflections. With frames T (rotations) each
cell has points a, b, c in its local axes, in units of :math:`\lambda`. :math:`w_L = \sqrt{1/2}`, or :math:`\sqrt{1/3}` with pair
features :math:`p_{ijc} = \sum_r L_{icr} R_{jcr}`, whose bias is

.. math::

    b_{ij} = \sum_c w_c\, p_{ijc} \quad (\text{linear}), \qquad
    b_{ij} = \sum_r \Big(\sum_c w_c L_{icr}\Big) \Big(\sum_c w'_c R_{jcr}\Big) \quad (\text{factor}).

All terms are further columns of q, k and v (Flash-IPA, Liu et al. 2025; FlashBias, Wu et al. 2025). With
:math:`y_{ip} = \sqrt{\tau / P}\,(x_i / \lambda + T_i a_{ip})`, :math:`z_{jp}` likewise from b, and u, u' the factors of the bias,

.. math::

    Q_i = [\,w_L q_i / \sqrt{d_h},\; y_i,\; 1,\; w_L u_i\,], \quad
    K_j = [\,k_j,\; z_j,\; -\tfrac12 \lVert z_j \rVert^2,\; u'_j\,], \quad
    V_j = [\,v_j,\; x_j / \lambda + T_j c_{jp},\; u'_j\,]

the output is :math:`\operatorname{softmax}(Q K^\top) V`; :math:`\lVert y_i \rVert^2`, the same for all keys, is left out. From the
further columns of the output follow, for each cell, the mean points in its local axes with their distances, and
:math:`\sum_j A_{ij} p_{ijc}`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.nn.attention.softmax import BLOCK, SoftmaxAttention
from alphastomics.nn.geometry import at_least_32_bits
from alphastomics.nn.parallel import attend_to_all

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import GateType
    from alphastomics.nn.geometry import Geometry, Pairs

PairReadout = Literal["linear", "factor"]

HIDDEN = -1e4  # score of padding; its weight is 0 in any precision
UNIT = 2.0**8  # unit of squares in 16 bits, since float16 overflows at 65504
TINY = 1e-8  # added to squared distances under a root, whose slope is infinite at 0


class PairColumns(nn.Module):
    """Bias from pair features, and their mean under attention, computed from their factors.

    Parameters
    ----------
    n_heads
        H.
    n_channels
        C.
    readout
        ``"linear"`` needs M = C R columns and is linear in the features; ``"factor"`` needs M = R columns and mixes the channels
        of the factors.
    """

    def __init__(self, n_heads: int, n_channels: int, readout: PairReadout) -> None:
        super().__init__()
        if readout not in ("linear", "factor"):
            raise ValueError(f"pair_readout={readout!r} is unknown; choose 'linear' or 'factor'")
        self.left = nn.Parameter(torch.randn(n_heads, n_channels) / n_channels**0.5)
        self.right = nn.Parameter(torch.randn(n_heads, n_channels) / n_channels**0.5) if readout == "factor" else None

    def columns(self, pairs: Pairs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Factors u and u' of the bias, (B, H, N, M)."""
        left, right, w = pairs.left.to(dtype), pairs.right.to(dtype), self.left.to(dtype)
        if self.right is not None:
            mix = "hc,bcnr->bhnr"
            return torch.einsum(mix, w, left), torch.einsum(mix, self.right.to(dtype), right)
        u = torch.einsum("hc,bcnr->bhncr", w, left).flatten(-2)
        return u, right.transpose(1, 2).flatten(-2)[:, None].expand_as(u)

    def read(self, pairs: Pairs, mixed: Tensor) -> Tensor:
        """Mean of the features under attention, (B, N, H C), from the mean of u' in ``mixed`` (B, H, N, >= M)."""
        left = pairs.left.to(mixed.dtype)
        _, n_channels, _, rank = left.shape
        if self.right is not None:
            return torch.einsum("bhnr,bcnr->bnhc", mixed[..., :rank], left).flatten(-2)
        mixed = mixed[..., : n_channels * rank].unflatten(-1, (n_channels, rank))
        return torch.einsum("bhncr,bcnr->bnhc", mixed, left).flatten(-2)


class GeometricAttention(SoftmaxAttention):
    """Multi-head attention over the cells of a context whose scores fall with distance.

    Parameters
    ----------
    d_model, n_heads, gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`; gates act on o alone.
    n_dims
        D.
    lengths
        Initial lengths of the first and the last head, in model units.
    n_points
        P, points per head and cell; 0 without frames.
    n_pair_channels
        C, channels of the pair features; 0 without them.
    pair_readout
        Use of the pair features, see :class:`PairColumns`.
    split_precision
        Whether attention in 16 bits splits columns of positions into parts that 16 bits represent exactly; a single 16-bit
        number cannot distinguish close cells. Lengths and positions then have no gradient. With points, attention always
        runs in at least 32 bits.

    Raises
    ------
    ValueError
        If d is not a multiple of H, or ``gate_type`` or ``pair_readout`` is unknown.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_dims: int,
        gate_type: GateType = "headwise",
        use_qk_norm: bool = True,
        lengths: tuple[float, float] = (0.05, 2.0),
        n_points: int = 0,
        n_pair_channels: int = 0,
        pair_readout: PairReadout = "factor",
        split_precision: bool = True,
    ) -> None:
        super().__init__(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
        self.n_dims, self.n_points, self.split_precision = n_dims, n_points, split_precision
        self.content = (1 / 3 if n_pair_channels else 1 / 2) ** 0.5  # w_L
        self.log_length = nn.Parameter(torch.linspace(math.log(lengths[0]), math.log(lengths[1]), n_heads))
        self.points = nn.Linear(d_model, 3 * n_heads * n_points * n_dims) if n_points else None
        self.pair_columns = PairColumns(n_heads, n_pair_channels, pair_readout) if n_pair_channels else None
        n_seen = n_heads * (n_points * (n_dims + 1) + n_pair_channels)
        self.seen = nn.Linear(n_seen, d_model, bias=False) if n_seen else None

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Attend.

        Parameters
        ----------
        x
            Features (B, N, d).
        geometry
            Positions, frames if there are points, and pair features if there are channels for them.
        mask
            Real cells (B, N); no cell attends to padding, whose output is 0.

        Returns
        -------
        Features (B, N, d).

        Raises
        ------
        ValueError
            If frames or pair features are missing, or positions have another number of dimensions.
        """
        b, n, d = x.shape
        q, k, v = self.columns(x, geometry, mask)
        with torch.autocast(x.device.type, enabled=False):  # precision is chosen in columns()
            mixed = attend_to_all(q, k, v, geometry.parallel, scale=1.0)
            seen = None if self.seen is None else self._seen(mixed[..., self.d_head :], x, geometry, mask)
        o = mixed[..., : self.d_head].transpose(1, 2)  # (B, N, H, d_h)
        gates = self.gates(x)
        if gates is not None:
            o = o * gates.view(b, n, self.n_heads, -1)
        y = self.out(o.reshape(b, n, d))
        if self.seen is not None:
            y = y + self.seen(seen)
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def columns(
        self, x: Tensor, geometry: Geometry, mask: Tensor | None, *, exact: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V, each (B, H, N, F), in the precision of v; in at least 32 bits if ``exact`` or if there are points.

        Mean points in local axes are small differences of large numbers.
        """
        q, k, v = self.heads(x)
        wide = at_least_32_bits(x.dtype)
        dtype = v.dtype if self.points is None and not exact else wide
        hidden = None if mask is None else ~mask[:, None, :, None]
        with torch.autocast(x.device.type, enabled=False):
            y, z, points = self._places(x, geometry, mask)
            if dtype.itemsize == 2:  # the gradient would be rounding errors; 0.0 * y keeps a gradient of 0
                y, z = y.detach() + 0.0 * y, z.detach() + 0.0 * z
            near = _distance_columns(y, z, hidden, dtype if self.split_precision else wide)
            k = k if hidden is None else k.masked_fill(hidden, 0.0)
            queries, keys = [self.content / self.d_head**0.5 * q.to(wide), near[0]], [k.to(wide), near[1]]
            values = [v.to(wide)] if points is None else [v.to(wide), points]
            if self.pair_columns is not None:
                left, right = self.pair_columns.columns(self._pairs(geometry), wide)
                right = right if hidden is None else right.masked_fill(hidden, 0.0)
                queries, keys, values = [*queries, self.content * left], [*keys, right], [*values, right]
            width = sum(part.shape[-1] for part in keys)
            width += -width % 8  # for fast kernels
            q, k, v = (_joined(parts, width).to(dtype) for parts in (queries, keys, values))
        return q, k, v

    def _places(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """y, z, and the points c in the axes of the slice, each (B, H, N, P D); c is None without points."""
        root = geometry.trusted(x)[:, None, None, None].sqrt()
        place = self._in_lengths(x, geometry, mask)
        if self.points is None:
            return root * place, root * place, None
        b, n, _ = x.shape
        local = self.points(x.to(self.points.weight.dtype)).to(place.dtype)
        local = local.view(b, n, 3, self.n_heads, self.n_points, self.n_dims)
        turned = torch.einsum("bnij,bnshpj->sbhnpi", self._frames(x, geometry, mask), local)
        y, z, c = (turned + place[..., None, :]).flatten(-2)
        root = root / self.n_points**0.5
        return root * y, root * z, c

    def _in_lengths(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Tensor:
        """Positions (B, H, N, D) in units of the length of the head."""
        position = geometry.centered(x, mask, self.n_dims)
        return position[:, None] * (-self.log_length.to(position.dtype)).exp()[:, None, None]

    def _frames(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Tensor:
        """Frames (B, N, D, D), 0 for padding and where positions are absent."""
        if geometry.position is None:
            return x.new_zeros(*x.shape[:2], self.n_dims, self.n_dims, dtype=at_least_32_bits(x.dtype))
        if geometry.frames is None:
            raise ValueError(f"n_points={self.n_points} needs the frames of the cells; without frames take n_points=0")
        used = geometry.used(x, mask)[..., None, None]
        return geometry.frames.to(at_least_32_bits(x.dtype)).masked_fill(~used, 0.0)

    def _pairs(self, geometry: Geometry) -> Pairs:
        if geometry.pairs is None:
            raise ValueError("this attention reads features of pairs, and there are none; take n_pair_channels=0")
        return geometry.pairs

    def _seen(self, mixed: Tensor, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Tensor:
        """Points, distances and pair features, (B, N, H (P (D + 1) + C)), from the further columns (B, H, N, F - d_h)."""
        mixed, found = mixed.to(at_least_32_bits(x.dtype)), []
        if self.points is not None:
            trust = geometry.trusted(x)[:, None, None, None, None]
            points = mixed[..., : self.n_points * self.n_dims].unflatten(-1, (self.n_points, self.n_dims))
            points = points - self._in_lengths(x, geometry, mask)[..., None, :]
            points = torch.einsum("bnji,bhnpj->bnhpi", self._frames(x, geometry, mask), points)
            distance = (points.square().sum(dim=-1, keepdim=True) + TINY).sqrt()
            found.append((trust * torch.cat([points, distance], dim=-1)).flatten(2))
        if self.pair_columns is not None:
            found.append(self.pair_columns.read(self._pairs(geometry), mixed[..., self.n_points * self.n_dims :]))
        return torch.cat(found, dim=-1).to(x.dtype)

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


def _distance_columns(y: Tensor, z: Tensor, hidden: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
    if hidden is not None:
        square = square.masked_fill(hidden, HIDDEN)
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
