"""Settings of a training: augmentation, masking, contexts, memory, validation, checkpoints, and Lightning's trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from alphastomics.config._setting import check, setting

MaskStrategy = Literal["random", "block", "structured"]
ContextKind = Literal["subset", "patch"]
GrowthKind = Literal["linear", "cosine", "quadratic", "geometric"]
Recompute = int | Literal["auto", "none", "all"]
Strategy = Literal[
    "auto",
    "ddp",
    "ddp_find_unused_parameters_true",
    "fsdp2",
    "fsdp",
    "deepspeed_stage_1",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "ddp_spawn",
    "ddp_fork",
    "ddp_notebook",
]
DEFAULT_STEPS = 4000  # optimizer steps without max_epochs and max_time; half as many if all contexts are placed
DEFAULT_BATCH_SIZE = 1024  # cells
CUDA_BATCH_SIZE = 2048  # on CUDA, where the time of a small step is that of launching its kernels
DEFAULT_CONTEXT_SIZE = 512
DEFAULT_VALIDATION_SIZE = 0.1  # with early stopping
_GROWING = ("context_growth", *get_args(GrowthKind))
_MASKED = ("enable_masking", True)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes to training contexts.

    By default, :meth:`~alphastomics.model.AlphaSTomics.train` derives the values from the number and kind of the cells.

    Parameters
    ----------
    gene_dropout
        Largest fraction of the measured genes that are dropped from a context; the fraction r is drawn uniformly per context.
        Dropped genes are set to 0 and marked as unmeasured. The others are divided by sqrt(1 - r), which preserves the variance
        of a sum over genes.
    thinning
        Largest fraction of the counts that are removed from a context; the fraction is drawn uniformly per context.
    gene_noise
        Standard deviation, in network units, of a random gain and a random offset of each gene per context, which imitate
        differences between specimens or between runs of an instrument.
    composition
        How strongly the contexts of a slice differ in composition. Cells are divided into contexts by a smooth random field of
        unit variance plus unit noise; this is the largest factor of the field, which is drawn uniformly per slice and epoch.
        With 0, every context is a uniform random sample of its slice. Only for contexts of kind ``subset``.
    rotate
        Rotate and reflect positions at random, unless all slices share a frame.

    Raises
    ------
    ValueError
        If a value is out of range.
    """

    SECTION: ClassVar[str] = "augmentation"

    gene_dropout: float = setting(0.5, ge=0, lt=1, from_data=True)
    thinning: float = setting(0.0, ge=0, lt=1, from_data=True)
    gene_noise: float = setting(0.0, ge=0, from_data=True)
    composition: float = setting(0.0, ge=0, from_data=True)
    rotate: bool = True

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Masked entries in training, for a model with ``enable_masking``.

    Parameters
    ----------
    mask_strategy
        Which entries are masked. ``random``: uniformly at random. ``block``: a block of consecutive measured genes, or of axes,
        in every cell. ``structured``: the entries with the largest absolute values; ties are broken at random.
    expression_mask_ratio
        Fraction of the expression entries of a context that is masked.
    position_mask_ratio
        Fraction of the coordinates of a context that is masked.
    masking_probability
        Probability that a context is masked. The other contexts have the same kind of input as in sampling.
    initial_mask_share
        Fraction of both ratios that applies at the first step.
    mask_ramp_steps
        Number of optimizer steps over which the ratios increase linearly to their full values.

    Raises
    ------
    ValueError
        If a value is out of range or the strategy is unknown.
    """

    SECTION: ClassVar[str] = "masking"

    mask_strategy: MaskStrategy = setting("random", requires=_MASKED)
    expression_mask_ratio: float = setting(0.3, ge=0, le=1, requires=_MASKED)
    position_mask_ratio: float = setting(0.33, ge=0, le=1, requires=_MASKED)
    masking_probability: float = setting(0.5, ge=0, le=1, requires=_MASKED)
    initial_mask_share: float = setting(0.0, ge=0, le=1, requires=_MASKED)
    mask_ramp_steps: int = setting(0, ge=0, requires=_MASKED)

    def __post_init__(self) -> None:
        check(self)

    def share(self, step: int) -> float:
        """Fraction of the ratios that applies at an optimizer step, counted from 0."""
        if step >= self.mask_ramp_steps:
            return 1.0
        return self.initial_mask_share + (1 - self.initial_mask_share) * step / self.mask_ramp_steps


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Contexts, memory, validation and checkpoints; arguments of :meth:`~alphastomics.model.AlphaSTomics.train`.

    Parameters
    ----------
    batch_size
        Number of cells in a batch. By default 1,024, or 2,048 on CUDA.
    context_size
        Number of cells per context. ``auto``: whole slices, or the longest contexts that fit in memory. By default 512, or
        ``auto`` for a model with ``context``.
    context_kind
        Cells of a context. ``subset``: random cells of a slice, over its whole extent. ``patch``: neighboring cells.
    context_growth
        How the context size increases, epoch by epoch, up to ``context_size``. By default it is constant.
    shortest_context
        Number of cells in the first contexts if the context size increases.
    growth_warmup
        Number of steps before the context size starts to increase.
    growth_steps
        Number of steps over which the context size increases. By default half of the training, less ``growth_warmup``.
    micro_batch_size
        Largest number of cells on a device at once. Larger batches are processed in parts, whose gradients are accumulated. By
        default as many as fit in memory.
    memory_budget
        Memory that training may use, in GiB. By default all free memory.
    recompute
        Number of blocks whose activations are recomputed in the backward pass, which saves memory and costs up to a third more
        time. ``auto``: as few as possible; ``none``; ``all``.
    validation_size
        Fraction of the slices held out for validation. By default none, or 0.1 with ``early_stopping``.
    train_size
        Fraction of the slices used for training; the others are held out for validation.
    early_stopping
        Stop training when the validation loss no longer decreases, and keep the weights with the lowest validation loss.
    checkpoint_every
        Number of optimizer steps between two checkpoints.
    num_workers
        Number of processes that prepare contexts; 0: a thread of the training process.
    context_parallel_size
        Number of processes over which the cells of each context are split.
    augmentation
        Random changes to training contexts. By default they are derived from the data.
    masking
        Masked entries, for a model with ``enable_masking``.
    """

    SECTION: ClassVar[str] = "training"

    batch_size: int | None = setting(None, ge=1)
    context_size: int | Literal["auto"] | None = setting(None, ge=1)
    context_kind: ContextKind = "subset"
    context_growth: GrowthKind | None = None
    shortest_context: int = setting(128, ge=1, requires=_GROWING)
    growth_warmup: int = setting(0, ge=0, requires=_GROWING)
    growth_steps: int | None = setting(None, ge=0, requires=_GROWING)
    micro_batch_size: int | None = setting(None, ge=1)
    memory_budget: float | None = setting(None, gt=0)
    recompute: Recompute = setting("auto", ge=0)
    validation_size: float | None = setting(None, gt=0, lt=1)
    train_size: float | None = setting(None, gt=0, lt=1, python_only=True)
    early_stopping: bool = False
    checkpoint_every: int = setting(200, ge=1)
    num_workers: int = setting(0, ge=0, key="data.loading.num_workers")
    context_parallel_size: int = setting(1, ge=1)
    augmentation: Augmentation | None = setting(None, python_only=True)
    masking: MaskingConfig | None = setting(None, python_only=True)

    def __post_init__(self) -> None:
        check(self)
        sizes = [size for size in (self.train_size, self.validation_size) if size is not None]
        if len(sizes) == 2 and abs(sum(sizes) - 1) > 1e-6:
            raise ValueError(
                f"train_size={self.train_size} and validation_size={self.validation_size} do not add up to 1; pass one of them"
            )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Arguments of :meth:`~alphastomics.model.AlphaSTomics.train` that are passed to Lightning's trainer.

    Parameters
    ----------
    max_epochs
        Number of passes over the cells. By default as many as a second network needs to place held-out cells best, and at most
        ``max_time`` if it is given, otherwise about 4,000 steps, or 2,000 with ``mode="expr_to_pos"``; no limit if ``max_steps`` is
        given.
    max_time
        Maximal duration of training, in seconds or as ``DD:HH:MM:SS``.
    accumulate_grad_batches
        Number of batches per optimizer step.
    gradient_clip_val
        Norm at which gradients are clipped; 0 disables clipping.
    accelerator
        Kind of device: ``auto``, ``cpu``, ``gpu``, ``mps``, …
    devices
        Number of devices, or their indices.
    gpus
        Number of GPUs; shorthand for ``accelerator`` and ``devices``.
    num_nodes
        Number of machines, each with ``devices`` devices.
    strategy
        How training is distributed over devices. ``auto``: one process for one device, otherwise ``ddp``.
    precision
        Numerical precision: ``auto``, ``32-true``, ``bf16-mixed``, … ``auto`` uses bfloat16 for matrix products if the hardware
        supports it.
    fp16
        Use half precision; shorthand for ``precision`` ``16-mixed``.
    deterministic
        Use only deterministic algorithms, which may be slower.
    """

    SECTION: ClassVar[str] = "training"

    max_epochs: int | None = setting(None, ge=1, flags=("--epochs",))
    max_time: float | str | None = None
    accumulate_grad_batches: int = setting(1, ge=1)
    gradient_clip_val: float = setting(1.0, ge=0)
    accelerator: str = "auto"
    devices: int | str = "auto"
    gpus: int | None = setting(None, ge=1)
    num_nodes: int = setting(1, ge=1)
    strategy: Strategy = "auto"
    precision: str = "auto"
    fp16: bool = setting(False, off=())
    deterministic: bool = setting(False, key="seed.deterministic")

    def __post_init__(self) -> None:
        check(self)
