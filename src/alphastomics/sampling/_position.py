r"""Placement of cells, and draws of their positions, given expression.

The network returns the conditional mean of the positions and the neighborhood embedding of the cells of a slice, which attend to
each other; a second neighborhood embedding is that of each cell alone. In a placement, the mean and the similarities by both embeddings are
averages over two networks (:mod:`alphastomics.sampling._second`). A placement follows in five steps. The first is left out for counts,
log-normalized and binary values, the third where positions are known or all slices share a frame, the fourth for other values:

1. average with the positions of retrieved reference cells (:mod:`alphastomics.sampling._retrieval`);
2. kriging, if positions of some cells are known (:mod:`alphastomics.sampling._kriging`);
3. scale of the reference (:mod:`alphastomics.sampling._scale`);
4. refinement of the layout by both neighborhood embeddings (:mod:`alphastomics.sampling._layout`);
5. removal of overlaps (:mod:`alphastomics.sampling._overlap`).

A draw is the placement for a random change of the genes (:mod:`alphastomics.sampling._perturbation`), in which a share of the cells
starts at the positions of retrieved reference cells (:mod:`alphastomics.sampling._retrieval`).

A slice larger than ``max_context`` is split into contexts that share the same anchor cells,

.. math::

    \hat x^{(b)} \leftarrow \hat x^{(b)} R_b + \delta_b, \qquad
    (R_b, \delta_b) = \arg\min \lVert \hat x^{(b)}_{A} R + \delta - \hat x^{(1)}_{A} \rVert^2,

and the means of the anchors A are averaged over contexts.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from alphastomics.diffusion.geometry import center, kabsch
from alphastomics.sampling._kriging import krige_positions
from alphastomics.sampling._layout import refine_layout
from alphastomics.sampling._overlap import remove_overlaps
from alphastomics.sampling._retrieval import average_positions, mode_positions, retrieve_positions
from alphastomics.sampling._scale import restore_radius
from alphastomics.sampling._second import average_means

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from alphastomics.sampling._cells import EncodedCells
    from alphastomics.sampling._sampler import Sampler


class KnownPositions:
    """Known positions of a slice, moved rigidly onto its conditional mean.

    Cells are placed in the canonical frame, so that a rotation of the known positions rotates the result.

    Parameters
    ----------
    position
        Positions (N, D) in the frame of the user and model units, NaN where they are not known.
    mean
        Conditional mean (N, D) in the canonical frame.
    shared_frame
        Whether both frames are the same.

    Attributes
    ----------
    mask
        Cells whose positions are known, (N,).
    position
        Their positions (n, D) in the canonical frame.
    """

    def __init__(self, position: Tensor, mean: Tensor, *, shared_frame: bool) -> None:
        self.mask = position.isfinite().all(-1)
        x, y = position[self.mask], mean[self.mask]
        self.rotation = torch.eye(x.shape[1]).to(x)
        self.origin = self.target = torch.zeros_like(x[0])
        if not shared_frame:
            self.rotation = kabsch(center(x[None]), center(y[None]))[0]  # that of a single cell is the identity
            self.origin, self.target = x.mean(0), y.mean(0)
        self.position = (x - self.origin) @ self.rotation + self.target

    def to_user_frame(self, position: Tensor) -> Tensor:
        """Positions (N, D) of the canonical frame in the frame of the user."""
        return (position - self.target) @ self.rotation.T + self.origin


class PositionSampler:
    """Places the cells of one slice, given their expression.

    Parameters
    ----------
    sampler
        The trained network and what belongs to it.
    cells
        The cells, N of them.
    second
        The same cells for the second network; None: its prediction is not used.

    Attributes
    ----------
    mean
        Conditional mean (1, N, D) in the canonical frame.
    latent
        Output (N, d) of the last block.
    cell_feature
        Neighborhood embedding (N, K) of each cell alone, unit vectors.
    """

    def __init__(self, sampler: Sampler, cells: EncodedCells, second: PositionSampler | None = None) -> None:
        self.sampler, self.module, self.second = sampler, sampler.module, second
        self.embedding, self.cell_feature, self.contexts, self.sequence = cells
        self.mean, self.latent = self._estimate()
        if second is not None:
            self.mean = average_means(self.mean, second.mean, self._share, shared_frame=sampler.shared_frame)

    @torch.no_grad()
    def _estimate(self) -> tuple[Tensor, Tensor]:
        """Conditional mean (1, N, D) and latents (N, d)."""
        module, shared_frame, one = self.module, self.sampler.shared_frame, self.embedding.new_ones(1)
        n_cells, n_dims = len(self.embedding), module.config.n_dims
        total, count = self.embedding.new_zeros(1, n_cells, n_dims), self.embedding.new_zeros(1, n_cells, 1)
        latent = torch.zeros_like(self.embedding)
        reference: Tensor | None = None
        for cells, n_anchors in self.contexts:
            sequence = None if self.sequence is None else self.sequence[cells][None]
            h = self.embedding[cells][None] + module.position_missing
            output = module.trunk(h, torch.zeros_like(one), one, None, ("position",), sequence=sequence)
            assert output.position is not None  # in ``predict``
            latent[cells] = output.latent[0].to(latent)
            mean = output.position.float()
            if not shared_frame:
                mean = center(mean)
                anchors = mean[:, :n_anchors]
                if reference is None:
                    reference = anchors
                elif n_anchors:
                    rotation = kabsch(center(anchors), center(reference))
                    mean = (mean - anchors.mean(1, keepdim=True)) @ rotation + reference.mean(1, keepdim=True)
            total[:, cells] += mean
            count[:, cells] += 1
        mean = total / count
        return mean if shared_frame or len(self.contexts) == 1 else center(mean), latent

    @cached_property
    def feature(self) -> Tensor:
        """Neighborhood embedding (N, K), unit vectors."""
        with torch.no_grad():
            return F.normalize(self.module.neighborhood(self.latent).float(), dim=-1)

    @property
    def joint_feature(self) -> Tensor:
        """Both neighborhood embeddings (N, 2 K), unit vectors: products are the mean of those of the two."""
        return torch.cat([self.feature, self.cell_feature], dim=1) / 2**0.5

    @property
    def layout_feature(self) -> Tensor:
        """Embeddings (N, 2 K) or (N, 4 K), unit vectors: products are the mean over both embeddings and both networks."""
        if self.second is None:
            return self.joint_feature
        weighted = ((1 - self._share) ** 0.5 * self.joint_feature, self._share**0.5 * self.second.joint_feature)
        return torch.cat(weighted, dim=1)

    @property
    def _share(self) -> float:
        """Share of the second network in averages."""
        assert self.sampler.fitted.second is not None  # there is a second network
        return self.sampler.fitted.second.share

    @torch.no_grad()
    def place(
        self,
        rng: np.random.Generator,
        *,
        refine: bool,
        retrieval_weight: float = 0.0,
        weight: Tensor | None = None,
        separate: bool = True,
        retrieve: bool = False,
        independent: tuple[Tensor, Tensor] | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """Positions (N, D), in the canonical frame or in that of ``known``.

        Parameters
        ----------
        rng
            Generator of the retrieved cells, of the rows of refinement and of the radii of the cells.
        refine
            Whether the layout is refined.
        retrieval_weight
            Weight of retrieved positions, from 0 to 1, in an average with the conditional mean.
        weight
            Weights (N,) of the cells in the refinement; 1 when None.
        separate
            Whether the scale of the reference is restored and overlaps are removed.
        retrieve
            Whether a share of the cells starts at the positions of retrieved reference cells, as in a draw. The layout is then
            always refined, because these positions are independent of each other.
        independent
            Place each cell at its own mode, without kriging, refinement and removal of overlaps, by its expression (N, G) in
            network units, and by the mask (G,) of its measured genes.
        known
            Positions (N, D) in the frame of the user and model units, NaN where they are not known. Known positions do not
            change.
        """
        x, frame, unexplained = self.mean[0], None, 1.0
        fitted = self.sampler.fitted
        if independent is not None:
            assert fitted.reference_cells is not None  # fitted after every training that places cells
            x = mode_positions(fitted.reference_cells, self.joint_feature, *independent).to(x)
        elif fitted.reference_cells is not None:
            if retrieve:
                x = retrieve_positions(fitted.reference_cells, self.feature, x, _torch_generator(rng))
            elif retrieval_weight:
                x = average_positions(fitted.reference_cells, self.cell_feature, x, retrieval_weight)
        if known is not None:
            frame = KnownPositions(known, self.mean[0], shared_frame=self.sampler.shared_frame)
        if independent is not None:
            return x if frame is None else frame.to_user_frame(x)
        if frame is not None:
            h = torch.cat([self.latent, self.embedding], dim=1)
            x, unexplained = krige_positions(h, x, frame.mask.nonzero()[:, 0], frame.position)
        nearest = fitted.nearest if separate else None
        if nearest is not None and frame is None and not self.sampler.shared_frame:
            x = restore_radius(x, reference_radius=float(nearest.radius[0]), n_reference=float(nearest.n_cells[0]))
        if refine or retrieve:
            generator = _torch_generator(rng)
            x = refine_layout(x, self.layout_feature, generator, weight=weight, unexplained=unexplained)
        if frame is not None:
            x = x.clone()
            x[frame.mask] = frame.position
        if nearest is not None:
            fixed = None if frame is None else frame.mask.cpu().numpy()
            x = torch.from_numpy(remove_overlaps(x.cpu().double().numpy(), nearest, rng, fixed)).to(x)
        return x if frame is None else frame.to_user_frame(x)


def _torch_generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**63)))
