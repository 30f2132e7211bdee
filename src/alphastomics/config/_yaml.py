"""The configuration of a training as a file: frozen dataclasses, one per section, and YAML in and out.

Every value is an option of ``alphastomics train``. None says nothing: the default is that of the option, which is not
repeated here. ``docs/configuration.md`` lists all keys.

Examples
--------
>>> config = Config.read("config.yaml")
>>> config.training.learning_rate
0.0001
>>> Config(model=ModelSection(d_model=256), training=TrainingSection(mode="joint")).write("mine.yaml")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphastomics._sections import build, from_options, leaves, mapping, plain, said, suggestion, text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = [
    "AugmentationSection",
    "Config",
    "DataSection",
    "DiffusionSection",
    "LoadingSection",
    "LossSection",
    "MaskingSection",
    "ModelSection",
    "PreprocessingSection",
    "RunSection",
    "SeedSection",
    "TrainingSection",
]

LARGEST = 2**16  # bytes of a file: ten times what one with every key has; the reader takes a second for as many
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
# The layout of three documents of the earlier version, and what its keys are here.
LAYER_SETTING = "TransformerLayer_setting"
LAYER_KEYS = {
    "num_layers": ("model", "n_layers"),
    "num_heads": ("model", "n_heads"),
    "dropout": ("model", "dropout"),
    "use_gated_attention": ("model", "use_gated_attention"),
    "gate_type": ("model", "gate_type"),
    "use_qk_norm": ("model", "use_qk_norm"),
    "use_moe": ("model", "use_moe"),
    "num_experts": ("model", "num_experts"),
    "moe_top_k": ("model", "moe_top_k"),
    "moe_load_balance_loss_weight": ("losses", "moe_load_balance_loss_weight"),
}


def option(name: str | None) -> Any:
    """A key whose option has another name; None: there is no such option."""
    return field(default=None, metadata={"option": name})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedSection:
    """What is random.

    Parameters
    ----------
    global_seed
        Decides the first weights and every draw (``--seed``).
    deterministic
        Whether only algorithms are used that give the same result every time (``--deterministic``).
    """

    global_seed: int | None = option("seed")
    deterministic: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The network.

    Parameters
    ----------
    num_genes
        Number of genes that the data must have (``--num-genes``).
    d_model
        Width (``--d-model``).
    n_heads
        Attention heads (``--n-heads``).
    n_layers
        Number of blocks (``--n-layers``).
    dropout
        Share of the branch outputs dropped in training (``--dropout``).
    attention
        ``full``, ``linear``, ``geometric``, ``neighbor`` or ``axial`` (``--attention``).
    pair_features
        ``factorized``: features of pairs of cells, for ``geometric`` and ``neighbor`` (``--pair-features``).
    rank
        Rank of these, or ``auto`` (``--rank``).
    sparse_pairs
        Where ``neighbor`` looks for neighbors: ``coordinate``, ``sequence`` or ``hybrid`` (``--sparse-pairs``).
    n_neighbors
        How many neighbors ``neighbor`` looks at (``--n-neighbors``).
    use_gated_attention
        The same as ``attention: full``; false is the same as ``attention: linear`` (``--use-gated-attention``).
    gate_type
        Gate of softmax attention (``--gate-type``).
    use_qk_norm
        Whether queries and keys are normalized (``--use-qk-norm``).
    use_moe
        A mixture of experts in the place of the feed-forward networks (``--use-moe``).
    num_experts
        Number of experts (``--num-experts``).
    moe_top_k
        How many experts see a cell (``--moe-top-k``).
    expert_width
        Whether experts share the width of the feed-forward network or have all of it (``--expert-width``).
    residual
        ``plain``, or ``hyper``: several residual streams (``--residual``).
    n_streams
        Number of residual streams (``--n-streams``).
    layer_sharing
        Which blocks share their weights: ``none``, ``universal``, ``alternating`` or ``block`` (``--layer-sharing``).
    sharing_block
        Blocks in a row that share their weights, with ``block`` (``--sharing-block``).
    bottleneck
        Ratio by which the feed-forward networks are narrower than the rest (``--bottleneck``).
    context
        ``slice``: whole slices are contexts; ``auto``: and their size chooses the attention (``--context``).
    """

    num_genes: int | None = None
    d_model: int | None = None
    n_heads: int | None = None
    n_layers: int | None = None
    dropout: float | None = None
    attention: Literal["full", "linear", "geometric", "neighbor", "axial"] | None = None
    pair_features: Literal["factorized"] | None = None
    rank: Literal["auto"] | int | None = None
    sparse_pairs: Literal["coordinate", "sequence", "hybrid"] | None = None
    n_neighbors: int | None = None
    use_gated_attention: bool | None = None
    gate_type: Literal["headwise", "elementwise", "none"] | None = None
    use_qk_norm: bool | None = None
    use_moe: bool | None = None
    num_experts: int | None = None
    moe_top_k: int | None = None
    expert_width: Literal["split", "full"] | None = None
    residual: Literal["plain", "hyper"] | None = None
    n_streams: int | None = None
    layer_sharing: Literal["none", "universal", "alternating", "block"] | None = None
    sharing_block: int | None = None
    bottleneck: int | None = None
    context: Literal["slice", "auto"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSection:
    """The diffusion processes.

    Parameters
    ----------
    num_timesteps
        Has no effect: time is continuous, and ``alphastomics sample --n-steps`` says how many steps are taken.
    schedule
        Noise schedule (``--schedule``).
    prediction_type
        What the network predicts (``--prediction-type``).
    position_nu
        Exponent of the time of positions (``--position-nu``).
    expression_nu
        Exponent of the time of expression (``--expression-nu``).
    """

    num_timesteps: int | None = option(None)
    schedule: Literal["cosine", "cosine_nd"] | None = None
    prediction_type: Literal["x0", "epsilon", "v"] | None = None
    position_nu: float | None = None
    expression_nu: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSection:
    """How the network is trained.

    Parameters
    ----------
    mode
        What the model learns to sample (``--mode``).
    batch_size
        Cells in a batch (``--batch-size``).
    context_size
        Cells that the network sees at once, or ``auto`` (``--context-size``).
    context_kind
        ``subset`` or ``patch`` (``--context-kind``).
    context_growth
        How contexts grow: ``linear``, ``cosine``, ``exponential`` or ``geometric`` (``--context-growth``).
    shortest_context
        Cells of the first contexts, where they grow (``--shortest-context``).
    growth_warmup
        Steps before contexts grow (``--growth-warmup``).
    growth_steps
        Steps in which contexts grow (``--growth-steps``).
    micro_batch_size
        Most cells that a device holds at once (``--micro-batch-size``).
    memory_budget
        Memory that training may use, in GiB (``--memory-budget``).
    recompute
        Blocks that run twice to save memory: ``auto``, ``none``, ``all`` or a number (``--recompute``).
    learning_rate
        Learning rate (``--lr``).
    max_epochs
        Passes over the cells (``--max-epochs``).
    max_time
        Longest time, in seconds or as ``DD:HH:MM:SS`` (``--max-time``).
    accumulate_grad_batches
        Batches for one step of the optimizer (``--accumulate-grad-batches``).
    gradient_clip_val
        Largest norm of the gradient (``--gradient-clip-val``).
    weight_decay
        Weight decay (``--weight-decay``).
    warmup_steps
        Steps until the full learning rate (``--warmup-steps``).
    lr_schedule
        How the learning rate falls: ``cosine``, ``linear`` or ``constant`` (``--lr-schedule``).
    final_lr
        Share of the learning rate that is left at the end, unless it is constant (``--final-lr``).
    min_distance_lr
        Learning rate of the minimum-distance network (``--min-distance-lr``).
    ema_decay
        Decay of the moving average of the weights (``--ema-decay``).
    validation_size
        Share of the slices that is held out (``--validation-size``).
    early_stopping
        Stop when the validation loss no longer falls (``--early-stopping``).
    checkpoint_every
        Steps between two checkpoints (``--checkpoint-every``).
    accelerator
        ``auto``, ``cpu``, ``gpu``, … (``--accelerator``).
    devices
        How many devices, or which (``--devices``).
    gpus
        Number of GPUs, in the place of both (``--gpus``).
    num_nodes
        Machines, each with that many devices (``--num-nodes``).
    strategy
        How training is spread over devices: ``auto``, ``ddp``, ``fsdp2``, … (``--strategy``).
    context_parallel_size
        Processes that share the cells of one context (``--context-parallel-size``).
    precision
        ``auto``, ``32-true``, ``bf16-mixed``, … (``--precision``).
    fp16
        The same as ``precision: 16-mixed`` (``--fp16``).
    """

    mode: Literal["expr_to_pos", "pos_to_expr", "joint", "any"] | None = None
    batch_size: int | None = None
    context_size: int | Literal["auto"] | None = None
    context_kind: Literal["subset", "patch"] | None = None
    context_growth: Literal["linear", "cosine", "exponential", "geometric"] | None = None
    shortest_context: int | None = None
    growth_warmup: int | None = None
    growth_steps: int | None = None
    micro_batch_size: int | None = None
    memory_budget: float | None = None
    recompute: int | Literal["auto", "none", "all"] | None = None
    learning_rate: float | None = option("lr")
    max_epochs: int | None = None
    max_time: float | str | None = None
    accumulate_grad_batches: int | None = None
    gradient_clip_val: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    lr_schedule: Literal["cosine", "linear", "constant"] | None = None
    final_lr: float | None = None
    min_distance_lr: float | None = None
    ema_decay: float | None = None
    validation_size: float | None = None
    early_stopping: bool | None = None
    checkpoint_every: int | None = None
    accelerator: str | None = None
    devices: int | str | None = None
    gpus: int | None = None
    num_nodes: int | None = None
    strategy: Strategy | None = None
    context_parallel_size: int | None = None
    precision: str | None = None
    fp16: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentationSection:
    """Random changes to training contexts.

    Parameters
    ----------
    gene_dropout
        Upper bound of the share of genes that a context loses (``--gene-dropout``).
    thinning
        Upper bound of the share of counts that a context loses (``--thinning``).
    gene_noise
        Standard deviation of a gain and an offset of each gene (``--gene-noise``).
    composition
        How unlike each other the contexts of a slice are (``--composition``).
    deformation
        Strength of the smooth deformation of contexts (``--deformation``).
    """

    gene_dropout: float | None = None
    thinning: float | None = None
    gene_noise: float | None = None
    composition: float | None = None
    deformation: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingSection:
    """Masked entries, which training asks for.

    Parameters
    ----------
    enable
        Whether there are any (``--enable-masking``).
    expression_mask_ratio
        Share of the entries of expression that is masked (``--expression-mask-ratio``).
    position_mask_ratio
        Share of the coordinates that is masked (``--position-mask-ratio``).
    mask_strategy
        ``random``, ``block`` or ``structured`` (``--mask-strategy``).
    masking_probability
        Probability that a context is masked (``--masking-probability``).
    initial_mask_share
        Share of both ratios at the first step (``--initial-mask-share``).
    mask_ramp_steps
        Steps over which the ratios grow to their full value (``--mask-ramp-steps``).
    """

    enable: bool | None = option("enable_masking")
    expression_mask_ratio: float | None = None
    position_mask_ratio: float | None = None
    mask_strategy: Literal["random", "block", "structured"] | None = None
    masking_probability: float | None = None
    initial_mask_share: float | None = None
    mask_ramp_steps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSection:
    """Weights of the losses.

    Parameters
    ----------
    lambda_expression
        Of expression (``--lambda-expression``).
    lambda_completion
        Of expression that is given with genes missing (``--lambda-completion``).
    lambda_position
        Of positions (``--lambda-position``).
    lambda_distance
        Of distances (``--lambda-distance``).
    lambda_neighbor
        Of the contrastive loss of neighbors (``--lambda-neighbor``).
    lambda_layout
        Of the layout loss (``--lambda-layout``).
    lambda_min_distance
        Of the minimum-distance loss (``--lambda-min-distance``).
    lambda_fape
        Of the frame-aligned point error of ordered chains (``--lambda-fape``).
    moe_load_balance_loss_weight
        Of the even use of experts (``--moe-load-balance-loss-weight``).
    reconstruction_weight
        Of masked entries (``--reconstruction-weight``).
    max_loss_weight
        Ceiling of the weight of the diffusion loss (``--max-loss-weight``).
    modality_dropout
        Share of contexts in which what is sampled is absent altogether (``--modality-dropout``).
    neighbor_width
        Width of a neighborhood in the contrastive loss (``--neighbor-width``).
    layout_width
        Width of a neighborhood in the layout loss (``--layout-width``).
    """

    lambda_expression: float | None = None
    lambda_completion: float | None = None
    lambda_position: float | None = None
    lambda_distance: float | None = None
    lambda_neighbor: float | None = None
    lambda_layout: float | None = None
    lambda_min_distance: float | None = None
    lambda_fape: float | None = None
    moe_load_balance_loss_weight: float | None = None
    reconstruction_weight: float | None = None
    max_loss_weight: float | None = None
    modality_dropout: float | None = None
    neighbor_width: float | None = None
    layout_width: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessingSection:
    """What the data are.

    Parameters
    ----------
    normalize_position
        Has no effect: the network sees positions scaled, and files and results have the units of the input.
    scale
        Has no effect: ``alphastomics preprocess --skip-scale`` leaves the genes of a dataset as they vary.
    layer
        Key of ``layers`` with the expression (``--layer``).
    position_key
        Key of ``obsm`` with the positions (``--position-key``).
    slice_key
        Column of ``obs`` with the slice of a cell (``--slice-key``).
    cell_type_key
        Column of ``obs`` with labels (``--cell-type-key``).
    sequence_key
        Column of ``obs`` with an order of the cells (``--sequence-key``).
    frame
        Whether every slice has its own frame or all share one (``--frame``).
    transform
        ``auto``, ``log1p`` or ``none`` (``--transform``).
    """

    normalize_position: bool | None = option(None)
    scale: bool | None = option(None)
    layer: str | None = None
    position_key: str | None = None
    slice_key: str | None = None
    cell_type_key: str | None = None
    sequence_key: str | None = None
    frame: Literal["slice", "shared"] | None = None
    transform: Literal["auto", "log1p", "none"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingSection:
    """How data are read.

    Parameters
    ----------
    num_workers
        Processes that cut contexts (``--num-workers``).
    streaming
        Whether a dataset is read a part at a time (``--streaming``).
    buffer_size
        Cells among which contexts are shuffled, with ``streaming`` (``--buffer-size``).
    """

    num_workers: int | None = None
    streaming: bool | None = None
    buffer_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """The data.

    Parameters
    ----------
    processed_data_dir
        Folder that ``alphastomics preprocess`` wrote (``--data-dir``).
    input_data
        ``.h5ad`` or ``.parquet`` file, in its place (``--input-data``).
    preprocessing
        What an ``.h5ad`` file has where; a dataset says so itself.
    loading
        How data are read.
    """

    processed_data_dir: Path | None = option("data_dir")
    input_data: Path | None = None
    preprocessing: PreprocessingSection = PreprocessingSection()
    loading: LoadingSection = LoadingSection()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """Where results go.

    Parameters
    ----------
    exp_name
        Name of the run and of its folder (``--exp-name``).
    output_dir
        Folder of all runs (``--output-dir``).
    test_after_train
        Whether the trained model is scored (``--test-after-train``).
    """

    exp_name: str | None = None
    output_dir: Path | None = None
    test_after_train: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A configuration.

    Parameters
    ----------
    seed, model, diffusion, training, augmentation, masking, losses, data, run
        Its sections.
    """

    seed: SeedSection = SeedSection()
    model: ModelSection = ModelSection()
    diffusion: DiffusionSection = DiffusionSection()
    training: TrainingSection = TrainingSection()
    augmentation: AugmentationSection = AugmentationSection()
    masking: MaskingSection = MaskingSection()
    losses: LossSection = LossSection()
    data: DataSection = DataSection()
    run: RunSection = RunSection()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Config:
        """Read a YAML file, which may also have the section ``TransformerLayer_setting``.

        Raises
        ------
        OSError
            If there is no such file.
        ValueError
            If it is no YAML, has a key that is not known or twice, or a value of another type.
        """
        from alphastomics._io._yaml import load

        path = Path(path)
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path} has more than {LARGEST:,} bytes; that is no configuration")
        return cls.from_dict(load(path), source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None, *, source: str = "the configuration") -> Config:
        """A configuration of nested mappings, as a file has them.

        Parameters
        ----------
        values
            Sections with their keys.
        source
            Where they come from, for messages.

        Raises
        ------
        ValueError
            If a key is not known, or a value of another type.
        """
        values = mapping(values, f"{source}:")
        settings = mapping(values.pop(LAYER_SETTING, None), f"{source}: {LAYER_SETTING}")
        return build(cls, _merged(values, settings, source), source, (LAYER_SETTING,))

    def to_dict(self) -> dict[str, Any]:
        """All keys, nested as in a file, as plain values; None where nothing is said."""
        return plain(self)

    def to_yaml(self) -> str:
        """The text of a file that :meth:`read` reads."""
        from alphastomics._io._yaml import dump

        return dump(self.to_dict())

    def write(self, path: str | PathLike[str]) -> None:
        """Write a YAML file atomically."""
        from alphastomics._io._atomic import write_text

        write_text(Path(path), self.to_yaml())

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Config:
        """The configuration that says what options of ``alphastomics train`` say, by their names with underscores."""
        return from_options(cls, options)

    def options(self) -> dict[str, Any]:
        """What it says, by the names of options."""
        return {leaf.option: leaf.value for leaf in leaves(self) if leaf.option is not None and leaf.value is not None}

    def without_effect(self) -> list[str]:
        """Keys, with their values, that are known and decide nothing, where this differs from what happens anyway."""
        preprocessing = self.data.preprocessing
        found = {
            "diffusion.num_timesteps": self.diffusion.num_timesteps,
            "data.preprocessing.normalize_position": preprocessing.normalize_position or None,
            "data.preprocessing.scale": None if preprocessing.scale else preprocessing.scale,
        }
        return [f"{key}: {text(value)}" for key, value in found.items() if value is not None]


def _merged(values: dict[str, Any], settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Values with those of ``TransformerLayer_setting`` where they belong."""
    for name, value in settings.items():
        if name not in LAYER_KEYS:
            raise ValueError(
                f"{source}: {LAYER_SETTING}.{said(name)} is not known; {suggestion(Config, str(name), LAYER_KEYS, (LAYER_SETTING,))}"
            )
        section, key = LAYER_KEYS[name]
        there = mapping(values.get(section), f"{source}: {section}")
        if key in there:
            raise ValueError(f"{source}: {LAYER_SETTING}.{name} and {section}.{key} are the same; give one")
        values = values | {section: there | {key: value}}
    return values
