r"""Inputs of attention besides features: positions and their trust, order, neighbors and pair features of the cells.

.. math::

    \tilde x_i = x_i - \frac{1}{n} \sum_{j \text{ real}} x_j, \qquad
    \text{terms of distance} \;\propto\; \tau_b \in [0, 1]

:math:`\tau` is the trust in the positions of a context: 1 if they are clean, 0 if they are absent. Only differences of positions
are used; centering keeps squares small where distances are computed from factors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn

from alphastomics.nn.neighbors import noisy_neighbors
from alphastomics.nn.pair.features import PairFeatures
from alphastomics.nn.parallel import SINGLE_PROCESS, SequenceParallel

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.config import DenoiserConfig


class Pairs(Protocol):
    """Features of pairs of cells as factors, p_ijc = sum_r L_icr R_jcr."""

    @property
    def left(self) -> Tensor:
        """L, (B, C, N, R)."""
        ...

    @property
    def right(self) -> Tensor:
        """R, (B, C, N, R)."""
        ...


class Factors(NamedTuple):
    """Factors L and R of :class:`Pairs`, without a mask."""

    left: Tensor
    right: Tensor


class Geometry(NamedTuple):
    """Geometry of the cells of a batch; None is unknown.

    Attributes
    ----------
    position
        (B, N, D) in model units.
    trust
        Trust in ``position``, (B,) in [0, 1]: 1 clean, 0 absent; None is 1. Terms of distance are multiplied
        by it, and where it is 0 positions are not used.
    sequence
        A real index (B, N) that orders the cells; only its differences are used.
    neighbors
        Cells (B, N, K) to which a cell attends, -1 for none, see :func:`alphastomics.nn.neighbors.neighbor_pairs`.
    pairs
        Features of pairs, as factors.
    parallel
        Processes over which the cells are split, see :mod:`alphastomics.nn.parallel`. All other entries, like features and
        masks, are then those of the n cells of this process; ``neighbors`` are indices into the cells of all processes.
    """

    position: Tensor | None = None
    trust: Tensor | None = None
    sequence: Tensor | None = None
    neighbors: Tensor | None = None
    pairs: Pairs | None = None
    parallel: SequenceParallel = SINGLE_PROCESS

    def split(self, parallel: SequenceParallel) -> Geometry:
        """Geometry of the cells of this process."""

        def local(x: Tensor | None) -> Tensor | None:
            return None if x is None else parallel.split(x)

        return self._replace(
            position=local(self.position),
            sequence=local(self.sequence),
            neighbors=None if self.neighbors is None else parallel.split(self.neighbors + 1) - 1,  # -1 for padding
            pairs=None if self.pairs is None else Factors(*(parallel.split(s, 2) for s in _sides(self.pairs))),
            parallel=parallel,
        )

    def trusted(self, x: Tensor) -> Tensor:
        """Trust (B,) of the contexts of ``x`` (B, N, d), in at least 32 bits; 0 without positions."""
        dtype = at_least_32_bits(x.dtype)
        if self.position is None:
            return torch.zeros(len(x), dtype=dtype, device=x.device)
        if self.trust is None:
            return torch.ones(len(x), dtype=dtype, device=x.device)
        return self.trust.detach().to(dtype)

    def centered(self, x: Tensor, mask: Tensor | None, n_dims: int) -> Tensor:
        """Positions (B, N, D) relative to the center of the real cells, in at least 32 bits; 0 for padding and where absent.

        Features ``x`` (B, N, d) determine precision and device. Raises ``ValueError`` if positions are not of ``n_dims``
        dimensions.
        """
        dtype = at_least_32_bits(x.dtype)
        if self.position is None:
            return torch.zeros(*x.shape[:2], n_dims, dtype=dtype, device=x.device)
        if self.position.shape[-1] != n_dims:
            raise ValueError(f"positions have {self.position.shape[-1]} dimensions, this attention is for {n_dims}")
        used = self.used(x, mask)[..., None]
        position = self.position.to(dtype).masked_fill(~used, 0.0)
        sums = torch.cat([position.sum(dim=1, keepdim=True), used.sum(dim=1, keepdim=True).to(dtype)], dim=-1)
        sums = self.parallel.sum_over_cells(sums)
        middle = sums[..., :-1] / sums[..., -1:].clamp_min(1)
        return (position - middle).masked_fill(~used, 0.0)

    def used(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Cells (B, N) whose position is used: real ones, in contexts whose trust is not 0."""
        used = (self.trusted(x) > 0)[:, None].expand(x.shape[:2])
        return used if mask is None else used & mask

    def part(self, context: int, n_cells: int) -> Geometry:
        """Geometry of the first ``n_cells`` cells of one context as a batch of one, which is not split."""
        one = slice(context, context + 1)

        def first(x: Tensor | None) -> Tensor | None:
            return None if x is None else self.parallel.first(x[one], n_cells)

        neighbors = first(self.neighbors)
        if neighbors is not None:
            neighbors = neighbors.masked_fill(neighbors >= n_cells, -1)
        pairs = None
        if self.pairs is not None:
            pairs = Factors(*(self.parallel.first(side[one], n_cells, 2) for side in _sides(self.pairs)))
        return Geometry(
            position=first(self.position),
            trust=None if self.trust is None else self.trust[one],
            sequence=first(self.sequence),
            neighbors=neighbors,
            pairs=pairs,
        )


def processes_of(geometry: Geometry | None) -> SequenceParallel:
    """Processes over which cells are split; a single process without a geometry."""
    return SINGLE_PROCESS if geometry is None else geometry.parallel


def _sides(pairs: Pairs) -> tuple[Tensor, Tensor]:
    return pairs.left, pairs.right


def at_least_32_bits(dtype: torch.dtype) -> torch.dtype:
    """Precision of positions and distances for features of precision ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


class GeometryEncoder(nn.Module):
    r"""The :class:`Geometry` of a batch, computed from the positions that are an input only.

    .. math::

        g = \big(z^{pos},\; \tau = 1 - t_{pos},\; s,\; \mathcal N(z^{pos}, s),\; p(h^0, z^{pos}, s)\big)

    Neighbors :math:`\mathcal N` are found among these positions at every call. If positions are absent, :math:`\tau = 0` and they
    are not used. A masked coordinate is set to 0, the center, as in the embedding of positions; a cell with a masked coordinate neither has nor is a neighbor in space. A context that is all
    padding has no positions.
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
        """Compute the geometry of the cells.

        Parameters
        ----------
        h
            Summed embeddings (B, N, d).
        t_pos
            Timestep of the positions (B,).
        mask
            Real cells (B, N); None if all are.
        position
            Noisy positions (B, N, D); None if they are absent in all contexts.
        masked
            Masked coordinates (B, N, D); None if there are none.
        sequence
            An index (B, N) that orders the cells, if the network uses one.

        Returns
        -------
        The geometry; None if the attention of the network does not use it.

        Raises
        ------
        ValueError
            If the network uses an order and ``sequence`` is None.
        """
        config = self.config
        if config.attention in ("full", "linear"):
            return None
        if config.reads_sequence and sequence is None:
            raise ValueError("this network uses an order of the cells; pass sequence=")
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
            neighbors = noisy_neighbors(
                position.detach(), known, geometry.sequence, real, config.n_neighbors, config.sparse_pairs
            )
            geometry = geometry._replace(neighbors=neighbors)
        if self.pairs is None:
            return geometry
        position, trust = geometry.centered(h, mask, config.n_dims), geometry.trusted(h)
        return geometry._replace(pairs=self.pairs(h, position, trust, geometry.sequence, mask))
