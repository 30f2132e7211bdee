"""The Lightning module of a training, which optimizes an :class:`~alphastomics.train.objective.Objective`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from alphastomics.config import ModelConfig, PlanConfig
from alphastomics.nn.diagnostics import LayerInputs, watch_layers
from alphastomics.nn.parallel import SINGLE_PROCESS
from alphastomics.nn.random import ContextGenerators, drawing_from
from alphastomics.train.diagnostics import EVERY, layer_statistics
from alphastomics.train.distributed.processes import (
    gather_objects,
    join_group,
    mean_over_processes,
    sum_over_processes,
    weighted_mean_over_processes,
)
from alphastomics.train.distributed.sharding import (
    copy_full_params,
    fill_gradients,
    full_weights,
    shard,
    touch_all_params,
)
from alphastomics.train.draws import VALIDATION
from alphastomics.train.finite import FiniteCheck
from alphastomics.train.memory.recompute import recompute
from alphastomics.train.objective import Objective
from alphastomics.train.optimization import (
    NonFiniteLossError,
    gradient_norm,
    learning_rate_factor,
    make_optimizer,
    override_settings,
)
from alphastomics.train.timesteps import keyed_rng

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.data._draws import Draws
    from alphastomics.diffusion import MaskingConfig, Mode, Process
    from alphastomics.nn import Denoiser
    from alphastomics.train.curriculum import LengthCurriculum
    from alphastomics.train.datamodule import ContextDataModule

DROPOUT = 50  # purpose of the generators, keyed by context, from which the network draws


class TrainingPlan(pl.LightningModule):
    """Training of a :class:`~alphastomics.nn.Denoiser` by an :class:`~alphastomics.train.objective.Objective`.

    Parameters
    ----------
    module
        The denoiser.
    mode, diffusion, shared_frame, spacing, masking
        As in :class:`~alphastomics.train.objective.Objective`.
    slice_names
        Names of the slices, for error messages.
    max_seconds
        Longest time of the training; the learning rate then depends on the elapsed time as well as on the steps.
    n_recomputed
        Number of blocks that are recomputed in training, see ``train/memory/recompute.py``.
    curriculum
        Callback that sets the length of contexts; None: their length is constant.
    group_size
        Number of processes over which the cells of a context are split, see ``train/distributed/processes.py``.
    **config
        Fields of :class:`~alphastomics.train.PlanConfig`.

    Raises
    ------
    ValueError
        As for :class:`~alphastomics.train.objective.Objective`.
    """

    def __init__(
        self,
        module: Denoiser,
        *,
        mode: Mode = ModelConfig.mode,
        diffusion: Process | None = None,
        shared_frame: bool = False,
        slice_names: tuple[str, ...] = (),
        spacing: float = 0.0,
        max_seconds: float | None = None,
        masking: MaskingConfig | None = None,
        n_recomputed: int = 0,
        curriculum: LengthCurriculum | None = None,
        group_size: int = 1,
        **config: Any,
    ) -> None:
        super().__init__()
        self.module, self.config = module, PlanConfig(**config)
        self.objective = Objective(
            module,
            self.config,
            mode=mode,
            diffusion=diffusion,
            shared_frame=shared_frame,
            spacing=spacing,
            masking=masking,
        )
        self.slice_names, self.max_seconds, self.curriculum = slice_names, max_seconds, curriculum
        self.n_recomputed, self.group_size = n_recomputed, group_size
        self.statistics_epoch = -1  # epoch of the last layer statistics
        self._started, self.done = time.monotonic(), 0.0
        self._elapsed = 0.0  # seconds of training up to the checkpoint that was resumed
        self._slice_index: Tensor | None = None  # slices of the current batch
        # The network of which `module` is a sharded copy, in a tuple so that it is not registered as a submodule.
        self._unsharded: tuple[Denoiser, ...] = ()

    # -- Begin and end -------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Replace the network by a sharded copy if the strategy shards weights."""
        if self.device_mesh is not None and not self._unsharded:
            self._unsharded, self.module = (self.module,), shard(self.module, self.device_mesh["data_parallel"])
            self.objective.module, self.objective.weights_sharded = self.module, True

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, and a learning rate with warm-up that depends on :meth:`progress`."""
        optimizer = make_optimizer(self.module, self.config, fused=not self._has_scaler)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Join the group of processes that share contexts, and start the check of gradients."""
        self.objective.parallel = join_group(self.trainer, self.group_size)
        self.finite = FiniteCheck(self.device)

    def on_train_start(self) -> None:
        """Start measuring time and set the expert load, after every strategy has restored the checkpoint."""
        self._started = time.monotonic() - self._elapsed
        self.objective.load.begin(self.module.config, self.device)

    def on_fit_end(self) -> None:
        """Restore the unsharded network."""
        self.unshard()

    def unshard(self, *, collective: bool = True) -> None:
        """Restore the unsharded network, for use in a single process.

        Parameters
        ----------
        collective
            Whether all processes call this; the trained weights are copied only then.
        """
        self.objective.parallel = SINGLE_PROCESS
        for module in self._unsharded:
            if collective:
                copy_full_params(self.module, module)
            self.module, self._unsharded = module, ()
            self.objective.module, self.objective.weights_sharded = module, False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the elapsed time, the epoch of the last layer statistics and the expert load."""
        checkpoint["elapsed_seconds"] = time.monotonic() - self._started
        checkpoint["last_look"] = self.statistics_epoch
        checkpoint["expert_load"] = self.objective.load.last

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore these values, and set the learning rates to those of this plan."""
        self._elapsed = checkpoint["elapsed_seconds"]
        self.statistics_epoch = checkpoint.get("last_look", -1)
        self.objective.load.last = checkpoint.get("expert_load")
        override_settings(checkpoint, self.config, fused=not self._has_scaler)

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        """Set the epoch of the loaders, which cut new contexts in every epoch."""
        self._datamodule.set_epoch(self.current_epoch)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Log the learning rate of the step if there are loggers."""
        if self.trainer.loggers:
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=True, on_epoch=False)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Loss of a batch, and the values that :class:`~alphastomics.train.callbacks.EpochMeans` averages over the epoch.

        Raises
        ------
        NonFiniteLossError
            If the loss is not finite; the weights have not been changed by it.
        """
        watch: AbstractContextManager[dict[int, LayerInputs]] = nullcontext({})
        if self.global_step % EVERY == 0:
            self.statistics_epoch, watch = self.current_epoch, watch_layers(self.module)
        draws = self.objective.draw(batch)
        batch, generators = batch._replace(draws=draws), self._generators(draws)
        with recompute(self.module.blocks, self.n_recomputed), drawing_from(generators), watch as layers:
            losses = self.objective.losses(batch, step=self.global_step)
        self._slice_index = batch.slice_index
        here, per_batch = self._count(batch_idx)
        loss = self.objective.total(losses, batch, per_batch)
        if self._waits:
            self.check_finite("loss", loss)
        mean = loss * (per_batch / here) if here else loss
        values = self._means("train", mean, losses, batch, here, layers)
        self.log("loss", mean.detach(), prog_bar=True)
        total = loss if self._is_single_device else touch_all_params(loss, self.module.parameters())
        return {"loss": total, "values": values, "n_contexts": round(here * self.n_groups)}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give weights that no batch of the step used a gradient of 0, and store the expert load for the next step."""
        if self._is_single_device:  # several processes have these gradients from the backward pass
            fill_gradients(optimizer.param_groups[0]["params"])
        self.objective.load.end_step(lambda counts: sum_over_processes(self.trainer, counts))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Check that the gradient is finite, and clip it by its norm.

        The gradient can be infinite or NaN although the loss is finite. With a gradient scaler (float16) it is not checked,
        because the scaler lets it overflow and skips such steps.
        """
        weights = optimizer.param_groups[0]["params"]
        norm = gradient_norm(weights)
        if not self._has_scaler:
            if self._waits:
                self.check_finite("gradient norm", norm)
            else:
                found_inf = self.finite.add(self.global_step, norm, self._slice_index)
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # of a fused step, which it skips
                self._raise_if_broken()
        # Lightning does not clip for a fused optimizer in 16 bits.
        if gradient_clip_val and gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(weights, gradient_clip_val)
        elif gradient_clip_val and self._unsharded:
            torch.nn.utils.clip_grad_norm_(weights, gradient_clip_val)
        elif gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(weights, gradient_clip_val, norm)

    @property
    def _is_single_device(self) -> bool:
        return isinstance(self.trainer.strategy, SingleDeviceStrategy)

    @property
    def _has_scaler(self) -> bool:
        """Whether gradients are scaled (float16)."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    @property
    def _waits(self) -> bool:
        """Whether each value is checked at once: except on a GPU, and in all of several processes together."""
        return self.device.type != "cuda" or self.trainer.world_size > 1

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss of a held-out batch, with the same noise in every epoch."""
        losses = self.objective.losses(batch, purpose=VALIDATION)
        here = self._datamodule.n_validated(batch_idx) / self.n_groups
        values = self._means("validation", self.objective.total(losses, batch, here), losses, batch, here)
        n_contexts = round(here * self.n_groups)
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=n_contexts, sync_dist=True)

    def check_finite(self, name: str, value: Tensor) -> None:
        """Raise :class:`NonFiniteLossError` in all processes if a value is not finite in one of them."""
        mean = mean_over_processes(self.trainer, value.detach())
        if bool(mean.isfinite()):
            return
        here = self._slice_index
        broken = set[int]() if here is None or bool(value.isfinite()) else {int(i) for i in here}
        broken = set[int]().union(*gather_objects(self.trainer, broken))
        raise self._not_finite(f"{name} is {mean.item():g}", self.global_step, broken)

    def _raise_if_broken(self) -> None:
        """Raise :class:`NonFiniteLossError` if the gradient of a step before was not finite, as far as it is known."""
        if (step := self.finite.first) is not None:
            raise self._not_finite("gradient norm is NaN or infinite", step, self.finite.slices_of(step))

    def _not_finite(self, what: str, step: int, slices: set[int]) -> NonFiniteLossError:
        names = ", ".join(sorted({self.slice_names[i] for i in slices} if self.slice_names else ())) or "unknown"
        return NonFiniteLossError(
            f"The {what} at step {step} (slices: {names}). The model keeps its last finite "
            "weights. Lower plan_kwargs['lr'], or check these slices for extreme values."
        )

    def progress(self) -> float:
        """Share of the training that is done, by steps or by time, whichever is larger."""
        total = self.trainer.estimated_stepping_batches  # also sets up the loaders if needed
        if self.curriculum is not None:
            done = self.curriculum.progress(self.trainer)
        else:
            done = self.global_step / total if total not in (0, float("inf")) and total > 0 else 0.0
        if self.max_seconds:
            share = (time.monotonic() - self._started) / self.max_seconds
            if self.trainer.world_size > 1:  # all processes must have the same learning rate
                share = float(mean_over_processes(self.trainer, torch.tensor(share, device=self.device)))
            done = max(done, share)
        self.done = min(1.0, done)
        return self.done

    def _learning_rate_factor(self, step: int) -> float:
        return learning_rate_factor(self.config, step, self.progress())

    def _generators(self, draws: Draws) -> ContextGenerators:
        """Random generators of the network, keyed by context like all draws of training."""
        seeds = [int(keyed_rng(key, DROPOUT).integers(2**63)) for key in draws.key]
        return ContextGenerators.seeded(seeds, draws.n_cells, draws.t_pos.device)

    @property
    def _datamodule(self) -> ContextDataModule:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def n_groups(self) -> int:
        """Number of groups of processes; each group has its own contexts."""
        return self.trainer.world_size // self.group_size

    def _count(self, batch_idx: int) -> tuple[float, float]:
        """Mean number of real contexts of a group, in this batch and over the batches of this optimizer step."""
        n, w = self.trainer.accumulate_grad_batches, self.n_groups
        first = batch_idx - batch_idx % n
        batches = range(first, min(first + n, int(self.trainer.num_training_batches)))
        counts = {i: self._datamodule.n_trained(i) for i in batches}
        return counts[batch_idx] / w, sum(counts.values()) / (w * n)

    def _means(
        self,
        stage: str,
        loss: Tensor,
        losses: dict[str, Tensor],
        batch: Batch,
        count: float,
        layers: Mapping[int, LayerInputs] | None = None,
    ) -> dict[str, Tensor]:
        """Means by name over the contexts of a batch; ``count`` is their mean number in a group of processes."""
        real = batch.mask.any(1).float()
        values = {f"{stage}_loss": loss.detach()}
        share = 1 / count if count else 0.0  # a batch of padding has weight 0
        values |= {f"{stage}_{name}": (value.detach() * real).sum() * share for name, value in losses.items()}
        if layers and batch.draws is not None:
            with full_weights(self.module.blocks):
                statistics = layer_statistics(layers, batch.mask, batch.draws.n_cells)
                values |= weighted_mean_over_processes(self.trainer, statistics, batch.mask.any())
        return values
