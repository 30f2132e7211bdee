"""Options that several commands share.

cyclopts turns every field into a flag, reads the type at run time, and takes the help from the docstring. Nothing here
imports the library, so that ``--help`` is quick; the tests compare choices and defaults with the library's own. What
the library tunes, or settles by the data, is None here and left to it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.types import ExistingDirectory, ExistingFile, PositiveInt  # noqa: TC002  read at run time
from cyclopts.validators import Number

from alphastomics._details import DETAILS
from alphastomics.config import Strategy  # noqa: TC001  read at run time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from alphastomics.model import AlphaSTomics

# Ranges, which are told where a value is read: with the flag, or with the file and the key.
Positive = Annotated[float, Parameter(validator=Number(gt=0, lt=inf))]
NotNegative = Annotated[float, Parameter(validator=Number(gte=0, lt=inf))]
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
PartialShare = Annotated[float, Parameter(validator=Number(gte=0, lt=1))]
HeldOut = Annotated[float, Parameter(validator=Number(gt=0, lt=1))]
Count = Annotated[int, Parameter(validator=Number(gte=0))]


def _numbers(least: int) -> Parameter:
    """Check numbers, where words are possible as well."""
    check = Number(gte=least)
    return Parameter(validator=lambda kind, value: None if isinstance(value, str) else check(kind, value))


ContextSize = Annotated[int | Literal["auto"], _numbers(1)]
Recompute = Annotated[int | Literal["auto", "none", "all"], _numbers(0)]

Mode = Literal["expr_to_pos", "pos_to_expr", "joint", "any"]

# Panels of the help, in this order below the options of the command itself.
RUN, DATA, MODEL, TRAINING, LOSSES, GLOBAL = (
    Group(name, sort_key=rank)
    for rank, name in enumerate(("Run", "Data", "Model", "Training", "Losses and optimizer", "Everywhere"), start=1)
)


# The names of the first version of the method, both ways of saying no.
UNMASKED = Parameter(negative=("--disable-masking", "--no-enable-masking"))
UNGATED = Parameter(negative=("--no-gated-attention", "--no-use-gated-attention"))
DENSE = Parameter(negative=("--no-moe", "--no-use-moe"))
SEVERAL = Parameter(consume_multiple=True, negative=())
HUB = "hf://"  # before the name of a repository, which could else be that of a folder


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class SetupOptions:
    """Where the reference keeps what.

    Parameters
    ----------
    layer
        Key of ``layers`` with the expression; ``X`` when not given.
    position_key
        Key of ``obsm`` with the positions, 2D or 3D, any units.
    slice_key
        Column of ``obs`` with the slice of a cell; ``slice_id`` if it is there when not given, else all cells are one.
    cell_type_key
        Column of ``obs`` with labels, for scores only.
    frame
        ``slice``: every slice has its own frame; ``shared``: all are registered to one.
    sequence_key
        Column of ``obs`` with an order of the cells.
    transform
        ``log1p`` for counts, ``none``, or ``auto``: by what the values are.
    """

    layer: str | None = None
    position_key: str = "spatial"
    slice_key: str | None = None
    cell_type_key: str | None = None
    frame: Literal["slice", "shared"] = "slice"
    sequence_key: str | None = None
    transform: Literal["auto", "log1p", "none"] = "auto"


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Architecture and diffusion.

    Parameters
    ----------
    mode
        What the model learns to sample.
    d_model
        Width.
    n_layers
        Number of blocks.
    n_heads
        Attention heads.
    gate_type
        Gate of softmax attention.
    use_gated_attention
        The same as ``--attention full``; no is the same as ``--attention linear``.
    use_qk_norm
        Whether queries and keys are normalized.
    attention
        ``full``, the default; ``linear``, the baseline; ``geometric``, which falls with distance; ``neighbor``, the nearest
        cells; or ``axial``, along a grid.
    pair_features
        ``factorized``: features of pairs of cells, for ``geometric`` and ``neighbor``.
    rank
        Rank of these; ``auto``: what is affordable for the cells that are seen at once.
    sparse_pairs
        Where ``neighbor`` looks for neighbors: in space, along the order of the cells, or both.
    n_neighbors
        How many neighbors ``neighbor`` looks at.
    use_moe
        A mixture of experts in the place of the feed-forward networks.
    num_experts
        Number of experts: 4 below 10,000 cells, 8 up to 100,000, 16 above are advised.
    moe_top_k
        How many experts see a cell: 1 is advised below 10,000 cells, 2 above.
    expert_width
        ``split``: the experts share the width of the feed-forward network; ``full``: each has all of it.
    residual
        ``plain``, or ``hyper``: several residual streams.
    n_streams
        Number of residual streams.
    layer_sharing
        Which blocks share their weights: none, all, every other, or some in a row.
    sharing_block
        Blocks in a row that share their weights, with ``block``.
    bottleneck
        Ratio by which the feed-forward networks are narrower than the rest; full width when not given.
    dropout
        Share of the branch outputs dropped in training; by the size of the reference when not given.
    schedule
        Noise schedule.
    position_nu
        Exponent of the time of positions.
    expression_nu
        Exponent of the time of expression.
    prediction_type
        What the network predicts.
    enable_masking
        Whether training masks some entries and asks for them.
    context
        ``slice``: whole slices are contexts, as far as the memory allows; ``auto``: and their size chooses ``--attention`` and
        ``--pair-features``.
    """

    mode: Annotated[Mode, Parameter(alias="--training-mode")] = "any"
    d_model: PositiveInt = 128
    n_layers: PositiveInt = 4
    n_heads: PositiveInt = 4
    gate_type: Literal["headwise", "elementwise", "none"] = "headwise"
    use_gated_attention: Annotated[bool | None, UNGATED] = None
    use_qk_norm: bool = True
    attention: Literal["full", "linear", "geometric", "neighbor", "axial"] | None = None
    pair_features: Literal["factorized"] | None = None
    rank: Literal["auto"] | PositiveInt = "auto"
    sparse_pairs: Literal["coordinate", "sequence", "hybrid"] = "coordinate"
    n_neighbors: PositiveInt = 32
    use_moe: Annotated[bool, DENSE] = False
    num_experts: PositiveInt = 4
    moe_top_k: PositiveInt = 2
    expert_width: Literal["split", "full"] = "split"
    residual: Literal["plain", "hyper"] = "plain"
    n_streams: PositiveInt = 4
    layer_sharing: Literal["none", "universal", "alternating", "block"] = "none"
    sharing_block: PositiveInt = 4
    bottleneck: PositiveInt | None = None
    dropout: PartialShare | None = None
    schedule: Literal["cosine", "cosine_nd"] = "cosine_nd"
    position_nu: Positive = 2.0
    expression_nu: Positive = 1.0
    prediction_type: Literal["x0", "epsilon", "v"] = "v"
    enable_masking: Annotated[bool, UNMASKED] = False
    context: Literal["slice", "auto"] | None = None

    def __post_init__(self) -> None:
        if self.attention is not None and self.use_gated_attention is (self.attention == "linear"):
            no = "" if self.use_gated_attention else "no-"
            raise ValueError(
                f"--attention {self.attention} and --{no}use-gated-attention contradict each other; give one"
            )
        usual = {field.name: field.default for field in fields(self)}
        for (switch, value), details in DETAILS.items():
            if getattr(self, switch) == value:
                continue
            on = f"{_flag(switch)} {value}"
            what, add = ("a model with experts", "--use-moe") if switch == "use_moe" else (on, "that")
            for name in details:
                if name in usual and getattr(self, name) != usual[name]:
                    raise ValueError(f"{_flag(name)} is for {what}; add {add}, or leave it out")

    def arguments(self) -> dict[str, Any]:
        """Arguments of :class:`~alphastomics.model.AlphaSTomics`."""
        arguments = asdict(self)
        ungated = arguments.pop("use_gated_attention") is False
        return arguments | {"attention": self.attention or ("linear" if ungated else "full")}


