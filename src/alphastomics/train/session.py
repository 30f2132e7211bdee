"""A training session: memory layout, data module, training plan, checkpoints and runner of one training."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from alphastomics._io._errors import check_folder
from alphastomics._rank import quiet_unless_first
from alphastomics.config import (
    DEFAULT_CONTEXT_SIZE,
    DEFAULT_VALIDATION_SIZE,
    PlanConfig,
)
from alphastomics.config._setting import settings_of
from alphastomics.train.arguments import TrainingArguments, check_arguments, plan_arguments
from alphastomics.train.callbacks import History, MicroBatches
from alphastomics.train.checkpoint import LastCheckpoint, checkpoint_path
from alphastomics.train.cross_fit import SHARE, TIME_SHARE, cross_fit
from alphastomics.train.curriculum import make_curriculum
from alphastomics.train.datamodule import training_slices
from alphastomics.train.defaults import default_augmentation, default_batch_size, default_steps
from alphastomics.train.distributed.devices import (
    check_cublas_workspace,
    count_devices,
    device_of,
    resolve_precision,
    seeded_generators,
)
from alphastomics.train.distributed.launch import run_in_subprocess, run_inline
from alphastomics.train.distributed.strategies import is_forked, resolve_strategy
from alphastomics.train.ema import MovingAverage
from alphastomics.train.memory.errors import free_traceback_frames, is_out_of_memory, out_of_memory_error
from alphastomics.train.memory.estimate import estimate_training
from alphastomics.train.memory.layout import estimated_device, fit_batch_layout
from alphastomics.train.runner import seconds_of
from alphastomics.train.timesteps import PLACED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from scvi.model.base import BaseModelClass

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.diffusion import Mode, Process
    from alphastomics.nn import Denoiser
    from alphastomics.train.cross_fit import CrossFit, PlacementScores
    from alphastomics.train.curriculum import LengthCurriculum
    from alphastomics.train.datamodule import ContextDataModule
    from alphastomics.train.memory.estimate import MemoryEstimate
    from alphastomics.train.memory.layout import BatchLayout
    from alphastomics.train.plan import TrainingPlan
    from alphastomics.train.runner import ContextRunner

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.5  # of the time that is left for the training in any case


class TrainingSession:
    """One training of a network; its methods are called in the order of their definition.

    Parameters
    ----------
    module
        The network.
    arguments
        Arguments of the training.
    trainer_kwargs
        Arguments of the trainer: ``max_epochs``, ``max_time``, ``accelerator``, ``devices``, ``strategy``, ``precision``, and
        optionally others.
    mode, diffusion
        What the network is trained to sample, and its diffusion process.
    seed
        Seed of all draws.
    """

    def __init__(
        self,
        module: Denoiser,
        arguments: TrainingArguments,
        trainer_kwargs: Mapping[str, Any],
        *,
        mode: Mode,
        diffusion: Process,
        seed: int,
    ) -> None:
        check_arguments(trainer_kwargs, arguments.plan_kwargs)
        if arguments.checkpoint is not None:
            check_folder(checkpoint_path(arguments.checkpoint).parent)
        self.module, self.arguments, self.mode, self.diffusion, self.seed = module, arguments, mode, diffusion, seed
        self.passed_kwargs = dict(trainer_kwargs)
        accelerator, devices, precision = (trainer_kwargs[name] for name in ("accelerator", "devices", "precision"))
        strategy = resolve_strategy(
            trainer_kwargs["strategy"],
            accelerator=accelerator,
            devices=devices,
            num_nodes=trainer_kwargs.get("num_nodes", 1),
            precision=precision,
            group_size=arguments.context_parallel_size,
        )
        quiet_unless_first()
        self.device = device_of(accelerator, devices)
        # Processes cannot be forked after CUDA was initialized, so a subprocess queries the GPU.
        self._query_device = run_in_subprocess if is_forked(strategy) and self.device.type == "cuda" else run_inline
        self.precision = self._query_device(lambda: resolve_precision(precision, self.device))
        self.trainer_kwargs = {**trainer_kwargs, "strategy": strategy, "precision": self.precision}
        check_cublas_workspace(trainer_kwargs.get("deterministic"), self.device)
        if arguments.masking is not None and not module.config.mask_tokens:
            raise ValueError("masking= requires a model with enable_masking=True")
        self.max_seconds, self.used_seconds = seconds_of(self.trainer_kwargs.pop("max_time")), 0.0
        self._started, self.seconds = time.monotonic(), 0.0
        self.checkpoint: Path | None = None

    def fit_layout(self, source: CellSource, *, whole_slices: bool, resumed: Mapping[str, int]) -> None:
        """Set the reference, and choose contexts and batches that fit into memory.

        Parameters
        ----------
        source
            The reference.
        whole_slices
            Whether contexts are whole slices if ``context_size`` is None.
        resumed
            Sizes of contexts and batches of the training that is resumed; empty for a new one.
        """
        arguments, self.source = self.arguments, source
        size = (
            ("auto" if whole_slices else DEFAULT_CONTEXT_SIZE)
            if arguments.context_size is None
            else arguments.context_size
        )
        self.plan_arguments = plan_arguments(
            self.module,
            self.mode,
            self.diffusion,
            source.schema,
            source.n_cells,
            arguments.masking,
            arguments.plan_kwargs,
        )
        self.layout: BatchLayout = self._query_device(
            lambda: fit_batch_layout(
                self.module.config,
                source,
                context_size=size,
                batch_size=arguments.batch_size,
                micro_batch_size=arguments.micro_batch_size,
                budget=arguments.memory_budget,
                recompute=arguments.recompute,
                accelerator=self.passed_kwargs["accelerator"],
                devices=self.passed_kwargs["devices"],
                accumulate=(self.trainer_kwargs.get("accumulate_grad_batches") or 1) > 1,
                precision=self.precision,
                resumed=resumed,
                group_size=arguments.context_parallel_size,
                **self.plan_arguments,
            )
        )

    def make_datamodule(self, kind: type[ContextDataModule], validation: CellSource | None) -> None:
        """Make the loaders, and choose the number of epochs; ``validation`` is used unless a share of the slices is held out."""
        arguments, layout = self.arguments, self.layout
        share = arguments.validation_size if arguments.train_size is None else 1 - arguments.train_size
        if share is None and validation is None and arguments.early_stopping:
            share = DEFAULT_VALIDATION_SIZE
        self.validation_size = share
        self.datamodule = kind(
            self.source,
            validation=validation if share is None else None,
            batch_size=layout.batch_size,
            context_size=layout.context_size,
            micro_batch_size=layout.micro_batch_size,
            kind=arguments.context_kind,
            seed=self.seed,
            augmentation=arguments.augmentation or default_augmentation(self.source.schema, self.source.n_cells),
            validation_size=share,
            num_workers=arguments.num_workers,
            targets=self.mode != "expr_to_pos",
            group_size=arguments.context_parallel_size,
        )
        max_epochs = self.passed_kwargs["max_epochs"]
        if max_epochs is None:
            limited = self.max_seconds is not None or (self.trainer_kwargs.get("max_steps") or -1) >= 0
            max_epochs = -1 if limited else -(-default_steps(self.mode) // self._steps_per_epoch)
        self.max_epochs = self.trainer_kwargs["max_epochs"] = max_epochs

    @property
    def _n_processes(self) -> int:
        kwargs = self.passed_kwargs
        return count_devices(kwargs["accelerator"], kwargs["devices"]) * kwargs.get("num_nodes", 1)

    @property
    def _steps_per_epoch(self) -> int:
        """Number of steps of the optimizer in an epoch, each on accumulated batches of all groups of processes."""
        n_groups = self._n_processes // self.arguments.context_parallel_size
        n_batches = n_groups * (self.passed_kwargs.get("accumulate_grad_batches") or 1)
        return -(-self.datamodule.steps_per_epoch // n_batches)

    @property
    def trained_source(self) -> CellSource:
        """The slices of the reference that are not held out for validation."""
        return training_slices(self.source, self.validation_size)

    def cross_fit(self, score: Callable[[Denoiser, tuple[SliceCells, ...]], PlacementScores | None]) -> CrossFit:
        """Train a second network without a part of the reference, and end the training where its score would no longer rise.

        ``score`` computes the scores of the placement of held-out cells by a network. Numbers of epochs or steps that are given are not
        changed.
        """
        limits, kwargs, placed = self._step_limits(), self.trainer_kwargs, PLACED[self.mode]
        # Processes cannot be forked after CUDA was initialized.
        device = torch.device("cpu") if is_forked(kwargs["strategy"]) else self.device
        second = cross_fit(
            self.module,
            self.trained_source,
            diffusion=self.diffusion,
            plan=PlanConfig(**{n: v for n, v in self.plan_arguments.items() if n in settings_of(PlanConfig)}),
            augmentation=self.datamodule.train_set.augmentation,
            score=score,
            n_contexts=default_batch_size(device) // DEFAULT_CONTEXT_SIZE,
            max_steps=max(1, round(SHARE * placed * min([default_steps(self.mode), *limits]))),
            max_seconds=None if self.max_seconds is None else TIME_SHARE * self.max_seconds,
            seed=self.seed,
            device=device,
        )
        steps = second.sufficient_steps(placed)
        chosen = self.passed_kwargs["max_epochs"] is None and (kwargs.get("max_steps") or -1) < 0
        if steps is not None and chosen and self._n_processes == 1:
            logger.info("Training for at most %d steps, after which cells held out were placed best.", steps)
            kwargs["max_steps"] = min([steps, *limits])
        return second

    def _step_limits(self) -> list[int]:
        """Numbers of steps that end the training."""
        max_steps = self.trainer_kwargs.get("max_steps") or -1
        n_steps = self.max_epochs * self._steps_per_epoch
        return [n_steps] * (self.max_epochs >= 0) + [max_steps] * (max_steps >= 0)

    def make_plan(self, kind: type[TrainingPlan]) -> None:
        """Choose the curriculum, and make the training plan."""
        curriculum = self._make_curriculum()
        if self.max_seconds is not None:  # the second network and what is fitted to it have taken a part of the time
            self.used_seconds = min(time.monotonic() - self._started, (1 - LEAST_SHARE) * self.max_seconds)
        self.plan = kind(
            self.module,
            slice_names=tuple(cells.name for cells in self.source.slices),
            max_seconds=None if self.max_seconds is None else self.max_seconds - self.used_seconds,
            n_recomputed=self.layout.n_recomputed,
            curriculum=curriculum,
            group_size=self.arguments.context_parallel_size,
            **self.plan_arguments,
        )
        callbacks = [*(self.trainer_kwargs.get("callbacks") or [])]
        if curriculum is not None:
            self.trainer_kwargs["reload_dataloaders_every_n_epochs"] = 1
            callbacks.append(curriculum)
        if curriculum is not None or self.datamodule.batches_per_step > 1:
            self.trainer_kwargs["callbacks"] = [*callbacks, MicroBatches()]

    def _make_curriculum(self) -> LengthCurriculum | None:
        arguments = self.arguments
        longest, shortest = self.datamodule.train_set.context_size, arguments.shortest_context
        if arguments.context_growth is not None and shortest > longest:
            raise ValueError(
                f"shortest_context={shortest} exceeds context_size={longest}; pass a smaller shortest_context="
            )
        return make_curriculum(
            self.datamodule.train_set,
            self.datamodule.set_context_size,
            kind=arguments.context_growth,
            shortest=shortest,
            warmup=arguments.growth_warmup,
            growth=arguments.growth_steps,
            n_steps=min(self._step_limits(), default=None),
        )

    def keep_checkpoints(self, description: Mapping[str, Any], resume_from: Path | None) -> None:
        """Resume from ``resume_from`` if given, and write checkpoints with a description if the arguments name a file."""
        if resume_from is not None:
            self.trainer_kwargs["ckpt_path"] = resume_from
        if self.arguments.checkpoint is not None:
            self.checkpoint = checkpoint_path(self.arguments.checkpoint)
            every = self.arguments.checkpoint_every
            self.trainer_kwargs["checkpoint"] = LastCheckpoint(self.checkpoint, description, every)

    def make_runner(self, kind: type[ContextRunner], model: BaseModelClass) -> None:
        """Log the size of the training, and make the runner, which stores the results in the model."""
        limit = f"{self.max_epochs} epochs" if self.max_epochs >= 0 else f"{self.trainer_kwargs.get('max_steps')} steps"
        if self.max_seconds is not None:
            limit = f"{self.max_seconds:.0f} s"
        logger.info(
            "Training on %d cells, %d genes, %d slices on %s (%s steps an epoch, at most %s).",
            self.source.n_cells, self.source.schema.n_genes, len(self.source.slices), self.device,
            self._steps_per_epoch, limit,
        )  # fmt: skip
        self.runner = kind(
            model,
            training_plan=self.plan,
            data_splitter=self.datamodule,
            ema=MovingAverage(self.plan.config.ema_decay),
            history=History(model.history_),
            max_seconds=self.max_seconds,
            used_seconds=self.used_seconds,
            early_stopping=self.arguments.early_stopping,
            **self.trainer_kwargs,
        )

    def run(self) -> None:
        """Train.

        Raises
        ------
        NotEnoughMemoryError
            If memory runs out.
        DeadProcessError, SystemExit
            If the training cannot continue in all processes.
        """
        self.module.train()  # Lightning does not change the mode, which is eval() after an earlier training
        start = time.monotonic()
        try:
            with seeded_generators(self.seed):
                self.runner()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            free_traceback_frames(error)
            raise out_of_memory_error(self.layout, self._estimate(), error) from error
        finally:
            self.seconds = time.monotonic() - start

    def _estimate(self) -> MemoryEstimate | None:
        """Memory of a step; None if it cannot be estimated."""
        n_cells, micro_batch_size = self.layout.context_size, self.layout.micro_batch_size
        n_batches = self.datamodule.batches_per_step * (self.passed_kwargs.get("accumulate_grad_batches") or 1)
        try:
            return estimate_training(
                self.module.config,
                n_cells=n_cells,
                n_contexts=max(1, micro_batch_size // n_cells),
                n_recomputed=self.layout.n_recomputed,
                group_size=self.arguments.context_parallel_size,
                accumulate=n_batches > 1,
                precision=self.precision,
                device=estimated_device(self.device.type),
                **self.plan_arguments,
            )
        except NotImplementedError:
            return None

    def resolved_arguments(self) -> dict[str, Any]:
        """All arguments, with the values chosen for those that were not arguments."""
        return {
            **vars(self.arguments),
            **self.passed_kwargs,
            **self.layout._asdict(),
            "max_epochs": self.max_epochs,
            "max_time": self.max_seconds,
            "precision": self.precision,
            "validation_size": self.validation_size,
            "augmentation": self.datamodule.train_set.augmentation,
            "masking": self.plan.objective.masking,
        }
