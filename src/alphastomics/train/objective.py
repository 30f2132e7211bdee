r"""The objective: add noise to the expression of a batch of contexts, denoise it, and compute the losses.

.. math::

    L = {} & \lambda_p L_{\text{aligned}} + \lambda_d L_{\text{distance}} + \lambda_n L_{\text{neighbor}}
        + \lambda_l L_{\text{layout}} + \lambda_e L_{\text{expression}} \\
        & + \lambda_c L_{\text{completion}} + \lambda_f L_{\text{fape}} + \lambda_b L_{\text{balance}}
        + \lambda_m L_{\text{masked}}

averaged over the contexts of all processes. Each loss is zero in contexts to which it does not apply.

With ``frame="slice"`` the positions of a context are known up to a rigid motion. Where positions are absent, the network
predicts their conditional mean in a frame that it learns, the *canonical frame*: the loss aligns the true positions to the
prediction. Where positions are an input, the true positions are first aligned to that prediction, so that all inputs are in one
frame; see ``docs/theory.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from alphastomics.chains.fape import chain_losses
from alphastomics.config import ModelConfig
from alphastomics.data import Batch
from alphastomics.diffusion import Process
from alphastomics.diffusion.deformation import deform
from alphastomics.diffusion.geometry import align, center, kabsch, rotate
from alphastomics.diffusion.losses import (
    aligned_error,
    distance_error,
    layout_error,
    mean_squared_error,
    neighbor_error,
)
from alphastomics.diffusion.masking import clean_value
from alphastomics.nn import Routings, balance_losses, expert_counts
from alphastomics.nn.parallel import SINGLE_PROCESS
from alphastomics.train.expert_load import ExpertLoad
from alphastomics.train.timesteps import Masks, draw_masks, draw_observed, draw_timesteps, keyed_rng, stratified_uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from alphastomics.config import PlanConfig
    from alphastomics.diffusion import MaskingConfig, Mode
    from alphastomics.nn import Denoiser, Prediction
    from alphastomics.nn.parallel import SequenceParallel


# Purposes of the generators that are keyed by context.
TRAINING, VALIDATION, DEFORMATION, OBSERVED, PAIRS, TYPES = 0, 1, 2, 3, 40, 50
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


class Objective:
    """The losses of a :class:`~alphastomics.nn.Denoiser`; the loss of a step is :meth:`total` of :meth:`losses`.

    Parameters
    ----------
    module
        The denoiser.
    config
        Weights and settings of the losses.
    mode
        What the denoiser is trained to sample.
    diffusion
        Diffusion process of expression.
    shared_frame
        Whether all slices are registered to one frame; positions are then neither aligned nor centered.
    spacing
        Distance between neighboring cells in model units, the unit of the frame-aligned point error; 0 if unknown: the error is
        then not computed.
    masking
        Which entries are masked in training; None: none.

    Attributes
    ----------
    parallel
        Group of processes that share the contexts of this process.
    weights_sharded
        Whether the weights are sharded; all processes must then call the network equally often.
    load
        Load of the experts in the last step.

    Raises
    ------
    ValueError
        If ``masking`` is given and the denoiser has no mask tokens, or ``lambda_fape`` is positive and the cells are not
        ordered chains in three dimensions.
    """

    def __init__(
        self,
        module: Denoiser,
        config: PlanConfig,
        *,
        mode: Mode = ModelConfig.mode,
        diffusion: Process | None = None,
        shared_frame: bool = False,
        spacing: float = 0.0,
        masking: MaskingConfig | None = None,
    ) -> None:
        if masking is not None and not module.config.mask_tokens:
            raise ValueError("masking requires a denoiser with mask_tokens=True; pass masking=None")
        if config.lambda_fape and not (module.config.sequence and module.config.n_dims == 3):
            raise ValueError(
                "lambda_fape requires ordered cells in three dimensions; pass sequence_key= or lambda_fape=0"
            )
        self.module, self.config = module, config
        self.mode: Mode = mode
        self.diffusion = diffusion or Process()
        self.shared_frame, self.spacing, self.masking = shared_frame, spacing, masking
        self.parallel: SequenceParallel = SINGLE_PROCESS
        self.weights_sharded = False
        self.load = ExpertLoad()

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

    def denoised(self, noised: Noised, batch: Batch) -> tuple[Prediction, Routings]:
        """Prediction of the network, and the routing of cells to experts."""
        only_position = self.mode == "expr_to_pos" and noised.masks.expression is None
        routings = Routings()
        output = self.module(
            noised.z_expr,
            noised.x_pos,
            noised.t_expr,
            noised.t_pos,
            None if bool(batch.mask.all()) else batch.mask,
            observed=noised.observed,
            predict=("position",) if only_position else ("expression", "position"),
            masked=noised.masks,
            local_density=batch.local_density if batch.local_density.shape[-1] else None,
            cell_type=self.cell_types(batch.cell_type),
            sequence=sequence_of(batch.sequence),
            routings=routings,
            parallel=self.parallel,
        )
        return output, routings

    def losses(self, batch: Batch, *, purpose: int = TRAINING, step: int = 0) -> dict[str, Tensor]:
        """Losses (B,) of each context by name; zero where they do not apply.

        Parameters
        ----------
        batch
            Contexts.
        purpose
            ``TRAINING`` or ``VALIDATION``, which draw different noise; in validation nothing is masked or deformed.
        step
            Step of the optimizer, which determines the masked share.
        """
        batch = self.with_hidden_types(batch, purpose)
        noised = self.noised(batch, purpose, step)
        output, routings = self.denoised(noised, batch)
        assert output.position is not None
        mask = batch.mask
        x_0_pos = self.predicted_position(output.position, mask)
        rngs = [keyed_rng(key, PAIRS + purpose) for key in batch.key.cpu().numpy()]
        losses = self._position_losses(x_0_pos, output.latent, noised, mask, rngs)
        if self.config.lambda_fape and self.spacing:
            index = batch.sequence[..., 0]
            true = torch.where(
                (noised.t_pos < 1)[:, None, None], noised.x_pos, align(noised.x_pos, x_0_pos.detach(), mask)
            )
            losses["fape"] = chain_losses(x_0_pos, true, noised.t_pos, mask, index, self.spacing)
        if output.expression is not None:
            losses |= self._expression_losses(output.expression.float(), x_0_pos, noised, batch)
        if routings:
            losses["balance"] = balance_losses(routings, mask, self.load.last if purpose == TRAINING else None)
            if purpose == TRAINING:
                self.load.add(expert_counts(routings, mask))
        return losses

    def _expression_losses(self, output: Tensor, x_0_pos: Tensor, noised: Noised, batch: Batch) -> dict[str, Tensor]:
        """Diffusion loss where expression is noisy, completion loss where it is clean, and loss of masked entries."""
        losses = {}
        mask, masked, t = batch.mask, noised.masks.expression, noised.t_expr
        x_0 = clean_value(self.diffusion, output, noised.z_expr, t, masked)
        if self.mode != "expr_to_pos":
            weight = self.diffusion.loss_weight(t, maximum=self.config.max_loss_weight)
            assert noised.observed is not None
            sampled = ~noised.observed if masked is None else ~(noised.observed | masked)
            genes = noised.measured * self.module.gene_weight.square()
            error = mean_squared_error(x_0, noised.x_expr, mask, weight, features=genes, entries=sampled)
            losses["expression"] = torch.where(t > 0, error, 0.0)
            # Clean inputs are thinned and lack genes; the completion loss compares with the full expression of the cell.
            one, every = torch.ones_like(t), batch.present * self.module.gene_weight.square()
            whole = clean_value(self.diffusion, output, noised.z_expr, one, None)
            unmasked = None if masked is None else ~masked
            error = mean_squared_error(whole, batch.target, mask, features=every, entries=unmasked)
            losses["completion"] = torch.where(t > 0, 0.0, error)
        if masked is not None:
            # Clean inputs are thinned by this gain; noisy expression is not.
            gain = torch.where(t > 0, 1.0, (1 - batch.dropout).sqrt())[:, None, None]
            losses["masked"] = mean_squared_error(x_0, noised.x_expr * gain, mask, entries=masked)
            positions = mean_squared_error(x_0_pos, noised.x_pos, mask, entries=noised.masks.position)
            losses["masked"] = losses["masked"] + positions
        return losses

    def _position_losses(
        self,
        x_0: Tensor,
        latent: Tensor,
        noised: Noised,
        mask: Tensor,
        rngs: Sequence[np.random.Generator],
    ) -> dict[str, Tensor]:
        """Aligned, distance, neighbor and layout loss where positions are absent."""
        losses = {name: x_0.new_zeros(len(x_0)) for name in ("aligned", "distance", "neighbor", "layout")}
        absent = noised.t_pos >= 1
        if bool(absent.any()):
            predicted, true, real = x_0[absent], noised.x_pos[absent], mask[absent]
            rngs = [rng for rng, is_absent in zip(rngs, absent.tolist(), strict=True) if is_absent]
            error = mean_squared_error if self.shared_frame else aligned_error
            losses["aligned"][absent] = error(predicted, true, real)
            kind, clamp = self.config.distance_loss, self.config.distance_threshold
            losses["distance"][absent] = distance_error(predicted, true, real, rngs, kind=kind, clamp=clamp) / 2
            expression = noised.z_expr[absent]
            if noised.masks.expression is not None:
                expression = expression.masked_fill(noised.masks.expression[absent], 0.0)
            width = self.config.neighbor_width * true.shape[-1] ** 0.5
            for feature in (self.module.neighborhood(latent[absent]), self.module.cell_neighborhood(expression)):
                losses["neighbor"][absent] += neighbor_error(feature, true, real, width=width, rngs=rngs)
            width = self.config.layout_width * true.shape[-1] ** 0.5
            losses["layout"][absent] = layout_error(predicted, true, real, width=width, rngs=rngs)
        return losses

    def total(self, losses: dict[str, Tensor], batch: Batch, count: float | Tensor | None = None) -> Tensor:
        """Weighted sum of the losses, divided by ``count``.

        Parameters
        ----------
        losses
            Result of :meth:`losses`.
        batch
            Contexts.
        count
            Mean number of real contexts in the batches of this step; None: their number in this batch. Lightning averages
            gradients over processes and over the batches of a step, which differ in their number of contexts. With the same
            divisor for all batches, the average is the mean over contexts.
        """
        config = self.config
        weights = {
            "aligned": config.lambda_position,
            "distance": config.lambda_distance,
            "neighbor": config.lambda_neighbor,
            "layout": config.lambda_layout,
            "expression": config.lambda_expression,
            "completion": config.lambda_completion,
            "fape": config.lambda_fape,
            "balance": config.moe_load_balance_loss_weight,
            "masked": config.reconstruction_weight,
        }
        real = batch.mask.any(1).float()
        count = torch.as_tensor(real.sum() if count is None else count, device=real.device)
        count = torch.where(count > 0, count, 1)  # 0 if all contexts are padding; the mean may be below 1
        parts = [weights[name] * (loss * real).sum() for name, loss in losses.items()]
        return sum(parts, start=real.new_zeros(())) / count


def sequence_of(column: Tensor) -> Tensor | None:
    """Sequence index (B, N) of the cells from the column (B, N, S) of a batch; None if S = 0."""
    return column[..., 0] if column.shape[-1] else None
