"""The model class that a user holds."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import rich.pretty  # noqa: F401  scvi-tools uses rich.pretty without importing it
from scvi import settings
from scvi.data import AnnDataManager
from scvi.model.base import BaseModelClass

from alphastomics import _keys
from alphastomics._provenance import result_record, training_record
from alphastomics._rank import quiet_unless_first
from alphastomics.data import AnnDataSource, Augmentation, TissueSchema, fit_schema
from alphastomics.data.parquet._source import BUFFER, ParquetSource
from alphastomics.diffusion import CosineSchedule, MaskingConfig, Process
from alphastomics.model import _checkpoint, _files, _hub
from alphastomics.model._components import principal_components
from alphastomics.model._fields import LARGEST_SLICE, SCHEMA, dataset_registry, largest_slice, schema_fields
from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters
from alphastomics.sampling._calibration import fit_dependence, fit_marginals, fit_outlines
from alphastomics.sampling._draws import check_effect
from alphastomics.sampling._exemplars import Exemplars
from alphastomics.sampling._frames import ReferenceFrame, fit_frame
from alphastomics.sampling._joint import sample_tissue
from alphastomics.sampling._latent import latent_representation
from alphastomics.sampling._place import sample_positions
from alphastomics.sampling._position import MAX_CONTEXT, SamplerConfig
from alphastomics.sampling._predict import sample_expression
from alphastomics.train import MODES, ContextDataModule, ContextRunner, DiffusionConfig, Mode, TrainingPlan, seconds_of
from alphastomics.train.callbacks import History, MicroBatches
from alphastomics.train.checkpoint import LastCheckpoint, checkpoint_path
from alphastomics.train.defaults import (
    advised_attention,
    advised_experts,
    default_augmentation,
    default_deformation,
    default_dropout,
    default_placement,
)
from alphastomics.train.distributed.devices import (
    check_cublas_workspace,
    device_of,
    preserve_algorithm_settings,
    resolve_precision,
    seeded_generators,
)
from alphastomics.train.distributed.launch import DeadProcessError, run_in_subprocess, run_inline
from alphastomics.train.distributed.processes import check_group_size, write_on_rank_zero
from alphastomics.train.distributed.strategies import is_forked, resolve_strategy
from alphastomics.train.ema import MovingAverage
from alphastomics.train.memory.estimate import estimate_inference, estimate_training
from alphastomics.train.memory.fit import (
    estimated_device,
    fit_batch_layout,
    fits_in_memory,
    free_traceback_frames,
    is_out_of_memory,
    make_curriculum,
    out_of_memory_error,
    recomputed_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from os import PathLike

    from anndata import AnnData
    from lightning.pytorch.strategies import Strategy
    from numpy.typing import NDArray

    from alphastomics.config import GrowthKind, Recompute
    from alphastomics.data import CellSource
    from alphastomics.sampling._calibration import Marginals
    from alphastomics.sampling._dependence import Dependence
    from alphastomics.sampling._outline import Outlines
    from alphastomics.train.memory.estimate import MemoryEstimate
    from alphastomics.train.memory.fit import BatchLayout

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 4000  # optimizer steps when neither max_epochs nor max_time says otherwise


class AlphaSTomics(BaseModelClass):
    """Diffusion transformer over expression and position of the cells of a tissue.

    Parameters
    ----------
    adata
        Reference registered with :meth:`setup_anndata`.
    registry
        Registry of an earlier setup, for a model without data.
    mode
        What the model learns to sample: ``"expr_to_pos"``, ``"pos_to_expr"``, ``"joint"``, or ``"any"`` of them.
    d_model, n_layers, n_heads
        Width, number of blocks, attention heads.
    gate_type
        Gate of softmax attention: ``"headwise"``, ``"elementwise"`` or ``"none"``.
    use_qk_norm
        Whether queries and keys are normalized.
    attention
        ``"full"``; ``"linear"``: the baseline whose cost grows with the cells alone, without gate and norms;
        ``"geometric"``: full attention that falls with distance; ``"neighbor"``: the nearest cells one by one, and all cells
        as ``"linear"``; ``"axial"``: along the rows and columns of a grid.
    pair_features
        ``"factorized"``: features of pairs of cells, which geometric attention and attention over neighbors read.
    rank
        Rank of these, up to 32; ``"auto"``: what is affordable for the cells that are seen at once.
    sparse_pairs, n_neighbors
        With ``attention="neighbor"``: the nearest cells are so many in space (``"coordinate"``), along the order of the cells
        (``"sequence"``, see ``sequence_key`` of :meth:`setup_anndata`), or half of them each (``"hybrid"``). Where cells are
        being placed, these are the nearest among the noisy positions.
    use_moe
        Whether a mixture of experts takes the place of the feed-forward networks.
    num_experts, moe_top_k
        Number of experts, and how many of them see a cell; see :func:`~alphastomics.train.advised_experts`.
    expert_width
        ``"split"``: the experts share the width of the feed-forward network; ``"full"``: each has all of it.
    residual, n_streams
        ``"plain"`` residual connections, or ``"hyper"``: so many residual streams, mixed by doubly stochastic matrices.
    layer_sharing, sharing_block
        ``"none"``; which blocks share their weights: ``"universal"``, all; ``"alternating"``, every other; ``"block"``, so many
        in a row.
    bottleneck
        Ratio by which the feed-forward networks are narrower than the rest; None for full width.
    dropout
        Share of the branch outputs dropped in training; None: by the size and kind of the reference.
    schedule
        ``"cosine"`` or ``"cosine_nd"``, see :class:`~alphastomics.diffusion.CosineSchedule`.
    position_nu, expression_nu
        Exponent of time of either modality.
    prediction_type
        ``"x0"``, ``"epsilon"`` or ``"v"``, see :class:`~alphastomics.diffusion.Process`.
    enable_masking
        Whether training masks some entries and asks for them, see :class:`~alphastomics.diffusion.MaskingConfig`.
    context
        ``"slice"``: :meth:`train` takes whole slices for contexts, as far as the memory allows, unless it is told otherwise;
        ``"auto"``: the same, and the size of the largest slice chooses ``attention`` and ``pair_features``, see
        :func:`~alphastomics.train.advised_attention`.
    random_state
        Decides the first weights and every draw of training; ``scvi.settings.seed``, or 0, when None.

    Raises
    ------
    ValueError
        If an argument is unknown, or excludes another.

    Examples
    --------
    >>> asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    >>> model = asx.model.AlphaSTomics(reference, mode="expr_to_pos")
    >>> model.train(max_time=300)
    >>> placed = model.sample(query, mode="expr_to_pos")
    """

    _data_splitter_cls = ContextDataModule
    _training_plan_cls = TrainingPlan
    _train_runner_cls = ContextRunner
    _module_cls = Denoiser

    def __init__(
        self,
        adata: AnnData | None = None,
        registry: dict[str, Any] | None = None,
        mode: Mode = "any",
        d_model: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        gate_type: Literal["headwise", "elementwise", "none"] = "headwise",
        use_qk_norm: bool = True,
        attention: Literal["full", "linear", "geometric", "neighbor", "axial"] = "full",
        pair_features: Literal["factorized"] | None = None,
        rank: int | Literal["auto"] = "auto",
        sparse_pairs: Literal["coordinate", "sequence", "hybrid"] = "coordinate",
        n_neighbors: int = 32,
        use_moe: bool = False,
        num_experts: int = 4,
        moe_top_k: int = 2,
        expert_width: Literal["split", "full"] = "split",
        residual: Literal["plain", "hyper"] = "plain",
        n_streams: int = 4,
        layer_sharing: Literal["none", "universal", "alternating", "block"] = "none",
        sharing_block: int = 4,
        bottleneck: int | None = None,
        dropout: float | None = None,
        schedule: Literal["cosine", "cosine_nd"] = "cosine_nd",
        position_nu: float = 2.0,
        expression_nu: float = 1.0,
        prediction_type: Literal["x0", "epsilon", "v"] = "v",
        enable_masking: bool = False,
        context: Literal["slice", "auto"] | None = None,
        random_state: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(map(repr, MODES))}")
        if context not in (None, "slice", "auto"):
            raise ValueError(f"context={context!r} is unknown; choose None, 'slice' or 'auto'")
        super().__init__(adata, registry)
        self.schema = TissueSchema.from_dict(self.registry_[SCHEMA])
        self.diffusion = DiffusionConfig(
            position=Process(schedule=CosineSchedule(name=schedule, nu=position_nu), prediction_type=prediction_type),
            expression=Process(
                schedule=CosineSchedule(name=schedule, nu=expression_nu), prediction_type=prediction_type
            ),
        )
        if dropout is None:
            dropout = default_dropout(self.schema, self.summary_stats.n_cells)
        config = DenoiserConfig(
            n_genes=self.schema.n_genes,
            n_dims=self.schema.n_dims,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            gate_type=gate_type,
            use_qk_norm=use_qk_norm,
            dropout=dropout,
            attention=attention,
            pair_features=pair_features,
            rank=rank,
            sparse_pairs=sparse_pairs,
            n_neighbors=n_neighbors,
            use_moe=use_moe,
            num_experts=num_experts,
            moe_top_k=moe_top_k,
            expert_width=expert_width,
            residual=residual,
            n_streams=n_streams,
            layer_sharing=layer_sharing,
            sharing_block=sharing_block,
            bottleneck=bottleneck,
            sequence=self.schema.sequence_key is not None,
            mask_tokens=enable_masking,
        )
        if context == "auto":  # a model that was saved keeps what was chosen
            config = self._advised(config, mode)
            attention, pair_features, context = config.attention, config.pair_features, "slice"
        if use_moe:
            self._advise_experts(num_experts, moe_top_k)
        random_state = (settings.seed or 0) if random_state is None else random_state
        with seeded_generators(random_state):
            self.module = self._module_cls(config)
        if self.schema.transform == "log1p":  # deviations of other values are in units that mean nothing
            self.module.weigh_genes(self.schema.gene_scale)
        self._dataset: ParquetSource | None = None  # the reference, where it is on disk
        self._validation: ParquetSource | None = None  # and the validation set that belongs to it
        self.frame_: ReferenceFrame | None = None
        self.deformation_: float | None = None  # strength of the last training
        self.marginals_: Marginals | None = None
        self.dependence_: Dependence | None = None
        self.outlines_: Outlines | None = None
        self.exemplars_: Exemplars | None = None
        self.trainings_: tuple[dict[str, Any], ...] = ()  # records of :mod:`alphastomics._provenance`
        self.init_params_ = self._get_init_params(locals())
        self._model_summary_string = (
            f"AlphaSTomics model (mode={mode!r}): {self.schema.n_genes} genes, {self.schema.n_dims}D, "
            f"{len(self.schema.slices)} reference slices, d_model={d_model}, n_layers={n_layers}, n_heads={n_heads}, "
            f"{_describe_parameters(self.module)}"
        )

    def _advised(self, config: DenoiserConfig, mode: Mode) -> DenoiserConfig:
        """The network with the attention that suits the largest slice and the memory of this machine."""
        for name, usual in (("attention", "full"), ("pair_features", None)):
            if getattr(config, name) != usual:
                raise ValueError(
                    f"context='auto' chooses {name}; leave {name}={getattr(config, name)!r} out, or say 'slice'"
                )
        n_cells = self.registry_.get(LARGEST_SLICE, self.summary_stats.n_cells)
        arguments = {"mode": mode, "diffusion": self.diffusion, "shared_frame": self.schema.frame == "shared"}
        advice = advised_attention(n_cells, lambda kind: fits_in_memory(replace(config, **kind), n_cells, **arguments))
        logger.info("Slices of up to %s cells: %s.", f"{n_cells:,}", ", ".join(f"{k}={v!r}" for k, v in advice.items()))
        return replace(config, **advice)

    def _advise_experts(self, num_experts: int, moe_top_k: int) -> None:
        """Say what the number of cells advises, where it is something else."""
        n_cells = self.summary_stats.n_cells
        advice = advised_experts(n_cells)
        if advice != {"num_experts": num_experts, "moe_top_k": moe_top_k}:
            logger.info(
                "num_experts=%d and moe_top_k=%d; for %d cells the advice is %d and %d.",
                num_experts, moe_top_k, n_cells, advice["num_experts"], advice["moe_top_k"],
            )  # fmt: skip

    # -- data --------------------------------------------------------------------------------------------------------

    @classmethod
    def setup_anndata(
        cls,
        adata: AnnData,
        *,
        layer: str | None = None,
        position_key: str = "spatial",
        slice_key: str | None = None,
        cell_type_key: str | None = None,
        frame: Literal["slice", "shared"] = "slice",
        sequence_key: str | None = None,
        transform: Literal["auto", "log1p", "none"] = "auto",
        **kwargs: Any,
    ) -> None:
        """Register a reference: cells with expression and positions.

        Everything is checked here, before anything is trained, and ``adata`` is only marked as registered.

        Parameters
        ----------
        adata
            The reference, in memory; sparse or dense, counts or not.
        layer
            Where expression is: a key of ``layers``, or ``X`` when None.
        position_key
            Where positions are in ``obsm``, shape (n_cells, 2) or (n_cells, 3), any units.
        slice_key
            Where the slice of a cell is in ``obs``. None takes ``obs["slice_id"]`` if it is there, else all cells are
            one slice; the log says which.
        cell_type_key
            Where labels are in ``obs``, if anywhere. Training does not use them.
        frame
            ``"slice"``: every slice has its own frame, free up to rotation, reflection and shift. ``"shared"``: all
            slices are registered to one frame.
        sequence_key
            Where an order of the cells is in ``obs``, if anywhere: a number for each, such as that of a section or a residue.
            Attention over neighbors and features of pairs read it; only differences count.
        transform
            ``"log1p"`` (counts: library size to the median, logarithm), ``"none"``, or ``"auto"``: ``"log1p"`` if and
            only if all values are non-negative integers.
        **kwargs
            For scvi-tools' own use (``source_registry``).

        Raises
        ------
        KeyError
            If a named key is missing.
        ValueError
            If values, positions or slices cannot be used; the message says which and what to do.
        """
        setup_method_args = cls._get_setup_method_args(**locals())
        source_registry = kwargs.get("source_registry")
        if source_registry is not None:
            schema = TissueSchema.from_dict(source_registry[SCHEMA])
        else:
            schema = fit_schema(
                adata,
                layer=layer,
                position_key=position_key,
                slice_key=slice_key,
                cell_type_key=cell_type_key,
                frame=frame,
                sequence_key=sequence_key,
                transform=transform,
            )
        if adata.is_view:
            adata._init_as_actual(adata.copy())
        manager = AnnDataManager(fields=schema_fields(schema), setup_method_args=setup_method_args)
        manager._registry[SCHEMA] = schema.to_dict()
        manager._registry[LARGEST_SLICE] = largest_slice(adata, schema)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)

    @classmethod
    def from_parquet(cls, data_dir: str | PathLike[str], *, buffer_size: int = BUFFER, **kwargs: Any) -> AlphaSTomics:
        """A model of a dataset on disk, which :meth:`train` then reads a part at a time.

        Its validation set, if it has one, is what :meth:`train` validates on.

        Parameters
        ----------
        data_dir
            Folder that ``alphastomics preprocess`` wrote.
        buffer_size
            Number of cells among which contexts are shuffled; expression is read from disk as it is needed.
        **kwargs
            Arguments of :class:`AlphaSTomics`.

        Raises
        ------
        FileNotFoundError, ValueError
            If the dataset is not there, or damaged.
        """
        source = ParquetSource(data_dir, buffer_size=buffer_size)
        model = cls(registry=dataset_registry(cls, source), **kwargs)
        model._dataset = source
        if source.info.n_cells("validation"):
            model._validation = ParquetSource(data_dir, ("validation",), buffer_size=buffer_size)
        return model

    def _check_query(self, adata: AnnData | None) -> AnnData:
        if adata is None:
            adata = self.adata
        if adata is None:
            raise ValueError("This model was loaded without data; pass adata")
        if adata.n_obs == 0:
            raise ValueError("The query has no cells; pass some, or check indices")
        return adata

    def _query_source(self, adata: AnnData | None, *, positions: bool = False) -> tuple[AnnData, AnnDataSource]:
        adata = self._check_query(adata)
        return adata, AnnDataSource(adata, self.schema, positions=positions)

    @property
    def mode(self) -> Mode:
        """What the model was made to sample."""
        return self.init_params_["non_kwargs"]["mode"]

    def default_augmentation(self) -> Augmentation:
        """Random changes to training contexts that suit the size and kind of the reference."""
        return default_augmentation(self.schema, self.summary_stats.n_cells)

    def default_placement(self) -> dict[str, Any]:
        """Arguments of :meth:`sample` by which :func:`~alphastomics.tl.reconstruct` takes the conditional mean."""
        return default_placement(self.schema, self.summary_stats.n_cells)

    # -- training ----------------------------------------------------------------------------------------------------

    @preserve_algorithm_settings()
    def train(
        self,
        max_epochs: int | None = None,
        max_time: str | timedelta | dict[str, float] | float | None = None,
        accelerator: str = "auto",
        devices: int | list[int] | str = "auto",
        strategy: str | Strategy = "auto",
        precision: str | int = "auto",
        batch_size: int = 1024,
        context_size: int | Literal["auto"] | None = None,
        context_kind: Literal["subset", "patch"] = "subset",
        context_growth: GrowthKind | None = None,
        shortest_context: int = 128,
        growth_warmup: int = 0,
        growth_steps: int | None = None,
        micro_batch_size: int | None = None,
        memory_budget: float | None = None,
        recompute: Recompute = "auto",
        context_parallel_size: int = 1,
        train_size: float | None = None,
        validation_size: float | None = None,
        early_stopping: bool = False,
        augmentation: Augmentation | None = None,
        masking: MaskingConfig | None = None,
        num_workers: int = 0,
        plan_kwargs: dict[str, Any] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        resume: str | PathLike[str] | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        """Train on the registered reference.

        Parameters
        ----------
        max_epochs
            Number of passes over the cells. None: until ``max_time``, or about 4,000 steps if that is None too.
        max_time
            Longest time: seconds, ``"DD:HH:MM:SS"``, a timedelta or its arguments. The learning rate falls with it.
        accelerator, devices
            As in :class:`lightning.pytorch.Trainer`.
        strategy
            How training is spread over devices: a name that :func:`~alphastomics.train.resolve_strategy` knows, or an object
            of Lightning's; every process takes batches of ``batch_size`` cells.
        precision
            ``"auto"``: bfloat16 for matrix products where the processor or GPU has it, else 32 bits; or any of
            Lightning's.
        batch_size, context_size
            Numbers of cells in a batch and in a context, the cells that the network sees at once; a context has no more
            cells than a batch. ``context_size="auto"``: whole slices, or the longest contexts for which the memory is
            enough; a batch is then one context, where that has more cells. None: 512, or ``"auto"`` for a model that was
            made with ``context=``.
        context_kind
            ``"subset"`` (random cells of a slice: the global shape) or ``"patch"`` (neighbors: the local one).
        context_growth
            How contexts grow, from epoch to epoch, until they have ``context_size`` cells: ``"linear"``, ``"cosine"``,
            ``"exponential"`` or ``"geometric"``, see :class:`~alphastomics.train.LengthSchedule`. None: not at all. Batches
            have the same number of cells at any length, or one context where that has more.
        shortest_context, growth_warmup, growth_steps
            Cells of the first contexts; steps at that length; steps from there to the full length, None for half of
            the training less the warmup.
        micro_batch_size
            Most cells that a device holds at once, at least one context: a batch of more is taken in parts, whose gradients
            are accumulated. None: as many as the memory allows.
        memory_budget
            GiB of memory that training may use; None: what is free. What a step needs is in the log before the first one.
        recompute
            Blocks that keep nothing for the gradient but their input, and run a second time for it: the same result in less
            memory, and a third more time. ``"auto"``: as few as possible; ``"none"``, ``"all"``, or a number of them.
        context_parallel_size
            Number of processes that share a context: each runs the blocks of the network on its part of the cells. Groups
            of so many consecutive processes take different contexts. 1: every process has contexts of its own.
        train_size, validation_size
            Shares of the slices; validation holds out whole slices, none by default. A dataset on disk that has a
            validation set is validated on that one, unless ``validation_size`` is given.
        early_stopping
            Stop when ``validation_loss`` has not fallen for 45 epochs (``early_stopping_patience``), and keep the weights with
            which it was lowest; holds out a tenth of the slices unless told otherwise.
        augmentation
            Random changes to training contexts; defaults follow from the data.
        masking
            Which entries are masked, for a model with ``enable_masking=True``; defaults of
            :class:`~alphastomics.diffusion.MaskingConfig` when None.
        num_workers
            Processes that cut contexts; a thread does when 0.
        plan_kwargs
            Fields of :class:`~alphastomics.train.PlanConfig`.
        checkpoint
            ``.ckpt`` file for the state of training, written every ``checkpoint_every`` steps and at the end, and replaced as a
            whole; or a folder, for ``last.ckpt`` in it. When training has ended, :meth:`load` takes the file too, with the
            weights that the model keeps.
        checkpoint_every
            Steps of the optimizer between two checkpoints; 200 when None.
        resume
            Such a file, of a training with the same arguments, which is continued where it was: weights, their average,
            optimizer, learning rate, lengths of contexts, place in the epoch, and time. ``max_epochs`` and ``max_time`` count
            from its beginning. ``"last"``: the newest whole file that ``checkpoint`` names, and from the beginning where there
            is none, so that one script can be started again and again until it has finished.
        **trainer_kwargs
            Passed to :class:`lightning.pytorch.Trainer`. ``logger``: any of Lightning's, which is told the losses, the learning
            rate (``lr``), ``cells_per_second`` and ``memory_gib``; none by default. ``deterministic=True``: only algorithms that
            give the same result every time, in this training.

        Raises
        ------
        FileNotFoundError, ValueError
            If ``resume`` is no whole checkpoint of this model on these cells.
        ValueError
            If the memory is not enough for one context; the message says how many cells would fit.
        OSError
            If a checkpoint cannot be written; the one before it is whole.
        NonFiniteLossError
            If the loss becomes NaN or infinite; the model keeps its last good weights.
        NotEnoughMemoryError
            If memory runs out all the same, a ``MemoryError`` and a ``torch.OutOfMemoryError``; the model keeps its weights.
        DeadProcessError
            If another process of the training has died.
        SystemExit
            If the training was asked to end by SIGTERM; its checkpoint is written.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "trainer_kwargs")}
        arguments |= trainer_kwargs
        if self.adata is None and self._dataset is None:
            raise ValueError("This model was loaded without data; load it with adata= to train it")
        strategy = resolve_strategy(  # before any work
            strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=trainer_kwargs.get("num_nodes", 1),
            precision=precision,
            context_parallel_size=context_parallel_size,
        )
        quiet_unless_first()
        # Where CUDA has been used processes cannot be forked: what asks the GPU asks from a process of its own.
        ask = (
            run_in_subprocess if is_forked(strategy) and device_of(accelerator, devices).type == "cuda" else run_inline
        )
        chosen = ask(lambda: resolve_precision(precision))
        check_cublas_workspace(trainer_kwargs.get("deterministic"), device_of(accelerator, devices))
        maskable = self.module.config.mask_tokens
        if masking is not None and not maskable:
            raise ValueError("This model has no mask tokens; make it with enable_masking=True to train it with masking")
        source = self._dataset or AnnDataSource(self.adata, self.schema, positions=True)
        if context_size is None:
            context_size = 512 if self.init_params_["non_kwargs"].get("context") is None else "auto"
        plan_arguments = self._plan_arguments(source.n_cells, masking, plan_kwargs)
        resume_state = _checkpoint.find(resume, checkpoint)
        contexts = ask(
            partial(
                fit_batch_layout,
                self.module,
                source,
                context_size=context_size,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                budget=memory_budget,
                recompute=recompute,
                accelerator=accelerator,
                devices=devices,
                accumulate=(trainer_kwargs.get("accumulate_grad_batches") or 1) > 1,
                precision=chosen,
                resumed={} if resume_state is None else resume_state.contexts,
                context_parallel_size=context_parallel_size,
                **plan_arguments,
            )
        )
        if validation_size is None and self._validation is None and (early_stopping or train_size is not None):
            validation_size = 0.1 if train_size is None else 1 - train_size
        datamodule = self._data_splitter_cls(
            source,
            validation=self._validation if validation_size is None else None,
            batch_size=contexts.batch_size,
            context_size=contexts.context_size,
            micro_batch_size=contexts.micro_batch_size,
            kind=context_kind,
            seed=self.init_params_["non_kwargs"]["random_state"],
            augmentation=augmentation or self.default_augmentation(),
            validation_size=validation_size,
            num_workers=num_workers,
            targets=self.mode != "expr_to_pos",
            context_parallel_size=context_parallel_size,
        )
        seconds = seconds_of(max_time)
        if max_epochs is None:
            max_epochs = -1 if seconds is not None else -(-DEFAULT_STEPS // datamodule.steps_per_epoch)
        curriculum = make_curriculum(
            datamodule,
            kind=context_growth,
            shortest=shortest_context,
            warmup=growth_warmup,
            growth=growth_steps,
            n_steps=_n_steps(max_epochs, datamodule.steps_per_epoch, trainer_kwargs.get("max_steps") or -1),
        )
        if curriculum is not None:
            trainer_kwargs["reload_dataloaders_every_n_epochs"] = 1
        if curriculum is not None or datamodule.batches_per_step > 1:
            own = [callback for callback in (curriculum, MicroBatches()) if callback is not None]
            trainer_kwargs["callbacks"] = [*(trainer_kwargs.get("callbacks") or []), *own]
        plan = self._training_plan_cls(
            self.module,
            slice_names=tuple(cells.name for cells in source.slices),
            spacing=self.schema.spacing / self.schema.scale,
            max_seconds=seconds,
            n_recomputed=contexts.n_recomputed,
            curriculum=curriculum,
            context_parallel_size=context_parallel_size,
            **plan_arguments,
        )
        if resume_state is not None:
            _checkpoint.check_resumable(resume_state, self, max_epochs=max_epochs)
            trainer_kwargs["ckpt_path"] = resume_state.path
        kept = None if checkpoint is None else checkpoint_path(checkpoint)
        if kept is not None:
            about = _checkpoint.describe(self, contexts)
            trainer_kwargs["checkpoint"] = LastCheckpoint(kept, about, checkpoint_every)
        logger.info(
            "Training on %d cells, %d genes, %d slices (%s steps an epoch, %s).",
            source.n_cells, self.schema.n_genes, len(source.slices), datamodule.steps_per_epoch,
            f"at most {max_epochs} epochs" if seconds is None else f"at most {seconds:.0f} s",
        )  # fmt: skip
        runner = self._train_runner_cls(
            self,
            training_plan=plan,
            data_splitter=datamodule,
            max_epochs=max_epochs,
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            precision=chosen,
            ema=MovingAverage(plan.config.ema_decay),
            history=History(self.history_),
            max_seconds=seconds,
            early_stopping=early_stopping,
            **trainer_kwargs,
        )
        if not self.is_trained_:
            self.module.set_components(principal_components(source, self.module.components.shape[1]))
        self.module.train()  # Lightning leaves it as it is, and after an earlier training that is eval()
        arguments |= contexts._asdict() | {
            "max_epochs": max_epochs,
            "max_time": seconds,
            "precision": chosen,
            "validation_size": validation_size,
            "augmentation": datamodule.train_set.augmentation,
            "masking": plan.objective.masking,
        }
        began, goes_on = time.monotonic(), True  # whether anything comes after the training
        try:
            with seeded_generators(datamodule.train_set.seed):
                runner()
        except (DeadProcessError, SystemExit):
            goes_on = False
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            free_traceback_frames(error)
            step = {"accelerator": accelerator, "precision": chosen, "plan_kwargs": plan_kwargs}
            estimate = self._estimated(contexts, context_parallel_size=context_parallel_size, **step)
            raise out_of_memory_error(contexts, estimate, error) from error
        finally:
            if self.trainer.global_step > 0:
                spent = time.monotonic() - began
                record = training_record(self, asdict(plan.config), arguments, n_cells=source.n_cells, seconds=spent)
                self.trainings_ = (*self.trainings_, record)
            if self.is_trained_ and goes_on:
                self._fit_rest(source, plan)
                if kept is not None and self.trainer.is_global_zero and kept.is_file():
                    _checkpoint.finalize(kept, self)

    def _fit_rest(self, source: CellSource, plan: TrainingPlan) -> None:
        """Fit what is fitted after the weights."""
        self.frame_ = fit_frame(self, source)
        self.deformation_ = float(plan.config.deformation)
        if self.mode != "expr_to_pos":
            self.marginals_ = fit_marginals(self, source)
            self.dependence_ = fit_dependence(self, source)
            self.exemplars_ = Exemplars.of(source)
        if self.mode in ("any", "joint"):
            self.outlines_ = fit_outlines(self, source)

    def _estimated(self, contexts: BatchLayout, **step: Any) -> MemoryEstimate | None:
        """Memory of a step; None where it cannot be estimated."""
        try:
            return self.estimate_memory(
                contexts.context_size,
                contexts.micro_batch_size,
                recompute=contexts.n_recomputed,
                **step,
            )
        except NotImplementedError:
            return None

    def _plan_arguments(
        self, n_cells: int, masking: MaskingConfig | None = None, plan_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a training plan and an estimate of its memory have in common, for a reference of ``n_cells`` cells."""
        return {
            "mode": self.mode,
            "diffusion": self.diffusion,
            "shared_frame": self.schema.frame == "shared",
            "masking": (masking or MaskingConfig()) if self.module.config.mask_tokens else None,
            "deformation": default_deformation(n_cells),
            **(plan_kwargs or {}),
        }

    def estimate_memory(
        self,
        n_cells: int = 512,
        batch_size: int = 1024,
        *,
        training: bool = True,
        precision: str | int = "auto",
        recompute: int | Literal["none", "all"] = "none",
        accelerator: str = "auto",
        context_parallel_size: int = 1,
        plan_kwargs: dict[str, Any] | None = None,
    ) -> MemoryEstimate:
        """Estimate the memory of a step of the training, or of a call of the network; nothing is run or allocated.

        Parameters
        ----------
        n_cells
            Cells of a context.
        batch_size
            Cells that the device holds at once: ``batch_size // n_cells`` contexts, at least one.
        training
            Whether a step of :meth:`train` is estimated, or a call without gradient, of one context.
        precision, accelerator, plan_kwargs
            As in :meth:`train`.
        recompute
            ``"none"``, ``"all"``, or the number of blocks that are recomputed.
        context_parallel_size
            Number of processes that share a context in training; the estimate is of one of them.

        Returns
        -------
        Bytes that are held at the peak: ``peak``, and its parts ``parameters``, ``gradients``, ``optimizer`` and
        ``activations``. Data, code and loaders come on top.

        Raises
        ------
        NotImplementedError
            If the shape of something in the network depends on values.
        ValueError
            If an argument makes no sense.
        """
        if n_cells < 1 or batch_size < 1:
            raise ValueError(f"n_cells={n_cells} and batch_size={batch_size} count cells: both at least 1")
        check_group_size(context_parallel_size, context_parallel_size)
        device = estimated_device(device_of(accelerator).type)
        common: dict[str, Any] = {
            "n_cells": n_cells, "precision": resolve_precision(precision), "device": device
        }  # fmt: skip
        if not training:
            return estimate_inference(self.module.config, **common)
        k = recomputed_blocks(recompute, self.module.config.n_layers)
        if k is None:
            raise ValueError(
                "recompute='auto' is for train(), which knows what may be used; say 'none', 'all' or a number"
            )
        return estimate_training(
            self.module.config,
            n_contexts=max(1, batch_size // n_cells),
            n_recomputed=k,
            context_parallel_size=context_parallel_size,
            **common,
            **self._plan_arguments(self.summary_stats.n_cells, None, plan_kwargs),
        )

    # -- answers -----------------------------------------------------------------------------------------------------

    def sample(
        self,
        adata: AnnData | None = None,
        mode: Mode = "expr_to_pos",
        n_steps: int = 30,
        n_samples: int = 1,
        reduce: Literal["medoid", "mean"] | None = None,
        inpaint: bool = False,
        n_cells: int | None = None,
        indices: Sequence[int] | NDArray[np.int64] | None = None,
        batch_size: int | None = None,
        random_state: int = 0,
        sampler: Literal["ddpm", "ddim", "dpm++2m"] | None = None,
        eta: float = 0.0,
        n_views: int = 1,
        refine: bool = False,
    ) -> AnnData:
        """Sample one modality given the other, or both.

        Parameters
        ----------
        adata
            Query; the reference when None. It is not modified. Not for ``mode="joint"``, which reads none.
        mode
            What is sampled. ``"expr_to_pos"``: positions from expression. ``"pos_to_expr"``: expression at positions.
            ``"joint"``: new slices, each in the outline of a reference slice drawn at random. The query's own values of
            what is sampled are never read unless ``inpaint``.
        n_steps
            Number of calls of the denoiser per draw. 1 gives the conditional mean, which is not a sample; all draws of
            expression are then the same.
        n_samples
            Number of draws of each slice.
        reduce
            What becomes of several draws. None: all of them are returned. ``"medoid"``: the draw nearest to all others is,
            for positions slice by slice. ``"mean"``: their mean is, for positions after alignment, each draw seeing a random
            half of the genes; for expression the conditional mean on the scale of the stored transform, without the noise of
            the draws and averaged over ``n_samples`` views of the slice. With either, positions have an uncertainty, for
            which ``"medoid"`` makes as many draws again; ``"mean"`` of expression has a standard deviation. Both are NaN of
            a single draw, which says nothing of them. Not for ``mode="joint"``: the cells of two draws are not the same.
        inpaint
            Read the query's own values of what is sampled: known ones are held to the bit, NaN is sampled. A position is
            known if all its coordinates are; expression is known value by value, and genes that the query lacks are
            sampled. Not for ``mode="joint"``.
        n_cells
            For ``mode="joint"`` alone, and needed there: number of cells of a new slice.
        indices
            Rows of the query to use; all when None. Not for ``mode="joint"``.
        batch_size
            Largest number of cells that attend to each other; larger slices are split into overlapping contexts that
            are fused at every step.
        random_state
            Decides every draw.
        sampler, eta
            Reverse step, see :mod:`alphastomics.diffusion.samplers`. None takes ``"dpm++2m"``, which needs the fewest
            steps, and where positions are held ``"ddpm"``, whose fresh noise lets cells forget what disagrees with
            them. ``eta`` is for ``sampler="ddim"``.
        n_views
            For positions: number of random views (subsets of genes and of cells) over which the conditional mean, from
            which every chain starts, is averaged. Not for ``reduce="mean"`` of several draws.
        refine
            For positions: move the cells of the conditional mean towards those that resemble them in the neighborhood
            embedding: more of its neighbors are right, and fewer cells gather between the places where they could lie.

        Returns
        -------
        A new AnnData
            Positions are in units of the reference. Several draws (``n_samples > 1`` without ``reduce``) come one after the
            other, numbered in ``obs["draw"]`` and at the end of the names of the cells. ``uns["alphastomics"]``: how it was made,
            see :func:`~alphastomics.tl.provenance`.
        ``mode="expr_to_pos"``
            The query's ``X``, ``obs`` and ``var``, not its layers; and, of shape (n_cells, n_dims), ``obsm[position_key]``:
            in the frame of the first reference slice; in the shared frame for ``frame="shared"``; in the frame of its known
            cells for a slice of which ``inpaint`` knows some. Cells of one slice (``obs[slice_key]``) are placed together;
            without that column all cells are one set. Draws in a free frame are aligned to their medoid. With ``reduce``,
            ``obs["position_uncertainty"]``: root mean square distance, in units of the positions, of aligned draws that each
            see a random half of the genes from the position that is returned; of their mean that is their standard deviation
            over all dimensions together. 0 where a position is held.
        ``mode="pos_to_expr"``
            The query's ``obs`` and ``obsm[position_key]``, the ``var`` of the reference (its gene names alone where it is not
            at hand) and, of shape (n_cells, n_genes), ``X`` in units of the reference, also in ``layers`` where the reference
            has its expression there; CSR under ``transform="log1p"``, dense under ``"none"``. With ``reduce="mean"``,
            ``layers["sd"]``: standard deviation of the draws in the units of ``X``, for which the cells of a slice share
            what few draws tell of each; NaN with ``n_samples=1``, 0 where a value is held, and 0 everywhere with
            ``n_steps=1``, which draws no noise. Under ``"log1p"`` ``obs["library_size"]``: the total
            counts to which a cell was brought, what those of its genes stand for that ``inpaint`` knows, else the median
            of the reference. Under ``frame="slice"`` a slice that overlaps with the first reference slice counts as
            registered to it, and one that lies elsewhere is read as if its center were there; at least 20 cells that
            ``inpaint`` knows as a whole turn it to where they fit better, if they clearly do.
        ``mode="joint"``
            ``n_cells`` cells for each draw, named ``cell_0`` and so on; ``X``, ``var`` and ``obs["library_size"]`` as above, at
            the median library size of the reference; ``obsm[position_key]``, (n_cells, n_dims), in the frame of the first
            reference slice, or in the shared one; ``obs[slice_key]``, ``obs["slice_id"]`` where the reference names none:
            ``"sample_0"`` for the first draw, and so on.

        Raises
        ------
        RuntimeError
            If the model is not trained.
        KeyError
            If the query lacks what is read: the expression of the cells to place, ``X`` or the layer of the reference; the
            places to write into, ``obsm[position_key]``, and ``obs[slice_key]`` if the reference has it; with ``inpaint``
            both.
        ValueError
            If the model was not made for ``mode``; if an argument is out of range, or has no effect beside the others; if
            the query has no cells, or values that cannot be used, or fewer than half of the genes by which cells are placed;
            if a cell has no position to write expression into, or positions are read and a cell has no slice; if there is no
            query and the model was loaded without data.

        Notes
        -----
        An interval that holds the truth with a probability of 80 %, as far as the uncertainty is right: a position lies within
        1.27 times ``obs["position_uncertainty"]`` in two dimensions, within 1.24 times in three; a value of
        expression within 1.28 times ``layers["sd"]`` of ``X`` with ``reduce="mean"``, counts with a higher one, because they
        are skewed. ``docs/theory.md`` says why.
        """
        parameters = {name: value for name, value in locals().items() if name not in ("self", "indices")}
        self._check_if_trained(warn=False, message="The model is not trained; call train() first")
        self._check_mode(mode, n_cells)
        config = SamplerConfig(
            n_steps=n_steps,
            sampler=sampler,
            eta=eta,
            max_context=_max_context(batch_size),
            n_views=n_views,
            refine=refine,
        )
        check_effect(
            mode,
            config,
            n_samples=n_samples,
            reduce=reduce,
            inpaint=inpaint,
            queried=adata is not None,
            selected=indices is not None,
        )
        draws: dict[str, Any] = {"n_samples": n_samples, "reduce": reduce, "random_state": random_state}
        if adata is None:
            adata = self.adata
        if indices is not None and adata is not None:
            adata = adata[np.asarray(indices)]
            parameters["indices"] = f"{adata.n_obs} rows"
        if mode == "joint":
            assert n_cells is not None  # _check_mode refuses
            result = sample_tissue(self, n_cells, config, **draws)
        elif mode == "pos_to_expr":
            result = sample_expression(self, self._check_query(adata), config, inpaint=inpaint, **draws)
        else:
            query, source = self._query_source(adata, positions=inpaint)
            result = sample_positions(self, query, source, config, **draws)
        result.uns[_keys.PROVENANCE] = result_record(self, "sample", parameters)
        return result

    def _check_mode(self, mode: str, n_cells: int | None) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(map(repr, MODES))}")
        if self.mode not in ("any", mode):
            raise ValueError(
                f"This model was trained with mode={self.mode!r} and has never seen the states that mode={mode!r} visits; "
                f"train one with mode={mode!r} or mode='any'"
            )
        if mode == "any":
            raise ValueError("mode='any' trains a model of everything; sample 'expr_to_pos', 'pos_to_expr' or 'joint'")
        if mode == "joint" and n_cells is None:
            raise ValueError("mode='joint' reads no query; say by n_cells how many cells the new slice has")
        if mode != "joint" and n_cells is not None:
            raise ValueError("n_cells is for mode='joint'; here the query says how many cells there are")

    def get_latent_representation(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | NDArray[np.int64] | None = None,
        batch_size: int | None = None,
        layer: Literal["encoder", "transformer", "all"] = "transformer",
        use_positions: bool = False,
    ) -> NDArray[np.float32]:
        """Embed cells by their expression, by the cells of their slice, and by their positions where these are used.

        Parameters
        ----------
        adata
            Cells; the reference when None.
        indices
            Rows to embed; all when None. Only these cells see each other.
        batch_size
            Largest number of cells that attend to each other.
        layer
            ``"encoder"``: the embedding of the cell alone; ``"transformer"``: after the last block; ``"all"``: both side
            by side.
        use_positions
            Whether the model sees where the cells lie. If not, ``obsm[position_key]`` is never read, and cells are
            embedded as dissociated ones are. Positions of a free frame (``frame="slice"``) need no registration: the
            expression of the cells says how their slice lies.

        Returns
        -------
        Shape (n_cells, d_model), twice as wide for ``"all"``; independent of the order of the rows. Embeddings with and
        without positions are not comparable.

        Raises
        ------
        KeyError
            If positions, or the slices they belong to, are to be used and are missing.
        ValueError
            If positions are to be used and a cell has none, or the model has never seen expression in given places: only
            ``mode="any"`` and ``mode="pos_to_expr"`` have.
        """
        self._check_if_trained(warn=False, message="The model is not trained; call train() first")
        if layer not in ("encoder", "transformer", "all"):
            raise ValueError(f"layer={layer!r} is unknown; choose 'encoder', 'transformer' or 'all'")
        if use_positions and self.mode not in ("any", "pos_to_expr"):
            raise ValueError(
                f"This model was trained with mode={self.mode!r} and has never seen cells in given places; pass "
                "use_positions=False, or train one with mode='any'"
            )
        if adata is None:
            adata = self.adata
        if indices is not None and adata is not None:
            adata = adata[np.asarray(indices)]
        _, source = self._query_source(adata, positions=use_positions)
        return latent_representation(self, source, layer=layer, max_context=_max_context(batch_size))

    # -- files -------------------------------------------------------------------------------------------------------

    def save(
        self,
        dir_path: str | Path,
        prefix: str | None = None,
        overwrite: bool = False,
        save_anndata: bool = False,
        **anndata_write_kwargs: Any,
    ) -> None:
        """Save to a folder as safetensors and JSON; of several processes of a script the first does, and the others wait.

        A model that completes cells holds expression of up to 8,192 cells of its reference, see :mod:`alphastomics.sampling._exemplars`:
        share it as you would share these.

        Parameters
        ----------
        dir_path
            Folder.
        prefix
            Not supported: a model has a folder of its own.
        overwrite
            Whether to replace a model that is there.
        save_anndata
            Whether to save the reference beside it, as ``adata.h5ad``.
        **anndata_write_kwargs
            Passed to :meth:`anndata.AnnData.write_h5ad`.
        """
        if prefix:
            raise ValueError("prefix is not supported: a model has a folder of its own")
        if save_anndata and self.adata is None:
            raise ValueError("save_anndata=True, but this model has no data")
        folder = Path(dir_path)

        def write() -> None:
            _files.write_model(folder, _files.model_tensors(self), _files.model_config(self), overwrite=overwrite)
            (folder / _files.DATA).unlink(missing_ok=True)  # those of the model that was there
            if save_anndata:
                self.adata.write_h5ad(folder / _files.DATA, **anndata_write_kwargs)

        write_on_rank_zero(folder.absolute(), write)

    @classmethod
    def load(
        cls,
        dir_path: str | Path,
        adata: AnnData | Literal[False] | None = None,
        accelerator: str = "auto",
        device: int | str = "auto",
        prefix: str | None = None,
        **kwargs: Any,
    ) -> AlphaSTomics:
        """Load a model that :meth:`save` wrote; the data it was trained on are not needed.

        Parameters
        ----------
        dir_path
            Folder; or the ``.ckpt`` file of a training that has ended, see :meth:`train`.
        adata
            Data to attach; None takes what was saved beside the model, if anything; False none.
        accelerator, device
            Where to put the network.
        prefix
            Not supported.
        **kwargs
            Not used.

        Raises
        ------
        FileNotFoundError, ValueError
            If the folder or file does not hold a whole model of this package.
        """
        if prefix:
            raise ValueError("prefix is not supported: a model has a folder of its own")
        path = Path(dir_path)
        stored = _checkpoint.read_model(path) if path.suffix == ".ckpt" else _files.read_model(path)
        return _files.restore(cls, path, stored, adata, accelerator=accelerator, device=device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        adata: AnnData | Literal[False] | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
        accelerator: str = "auto",
        device: int | str = "auto",
    ) -> AlphaSTomics:
        """Load a model from a folder, or from the Hugging Face Hub.

        Nothing that is loaded can run code; see :doc:`/files`.

        Parameters
        ----------
        name_or_path
            Folder that :meth:`save` wrote, which always wins, or ``"organization/name"`` on the Hub, of which the files of a
            model are downloaded and no others.
        adata
            Data to attach; None takes what was saved beside the model in a folder, if anything; False none.
        revision
            Branch, tag or commit on the Hub; ``main`` when None.
        token
            Token for the Hub; that of ``hf auth login`` or of the environment variable ``HF_TOKEN`` when None.
        accelerator, device
            Where to put the network.

        Raises
        ------
        ImportError
            If huggingface_hub is not installed (the extra ``hub``) and the model is not here.
        FileNotFoundError
            If there is no such folder, repository or revision.
        OSError
            If the Hub cannot be reached.
        ValueError
            If it is no whole model of this package.

        Examples
        --------
        >>> model = asx.model.AlphaSTomics.from_pretrained("organization/name")
        """
        folder = _hub.find_folder(name_or_path, revision=revision, token=token)
        return cls.load(folder, adata, accelerator, device)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        license: str | None = None,
        overwrite: bool = False,
        token: str | None = None,
        commit_message: str = "Upload model with alphastomics",
    ) -> str:
        """Send the model to the Hugging Face Hub, with a card that says what it is.

        What is sent is what :meth:`save` writes, without the reference. A model that completes cells holds expression of up to
        8,192 cells of it, see :mod:`alphastomics.sampling._exemplars`: share it as you would share these.

        Parameters
        ----------
        repo_id
            ``"organization/name"``; made if it is not there.
        private
            Whether only its organization sees it; as the organization has it by default if not.
        license
            License for the card, as the Hub writes it, for example ``"cc-by-4.0"``.
        overwrite
            Whether to replace another model, and a card, that the repository holds.
        token
            Token for the Hub; that of ``hf auth login`` or of the environment variable ``HF_TOKEN`` when None.
        commit_message
            What the history of the repository says of it.

        Returns
        -------
        Where the model is.

        Raises
        ------
        ImportError
            If huggingface_hub is not installed (the extra ``hub``).
        OSError
            If the token is missing or does not suffice (:class:`PermissionError`), or the Hub cannot be reached or fails.
        ValueError
            If the model is not trained, or the repository holds another one or is public against `private`.

        Examples
        --------
        >>> model.push_to_hub("organization/name", private=True, license="cc-by-4.0")
        """
        return _hub.push(
            self,
            repo_id,
            private=private,
            license=license,
            overwrite=overwrite,
            token=token,
            commit_message=commit_message,
        )


def _n_steps(max_epochs: int, steps_per_epoch: int, max_steps: int) -> int | None:
    """Steps after which training ends, by number; None where only time ends it."""
    limits = [max_epochs * steps_per_epoch] * (max_epochs >= 0) + [max_steps] * (max_steps >= 0)
    return min(limits, default=None)


def _max_context(batch_size: int | None) -> int:
    if batch_size is None:
        return MAX_CONTEXT
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} counts cells: at least 1, or None for {MAX_CONTEXT}")
    return batch_size


def _describe_parameters(module: Denoiser) -> str:
    total, active = count_parameters(module)
    return f"{total:,} parameters" + (f", {active:,} active" if active < total else "")
