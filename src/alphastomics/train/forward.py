r"""The forward process of training: what the network receives for a batch of contexts.

.. math:: z = \alpha(t)\, x + \sigma(t)\, \varepsilon, \qquad \varepsilon \sim \mathcal N(0, I)

for expression x with the timesteps of :mod:`alphastomics.train.timesteps`. Positions are clean or absent. Some entries of
expression are observed while the others are sampled, and entries may be masked.

With ``frame="slice"`` the positions of a context are known up to a rigid motion. Where positions are an input, the true positions
are first aligned to the conditional mean that the network predicts without them, so that all inputs are in one frame, the
*canonical frame*; see ``docs/theory.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from alphastomics.config import ModelConfig
from alphastomics.data import Batch
from alphastomics.diffusion import Process
from alphastomics.diffusion.deformation import deform
from alphastomics.diffusion.geometry import center, kabsch, rotate
from alphastomics.train.timesteps import Masks, draw_masks, draw_observed, draw_timesteps, keyed_rng, stratified_uniform

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import PlanConfig
    from alphastomics.diffusion import MaskingConfig, Mode
    from alphastomics.nn import Denoiser


# Purposes of the generators that are keyed by context.
TRAINING, VALIDATION, DEFORMATION, OBSERVED, TYPES = 0, 1, 2, 3, 50
ALL_HIDDEN = 0.5  # share of the contexts in which no cell type is known


class Noised(NamedTuple):
    """A batch with noise: clean values, noisy expression, timesteps and masks.

    Attributes
    ----------
    x_expr, x_pos
        Clean expression (B, N, G) and positions (B, N, D); those that are an input are in the canonical frame.
    z_expr
        Noisy expression (B, N, G).
    t_expr, t_pos
        Timesteps (B,).
    measured
        Genes (B, G) that the input has.
    observed
        Observed entries (B, N, G) of expression; None if expression is not sampled.
    masks
        Masked entries.
    """

    x_expr: Tensor
    x_pos: Tensor
    z_expr: Tensor
    t_expr: Tensor
    t_pos: Tensor
    measured: Tensor
    observed: Tensor | None
    masks: Masks


class ForwardProcess:
    """Noise, frame, observed and masked entries of the inputs of a :class:`~alphastomics.nn.Denoiser` in training.

    Parameters
    ----------
    module
        The denoiser, which predicts the canonical frame.
    config
        Settings of the training.
    mode
        What the denoiser is trained to sample.
    diffusion
        Diffusion process of expression.
    shared_frame
        Whether all slices are registered to one frame; positions are then neither aligned nor centered.
    masking
        Which entries are masked in training; None: none.

    Attributes
    ----------
    weights_sharded
        Whether the weights are sharded; all processes must then call the network equally often.

    Raises
    ------
    ValueError
        If ``masking`` is given and the denoiser has no mask tokens.
    """

    def __init__(
        self,
        module: Denoiser,
        config: PlanConfig,
        *,
        mode: Mode = ModelConfig.mode,
        diffusion: Process | None = None,
        shared_frame: bool = False,
        masking: MaskingConfig | None = None,
    ) -> None:
        if masking is not None and not module.config.mask_tokens:
            raise ValueError("masking requires a denoiser with mask_tokens=True; pass masking=None")
        self.module, self.config = module, config
        self.mode: Mode = mode
        self.diffusion = diffusion or Process()
        self.shared_frame, self.masking = shared_frame, masking
        self.weights_sharded = False

    def draw(self, batch: Batch, purpose: int) -> tuple[Tensor, Tensor, Tensor]:
        """Timesteps (B,) of both modalities and standard normal noise of expression, keyed by (seed, epoch, context)."""
        keys = batch.key.cpu().numpy()
        device = batch.position.device
        rngs = [keyed_rng(key, purpose) for key in keys]
        timesteps = [
            draw_timesteps(
                self.mode,
                rng,
                modality_dropout=self.config.modality_dropout,
                kind=stratified_uniform(key, purpose),
            )
            for rng, key in zip(rngs, keys, strict=True)
        ]
        t_expr = torch.tensor([timestep.expression for timestep in timesteps], device=device)
        t_pos = torch.tensor([timestep.position for timestep in timesteps], device=device)
        # Noise is drawn for real cells only, so that it does not depend on the padding.
        n_cells = batch.mask.sum(1).tolist()
        noise = torch.zeros(batch.expression.shape)
        for part, rng, n, timestep in zip(noise, rngs, n_cells, t_expr.tolist(), strict=True):
            if 0 < timestep < 1:
                part[:n] = torch.from_numpy(rng.standard_normal((n, noise.shape[2]), dtype="float32"))
        return t_expr, t_pos, noise.to(device)

    def canonical(self, batch: Batch, mask: Tensor, x_pos: Tensor | None = None, cells: int = 256) -> Tensor:
        """Positions ``x_pos`` (B, N, D) rotated or reflected into the canonical frame, estimated from at most ``cells`` cells."""
        # The cells are spread evenly over the real cells of a context, which come first, whatever the padding.
        n_cells = mask.sum(1, keepdim=True)
        number = torch.arange(min(cells, mask.shape[1]), device=mask.device) * (-(-n_cells // cells))
        subset, subset_mask = number.clamp_max(mask.shape[1] - 1)[..., None], number < n_cells
        training = self.module.training
        self.module.eval()
        with torch.no_grad():
            mean = self.conditional_mean(
                batch.expression.take_along_dim(subset, 1),
                subset_mask,
                sequence_of(batch.sequence.take_along_dim(subset, 1)),
                self.cell_types(batch.cell_type.take_along_dim(subset[..., 0], 1)),
            )
        self.module.train(training)
        subset_position = center(batch.position.take_along_dim(subset, 1), subset_mask)
        rotation = kabsch(subset_position, mean, subset_mask.to(mean.dtype))
        return rotate(center(batch.position, mask) if x_pos is None else x_pos, rotation)

    def deformed(self, x_pos: Tensor, t_pos: Tensor, batch: Batch, purpose: int) -> Tensor:
        """Deform the contexts whose positions are an input; in validation none."""
        if not self.config.deformation or purpose == VALIDATION:
            return x_pos
        keys = batch.key.cpu().numpy()
        contexts = [
            deform(x, self.config.deformation, keyed_rng(key, DEFORMATION)) if float(t) < 1 else x
            for x, t, key in zip(x_pos, t_pos, keys, strict=True)
        ]
        return torch.stack(contexts)

    def centered(self, batch: Batch, t_pos: Tensor) -> Tensor:
        """Positions relative to the center of the context, or to that of the slice where they are an input."""
        about_slice = (batch.position - batch.center[:, None]) * batch.mask[..., None]
        return torch.where((t_pos < 1)[:, None, None], about_slice, center(batch.position, batch.mask))

    def observed(self, batch: Batch, x_expr: Tensor, t_expr: Tensor, purpose: int) -> tuple[Tensor, Tensor]:
        """Mask (B, N, G) of the observed entries of expression while the others are sampled, and their values.

        Completely observed cells keep their values. Partly observed cells are thinned and lack genes like any augmented input,
        because the network could recognize a cell by its exact values and memorize it.
        """
        observed = torch.zeros_like(x_expr, dtype=torch.bool)
        for row, mask, t, key in zip(observed, batch.mask, t_expr.tolist(), batch.key.cpu().numpy(), strict=True):
            if t > 0:
                n = int(mask.sum())
                row[:n] = torch.from_numpy(draw_observed(n, x_expr.shape[2], keyed_rng(key, OBSERVED + purpose))).to(
                    row.device
                )
        whole = observed.all(dim=-1, keepdim=True)
        thinned = batch.expression * (1 - batch.dropout).sqrt()[:, None, None]
        observed = observed & batch.present[:, None] & (whole | batch.measured[:, None])
        return observed, torch.where(whole, x_expr, thinned)

    def cell_types(self, cell_type: Tensor) -> Tensor | None:
        """The cell types (B, N); None if the network does not use them."""
        return cell_type if self.module.config.n_cell_types else None

    def with_hidden_types(self, batch: Batch, purpose: int) -> Batch:
        """A batch in which a random share of the cell types of every context is unknown, in half of the contexts all of them."""
        if not self.module.config.n_cell_types or purpose == VALIDATION:
            return batch
        cell_type = batch.cell_type.clone()
        for row, key in zip(cell_type, batch.key.cpu().numpy(), strict=True):
            rng = keyed_rng(key, TYPES)
            hidden = rng.random(len(row)) < (1.0 if rng.random() < ALL_HIDDEN else rng.random())
            row[torch.from_numpy(hidden).to(row.device)] = 0
        return batch._replace(cell_type=cell_type)

    def conditional_mean(
        self, expression: Tensor, mask: Tensor, sequence: Tensor | None = None, cell_type: Tensor | None = None
    ) -> Tensor:
        """Conditional mean of the positions (B, N, D) given expression (B, N, G)."""
        zero, one = expression.new_zeros(len(expression)), expression.new_ones(len(expression))
        absent = expression.new_zeros(*expression.shape[:2], self.module.config.n_dims)
        output = self.module(
            expression, absent, zero, one, mask, predict=("position",), cell_type=cell_type, sequence=sequence
        )
        return self.predicted_position(output.position, mask)

    def predicted_position(self, output: Tensor, mask: Tensor) -> Tensor:
        """Positions that the network predicts, centered unless the frame is shared."""
        return output.float() if self.shared_frame else center(output.float(), mask)

    def noised(self, batch: Batch, purpose: int, step: int = 0) -> Noised:
        """Draw timesteps, add noise to expression, and mask entries as configured for this step of the optimizer."""
        t_expr, t_pos, noise = self.draw(batch, purpose)
        x_pos = batch.position if self.shared_frame else self.centered(batch, t_pos)
        # All processes must evaluate a network whose weights are sharded.
        moved = [i for i, t in enumerate(t_pos.tolist()) if t < 1 or self.weights_sharded]
        if moved and not self.shared_frame:
            part, x, t = Batch(*(field[moved] for field in batch)), x_pos[moved], t_pos[moved]
            x_moved = self.deformed(self.canonical(part, part.mask, x), t, part, purpose)
            # Where positions are absent they stay as they are, so that no loss depends on the rest of the batch.
            x_pos = x_pos.clone()
            x_pos[moved] = torch.where((t < 1)[:, None, None], x_moved, x)
        x_expr, values, measured, observed = batch.expression, batch.expression, batch.measured, None
        if self.mode != "expr_to_pos":
            sampled = (t_expr > 0)[:, None]
            x_expr = torch.where(sampled[..., None], batch.target, x_expr)
            measured = measured | (sampled & batch.present)
            observed, values = self.observed(batch, x_expr, t_expr, purpose)
        z_expr = self.diffusion.noise(x_expr, t_expr, noise) * measured.unsqueeze(1)
        if observed is not None:
            z_expr = torch.where(observed, values, z_expr)
        masks = Masks()
        if self.masking is not None and purpose != VALIDATION:
            share = self.masking.share(step)
            masks = draw_masks(self.masking, batch, x_expr, x_pos, measured, t_expr, t_pos, share=share)
        if observed is not None and masks.expression is not None:
            observed = observed & ~masks.expression  # a masked entry is not observed
        return Noised(x_expr, x_pos, z_expr, t_expr, t_pos, measured, observed, masks)


def sequence_of(column: Tensor) -> Tensor | None:
    """Sequence index (B, N) of the cells from the column (B, N, S) of a batch; None if S = 0."""
    return column[..., 0] if column.shape[-1] else None
