"""The training of a denoiser under Lightning: what happens before, in and after a step, whose loss is in ``train/objective.py``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from alphastomics.config import PlanConfig
from alphastomics.nn.diagnostics import SeenLayer, watch_layers
from alphastomics.nn.parallel import ALONE
from alphastomics.nn.random import ContextGenerators, drawing_from
from alphastomics.train.diagnostics import EVERY, layer_statistics
from alphastomics.train.distributed.processes import join_group, sum_over_processes, weighted_mean_over_processes
from alphastomics.train.distributed.sharding import copy_full_params, full_weights, shard, touch_all_params
from alphastomics.train.memory.recompute import recompute
from alphastomics.train.objective import VALIDATION, Objective
from alphastomics.train.timesteps import keyed_rng

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.diffusion import DiffusionConfig, MaskingConfig, Mode
    from alphastomics.nn import Denoiser
    from alphastomics.train.curriculum import LengthCurriculum
    from alphastomics.train.datamodule import ContextDataModule

DROPOUT = 50  # purpose of the generators, keyed by context, by which the network draws


class TrainingPlan(Objective):
    """Losses and optimizer of a :class:`~alphastomics.nn.Denoiser`.

    Parameters
    ----------
    module
        The denoiser.
    mode
        What it is trained to sample.
    diffusion
        Its two processes.
    shared_frame
        Whether positions are registered, so that nothing is aligned or centered.
    slice_names
        Names of the slices, for messages.
    spacing
        Distance between neighboring cells in model units; 0 trains no minimum-distance network.
    max_seconds
        Time the training may take; the learning rate then follows the clock on the wall as well as the steps.
    masking
        Which entries are masked in training; none when None.
    n_recomputed
        Number of blocks that are recomputed in training, see ``train/memory/recompute.py``.
    curriculum
        By which contexts grow, if they do.
    context_parallel_size
        Number of processes over which the cells of a context are split, see ``train/distributed/processes.py``.
    **config
        Fields of :class:`~alphastomics.train.PlanConfig`.

    Raises
    ------
    ValueError
        If entries are to be masked and the denoiser has no tokens for them, or chains are asked for where there are none.
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
            module,
            PlanConfig(**config),
            mode=mode,
            diffusion=diffusion,
            shared_frame=shared_frame,
            slice_names=slice_names,
            spacing=spacing,
            max_seconds=max_seconds,
            masking=masking,
            curriculum=curriculum,
        )
        self.n_recomputed = n_recomputed
        self.context_parallel_size = context_parallel_size
        # Where weights are spread over processes, the network that they come from; in a tuple it is no part of this one.
        self._whole: tuple[Denoiser, ...] = ()

    @property
    def weights_sharded(self) -> bool:
        """Where weights are spread over processes."""
        return bool(self._whole)

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
                copy_full_params(self.module, module)
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
        self.load.end_step(lambda counts: sum_over_processes(self.trainer, counts))

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
        self.check_finite("loss", loss)
        self._log("train", loss * (per_batch / here) if here else loss, losses, batch, here, seen)
        return touch_all_params(loss, self.module.parameters())

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
        """Mean number of real contexts that a group has in this batch, and in a batch of this step of the optimizer."""
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
            with full_weights(self.module.blocks):
                values |= weighted_mean_over_processes(
                    self.trainer, layer_statistics(seen, batch.mask), batch.mask.any()
                )
        n_contexts = round(count * self._n_groups)
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=n_contexts, sync_dist=True)
        if stage == "train":
            self.sums.take_up(self)
            self.log("loss", loss.detach(), prog_bar=True)