@Parameter(name="*", group=TRAINING)
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """Training.

    Parameters
    ----------
    max_epochs
        Passes over the cells. Not given: until ``--max-time``, or about 4,000 steps without that.
    max_time
        Longest time, in seconds or as ``DD:HH:MM:SS``.
    batch_size
        Cells in a batch.
    context_size
        Cells that the network sees at once; ``auto``: whole slices, or as many cells as the memory allows. 512 when not
        given, or ``auto`` with ``--context``.
    context_kind
        ``subset``: random cells of a slice; ``patch``: neighbors.
    context_growth
        How contexts grow, epoch by epoch, until they have ``--context-size`` cells; not at all when not given.
    shortest_context
        Cells of the first contexts, where they grow.
    growth_warmup
        Steps before contexts grow.
    growth_steps
        Steps in which contexts grow; half of the training, less the warmup, when not given.
    micro_batch_size
        Most cells that a device holds at once; larger batches are taken in parts.
    memory_budget
        Memory that training may use, in GiB; what is free when not given.
    recompute
        Blocks that run twice to save memory: ``auto``, as few as possible, ``none``, ``all``, or a number of them.
    validation_size
        Share of the slices that is held out for validation, whole slices.
    early_stopping
        Stop when the validation loss no longer falls.
    checkpoint_every
        Steps between two checkpoints, from which ``--resume`` goes on; 200 when not given.
    gene_dropout
        Upper bound of the share of genes that a context loses; by the size of the reference when not given.
    thinning
        Upper bound of the share of counts that a context loses; likewise.
    gene_noise
        Standard deviation of a gain and an offset that each gene gets per context; likewise.
    composition
        How unlike each other the contexts of a slice are in their composition.
    mask_strategy
        With ``--enable-masking``, which entries are masked: ``random``, in a ``block`` of neighboring genes, or
        ``structured``, the largest values.
    expression_mask_ratio
        Share of the entries of expression that is masked; .3 when not given.
    position_mask_ratio
        Share of the coordinates that is masked; .33 when not given.
    masking_probability
        Probability that a context is masked; .5 when not given.
    initial_mask_share
        Share of both ratios at the first step.
    mask_ramp_steps
        Steps over which the ratios grow to their full value.
    num_workers
        Processes that cut contexts.
    accelerator
        ``auto``, ``cpu``, ``gpu``, ``mps``, …
    devices
        How many devices, or which.
    gpus
        The same as ``--accelerator gpu --devices`` with this number.
    num_nodes
        Machines, each with that many devices; 1 when not given.
    strategy
        How training is spread over devices; ``auto``: one process for one device, else ``ddp``.
    context_parallel_size
        Processes that share the cells of one context; 1 when not given.
    precision
        ``auto``, ``32-true``, ``bf16-mixed``, …
    fp16
        The same as ``--precision 16-mixed``.
    accumulate_grad_batches
        Batches whose gradients make one step of the optimizer; 1 when not given.
    gradient_clip_val
        Largest norm of the gradient; 1 when not given.
    deterministic
        Use only algorithms that give the same result every time, which may be slower.
    """

    max_epochs: Annotated[PositiveInt | None, Parameter(alias="--epochs")] = None
    max_time: float | str | None = None
    batch_size: PositiveInt = 1024
    context_size: ContextSize | None = None
    context_kind: Literal["subset", "patch"] = "subset"
    context_growth: Literal["linear", "cosine", "exponential", "geometric"] | None = None
    shortest_context: PositiveInt = 128
    growth_warmup: Count = 0
    growth_steps: Count | None = None
    micro_batch_size: PositiveInt | None = None
    memory_budget: Positive | None = None
    recompute: Recompute = "auto"
    validation_size: HeldOut | None = None
    early_stopping: bool = False
    checkpoint_every: PositiveInt | None = None
    gene_dropout: float | None = None
    thinning: float | None = None
    gene_noise: float | None = None
    composition: NotNegative | None = None
    mask_strategy: Literal["random", "block", "structured"] | None = None
    expression_mask_ratio: Share | None = None
    position_mask_ratio: Share | None = None
    masking_probability: Share | None = None
    initial_mask_share: Share | None = None
    mask_ramp_steps: Count | None = None
    num_workers: Count = 0
    accelerator: str = "auto"
    devices: int | str = "auto"
    gpus: PositiveInt | None = None
    num_nodes: PositiveInt | None = None
    strategy: Strategy = "auto"
    context_parallel_size: PositiveInt | None = None
    precision: str = "auto"
    fp16: Annotated[bool, Parameter(negative=())] = False
    accumulate_grad_batches: PositiveInt | None = None
    gradient_clip_val: NotNegative | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.gpus is not None and (self.accelerator, self.devices) != ("auto", "auto"):
            raise ValueError("--gpus names accelerator and devices; give it alone, or --accelerator and --devices")
        if self.fp16 and self.precision != "auto":
            raise ValueError("--fp16 names a precision; give it alone, or --precision")

    def check_device(self) -> None:
        """Refuse a device that is not here, or a strategy that cannot be here; imports torch.

        Raises
        ------
        ImportError, RuntimeError, ValueError
            If there is none; in the words of the command line.
        """
        from alphastomics.train import resolve_strategy
        from alphastomics.train.distributed.devices import device_of

        places: dict[str, Any] = {"accelerator": self.accelerator, "devices": self.devices}
        if self.gpus is None:
            device_of(**places)
        else:
            places = {"accelerator": "gpu", "devices": self.gpus}
            try:
                device_of(**places)
            except ValueError as error:
                raise ValueError(
                    f"there is no --gpus {self.gpus} here; leave --gpus out to use what is there"
                ) from error
        precision = "16-mixed" if self.fp16 else self.precision
        try:
            resolve_strategy(
                self.strategy,
                num_nodes=self.num_nodes or 1,
                precision=precision,
                group_size=self.context_parallel_size or 1,
                **places,
            )
        except (ImportError, RuntimeError, ValueError) as error:
            raise type(error)(_in_flags(str(error))) from error

    def arguments(self, model: AlphaSTomics) -> dict[str, Any]:
        """Arguments of :meth:`~alphastomics.model.AlphaSTomics.train` for that model."""
        from alphastomics.diffusion import MaskingConfig

        arguments = asdict(self)
        masks = given({field.name: arguments.pop(field.name) for field in fields(MaskingConfig)})
        arguments["masking"] = MaskingConfig(**masks) if masks else None
        changes = {name: arguments.pop(name) for name in ("gene_dropout", "thinning", "gene_noise", "composition")}
        arguments["augmentation"] = replace(model.default_augmentation(), **given(changes))
        gpus = arguments.pop("gpus")
        if gpus is not None:
            arguments |= {"accelerator": "gpu", "devices": gpus}
        if arguments.pop("fp16"):
            arguments["precision"] = "16-mixed"
        trainer = {name: arguments.pop(name) for name in PASSED_ON}
        if arguments.pop("deterministic"):
            trainer["deterministic"] = True
        return arguments | given(trainer)


