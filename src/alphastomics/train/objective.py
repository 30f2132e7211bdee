r"""The objective: noise a batch of contexts, denoise it, compare.

.. math::

    L = \lambda_e L_{expr} + \lambda_c L_{completion} + \lambda_p L_{pos} + \lambda_n L_{neighbor} + \lambda_b L_{balance} + \lambda_m L_{masked}

averaged over the contexts of all processes. ``frame="slice"`` leaves each context free up to a rigid motion, which is
resolved once, by the model itself: with the positions absent the network predicts its conditional mean in a frame of
its own choosing (the *canonical frame*: the loss aligns the truth to the prediction), and every noisy context is first
aligned to that prediction. All later steps are then ordinary diffusion in one frame; see ``docs/theory.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from alphastomics.chains.fape import chain_losses
from alphastomics.diffusion import DiffusionConfig, smallest_time
from alphastomics.diffusion.deformation import deform
from alphastomics.diffusion.geometry import center, kabsch, rotate
from alphastomics.diffusion.losses import (
    aligned_error,
    distance_error,
    layout_error,
    mean_squared_error,
    neighbor_error,
)
from alphastomics.diffusion.masking import clean_value
from alphastomics.nn import Routings, balance_losses, expert_counts
from alphastomics.nn.parallel import ALONE
from alphastomics.train.losses import ExpertLoad, min_distance_losses
from alphastomics.train.timesteps import Masks, draw_masks, draw_observed, draw_timesteps, keyed_rng, spread_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from alphastomics.config import PlanConfig
    from alphastomics.data import Batch
    from alphastomics.diffusion import MaskingConfig, Mode
    from alphastomics.nn import Denoiser, Prediction
    from alphastomics.nn.parallel import SequenceParallel


# Purposes of the generators that are keyed by context: training and validation noise, and what else is drawn.
TRAINING, VALIDATION, DEFORMATION, OBSERVED, PAIRS = 0, 1, 2, 3, 40


class Noised(NamedTuple):
    """A batch with noise, its timesteps, and what the network is to predict.

    Attributes
    ----------
    x_expr, x_pos
        Clean expression (B, N, G) and positions (B, N, D), in the frame in which they are noised.
    z_expr, z_pos
        The same with noise.
    t_expr, t_pos
        Timesteps (B,).
    measured
        Genes (B, G) that the input has.
    observed
        Entries (B, N, G) of expression that are given; None where expression is not sampled.
    masks
        Masked entries.
    """

    x_expr: Tensor
    x_pos: Tensor
    z_expr: Tensor
    z_pos: Tensor
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
        Weights of the losses.
    mode
        What it is trained to sample.
    diffusion
        Its two processes.
    shared_frame
        Whether positions are registered, so that nothing is aligned or centered.
    spacing
        Distance between neighboring cells in model units; 0 trains no minimum-distance network.
    masking
        Which entries are masked in training; None masks nothing.

    Attributes
    ----------
    parallel
        Processes that share the contexts of this one.
    weights_sharded
        Whether the weights are sharded, so that all processes must call the network equally often.
    load
        How much each expert was used in the last step.

    Raises
    ------
    ValueError
        If ``masking`` is given and the denoiser has no mask tokens, or ``lambda_fape`` and the cells are no ordered chains.
    """

    def __init__(
        self,
        module: Denoiser,
        config: PlanConfig,
        *,
        mode: Mode = "any",
        diffusion: DiffusionConfig | None = None,
        shared_frame: bool = False,
        spacing: float = 0.0,
        masking: MaskingConfig | None = None,
    ) -> None:
        if masking is not None and not module.config.mask_tokens:
            raise ValueError("masking needs a denoiser with mask_tokens=True; pass masking=None")
        if config.lambda_fape and not (module.config.sequence and module.config.n_dims == 3):
            raise ValueError("lambda_fape needs ordered cells in three dimensions; pass sequence_key= or lambda_fape=0")
        self.module, self.config = module, config
        self.mode: Mode = mode
        self.diffusion = diffusion or DiffusionConfig()
        self.shared_frame, self.spacing, self.masking = shared_frame, spacing, masking
        self.smallest = smallest_time(self.diffusion.position.schedule, spacing)
        self.parallel: SequenceParallel = ALONE
        self.weights_sharded = False
        self.load = ExpertLoad()

    def draw(self, batch: Batch, purpose: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Timesteps (B,) and standard noise of both modalities, keyed by (seed, epoch, context)."""
        keys = batch.key.cpu().numpy()
        device = batch.position.device
        rngs = [keyed_rng(key, purpose) for key in keys]
        timesteps = [
            draw_timesteps(
                self.mode,
                rng,
                absent=self.config.modality_dropout,
                smallest=self.smallest,
                kind=spread_kind(key, purpose),
            )
            for rng, key in zip(rngs, keys, strict=True)
        ]
        t_expr = torch.tensor([timestep.expression for timestep in timesteps], device=device)
        t_pos = torch.tensor([timestep.position for timestep in timesteps], device=device)
        # Numbers are drawn for real cells alone: what a context is padded to must not move its generator.
        n_cells = batch.mask.sum(1).tolist()
        noise = []
        for value, t in ((batch.expression, t_expr), (batch.position, t_pos)):
            parts = torch.zeros(value.shape)
            for part, rng, n, timestep in zip(parts, rngs, n_cells, t.tolist(), strict=True):
                if 0 < timestep < 1:
                    part[:n] = torch.from_numpy(rng.standard_normal((n, value.shape[2]), dtype="float32"))
            noise.append(parts.to(device))
        return t_expr, t_pos, noise[0], noise[1]

    def canonical(self, batch: Batch, mask: Tensor, x_pos: Tensor | None = None, cells: int = 256) -> Tensor:
        """Positions ``x_pos`` rotated or reflected into the model's own frame, from the clean expression of a few cells."""
        # Every context chooses among its own cells, which come first, whatever it is padded to.
        n_cells = mask.sum(1, keepdim=True)
        number = torch.arange(min(cells, mask.shape[1]), device=mask.device) * (-(-n_cells // cells))
        few, few_mask = number.clamp_max(mask.shape[1] - 1)[..., None], number < n_cells
        training = self.module.training
        self.module.eval()
        with torch.no_grad():
            few_sequence = sequence_of(batch.sequence.take_along_dim(few, 1))
            mean = self.conditional_mean(batch.expression.take_along_dim(few, 1), few_mask, few_sequence)
        self.module.train(training)
        few_position = center(batch.position.take_along_dim(few, 1), few_mask)
        rotation = kabsch(few_position, mean, few_mask.to(mean.dtype))
        return rotate(center(batch.position, mask) if x_pos is None else x_pos, rotation)

    def deformed(self, x_pos: Tensor, t_pos: Tensor, batch: Batch, purpose: int) -> Tensor:
        """Deform the contexts whose position timestep runs; in validation none."""
        if not self.config.deformation or purpose == VALIDATION:
            return x_pos
        keys = batch.key.cpu().numpy()
        contexts = [
            deform(x, self.config.deformation, keyed_rng(key, DEFORMATION)) if float(t) < 1 else x
            for x, t, key in zip(x_pos, t_pos, keys, strict=True)
        ]
        return torch.where(
            (t_pos <= 0)[:, None, None], torch.stack(contexts), center(torch.stack(contexts), batch.mask)
        )

    def centered(self, batch: Batch, t_pos: Tensor) -> Tensor:
        """Positions about the center of the context, or of the whole slice where they are given."""
        given = (t_pos <= 0)[:, None, None]
        about_slice = (batch.position - batch.center[:, None]) * batch.mask[..., None]
        return torch.where(given, about_slice, center(batch.position, batch.mask))

    def observed(self, batch: Batch, x_expr: Tensor, t_expr: Tensor, purpose: int) -> tuple[Tensor, Tensor]:
        """Entries (B, N, G) of expression that are given while the others are sampled, and their values.

        Whole cells are given unchanged. Single genes of a cell are given as an input has them, thinned and with genes
        missing: the full values are a fingerprint from which the network would memorize the cell.
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

    def conditional_mean(self, expression: Tensor, mask: Tensor, sequence: Tensor | None = None) -> Tensor:
        """Estimate of the positions (B, N, D) of cells of which only the expression is known."""
        zero, one = expression.new_zeros(len(expression)), expression.new_ones(len(expression))
        absent = expression.new_zeros(*expression.shape[:2], self.module.config.n_dims)
        output = self.module(expression, absent, zero, one, mask, predict=("position",), sequence=sequence)
        return self.clean_position(output.position.float(), absent, one, mask)

    def clean_position(
        self, output: Tensor, z: Tensor, t: Tensor, mask: Tensor, masked: Tensor | None = None
    ) -> Tensor:
        """The network's output as clean positions, centered unless the frame is shared."""
        x_0 = clean_value(self.diffusion.position, output, z, t, masked)
        return x_0 if self.shared_frame else center(x_0, mask)

    def noised(self, batch: Batch, purpose: int, step: int = 0) -> Noised:
        """Add noise to a batch at the timesteps of its contexts, and mask what is masked at this step of the optimizer."""
        t_expr, t_pos, noise_expr, noise_pos = self.draw(batch, purpose)
        mask = batch.mask
        x_pos = batch.position if self.shared_frame else self.centered(batch, t_pos)
        if not self.shared_frame:
            noise_pos = center(noise_pos, mask)
            if self.weights_sharded or bool((t_pos < 1).any()):
                moved = self.deformed(self.canonical(batch, mask, x_pos), t_pos, batch, purpose)
                # Contexts that are placed stay, so that no loss depends on what else is in the batch.
                x_pos = torch.where((t_pos < 1)[:, None, None], moved, x_pos)
        x_expr, given, measured, observed = batch.expression, batch.expression, batch.measured, None
        if self.mode != "expr_to_pos":
            sampled = (t_expr > 0)[:, None]
            x_expr = torch.where(sampled[..., None], batch.target, x_expr)
            measured = measured | (sampled & batch.present)
            observed, given = self.observed(batch, x_expr, t_expr, purpose)
        z_expr = self.diffusion.expression.noise(x_expr, t_expr, noise_expr) * measured.unsqueeze(1)
        if observed is not None:
            z_expr = torch.where(observed, given, z_expr)
        z_pos = self.diffusion.position.noise(x_pos, t_pos, noise_pos)
        masks = Masks()
        if self.masking is not None and purpose != VALIDATION:
            share = self.masking.share(step)
            masks = draw_masks(self.masking, batch, x_expr, x_pos, measured, t_expr, t_pos, share=share)
        if observed is not None and masks.expression is not None:
            observed = observed & ~masks.expression  # a masked entry is not marked as known
        return Noised(x_expr, x_pos, z_expr, z_pos, t_expr, t_pos, measured, observed, masks)

    def denoised(self, noised: Noised, batch: Batch) -> tuple[Prediction, Routings]:
        """The network's prediction, and the experts to which it sent the cells."""
        only_position = self.mode == "expr_to_pos" and noised.masks.expression is None
        routings = Routings()
        output = self.module(
            noised.z_expr,
            noised.z_pos,
            noised.t_expr,
            noised.t_pos,
            None if bool(batch.mask.all()) else batch.mask,
            observed=noised.observed,
            predict=("position",) if only_position else ("expression", "position"),
            masked=noised.masks,
            local_density=batch.local_density if batch.local_density.shape[-1] else None,
            sequence=sequence_of(batch.sequence),
            routings=routings,
            parallel=self.parallel,
        )
        return output, routings

    def losses(self, batch: Batch, *, purpose: int = TRAINING, step: int = 0) -> dict[str, Tensor]:
        """Loss of each kind per context, (B,); zero where it does not apply.

        Parameters
        ----------
        batch
            Contexts.
        purpose
            ``TRAINING`` or ``VALIDATION``, which draw different noise; validation neither masks nor deforms.
        step
            Step of the optimizer, on which the masked share depends.
        """
        noised = self.noised(batch, purpose, step)
        output, routings = self.denoised(noised, batch)
        assert output.position is not None
        mask, masked = batch.mask, noised.masks
        x_0_pos = self.clean_position(output.position.float(), noised.z_pos, noised.t_pos, mask, masked.position)
        rngs = [keyed_rng(key, PAIRS + purpose) for key in batch.key.cpu().numpy()]
        losses = self._position_losses(x_0_pos, output.latent, noised.x_pos, noised.t_pos, mask, masked.position, rngs)
        if self.config.lambda_fape and self.spacing:
            index = batch.sequence[..., 0]
            losses["fape"] = chain_losses(x_0_pos, noised.x_pos, noised.t_pos, mask, index, self.spacing)
        if output.expression is not None:
            losses |= self._expression_losses(output.expression.float(), x_0_pos, noised, batch)
        if routings:
            losses["balance"] = balance_losses(routings, mask, self.load.last if purpose == TRAINING else None)
            if purpose == TRAINING:
                self.load.add(expert_counts(routings, mask))
        if self.spacing:
            losses["min_distance"] = min_distance_losses(self.module.min_distance, batch, self.spacing, purpose)
        return losses

    def _expression_losses(self, output: Tensor, x_0_pos: Tensor, noised: Noised, batch: Batch) -> dict[str, Tensor]:
        """Diffusion loss where the timestep runs; what the input lacks where it is clean; and what was masked."""
        losses = {}
        mask, masked, t = batch.mask, noised.masks.expression, noised.t_expr
        x_0 = clean_value(self.diffusion.expression, output, noised.z_expr, t, masked)
        if self.mode != "expr_to_pos":
            weight = self.diffusion.expression.loss_weight(t, maximum=self.config.max_loss_weight)
            assert noised.observed is not None
            asked = ~noised.observed if masked is None else ~(noised.observed | masked)
            genes = noised.measured * self.module.gene_weight.square()
            error = mean_squared_error(x_0, noised.x_expr, mask, weight, features=genes, entries=asked)
            losses["expression"] = torch.where(t > 0, error, 0.0)
            # A clean input is thinned and lacks genes: the completion loss asks for the full expression of the cell.
            one, every = torch.ones_like(t), batch.present * self.module.gene_weight.square()
            whole = clean_value(self.diffusion.expression, output, noised.z_expr, one, None)
            unmasked = None if masked is None else ~masked
            error = mean_squared_error(whole, batch.target, mask, features=every, entries=unmasked)
            losses["completion"] = torch.where(t > 0, 0.0, error)
        if masked is not None:
            # Sampled expression has no gain: it is a value of the tissue, not of an input that lacks genes.
            gain = torch.where(t > 0, 1.0, (1 - batch.dropout).sqrt())[:, None, None]
            losses["masked"] = mean_squared_error(x_0, noised.x_expr * gain, mask, entries=masked)
            positions = mean_squared_error(x_0_pos, noised.x_pos, mask, entries=noised.masks.position)
            losses["masked"] = losses["masked"] + positions
        return losses

    def _position_losses(
        self,
        x_0: Tensor,
        latent: Tensor,
        x_pos: Tensor,
        t_pos: Tensor,
        mask: Tensor,
        masked: Tensor | None,
        rngs: Sequence[np.random.Generator],
    ) -> dict[str, Tensor]:
        """Diffusion loss where the timestep runs; aligned, distance and neighbor loss where positions are absent."""
        losses = {name: x_0.new_zeros(len(x_0)) for name in ("diffusion", "aligned", "distance", "neighbor", "layout")}
        runs = (t_pos > 0) & (t_pos < 1)
        if bool(runs.any()):
            weight = self.diffusion.position.loss_weight(t_pos[runs], maximum=self.config.max_loss_weight)
            seen = None if masked is None else ~masked[runs]
            losses["diffusion"][runs] = mean_squared_error(x_0[runs], x_pos[runs], mask[runs], weight, entries=seen)
        absent = t_pos >= 1
        if bool(absent.any()):
            predicted, true, real = x_0[absent], x_pos[absent], mask[absent]
            rngs = [rng for rng, judged in zip(rngs, absent.tolist(), strict=True) if judged]
            error = mean_squared_error if self.shared_frame else aligned_error
            losses["aligned"][absent] = error(predicted, true, real)
            kind, clamp = self.config.distance_loss, self.config.distance_threshold
            losses["distance"][absent] = distance_error(predicted, true, real, rngs, kind=kind, clamp=clamp) / 2
            feature = self.module.neighborhood(latent[absent])
            width = self.config.neighbor_width * true.shape[-1] ** 0.5
            losses["neighbor"][absent] = neighbor_error(feature, true, real, width=width, rngs=rngs)
            width = self.config.layout_width * true.shape[-1] ** 0.5
            losses["layout"][absent] = layout_error(predicted, true, real, width=width, rngs=rngs)
        return losses

    def total(self, losses: dict[str, Tensor], batch: Batch, count: float | Tensor | None = None) -> Tensor:
        """Weighted sum of the losses over ``count``, the mean number of real contexts in a batch of this step.

        Lightning averages gradients over processes and over the batches of a step, which differ in their number of contexts.
        Dividing all of them by the same count makes that the mean over contexts. None: the contexts of this batch.
        """
        config = self.config
        weights = {
            "diffusion": config.lambda_position,
            "aligned": config.lambda_position,
            "distance": config.lambda_distance,
            "neighbor": config.lambda_neighbor,
            "layout": config.lambda_layout,
            "expression": config.lambda_expression,
            "completion": config.lambda_completion,
            "min_distance": config.lambda_min_distance,
            "fape": config.lambda_fape,
            "balance": config.moe_load_balance_loss_weight,
            "masked": config.reconstruction_weight,
        }
        real = batch.mask.any(1).float()
        count = torch.as_tensor(real.sum() if count is None else count, device=real.device)
        count = torch.where(count > 0, count, 1)  # a batch of padding has loss 0; a mean below 1 is not clamped
        parts = [weights[name] * (loss * real).sum() for name, loss in losses.items()]
        return sum(parts, start=real.new_zeros(())) / count


def sequence_of(column: Tensor) -> Tensor | None:
    """Index (B, N) of the cells in their order from the column (B, N, S) of a batch; None where S = 0."""
    return column[..., 0] if column.shape[-1] else None
