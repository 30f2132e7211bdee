r"""Axial attention over cells, along the rows and columns of a grid that contains every cell once (Ho et al. 2019).

.. math::

    y = R(x) + C\big(x + R(x)\big), \qquad
    \text{column}_i = \Big\lfloor \frac{m}{n} \operatorname{rank}(a \cdot x_i) \Big\rfloor, \qquad
    \text{row}_i = \text{rank of } b \cdot x_i \text{ within the column}, \qquad m = \lceil \sqrt n\, \rceil

R attends along rows and C along columns, both as :class:`~alphastomics.nn.SoftmaxAttention`. The n cells are assigned to columns
by quantiles: sizes of columns differ by at most one, so that only the last row has gaps. Two steps connect every cell to every
other cell whose row is occupied in its column. Time is O(n^1.5).

A grid is not invariant to rotation, so a and b are axes turned by another angle in each layer; in three dimensions they turn
about the diagonal, which treats all three axes alike. If positions are absent, cells are arranged by two fixed random
projections of their features instead: similar cells share a column.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.config import NetworkConfig
from alphastomics.nn.attention.softmax import SoftmaxAttention
from alphastomics.nn.neighbors import lexicographic_order
from alphastomics.nn.parallel import SINGLE_PROCESS

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import GateType
    from alphastomics.nn.geometry import Geometry
    from alphastomics.nn.parallel import SequenceParallel


class Grid(NamedTuple):
    """Arrangement of the cells of each context in a square of S x S slots.

    Attributes
    ----------
    slot
        Slot of every cell (B, N), S * column + row; S^2, outside of the square, for padding.
    occupied
        Whether a slot contains a cell, (B, S, S), by column and row.
    """

    slot: Tensor
    occupied: Tensor

    def lay(self, x: Tensor) -> Tensor:
        """Scatter cells (B, N, d) to slots (B, S, S, d); empty slots are 0."""
        slots = x.new_zeros(len(x), self.occupied[0].numel() + 1, x.shape[-1])
        slots = slots.scatter_(1, self.slot[..., None].expand_as(x), x)
        return slots[:, :-1].unflatten(1, self.occupied.shape[1:])

    def take(self, slots: Tensor) -> Tensor:
        """Gather cells (B, N, d) from slots (B, S, S, d); padding is 0."""
        slots = F.pad(slots.flatten(1, 2), (0, 0, 0, 1))
        return slots.gather(1, self.slot[..., None].expand(-1, -1, slots.shape[-1]))


def quantile_grid(a: Tensor, b: Tensor, mask: Tensor, *, multiple: int = 1) -> Grid:
    """Assign real cells with coordinates ``a`` and ``b`` (B, N) to columns by quantiles of a, and sort these by b.

    Ties in one coordinate are broken by the other. S is rounded up to a multiple of ``multiple`` by empty rows and columns.
    """
    side = math.isqrt(max(mask.shape[1] - 1, 0)) + 1
    side += -side % multiple
    n = mask.sum(dim=1, keepdim=True).clamp_min(1)
    m = n.float().sqrt().ceil().long()
    column = _rank(b, a, (~mask).long()) * m // n
    column = torch.where(mask, column, side)
    before = (column * n + m - 1) // m  # number of cells in previous columns
    row = _rank(a, b, column) - before
    slot = torch.where(mask, column * side + row, side**2)
    occupied = torch.zeros(len(mask), side**2 + 1, dtype=torch.bool, device=mask.device).scatter(1, slot, True)
    return Grid(slot, occupied[:, :-1].unflatten(1, (side, side)))


class GridAttention(nn.Module):
    """Attention of every cell along its row and its column.

    Parameters
    ----------
    d_model, n_heads, gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`.
    n_dims
        D.
    angle
        Angle in radians by which the axes are turned.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_dims: int,
        angle: float = 0.0,
        gate_type: GateType = NetworkConfig.gate_type,
        use_qk_norm: bool = NetworkConfig.use_qk_norm,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_dims = n_heads, n_dims
        self.along_rows, self.along_columns = (
            SoftmaxAttention(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm) for _ in range(2)
        )
        self.axes: Tensor
        self.register_buffer("axes", _axes(n_dims, angle), persistent=False)
        self.feature_axes: Tensor
        self.register_buffer("feature_axes", torch.randn(2, d_model, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, d) to (B, N, d), 0 for padding; see :class:`~alphastomics.nn.Attention`.

        ``geometry`` has positions.

        Raises
        ------
        ValueError
            If positions have another number of dimensions.
        """
        grid, parallel = self.grid(x, geometry, mask), geometry.parallel
        local_rows = parallel.split(grid.lay(parallel.gather(x)), dim=2)
        along_rows, along_columns = self._passes(local_rows, grid.occupied, parallel)
        local_cells = grid._replace(slot=parallel.split(grid.slot))
        return local_cells.take(parallel.gather(along_rows + along_columns, dim=2))

    def grid(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Grid:
        """Arrange the cells of all processes in a grid; the arguments are those of :meth:`forward`."""
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):  # rounding would create ties
            position = geometry.centered(x, mask, self.n_dims)
            located = (geometry.trusted(x) > 0)[:, None, None]
            by_features = x.to(position.dtype) @ self.feature_axes.to(position.dtype).T
            along_axes = torch.where(located, position @ self.axes.to(position.dtype).T, by_features)
            parallel = geometry.parallel
            a, b = parallel.gather(along_axes).unbind(dim=-1)
            return quantile_grid(a, b, parallel.gather(mask), multiple=parallel.world_size)

    def _passes(
        self, x: Tensor, occupied: Tensor, parallel: SequenceParallel = SINGLE_PROCESS
    ) -> tuple[Tensor, Tensor]:
        """Both terms of y for slots ``x`` (B, S, S, d), of which a process holds some rows."""
        rows, in_rows = _rows(x, parallel.split(occupied, dim=2))
        shape = (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
        along_rows = self.along_rows(rows, mask=in_rows).view(shape).transpose(1, 2)
        local_columns = parallel.resplit(x + along_rows, whole=1, split=2)
        columns, in_columns = _columns(local_columns, parallel.split(occupied))
        along_columns = self.along_columns(columns, mask=in_columns).view_as(local_columns)
        return along_rows, parallel.resplit(along_columns, whole=2, split=1)

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates in (0, 1) of the attention along rows; those along columns depend on its output."""
        return self.along_rows.gates(x)

    def weights(self, x: Tensor, rows: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:
        """Rows (R,) of the product of both attention matrices (columns, then rows), (B, H, R, N)."""
        grid = self.grid(x, geometry, mask)
        by_row, by_column = self._matrices(x, grid)
        side = grid.occupied.shape[-1]
        slot = grid.slot[:, rows].clamp(max=side**2 - 1)
        context = torch.arange(len(x), device=x.device)[:, None]
        column, row = slot // side, slot % side
        # (B, R, H, S) and (B, R, S, H, S)
        first, second = by_column[context, column, :, row], by_row[context, :, :, column]
        slots = torch.einsum("brhs,brshc->bcsrh", first, second)
        cells = grid.take(slots.flatten(3)).unflatten(2, (len(rows), self.n_heads))
        return cells.permute(0, 3, 2, 1)

    def received(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:
        """Mean attention that each cell receives from real cells in that product, (B, H, N)."""
        grid = self.grid(x, geometry, mask)
        by_row, by_column = self._matrices(x, grid)
        occupied = grid.occupied.to(by_row.dtype)
        by_column = torch.einsum("bcr,bchrs->bchs", occupied, by_column)
        slots = torch.einsum("bchs,bshcd->bdsh", by_column, by_row)
        return grid.take(slots).transpose(1, 2) / occupied.sum(dim=(1, 2))[:, None, None].clamp_min(1)

    def _matrices(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Attention matrices of all rows, and of all columns, (B, S, H, S, S) each."""
        x = grid.lay(x)
        along_rows, _ = self._passes(x, grid.occupied)
        b, side, _, _ = x.shape
        every = torch.arange(side, device=x.device)
        rows, in_rows = _rows(x, grid.occupied)
        columns, in_columns = _columns(x + along_rows, grid.occupied)
        by_row = self.along_rows.weights(rows, every, mask=in_rows)
        by_column = self.along_columns.weights(columns, every, mask=in_columns)
        return by_row.view(b, side, -1, side, side), by_column.view(b, side, -1, side, side)


def _columns(x: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Columns (B S, S, d) of slots (B, S, S, d), and the mask (B S, S) of slots to attend to."""
    occupied = occupied.flatten(0, 1)
    return x.flatten(0, 1), occupied | ~occupied.any(dim=1, keepdim=True)  # all slots of an empty column


def _rows(x: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B S, S, d), and the mask (B S, S) of slots to attend to."""
    return _columns(x.transpose(1, 2), occupied.transpose(1, 2))


def _rank(*keys: Tensor) -> Tensor:
    """Ranks (B, N) of cells sorted by ``keys`` (B, N), of which the last is the primary key."""
    order = lexicographic_order(*keys)
    return torch.empty_like(order).scatter(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))


def _axes(n_dims: int, angle: float) -> Tensor:
    """Unit vectors a and b, (2, D), turned by ``angle``; in three dimensions about the diagonal."""
    c, s = math.cos(angle), math.sin(angle)
    if n_dims == 2:
        return torch.tensor([[c, s], [-s, c]])
    along, across = (1 - c) / 3, s / 3**0.5
    return torch.tensor([[c + along, along + across, along - across], [along - across, c + along, along + across]])