@Parameter(name="*", group=TRAINING)
@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """What is compared, and on what terms.

    Parameters
    ----------
    configurations
        Names of configurations, of those that ``alphastomics.tl.compare`` lists; all of them when not given.
    held_out
        Slices to score; the last by name when not given.
    max_time
        Time of each training, in seconds or as ``DD:HH:MM:SS``; 180 seconds when no number of steps is given.
    max_steps
        Steps of each training instead.
    mode
        ``any`` scores positions and expression, ``expr_to_pos`` positions alone.
    d_model
        Width, except where it is what differs.
    n_layers
        Number of blocks.
    n_heads
        Attention heads.
    batch_size
        Cells in a batch.
    context_size
        Cells that the network sees at once; 512 when not given.
    n_samples
        Draws of expression whose mean is scored.
    n_steps
        Calls of the network per draw of expression.
    max_cells
        Cells of each slice whose expression is sampled.
    accelerator
        ``auto``, ``cpu``, ``gpu``, ``mps``, …
    precision
        ``auto``, ``32-true``, ``bf16-mixed``, …
    """

    configurations: Annotated[tuple[str, ...] | None, SEVERAL] = None
    held_out: Annotated[tuple[str, ...] | None, SEVERAL] = None
    max_time: float | str | None = None
    max_steps: PositiveInt | None = None
    mode: Literal["any", "expr_to_pos"] = "any"
    d_model: PositiveInt = 128
    n_layers: PositiveInt = 4
    n_heads: PositiveInt = 4
    batch_size: PositiveInt = 1024
    context_size: PositiveInt | None = None
    n_samples: PositiveInt = 4
    n_steps: PositiveInt = 10
    max_cells: PositiveInt = 2000
    accelerator: str = "auto"
    precision: str = "auto"

    def arguments(self) -> dict[str, Any]:
        """Arguments of :func:`alphastomics.tl.compare`."""
        return asdict(self)


