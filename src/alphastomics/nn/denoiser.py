r"""Denoiser: clean expression and positions of N cells from noisy ones and the timesteps of both modalities.

.. math::

    h^0_i &= E(w \odot z^{expr}_i) + V^\top z^{expr}_i + C_{k_i} + P(z^{pos}_i), \qquad c = \psi(t_{expr}, t_{pos}), \qquad
    g = \operatorname{GeometryEncoder}(h^0, z^{pos}, t_{pos}) \\
    h^{l+1} &= \operatorname{Block}(h^l, c, g, \text{mask}), \qquad
    F^{pos}_i = W_p \operatorname{AdaNorm}(h^L_i, c), \quad F^{expr}_i = W_e \operatorname{AdaNorm}(h^L_i, c)

w are weights of the genes (:meth:`Denoiser.weigh_genes`) and V principal components of the reference
(:meth:`Denoiser.set_components`). A modality whose timestep is 1 is absent: its noisy value is pure noise, and its embedding is
replaced by a learned token. Masked entries have other tokens (:meth:`Denoiser.embed_expression`,
:meth:`Denoiser.embed_position`). C are embeddings of the cell types k, if cell types are an input
(:meth:`Denoiser.embed_cell_type`). Shapes: B contexts, N cells, G genes, D dimensions, width d.
"""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from alphastomics.nn.block import AdaptiveNorm, Block
from alphastomics.nn.cell_encoder import CellEncoder
from alphastomics.nn.config import DenoiserConfig
from alphastomics.nn.embeddings import FourierPosition, LocalDensityEmbedding, TimestepEmbedding
from alphastomics.nn.experts import Routing, Routings
from alphastomics.nn.geometry import Geometry, GeometryEncoder
from alphastomics.nn.parallel import SINGLE_PROCESS
from alphastomics.nn.random import drawing_for_cells
from alphastomics.nn.residual import expand, reduce
from alphastomics.nn.sharing import LayerStack

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from numpy.typing import ArrayLike
    from torch import Tensor

    from alphastomics.nn.parallel import SequenceParallel

__all__ = ["Denoiser", "DenoiserConfig", "Prediction"]

GOLDEN_ANGLE = math.pi * (3 - 5**0.5)  # angle between the grids of successive blocks, so that no direction repeats


class Prediction(NamedTuple):
    """Output of the denoiser for each cell; its meaning is the ``prediction_type`` of the diffusion process.

    Attributes
    ----------
    expression
        (B, N, G), or None if it is not in ``predict``.
    position
        (B, N, D), or None if it is not in ``predict``.
    latent
        (B, N, d), the normed output of the last block.
    """

    expression: Tensor | None
    position: Tensor | None
    latent: Tensor


