r"""One training step: noise a batch of contexts, denoise it, compare.

.. math::

    L = \lambda_e L_{expr} + \lambda_c L_{completion} + \lambda_p L_{pos} + \lambda_n L_{neighbour} + \lambda_b L_{balance} + \lambda_m L_{masked}

averaged over the contexts of all processes. ``frame="slice"`` leaves each context free up to a rigid motion, which is
resolved once, by the model itself: with the positions absent the network predicts its conditional mean in a frame of
its own choosing (the *canonical frame*: the loss aligns the truth to the prediction), and every noisy context is first
aligned to that prediction. All later steps are then ordinary diffusion in one frame; see ``docs/theory.md``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from alphastomics.diffusion.deformation import deform
from alphastomics.diffusion.geometry import centre, kabsch, rotate
from alphastomics.diffusion.losses import (
    aligned_error,
    distance_error,
    layout_error,
    mean_squared_error,
    neighbour_error,
)
from alphastomics.diffusion.masking import clean_value
from alphastomics.nn import Routings, balance_losses, expert_counts
from alphastomics.nn.diagnostics import SeenLayer, watch_layers
from alphastomics.nn.draws import ContextGenerators, drawing_from
from alphastomics.nn.parallel import ALONE
from alphastomics.train.balance import ExpertLoad
from alphastomics.train.chain import chain_losses
from alphastomics.train.clocks import Mode, draw_clocks, keyed_rng, spread_kind
from alphastomics.train.config import DiffusionConfig, PlanConfig
from alphastomics.train.context_parallel import join_group
from alphastomics.train.diagnostics import EVERY, layer_statistics
from alphastomics.train.held import draw_held
from alphastomics.train.masking import Masks, draw_masks
from alphastomics.train.optimisation import Optimisation
from alphastomics.train.packing import packing_losses, smallest_time
from alphastomics.train.processes import mean_of_all, mean_of_some, sum_of_all
from alphastomics.train.recompute import recompute
from alphastomics.train.sharding import copy_whole, gathered, reached, shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.diffusion import MaskingConfig
    from alphastomics.nn import Denoiser
    from alphastomics.train.datamodule import ContextDataModule
    from alphastomics.train.length_schedule import LengthCurriculum


# Purposes of the generators that are keyed by context: training and validation noise, and what else is drawn; by DROPOUT the
# network draws.
TRAINING, VALIDATION, DEFORMATION, HELD, PAIRS, DROPOUT = 0, 1, 2, 3, 40, 50


class TrainingPlan(Optimisation):
    """Losses and optimiser of a :class:`~alphastomics.nn.Denoiser`.

    Parameters
    ----------
    module
        The denoiser.
    mode
        What it is trained to sample.
    diffusion
        Its two processes.
    shared_frame
        Whether positions are registered, so that nothing is aligned or centred.
    slice_names
        Names of the slices, for messages.
    spacing
        Distance between neighbouring cells in model units; 0 trains no packing network.
    max_seconds
        Time the training may take; the learning rate then follows the clock on the wall as well as the steps.
    masking
        Which entries are masked in training; none when None.
    n_recomputed
        Number of blocks that are recomputed in training, see ``train/recompute.py``.
    curriculum
        By which contexts grow, if they do.
    context_parallel_size
        Number of processes over which the cells of a context are split, see ``train/context_parallel.py``.
    **config
        Fields of :class:`~alphastomics.train.PlanConfig`.

    Raises
    ------
    ValueError
        If entries are to be masked and the denoiser has no tokens for them.
    """

    def __init__(
        self,
        module: Denoiser,
        *,
        mode: Mode = "any",
        diffusion: DiffusionConfig | None = None,
        shared_frame: bool = False,
        slice_names: tuple[str, ...] = (),
        spacing: float = 0.0,
        max_seconds: float | None = None,
        masking: MaskingConfig | None = None,
        n_recomputed: int = 0,
        curriculum: LengthCurriculum | None = None,
        context_parallel_size: int = 1,
        **config: Any,
    ) -> None:
        super().__init__(
            module, PlanConfig(**config), slice_names=slice_names, max_seconds=max_seconds, curriculum=curriculum
        )
        if masking is not None and not module.config.mask_tokens:
            raise ValueError("The denoiser has no mask tokens; make it with mask_tokens=True, or pass masking=None")
        if self.config.lambda_fape and not (module.config.sequence and module.config.n_dims == 3):
            raise ValueError(
                "lambda_fape is for cells with an order in three dimensions; pass sequence_key=, or leave it out"
            )
        self.mode: Mode = mode
        self.diffusion = diffusion or DiffusionConfig()
        self.shared_frame = shared_frame
        self.spacing = spacing
        self.smallest = smallest_time(self.diffusion.position.schedule, spacing)
        self.masking = masking
        self.n_recomputed = n_recomputed
        self.context_parallel_size = context_parallel_size
        self.parallel = ALONE  # while training runs, the processes of the group
        # Where weights are spread over processes, the network that they come from; in a tuple it is no part of this one.
        self._whole: tuple[Denoiser, ...] = ()
        self.load = ExpertLoad()

    # -- one step ----------------------------------------------------------------------------------------------------

    def draw(self, batch: Batch, purpose: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Clocks (B,) and standard noise of both modalities, keyed by (seed, epoch, context)."""
        keys = batch.key.cpu().numpy()
        device = batch.position.device
        rngs = [keyed_rng(key, purpose) for key in keys]
        clocks = [
            draw_clocks(
                self.mode, rng, absent=self.config.absent, smallest=self.smallest, kind=spread_kind(key, purpose)
            )
            for rng, key in zip(rngs, keys, strict=True)
        ]
        t_expr = torch.tensor([clock.expression for clock in clocks], device=device)
        t_pos = torch.tensor([clock.position for clock in clocks], device=device)
        # Numbers are drawn for real cells alone: what a context is padded to must not move its generator.
        n_cells = batch.mask.sum(1).tolist()
        noise = []
        for value, t in ((batch.expression, t_expr), (batch.position, t_pos)):
            parts = torch.zeros(value.shape)
            for part, rng, n, clock in zip(parts, rngs, n_cells, t.tolist(), strict=True):
                if 0 < clock < 1:
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
        few_position = centre(batch.position.take_along_dim(few, 1), few_mask)
        rotation = kabsch(few_position, mean, few_mask.to(mean.dtype))
        return rotate(centre(batch.position, mask) if x_pos is None else x_pos, rotation)

    def deformed(self, x_pos: Tensor, t_pos: Tensor, batch: Batch, purpose: int) -> Tensor:
        """Deform the contexts whose position clock runs; in validation none."""
        if not self.config.deformation or purpose == VALIDATION:
            return x_pos
        keys = batch.key.cpu().numpy()
        contexts = [
            deform(x, self.config.deformation, keyed_rng(key, DEFORMATION)) if float(t) < 1 else x
            for x, t, key in zip(x_pos, t_pos, keys, strict=True)
        ]
        return torch.where(
            (t_pos <= 0)[:, None, None], torch.stack(contexts), centre(torch.stack(contexts), batch.mask)
        )

    def centred(self, batch: Batch, t_pos: Tensor) -> Tensor:
        """Positions about the centre of the context, or of the whole slice where they are given."""
        given = (t_pos <= 0)[:, None, None]
        about_slice = (batch.position - batch.centre[:, None]) * batch.mask[..., None]
        return torch.where(given, about_slice, centre(batch.position, batch.mask))

    def held(self, batch: Batch, x_expr: Tensor, t_expr: Tensor, purpose: int) -> tuple[Tensor, Tensor]:
        """Entries (B, N, G) of expression that are given while the others are sampled, and the values that are given.

        Whole cells are given as they are. Of some genes of a cell is given what an input has, thinned and with genes
        missing: in full they are a fingerprint by which the network would know the cell by heart.
        """
        held = torch.zeros_like(x_expr, dtype=torch.bool)
        for row, mask, t, key in zip(held, batch.mask, t_expr.tolist(), batch.key.cpu().numpy(), strict=True):
            if t > 0:
                n = int(mask.sum())
                row[:n] = torch.from_numpy(draw_held(n, x_expr.shape[2], keyed_rng(key, HELD + purpose))).to(row.device)
        whole = held.all(dim=-1, keepdim=True)
        thinned = batch.expression * (1 - batch.dropout).sqrt()[:, None, None]
        held = held & batch.present[:, None] & (whole | batch.measured[:, None])
        return held, torch.where(whole, x_expr, thinned)

    def conditional_mean(self, expression: Tensor, mask: Tensor, sequence: Tensor | None = None) -> Tensor:
        """Estimate of the positions (B, N, D) of cells of which only the expression is known."""
        zero, one = expression.new_zeros(len(expression)), expression.new_ones(len(expression))
        absent = expression.new_zeros(*expression.shape[:2], self.module.config.n_dims)
        output = self.module(expression, absent, zero, one, mask, predict=("position",), sequence=sequence)
        return self.clean_position(output.position.float(), absent, one, mask)

    def clean_position(
        self, output: Tensor, z: Tensor, t: Tensor, mask: Tensor, masked: Tensor | None = None
    ) -> Tensor:
        """The network's output as clean positions, centred unless the frame is shared."""
        x_0 = clean_value(self.diffusion.position, output, z, t, masked)
        return x_0 if self.shared_frame else centre(x_0, mask)

    def masks(
        self,
        batch: Batch,
        x_expr: Tensor,
        x_pos: Tensor,
        measured: Tensor,
        t_expr: Tensor,
        t_pos: Tensor,
        purpose: int,
    ) -> Masks:
        """Masked entries; none in validation.

        The ratio follows the trainer's own count of steps, which a checkpoint holds and a resumed training takes up: a
        count kept beside it could only disagree.
        """
        if self.masking is None or purpose == VALIDATION:
            return Masks()
        share = self.masking.share(0 if self._trainer is None else self.global_step)
        return draw_masks(self.masking, batch, x_expr, x_pos, measured, t_expr, t_pos, share=share)

    def losses(self, batch: Batch, *, purpose: int = TRAINING) -> dict[str, Tensor]:
        """Loss of each kind per context, (B,); zero where it does not apply."""
        t_expr, t_pos, noise_expr, noise_pos = self.draw(batch, purpose)
        mask = batch.mask
        x_pos = batch.position if self.shared_frame else self.centred(batch, t_pos)
        if not self.shared_frame:
            noise_pos = centre(noise_pos, mask)
            # Where weights are spread over processes all of them call the network equally often.
            if self._whole or bool((t_pos < 1).any()):
                moved = self.deformed(self.canonical(batch, mask, x_pos), t_pos, batch, purpose)
                # Contexts that are placed stay, so that no loss depends on what else is in the batch.
                x_pos = torch.where((t_pos < 1)[:, None, None], moved, x_pos)
        x_expr, given, measured, held = batch.expression, batch.expression, batch.measured, None
        if self.mode != "expr_to_pos":
            sampled = (t_expr > 0)[:, None]
            x_expr = torch.where(sampled[..., None], batch.target, x_expr)
            measured = measured | (sampled & batch.present)
            held, given = self.held(batch, x_expr, t_expr, purpose)
        z_expr = self.diffusion.expression.noise(x_expr, t_expr, noise_expr) * measured.unsqueeze(1)
        if held is not None:
            z_expr = torch.where(held, given, z_expr)
        z_pos = self.diffusion.position.noise(x_pos, t_pos, noise_pos)
        masks = self.masks(batch, x_expr, x_pos, measured, t_expr, t_pos, purpose)
        if held is not None and masks.expression is not None:
            held = held & ~masks.expression  # what is masked is not marked as known
        only_position = self.mode == "expr_to_pos" and masks.expression is None
        predict = ("position",) if only_position else ("expression", "position")
        real = None if bool(mask.all()) else mask
        routings = Routings()
        output = self.module(
            z_expr,
            z_pos,
            t_expr,
            t_pos,
            real,
            held=held,
            predict=predict,
            masked=masks,
            crowding=batch.crowding if batch.crowding.shape[-1] else None,
            sequence=sequence_of(batch.sequence),
            routings=routings,
            parallel=self.parallel,
        )
        x_0_pos = self.clean_position(output.position.float(), z_pos, t_pos, mask, masks.position)
        rngs = [keyed_rng(key, PAIRS + purpose) for key in batch.key.cpu().numpy()]
        losses = self._position_losses(x_0_pos, output.latent, x_pos, t_pos, mask, masks.position, rngs)
        if self.config.lambda_fape and self.spacing:
            losses["fape"] = chain_losses(x_0_pos, x_pos, t_pos, mask, batch.sequence[..., 0], self.spacing)
        if output.expression is not None:
            x_0 = clean_value(self.diffusion.expression, output.expression.float(), z_expr, t_expr, masks.expression)
        if self.mode != "expr_to_pos":
            weight = self.diffusion.expression.loss_weight(t_expr, maximum=self.config.max_loss_weight)
            assert held is not None
            asked = ~held if masks.expression is None else ~(held | masks.expression)
            genes = measured * self.module.gene_weight.square()
            error = mean_squared_error(x_0, x_expr, mask, weight, features=genes, entries=asked)
            losses["expression"] = torch.where(t_expr > 0, error, 0.0)
            # Clean, but thinned and with genes missing, the input leaves something to say: what the cell holds in full.
            one, every = torch.ones_like(t_expr), batch.present * self.module.gene_weight.square()
            whole = clean_value(self.diffusion.expression, output.expression.float(), z_expr, one, None)
            unmasked = None if masks.expression is None else ~masks.expression
            error = mean_squared_error(whole, batch.target, mask, features=every, entries=unmasked)
            losses["completion"] = torch.where(t_expr > 0, 0.0, error)
        if masks.expression is not None:
            # What is asked back never has the gain: it is a value of the tissue, not of an input that lacks genes.
            gain = torch.where(t_expr > 0, 1.0, (1 - batch.dropout).sqrt())[:, None, None]
            losses["masked"] = mean_squared_error(x_0, x_expr * gain, mask, entries=masks.expression)
            losses["masked"] = losses["masked"] + mean_squared_error(x_0_pos, x_pos, mask, entries=masks.position)
        if routings:
            losses["balance"] = balance_losses(routings, mask, self.load.last if purpose == TRAINING else None)
            if purpose == TRAINING:
                self.load.add(expert_counts(routings, mask))
        if self.spacing:
            losses["packing"] = packing_losses(self.module.packing, batch, self.spacing, purpose)
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
        """Diffusion loss where the clock runs; aligned, distance and neighbour loss where positions are absent."""
        losses = {name: x_0.new_zeros(len(x_0)) for name in ("diffusion", "aligned", "distance", "neighbour", "layout")}
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
            losses["distance"][absent] = distance_error(predicted, true, real, rngs) / 2
            feature = self.module.neighbourhood(latent[absent])
            width = self.config.neighbour_width * true.shape[-1] ** 0.5
            losses["neighbour"][absent] = neighbour_error(feature, true, real, width=width, rngs=rngs)
            width = self.config.layout_width * true.shape[-1] ** 0.5
            losses["layout"][absent] = layout_error(predicted, true, real, width=width, rngs=rngs)
        return losses

    def total(self, losses: dict[str, Tensor], batch: Batch, count: float | Tensor | None = None) -> Tensor:
        """Weighted sum of the losses over ``count``, the mean number of real contexts in such a batch of any process.

        Lightning averages gradients over processes and over the batches of a step, each with as many contexts as it has: the
        same count for all of them makes that the mean over the contexts. None counts those of this batch on all processes.
        """
        config = self.config
        weights = {
            "diffusion": config.lambda_position,
            "aligned": config.lambda_position,
            "distance": config.lambda_distance,
            "neighbour": config.lambda_neighbour,
            "layout": config.lambda_layout,
            "expression": config.lambda_expression,
            "completion": config.lambda_completion,
            "packing": config.lambda_packing,
            "fape": config.lambda_fape,
            "balance": config.moe_load_balance_loss_weight,
            "masked": config.reconstruction_weight,
        }
        real = batch.mask.any(1).float()
        if count is None:
            count = real.sum() if self._trainer is None else mean_of_all(self.trainer, real.sum())
        count = torch.as_tensor(count, device=real.device)
        count = torch.where(count > 0, count, 1)  # nothing but padding costs nothing; the mean may well lie below 1
        parts = [weights[name] * (loss * real).sum() for name, loss in losses.items()]
        return sum(parts, start=real.new_zeros(())) / count

    # -- Lightning ---------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        """Cut new contexts in every epoch."""
        self.trainer.datamodule.set_epoch(self.current_epoch)  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Where weights are to be spread over processes, train a copy of which each has a part."""
        if self._device_mesh is not None and not self._whole:
            self._whole, self.module = (self.module,), shard(self.module, self._device_mesh["data_parallel"])

    def unshard(self, *, together: bool = True) -> None:
        """Give back the network that was there before, with what was learned if all processes do so ``together``.

        Cells are no longer split.
        """
        self.parallel = ALONE
        for module in self._whole:
            if together:
                copy_whole(self.module, module)
            self.module, self._whole = module, ()

    def on_fit_end(self) -> None:
        """Leave a network that is whole."""
        self.unshard()

    def on_fit_start(self) -> None:
        """Start the clock, and from experts that are evenly used; meet those who share contexts."""
        super().on_fit_start()
        self.parallel = join_group(self.trainer, self.context_parallel_size)
        self.load.begin(self.module.config, self.device)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a broken gradient, and remember the use of the experts for the next step."""
        super().on_before_optimizer_step(optimizer)
        self.load.end_step(lambda counts: sum_of_all(self.trainer, counts))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the use of the experts as well."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["expert_load"] = self.load.last

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from there."""
        super().on_load_checkpoint(checkpoint)
        self.load.last = checkpoint.get("expert_load")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of a batch; raises ``NonFiniteLossError`` before a broken step reaches the weights."""
        look = self.global_step % EVERY == 0
        self.last_look = self.current_epoch if look else self.last_look
        watch = watch_layers(self.module) if look else nullcontext(dict[int, SeenLayer]())
        with recompute(self.module.blocks, self.n_recomputed), drawing_from(self._generators(batch)), watch as seen:
            losses = self.losses(batch)
        self.current = batch.slice_index
        here, per_batch = self._count(batch_idx)
        loss = self.total(losses, batch, per_batch)
        self.refuse_if_broken("loss", loss)
        self._log("train", loss * (per_batch / here) if here else loss, losses, batch, here, seen)
        return reached(loss, self.module.parameters())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss of a held-out batch, with the same noise at every epoch."""
        losses = self.losses(batch, purpose=VALIDATION)
        here = self._datamodule.n_validated(batch_idx) / self._n_groups
        self._log("validation", self.total(losses, batch, here), losses, batch, here)

    def _generators(self, batch: Batch) -> ContextGenerators:
        """What the network draws for each context, keyed as all draws of training are."""
        seeds = [int(keyed_rng(key, DROPOUT).integers(2**63)) for key in batch.key.cpu().numpy()]
        return ContextGenerators.seeded(seeds, batch.mask.sum(1).tolist(), batch.mask.device)

    @property
    def _datamodule(self) -> ContextDataModule:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def _n_groups(self) -> int:
        """Number of groups of processes, each of which has contexts of its own."""
        return self.trainer.world_size // self.context_parallel_size

    def _count(self, batch_idx: int) -> tuple[float, float]:
        """Mean number of real contexts that a group has in this batch, and in a batch of this step of the optimiser."""
        n, w = self.trainer.accumulate_grad_batches, self._n_groups
        first = batch_idx - batch_idx % n
        batches = range(first, min(first + n, int(self.trainer.num_training_batches)))
        counts = {i: self._datamodule.n_trained(i) for i in batches}
        return counts[batch_idx] / w, sum(counts.values()) / (w * n)

    def _log(
        self,
        stage: str,
        loss: Tensor,
        losses: dict[str, Tensor],
        batch: Batch,
        count: float,
        seen: Mapping[int, SeenLayer] | None = None,
    ) -> None:
        """Log means over the contexts of a batch, of which each group of processes has ``count``."""
        real = batch.mask.any(1).float()
        values = {f"{stage}_loss": loss.detach()}
        share = 1 / count if count else 0.0  # a batch of padding weighs nothing
        values |= {f"{stage}_{name}": (value.detach() * real).sum() * share for name, value in losses.items()}
        if seen:
            with gathered(self.module.blocks):
                values |= mean_of_some(self.trainer, layer_statistics(seen, batch.mask), batch.mask.any())
        n_contexts = round(count * self._n_groups)
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=n_contexts, sync_dist=True)
        if stage == "train":
            self.sums.take_up(self)
            self.log("loss", loss.detach(), prog_bar=True)


def sequence_of(column: Tensor) -> Tensor | None:
    """Index (B, N) of the cells in their order from the column (B, N, S) of a batch; None where S = 0."""
    return column[..., 0] if column.shape[-1] else None