@Parameter(name="*", group=LOSSES)
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Loss weights and optimizer; what is not given is left to the library.

    Parameters
    ----------
    lr
        Learning rate of AdamW.
    weight_decay
        Weight decay of AdamW.
    warmup_steps
        Steps until the full learning rate.
    lr_schedule
        How the learning rate falls.
    final_lr
        Share of the learning rate that is left at the end, unless it is constant.
    modality_dropout
        Share of contexts in which the modality to be sampled is absent altogether.
    lambda_expression
        Weight of the loss of expression.
    lambda_completion
        Weight of the loss of expression that is given with genes missing and asked for in full.
    lambda_position
        Weight of the loss of positions.
    lambda_distance
        Weight of the loss of distances.
    lambda_neighbor
        Weight of the contrastive loss of neighbors.
    lambda_layout
        Weight of the layout loss.
    lambda_min_distance
        Weight of the minimum-distance loss.
    lambda_fape
        Weight of the frame-aligned point error of ordered chains in three dimensions.
    moe_load_balance_loss_weight
        Weight of the loss that keeps experts in even use.
    reconstruction_weight
        Weight of the loss of masked entries.
    neighbor_width
        Width of a neighborhood in the contrastive loss, in model units per square root of dimension.
    layout_width
        Width of a neighborhood in the layout loss, in the same units.
    deformation
        Strength of the smooth deformation of diffusion contexts; by default by the number of cells.
    max_loss_weight
        Ceiling of the weight of the diffusion loss.
    ema_decay
        Decay of the moving average of the weights.
    min_distance_lr
        Learning rate of the minimum-distance network.
    """

    lr: Positive | None = None
    weight_decay: NotNegative | None = None
    warmup_steps: Count | None = None
    lr_schedule: Literal["cosine", "linear", "constant"] | None = None
    final_lr: Share | None = None
    modality_dropout: Share | None = None
    lambda_expression: NotNegative | None = None
    lambda_completion: NotNegative | None = None
    lambda_position: NotNegative | None = None
    lambda_distance: NotNegative | None = None
    lambda_neighbor: NotNegative | None = None
    lambda_layout: NotNegative | None = None
    lambda_min_distance: NotNegative | None = None
    lambda_fape: NotNegative | None = None
    moe_load_balance_loss_weight: NotNegative | None = None
    reconstruction_weight: NotNegative | None = None
    neighbor_width: Positive | None = None
    layout_width: Positive | None = None
    deformation: NotNegative | None = None
    max_loss_weight: Positive | None = None
    ema_decay: PartialShare | None = None
    min_distance_lr: Positive | None = None

    def arguments(self) -> dict[str, Any]:
        """Fields of :class:`~alphastomics.train.PlanConfig` that were given."""
        return given(asdict(self))


# Left to the library, or to Lightning, unless given.
PASSED_ON = ("accumulate_grad_batches", "gradient_clip_val", "num_nodes", "context_parallel_size")
MASKS = (
    "mask_strategy",
    "expression_mask_ratio",
    "position_mask_ratio",
    "masking_probability",
    "initial_mask_share",
    "mask_ramp_steps",
)


def _check_checkpoint(kind: Any, value: str) -> None:
    """Complain about a model that is neither here nor on the Hub, before anything is imported."""
    if not value.startswith(HUB) and not Path(value).exists():
        raise ValueError(f'"{value}" does not exist; models of the Hugging Face Hub are {HUB}organization/name')


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _in_flags(text: str) -> str:
    """What is said of ``strategy='ddp'`` and of ``num_nodes=`` as of ``--strategy ddp`` and ``--num-nodes``."""
    names = "strategy|precision|context_parallel_size|devices|num_nodes"
    return re.sub(rf"\b({names})=(?:'?([\w-]+)'?)?", lambda said: f"{_flag(said[1])} {said[2] or ''}".rstrip(), text)


def check_masks(model: ModelOptions, training: TrainingOptions) -> None:
    """Refuse options of masks for a model without any."""
    found = next((name for name in MASKS if getattr(training, name) is not None), None)
    if found is not None and not model.enable_masking:
        raise ValueError(
            f"--{found.replace('_', '-')} is for training with masks; add --enable-masking, or leave it out"
        )


def given(options: dict[str, Any]) -> dict[str, Any]:
    """What is not None."""
    return {name: value for name, value in options.items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class QueryOptions:
    """A model, and the cells that it is asked about.

    Parameters
    ----------
    checkpoint
        Folder of a model, of a run of ``alphastomics train``, or a ``.ckpt`` file of a training that has ended; or
        ``hf://organization/name`` of the Hugging Face Hub, with ``@revision`` behind it or without.
    input_data
        Cells, an ``.h5ad`` file, a ``.parquet`` file or a ``.pt`` file of tensors; only a tissue that is drawn as a whole
        needs none.
    data_dir
        Folder of a dataset that has the cells instead.
    split
        Which part of the dataset: ``test`` when not given.
    accelerator
        ``auto``, ``cpu``, ``gpu``, ``mps``, …
    """

    checkpoint: Annotated[str, Parameter(validator=_check_checkpoint)]
    input_data: ExistingFile | None = None
    data_dir: ExistingDirectory | None = None
    split: Literal["train", "validation", "test"] | None = None
    accelerator: str = "auto"

    def __post_init__(self) -> None:
        if self.input_data is not None and self.data_dir is not None:
            raise ValueError("--input-data and --data-dir both name the cells; give one of them")
        if self.split is not None and self.data_dir is None:
            raise ValueError("--split is for a dataset; give its folder with --data-dir")

    @property
    def names_cells(self) -> bool:
        """Whether cells were given."""
        return self.input_data is not None or self.data_dir is not None

    @property
    def origin(self) -> Path | None:
        """The file or folder with the cells."""
        return self.input_data or self.data_dir

    def load(self, modes: Sequence[str] = (), flag: str = "") -> AlphaSTomics:
        """Load the model, which must be one of these modes, if any, as a flag asks for it; imports torch."""
        from alphastomics.cli._query import check_mode
        from alphastomics.cli._run import find_model
        from alphastomics.model import AlphaSTomics

        if self.checkpoint.startswith(HUB):
            from alphastomics.model._hub import download

            name, _, revision = self.checkpoint.removeprefix(HUB).partition("@")
            folder = download(name, revision=revision or None)
        else:
            folder = find_model(Path(self.checkpoint))
        model = AlphaSTomics.load(folder, adata=False, accelerator=self.accelerator)
        if modes:
            check_mode(model, modes, flag)
        return model

    def read(self, modes: Sequence[str] = (), flag: str = "", **reads: bool) -> tuple[AlphaSTomics, AnnData]:
        """Load the model, as :meth:`load` does, and the cells, of which it ``reads`` ``positions`` and ``expression``."""
        from alphastomics.cli._cells import INPUTS, check_suffix, read_file, read_split

        if self.data_dir is not None:
            model = self.load(modes, flag)
            return model, read_split(self.data_dir, self.split or "test", model.schema, **reads)
        if self.input_data is None:
            raise ValueError("--input-data or --data-dir is needed: the cells that the model is asked about")
        check_suffix(self.input_data, INPUTS)
        model = self.load(modes, flag)
        return model, read_file(self.input_data, model.schema, **reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoModelOptions(ModelOptions):
    """As :class:`ModelOptions`, for a model that only places cells."""

    mode: Annotated[Mode, Parameter(alias="--training-mode")] = "expr_to_pos"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTrainingOptions(TrainingOptions):
    """As :class:`TrainingOptions`, for a few minutes: small contexts, for as many steps as fit."""

    max_time: float | str = 240.0
    batch_size: PositiveInt = 256
    context_size: PositiveInt = 256
