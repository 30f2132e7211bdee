"""Mixin of the model class: training, and estimates of its memory."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from alphastomics._messages import hide_others
from alphastomics._provenance import training_record
from alphastomics.config import (
    DEFAULT_CONTEXT_SIZE,
    PLACING_MODES,
    Augmentation,
    PlanConfig,
    TrainerConfig,
    TrainingConfig,
)
from alphastomics.config._setting import check_names, split_arguments
from alphastomics.model import _checkpoint
from alphastomics.model._base import ModelBase
from alphastomics.model._components import principal_components
from alphastomics.nn import Denoiser
from alphastomics.sampling._held_out_score import score_held_out
from alphastomics.train import ContextDataModule, ContextRunner, TrainingPlan
from alphastomics.train.arguments import TrainingArguments, plan_arguments
from alphastomics.train.defaults import default_augmentation, default_batch_size
from alphastomics.train.distributed.devices import device_of, preserve_algorithm_settings, resolve_precision
from alphastomics.train.distributed.processes import check_group_size
from alphastomics.train.memory.estimate import estimate_inference, estimate_training
from alphastomics.train.memory.fit import recomputed_blocks
from alphastomics.train.memory.layout import estimated_device
from alphastomics.train.session import TrainingSession

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta
    from os import PathLike

    from lightning.pytorch.strategies import Strategy

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.data.parquet._source import ParquetSource
    from alphastomics.sampling._held_out_score import HeldOutScores
    from alphastomics.train.memory.estimate import MemoryEstimate

logger = logging.getLogger(__name__)

LEAST_SPEARMAN = 0.1  # distance Spearman of held-out cells, below which a placement is not reliable


class TrainingMixin(ModelBase):
    """Trains a model."""

    _data_splitter_cls = ContextDataModule
    _training_plan_cls = TrainingPlan
    _train_runner_cls = ContextRunner
    _module_cls = Denoiser
    _validation: ParquetSource | None  # its validation set

    def default_augmentation(self) -> Augmentation:
        """Random changes to training contexts, chosen for the size and kind of the reference.

        Examples
        --------
        >>> augmentation = dataclasses.replace(model.default_augmentation(), rotate=False)
        >>> model.train(augmentation=augmentation)
        """
        return default_augmentation(self.schema, self.summary_stats.n_cells)

    @hide_others()
    @preserve_algorithm_settings()
    def train(
        self,
        max_epochs: int | None = TrainerConfig.max_epochs,
        max_time: str | timedelta | dict[str, float] | float | None = TrainerConfig.max_time,
        accelerator: str = TrainerConfig.accelerator,
        devices: int | list[int] | str = TrainerConfig.devices,
        strategy: str | Strategy = TrainerConfig.strategy,
        precision: str | int = TrainerConfig.precision,
        batch_size: int | None = TrainingConfig.batch_size,
        context_size: int | Literal["auto"] | None = TrainingConfig.context_size,
        train_size: float | None = TrainingConfig.train_size,
        validation_size: float | None = TrainingConfig.validation_size,
        early_stopping: bool = TrainingConfig.early_stopping,
        plan_kwargs: dict[str, Any] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        resume: str | PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Train on the registered reference.

        Parameters
        ----------
        max_epochs
            Number of passes over the cells. None: the number of steps after which a second network, which is trained without a
            part of the reference first, places that part best; at most ``max_time``, or about 4,000 steps if that is None too, 2,000
            with ``mode="expr_to_pos"``.
            Several processes and models that do not place cells are trained for the longest duration.
        max_time
            Maximal duration: seconds, ``"DD:HH:MM:SS"``, a timedelta or its arguments. The learning rate decreases with the
            elapsed fraction of it. The second network of a model that places cells takes at most an eighth of it.
        accelerator, devices
            As in :class:`lightning.pytorch.Trainer`.
        strategy
            How training is distributed over devices: a name that :func:`~alphastomics.train.resolve_strategy` accepts, or a
            strategy object of Lightning. Each process trains on its own batches of ``batch_size`` cells.
        precision
            ``"auto"``: bfloat16 for matrix products if the processor or GPU supports it, else 32 bits; or a precision of
            :class:`lightning.pytorch.Trainer`.
        batch_size, context_size
            Number of cells in a batch and in a context, whose cells attend to each other; a context has no more cells than a
            batch. ``context_size="auto"``: whole slices, or the longest contexts that fit into memory; if a context then has
            more cells than ``batch_size``, a batch is one context. None: batches of 1,024 cells, or 2,048 on CUDA, and contexts of 512,
            or ``"auto"`` for a model that was made with ``context=``.
        train_size, validation_size
            Fractions of the slices, of which one determines the other. Whole slices are held out for validation, none by default. The
            validation set of a dataset on disk is used unless a fraction is given.
        early_stopping
            Whether to stop when ``validation_loss`` has not decreased for 45 epochs (``early_stopping_patience``), and keep the
            weights with the lowest loss; holds out a tenth of the slices by default.
        plan_kwargs
            Fields of :class:`~alphastomics.train.PlanConfig`.
        checkpoint
            ``.ckpt`` file for the state of training, replaced atomically during training and at the end; or an existing folder, in which
            ``last.ckpt`` is written. When training has ended, the file also contains the trained model for :meth:`load`.
        resume
            Checkpoint of a training run with the same arguments, from which training continues: weights, their average,
            optimizer, learning rate, context size, position in the epoch, and time. ``max_epochs`` and ``max_time`` count from
            the beginning of that run. ``"last"``: the newest complete checkpoint in ``checkpoint``, or a new run if there is
            none, so that a script can be restarted until training has finished.
        **kwargs
            Further fields of :class:`~alphastomics.config.TrainingConfig`: kind and growth of contexts, memory, recompute,
            context parallelism, loaders, augmentation, masking, checkpoints. All others are passed to
            :class:`lightning.pytorch.Trainer`. ``logger``: a logger of Lightning, none by default, for the losses, the learning
            rate (``lr``), ``cells_per_second`` and ``memory_gib``. ``deterministic=True``: only deterministic algorithms in
            this training.

        Raises
        ------
        FileNotFoundError, ValueError
            If ``resume`` is not a complete checkpoint of this model on these cells.
        ValueError
            If one context does not fit in memory; the message contains the number of cells that would fit. Or if an argument is
            invalid.
        OSError
            If a checkpoint cannot be written; the previous one is intact.
        NonFiniteLossError
            If the loss becomes NaN or infinite; the model keeps its last finite weights.
        NotEnoughMemoryError
            If memory runs out although the estimate fits. It is a ``MemoryError`` and a ``torch.OutOfMemoryError``. The model
            keeps its weights.
        DeadProcessError
            If another process of the training has died.
        SystemExit
            If training was stopped by SIGTERM, after the checkpoint was written.

        Examples
        --------
        >>> asx.model.AlphaSTomics.setup_anndata(reference, slice_key="slice_id")
        >>> model = asx.model.AlphaSTomics(reference)
        >>> model.train(max_time=600, checkpoint="last.ckpt", resume="last")
        """
        passed = {name: value for name, value in locals().items() if name not in ("self", "kwargs")} | kwargs
        (arguments,), trainer_kwargs = split_arguments(passed, TrainingArguments)
        if self.adata is None and self._dataset is None:
            raise ValueError("This model was loaded without data; load it with adata= to train it")
        session = TrainingSession(
            self.module,
            TrainingArguments(**arguments),
            trainer_kwargs,
            mode=self.mode,
            diffusion=self.diffusion,
            seed=self._arguments["random_state"],
        )
        source = self._training_source()
        resumed = _checkpoint.find_resume_state(resume, checkpoint)
        session.fit_layout(
            source,
            whole_slices=self._arguments.get("context") is not None,
            resumed={} if resumed is None else resumed.contexts,
        )
        session.make_datamodule(self._data_splitter_cls, self._validation)
        if resumed is not None:
            _checkpoint.check_resumable(resumed, self._state(self._fitted), max_epochs=session.max_epochs)
        source = session.trained_source
        if not self.is_trained_:
            self.module.set_components(principal_components(source, self.module.components.shape[1]))
        held_out = None
        if self.mode in PLACING_MODES:
            second = session.cross_fit(partial(self._score_network, source))
            held_out = None if second.scores is None else second.scores.to_dict()
            if held_out is not None:
                _log_held_out(held_out)
            self._fit_draws(source, second)
        session.make_plan(self._training_plan_cls)
        description = _checkpoint.describe(self._state(self._fitted), session.layout)
        session.keep_checkpoints(description, None if resumed is None else resumed.path)
        session.make_runner(self._train_runner_cls, self)
        try:
            session.run()
        finally:
            self._record_training(session, held_out)
        if self.is_trained_:
            self._fit_statistics(source, float(session.plan.config.deformation))
            if session.checkpoint is not None and self.trainer.is_global_zero and session.checkpoint.is_file():
                _checkpoint.finalize(session.checkpoint, self._state())

    def _score_network(
        self, source: CellSource, module: Denoiser, held_out: tuple[SliceCells, ...]
    ) -> HeldOutScores | None:
        """Scores of the placement of cells of the reference by another network."""
        return score_held_out(self._placing_sampler(module), source, held_out)

    def _record_training(self, session: TrainingSession, held_out: dict[str, float] | None) -> None:
        """Add a training to the records; its statistics are fitted afterwards."""
        if self.trainer.global_step == 0:
            return
        config = session.plan.config
        record = training_record(
            self,
            asdict(config),
            session.resolved_arguments(),
            n_cells=session.source.n_cells,
            seconds=session.seconds,
            held_out=held_out,
        )
        self.trainings_ = (*self.trainings_, record)
        self._unfitted_deformation = float(config.deformation)

    def estimate_memory(
        self,
        n_cells: int = DEFAULT_CONTEXT_SIZE,
        batch_size: int | None = TrainingConfig.batch_size,
        *,
        training: bool = True,
        precision: str | int = TrainerConfig.precision,
        recompute: int | Literal["none", "all"] = "none",
        accelerator: str = TrainerConfig.accelerator,
        context_parallel_size: int = TrainingConfig.context_parallel_size,
        plan_kwargs: dict[str, Any] | None = None,
    ) -> MemoryEstimate:
        """Estimate the memory of a training step, or of a call of the network; nothing is computed or allocated.

        Parameters
        ----------
        n_cells
            Number of cells of a context.
        batch_size
            Number of cells on the device at once in training: ``batch_size // n_cells`` contexts, at least one. None: those of a batch
            of :meth:`train`.
        training
            Whether to estimate a step of :meth:`train`; if not, a call of the network for one context in sampling, without gradients
            and in 32 bits. Of the other arguments, only `n_cells` and `accelerator` apply to sampling.
        precision, accelerator, plan_kwargs
            As in :meth:`train`.
        recompute
            ``"none"``, ``"all"``, or the number of blocks that are recomputed.
        context_parallel_size
            Number of processes that share a context in training; the estimate is for one of them.

        Returns
        -------
        Memory in bytes: ``peak``, and its parts ``parameters``, ``gradients``, ``optimizer`` and ``activations``. Data, code
        and loaders are not included.

        Raises
        ------
        NotImplementedError
            If a shape in the network depends on values.
        TypeError
            If `plan_kwargs` has an unknown argument.
        ValueError
            If an argument is invalid.

        Examples
        --------
        >>> model.estimate_memory(n_cells=10_000, precision="32-true").peak / 2**30  # GiB
        """
        device = device_of(accelerator)
        batch_size = default_batch_size(device) if batch_size is None else batch_size
        if n_cells < 1 or batch_size < 1:
            raise ValueError(f"n_cells={n_cells} and batch_size={batch_size} must be at least 1 cell")
        check_names(plan_kwargs or {}, PlanConfig)
        check_group_size(context_parallel_size, context_parallel_size)
        common: dict[str, Any] = {"n_cells": n_cells, "device": estimated_device(device.type)}
        if not training:
            return estimate_inference(self.module.config, **common)
        k = recomputed_blocks(recompute, self.module.config.n_layers)
        if k is None:
            raise ValueError("recompute='auto' is only supported by train(); choose 'none', 'all' or a number")
        return estimate_training(
            self.module.config,
            n_contexts=max(1, batch_size // n_cells),
            precision=resolve_precision(precision, device),
            n_recomputed=k,
            group_size=context_parallel_size,
            **common,
            **plan_arguments(
                self.module, self.mode, self.diffusion, self.schema, self.summary_stats.n_cells, None, plan_kwargs
            ),
        )


def _log_held_out(scores: Mapping[str, float]) -> None:
    """Log the scores of held-out cells of the reference, with a warning near chance."""
    logger.info(
        "%d held-out cells of the reference were placed by a second network with a distance Spearman of %.2f (chance: 0), a kNN "
        "preservation of %.3f (%.3f) and a contact precision of %.3f (%.3f).",
        scores["n_scored"],
        scores["distance_spearman"],
        scores["knn_preservation"],
        scores["knn_preservation_chance"],
        scores["contact_precision"],
        scores["contact_precision_chance"],
    )
    if scores["distance_spearman"] < LEAST_SPEARMAN:
        logger.warning(
            "A distance Spearman below %.1f is near chance: expression may not determine positions in this tissue, or the training was "
            "too short. Do not rely on the placement.",
            LEAST_SPEARMAN,
        )
