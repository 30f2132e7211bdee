r"""The objective: add noise to the expression of a batch of contexts, denoise it, and compute the losses.

.. math::

    L = {} & \lambda_p L_{\text{aligned}} + \lambda_d L_{\text{distance}} + \lambda_n L_{\text{neighbor}}
        + \lambda_l L_{\text{layout}} + \lambda_e L_{\text{expression}} \\
        & + \lambda_c L_{\text{completion}} + \lambda_f L_{\text{fape}} + \lambda_b L_{\text{balance}}
        + \lambda_m L_{\text{masked}}

averaged over the contexts of all processes. Each loss is zero in contexts to which it does not apply.

With ``frame="slice"`` the positions of a context are known up to a rigid motion. Where positions are absent, the network
predicts their conditional mean in a frame that it learns, the *canonical frame*: the loss aligns the true positions to the
prediction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from alphastomics.chains.fape import chain_losses
from alphastomics.config import ModelConfig
from alphastomics.diffusion.geometry import align, center
from alphastomics.diffusion.losses import (
    aligned_error,
    by_features,
    by_positions,
    distance_error,
    mean_squared_error,
    neighborhood_errors,
)
from alphastomics.diffusion.masking import clean_value
from alphastomics.nn import Routings, balance_losses, expert_counts
from alphastomics.nn.parallel import SINGLE_PROCESS
from alphastomics.train.draws import TRAINING
from alphastomics.train.expert_load import ExpertLoad
from alphastomics.train.forward import ForwardProcess, sequence_of
from alphastomics.train.timesteps import keyed_rng

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import PlanConfig
    from alphastomics.data import Batch
    from alphastomics.data._draws import Draws
    from alphastomics.diffusion import MaskingConfig, Mode, Process
    from alphastomics.nn import Denoiser, Prediction
    from alphastomics.nn.parallel import SequenceParallel
    from alphastomics.train.forward import Noised

POSITION_LOSSES = ("aligned", "distance", "neighbor", "layout")  # in the same order in all processes
PAIRS = 40  # purpose of the generator that draws pairs


class Objective(ForwardProcess):
    """The losses of a :class:`~alphastomics.nn.Denoiser`; the loss of a step is :meth:`total` of :meth:`losses`.

    Parameters
    ----------
    module, mode, diffusion, shared_frame, masking
        As for :class:`~alphastomics.train.forward.ForwardProcess`.
    config
        Weights and settings of the losses.
    spacing
        Distance between neighboring cells in model units, the unit of the frame-aligned point error; 0 if unknown: the error is
        then not computed.

    Attributes
    ----------
    parallel
        Group of processes that share the contexts of this process.
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
        if config.lambda_fape and not (module.config.sequence and module.config.n_dims == 3):
            raise ValueError(
                "lambda_fape requires ordered cells in three dimensions; pass sequence_key= or lambda_fape=0"
            )
        super().__init__(module, config, mode=mode, diffusion=diffusion, shared_frame=shared_frame, masking=masking)
        self.spacing = spacing
        self.parallel: SequenceParallel = SINGLE_PROCESS
        self.load = ExpertLoad()

    def denoised(self, noised: Noised, batch: Batch, draws: Draws) -> tuple[Prediction, Routings]:
        """Prediction of the network, and the routing of cells to experts."""
        only_position = self.mode == "expr_to_pos" and noised.masks.expression is None
        routings = Routings()
        output = self.module(
            noised.z_expr,
            noised.x_pos,
            noised.t_expr,
            noised.t_pos,
            None if min(draws.n_cells) == batch.mask.shape[1] else batch.mask,
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
        draws = self.draw(batch, purpose)
        if draws.hidden_type.shape[1]:
            batch = batch._replace(cell_type=batch.cell_type.masked_fill(draws.hidden_type, 0))
        noised = self.noised(batch, draws, purpose, step)
        output, routings = self.denoised(noised, batch, draws)
        assert output.position is not None
        mask = batch.mask
        x_0_pos = self.predicted_position(output.position, mask)
        losses = self._position_losses(x_0_pos, output.latent, noised, mask, draws, purpose)
        if self.config.lambda_fape and self.spacing and batch.sequence.shape[-1]:
            losses["fape"] = self._chain_losses(x_0_pos, noised.x_pos, batch, draws.absent)
        if output.expression is not None:
            losses |= self._expression_losses(output.expression.float(), x_0_pos, noised, batch)
        if routings:
            losses["balance"] = balance_losses(routings, mask, self.load.last if purpose == TRAINING else None)
            if purpose == TRAINING:
                self.load.add(expert_counts(routings, mask))
        return losses

    def _expression_losses(self, output: Tensor, x_0_pos: Tensor, noised: Noised, batch: Batch) -> dict[str, Tensor]:
        """Diffusion loss where expression is noisy, completion loss where it is clean, and loss of masked entries."""
        losses: dict[str, Tensor] = {}
        mask, masked, t = batch.mask, noised.masks.expression, noised.t_expr
        if self.mode != "expr_to_pos":
            # Clean inputs are thinned and lack genes; the completion loss compares with the full expression of the cell.
            clean = t <= 0
            genes = torch.where(clean[:, None], batch.present, noised.measured) * self.module.gene_weight.square()
            assert noised.observed is not None
            predicted = 1 - noised.observed
            if masked is not None:
                predicted = predicted * ~masked
            x_0 = self.diffusion.x0(output, noised.z_expr, torch.where(clean, 1.0, t))
            error = mean_squared_error(x_0, batch.target, mask, features=genes, entries=predicted)
            weight = self.diffusion.loss_weight(t, maximum=self.config.max_loss_weight)
            losses |= {
                "expression": torch.where(clean, 0.0, error * weight),
                "completion": torch.where(clean, error, 0.0),
            }
        if masked is not None:
            x_0 = clean_value(self.diffusion, output, noised.z_expr, t, masked)
            # Clean inputs are thinned by this gain; noisy expression is not.
            gain = torch.where(t > 0, 1.0, (1 - batch.dropout).sqrt())[:, None, None]
            losses["masked"] = mean_squared_error(x_0, noised.x_expr * gain, mask, entries=masked)
            x_pos = noised.x_pos if self.shared_frame else center(noised.x_pos, mask)  # as the prediction is
            positions = mean_squared_error(x_0_pos, x_pos, mask, entries=noised.masks.position)
            losses["masked"] = losses["masked"] + positions
        return losses

    def _position_losses(
        self, x_0: Tensor, latent: Tensor, noised: Noised, mask: Tensor, draws: Draws, purpose: int
    ) -> dict[str, Tensor]:
        """Aligned, distance, neighbor and layout loss where positions are absent."""
        zero, absent = x_0.new_zeros(len(x_0)), draws.absent
        if not len(absent):
            return dict.fromkeys(POSITION_LOSSES, zero)
        predicted, true, real = (x.index_select(0, absent) for x in (x_0, noised.x_pos, mask))
        rngs = [keyed_rng(key, PAIRS + purpose) for key in draws.key[list(draws.placed)]]
        error = mean_squared_error if self.shared_frame else aligned_error
        kind, clamp = self.config.distance_loss, self.config.distance_threshold
        aligned = error(predicted, true, real)
        distance = distance_error(predicted, true, real, rngs, kind=kind, clamp=clamp) / 2
        expression = noised.z_expr.index_select(0, absent)
        if noised.masks.expression is not None:
            expression = expression.masked_fill(noised.masks.expression.index_select(0, absent), 0.0)
        near, far = (w * true.shape[-1] ** 0.5 for w in (self.config.neighbor_width, self.config.layout_width))
        features = self.module.neighborhood(latent.index_select(0, absent)), self.module.cell_neighborhood(expression)
        neighborhoods = [*(by_features(feature, near) for feature in features), by_positions(predicted, far)]
        of_latents, of_cells, layout = neighborhood_errors(neighborhoods, true, real, rngs)
        values = (aligned, distance, of_latents + of_cells, layout)
        return {name: zero.index_copy(0, absent, value) for name, value in zip(POSITION_LOSSES, values, strict=True)}

    def _chain_losses(self, x_0: Tensor, x_pos: Tensor, batch: Batch, absent: Tensor) -> Tensor:
        """Frame-aligned point error where positions are absent."""
        fields = (x_0, x_pos, batch.mask, batch.sequence[..., 0])
        predicted, true, mask, sequence = (x.index_select(0, absent) for x in fields)
        if not self.shared_frame:  # the slice may be a reflection of the canonical frame, which the error would count
            true = align(true, predicted.detach(), mask)
        losses = chain_losses(predicted, true, mask, sequence, self.spacing)
        return x_0.new_zeros(len(x_0)).index_copy(0, absent, losses)

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
        count = real.sum() if count is None else count
        # 0 if all contexts are padding; the mean may be below 1
        count = torch.where(count > 0, count, 1) if isinstance(count, torch.Tensor) else count if count > 0 else 1.0
        parts = [weights[name] * (loss * real).sum() for name, loss in losses.items()]
        return sum(parts, start=real.new_zeros(())) / count