class Denoiser(nn.Module):
    """Diffusion transformer over the cells of a context; see the equations of the module.

    Parameters
    ----------
    config
        Architecture.
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        d = config.d_model
        self.gene_weight: Tensor
        self.register_buffer("gene_weight", torch.ones(config.n_genes))
        self.components: Tensor
        self.register_buffer("components", torch.zeros(config.n_genes, min(config.n_components, d)))
        self.expression_in = nn.Sequential(nn.Linear(config.n_genes, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.position_in = FourierPosition(config.n_dims, d)
        self.local_density_in = LocalDensityEmbedding(config.n_ranks, d)
        self.expression_missing = nn.Parameter(torch.zeros(d))
        self.position_missing = nn.Parameter(torch.zeros(d))
        self.expression_observed = nn.Parameter(torch.zeros(config.n_genes, d))
        if config.mask_tokens:
            self.expression_mask = nn.Parameter(torch.zeros(config.n_genes))
            self.position_mask = nn.Parameter(torch.zeros(config.n_dims, d))
        if config.n_cell_types:
            self.cell_type_in = nn.Embedding(config.n_cell_types + 1, d, padding_idx=0)
        self.timestep = TimestepEmbedding(d)
        self.surroundings = GeometryEncoder(config)
        depth = count()  # blocks are made in order
        self.blocks = LayerStack(
            lambda: Block(config, angle=GOLDEN_ANGLE * next(depth)),
            config.n_layers,
            sharing=config.layer_sharing,
            block_size=config.sharing_block,
            unshared=(*Block.UNSHARED, "attention.axes") if config.attention == "axial" else Block.UNSHARED,
        )
        self.norm_out = AdaptiveNorm(d)
        self.expression_out = nn.Linear(d, config.n_genes)
        self.position_out = nn.Linear(d, config.n_dims)
        self.neighbor_out = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, config.n_latent))
        self.cell_encoder = CellEncoder(config)

    def weigh_genes(self, gene_scale: ArrayLike) -> None:
        """Weight genes by their standard deviation (G,) in the reference.

        In network units all genes have the same variance. Genes of low variance are mostly counting noise, which a network
        would overfit if all genes had the same weight.
        """
        weight = torch.as_tensor(np.asarray(gene_scale), dtype=torch.float32)
        self.gene_weight.copy_(weight / weight.square().mean().sqrt())

    def set_components(self, components: ArrayLike) -> None:
        """Add the scores of orthonormal ``components`` (G, K) to the first channels of every embedding of expression.

        They distinguish cells before training. If there are fewer components than channels for them, the other channels are
        not changed.
        """
        values = torch.as_tensor(np.asarray(components), dtype=torch.float32)
        self.components.zero_()
        self.components[:, : values.shape[1]] = values

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.position_missing.device

    def embed_expression(
        self, expression: Tensor, t_expr: Tensor, observed: Tensor | None = None, masked: Tensor | None = None
    ) -> Tensor:
        r"""Embedding (B, N, d) of noisy expression (B, N, G).

        It is the missing token where the timestep is 1. Entries that are ``observed`` (B, N, G) are clean at any time, and add

        .. math:: m_i = \frac{1}{\sqrt G} \sum_g o_{ig} M_g

        to the embedding, with o 1 where an entry is observed and 0 elsewhere. At timestep 1 the other entries are set to 0,
        and a cell without observed entries is absent. A ``masked`` entry (B, N, G) is replaced by a learned value of its gene:
        the first layer is linear in the genes, so that this adds one learned vector per masked gene.
        """
        if masked is not None:
            expression = torch.where(masked, self.expression_mask, expression)
        absent = (t_expr >= 1)[:, None, None]
        if observed is None:
            return torch.where(absent, self.expression_missing, self._embed(expression))
        observed = observed.to(expression.dtype)
        expression = expression.masked_fill(observed < absent, 0.0)  # absent, and not observed
        mark = observed @ self.expression_observed / self.config.n_genes**0.5
        embedding = self._embed(expression) + mark
        nothing = observed.sum(dim=-1, keepdim=True) == 0
        return torch.where(absent & nothing, self.expression_missing, embedding)

    def _embed(self, expression: Tensor) -> Tensor:
        scores = functional.pad(expression @ self.components, (0, self.config.d_model - self.components.shape[1]))
        return self.expression_in(expression * self.gene_weight) + scores

    def embed_cell_type(self, cell_type: Tensor, t_expr: Tensor) -> Tensor:
        """Embedding (B, N, d) of cell types (B, N), from 1, 0 where unknown; 0 unless the timestep of expression is 0."""
        return (t_expr <= 0)[:, None, None] * self.cell_type_in(cell_type)

    def embed_position(
        self,
        position: Tensor | None,
        t_pos: Tensor,
        masked: Tensor | None = None,
        local_density: Tensor | None = None,
    ) -> Tensor:
        """Embedding (B, N, d) of noisy positions (B, N, D); the missing token (d,) without them and where the timestep is 1.

        ``local_density`` (B, N, K), a function of the clean positions of the slice, is used at timestep 0. A ``masked``
        coordinate (B, N, D) is set to 0, the center, and a learned vector of its axis is added to the embedding, because any
        replacement value is also a valid coordinate.
        """
        if position is None:
            return self.position_missing
        if masked is None:
            embedding = self.position_in(position)
        else:
            visible = position.masked_fill(masked, 0.0)
            embedding = self.position_in(visible) + masked.to(position.dtype) @ self.position_mask
        if local_density is not None:
            embedding = embedding + (t_pos <= 0)[:, None, None] * self.local_density_in(local_density)
        return torch.where((t_pos >= 1)[:, None, None], self.position_missing, embedding)

    def trunk(
        self,
        h: Tensor,
        t_expr: Tensor,
        t_pos: Tensor,
        mask: Tensor | None,
        predict: tuple[str, ...],
        routings: MutableSequence[Routing] | None = None,
        *,
        position: Tensor | None = None,
        masked: Tensor | None = None,
        sequence: Tensor | None = None,
        parallel: SequenceParallel = SINGLE_PROCESS,
    ) -> Prediction:
        """Run blocks and heads on the summed embeddings ``h`` (B, N, d).

        The arguments are those of :meth:`forward`, except that ``masked`` are the masked coordinates (B, N, D).
        """
        geometry = self.surroundings(h, t_pos, mask, position=position, masked=masked, sequence=sequence)
        timestep = self.timestep(t_expr, t_pos)
        if mask is not None:  # a context that is all padding attends to itself, which keeps gradients finite
            mask = mask | ~mask.any(dim=1, keepdim=True)
        if parallel.world_size > 1:
            return self._predict_split(h, timestep, geometry or Geometry(), mask, predict, routings, parallel)
        return self._predict(h, timestep, geometry, mask, predict, routings)

    def _predict_split(
        self,
        h: Tensor,
        timestep: Tensor,
        geometry: Geometry,
        mask: Tensor | None,
        predict: tuple[str, ...],
        routings: MutableSequence[Routing] | None,
        parallel: SequenceParallel,
    ) -> Prediction:
        """Run :meth:`_predict` on the cells of this process and gather the result of all cells."""
        n_cells, local_routings = h.shape[1], Routings()
        mask = parallel.split(torch.ones_like(h[..., 0], dtype=torch.bool) if mask is None else mask)
        h, geometry = parallel.split(h), geometry.split(parallel)
        with drawing_for_cells(parallel.rank * h.shape[1]):
            prediction = self._predict(h, timestep, geometry, mask, predict, local_routings)
        if routings is not None:
            for local in local_routings:
                routings.append(Routing(*(parallel.gather(part, n_cells) for part in local)))
        expression, position = (None if x is None else parallel.gather(x, n_cells) for x in prediction[:2])
        return Prediction(expression, position, parallel.gather(prediction.latent, n_cells))

    def _predict(
        self,
        h: Tensor,
        timestep: Tensor,
        geometry: Geometry | None,
        mask: Tensor | None,
        predict: tuple[str, ...],
        routings: MutableSequence[Routing] | None,
    ) -> Prediction:
        if self.config.residual == "hyper":
            h = expand(h, self.config.n_streams)
        h = self.blocks(h, timestep, geometry, mask, routings)
        if self.config.residual == "hyper":
            h = reduce(h)
        (h,) = self.norm_out(h, timestep)
        with torch.autocast(h.device.type, enabled=False):  # 16 bits are too coarse for positions
            position = self.position_out(h.to(self.position_out.weight.dtype)) if "position" in predict else None
        return Prediction(
            expression=self.expression_out(h) if "expression" in predict else None,
            position=position,
            latent=h,
        )

    def forward(
        self,
        expression: Tensor,
        position: Tensor | None,
        t_expr: Tensor,
        t_pos: Tensor,
        mask: Tensor | None = None,
        *,
        observed: Tensor | None = None,
        predict: tuple[str, ...] = ("expression", "position"),
        routings: MutableSequence[Routing] | None = None,
        masked: tuple[Tensor | None, Tensor | None] = (None, None),
        local_density: Tensor | None = None,
        cell_type: Tensor | None = None,
        sequence: Tensor | None = None,
        parallel: SequenceParallel = SINGLE_PROCESS,
    ) -> Prediction:
        """Run the network.

        Parameters
        ----------
        expression
            Noisy expression (B, N, G) in network units, zero where a gene is unmeasured.
        position
            Noisy positions (B, N, D) in model units; None if they are absent in all contexts.
        t_expr, t_pos
            Timesteps (B,) in [0, 1]; 0 is clean, 1 absent. The values of an absent modality are not used.
        mask
            Real cells (B, N); None if all are.
        observed
            Entries of expression (B, N, G) that are clean at any timestep, true or 1; None if there are none.
        predict
            Which heads to run.
        masked
            Masked entries of expression (B, N, G) and of positions (B, N, D), whose values are not used.
        local_density
            Local density of each cell (B, N, K), see :func:`alphastomics.data.local_density`; used where the timestep of
            positions is 0. None if it is unknown.
        cell_type
            Cell types (B, N), from 1, 0 where unknown; used where the timestep of expression is 0. None: all unknown.
        sequence
            An index (B, N) that orders the cells, if the network uses one; only its differences matter.
        routings
            A list to which every layer with experts appends its routing.
        parallel
            Processes that share these contexts: each runs blocks and heads on some of the cells and returns the result for
            all cells.
        """
        h = self.embed_expression(expression, t_expr, observed, masked[0])
        if cell_type is not None:
            h = h + self.embed_cell_type(cell_type, t_expr)
        h = h + self.embed_position(position, t_pos, masked[1], local_density)
        return self.trunk(
            h,
            t_expr,
            t_pos,
            mask,
            predict,
            routings,
            position=position,
            masked=masked[1],
            sequence=sequence,
            parallel=parallel,
        )

    def neighborhood(self, latent: Tensor) -> Tensor:
        """Embedding (B, N, n_latent) in which cells that are close in the tissue have similar directions."""
        return self.neighbor_out(latent)

    def cell_neighborhood(self, expression: Tensor) -> Tensor:
        """The same (B, N, n_latent) of each cell alone, given clean expression (B, N, G)."""
        return self.cell_encoder(expression * self.gene_weight)
