"""Settings of a model: what it samples, its network, its diffusion processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from alphastomics.config._setting import check, setting

Mode = Literal["expr_to_pos", "pos_to_expr", "joint", "any"]
PLACING_MODES: tuple[Mode, ...] = ("expr_to_pos", "any")  # of models that predict positions given expression
AttentionKind = Literal["full", "linear", "geometric", "neighbor", "axial"]
GateType = Literal["headwise", "elementwise", "none"]
PairFeatureKind = Literal["factorized"]
PairKind = Literal["coordinate", "sequence", "hybrid"]
ExpertWidth = Literal["split", "full"]
PairAttention = Literal["triangle", "axial", "cross"]
PairResidual = Literal["mix", "tangent", "distribute"]
ResidualKind = Literal["plain", "hyper"]
Sharing = Literal["none", "universal", "alternating", "block"]
ScheduleName = Literal["cosine", "cosine_nd"]
PredictionType = Literal["x0", "epsilon", "v"]
MAX_RANK = 32
_PAIRS = ("pair_features", "factorized")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Architecture of the network.

    Parameters
    ----------
    d_model
        Width of the network.
    n_heads
        Number of attention heads; must divide ``d_model``. A head has at most 32 channels, and fewer in a narrow network.
    n_layers
        Number of transformer blocks.
    dropout
        Probability of setting an output of a branch of a block to 0 in training. By default it is derived from the number and kind of the cells.
    attention
        Kind of attention. ``full``: softmax attention between all cells, in training to every fourth of them. ``linear``: linear
        attention, a baseline whose cost is linear in the number of cells. ``geometric``: softmax attention between all cells that
        decays with distance. ``neighbor``: softmax attention to the nearest cells and linear attention to all cells. ``axial``:
        attention along the rows and columns of a grid.
    pair_features
        ``factorized``: low-rank features of pairs of cells, for geometric and neighbor attention. By default none.
    rank
        Rank of the pair features, at most 32. ``auto``: the largest rank whose factors take at most 64 MiB per context, but at
        least 8 and at most 16 in two dimensions, one more in three, and 16 more if the cells have an order. The weights do not
        depend on the rank.
    pair_attention
        Attention between pair features. ``axial`` and ``cross`` take time quadratic in the number of cells, ``triangle`` cubic.
        By default none.
    pair_residual
        How a layer adds its update to the pair features without increasing their rank. ``mix``: a learned mixture of the ranks.
        ``tangent``: a step in the tangent space of matrices of that rank. ``distribute``: equal shares for all ranks.
    pair_dropout
        Probability of dropping a row or a column of an update of the pair features in training.
    sparse_pairs
        How the neighbors of neighbor attention are selected: by position (``coordinate``), by the order of the cells
        (``sequence``), or half of them by each (``hybrid``).
    n_neighbors
        Number of neighbors of a cell in neighbor attention.
    gate_type
        Gate of softmax attention: one value per head, one per channel, or none.
    use_qk_norm
        Normalize queries and keys.
    use_moe
        Replace the feed-forward networks by mixtures of experts.
    num_experts
        Number of experts. Recommended: 4 for fewer than 10,000 cells, 8 for up to 100,000, 16 for more.
    moe_top_k
        Number of experts that process each cell. Recommended: 1 for fewer than 10,000 cells, 2 for more.
    expert_width
        ``split``: the experts share the width of the feed-forward network. ``full``: each expert has the full width.
    residual
        Residual connections. ``plain``: one stream. ``hyper``: several streams, mixed by doubly stochastic matrices.
    n_streams
        Number of residual streams.
    layer_sharing
        Which blocks share weights: ``none``, all (``universal``), every other block (``alternating``), or consecutive blocks
        (``block``).
    sharing_block
        Number of consecutive blocks that share weights.
    bottleneck
        Width of the network divided by the width of the feed-forward branches. By default both have the same width.
    """

    SECTION: ClassVar[str] = "model"

    d_model: int = setting(128, ge=1)
    n_heads: int = setting(4, ge=1)
    n_layers: int = setting(4, ge=1)
    dropout: float | None = setting(None, ge=0, lt=1)
    attention: AttentionKind = "full"
    pair_features: PairFeatureKind | None = None
    rank: int | Literal["auto"] = setting("auto", ge=1, le=MAX_RANK, requires=_PAIRS)
    pair_attention: PairAttention | None = setting(None, requires=_PAIRS)
    pair_residual: PairResidual = setting("mix", requires=_PAIRS)
    pair_dropout: float = setting(0.0, ge=0, lt=1, requires=_PAIRS)
    sparse_pairs: PairKind = setting("coordinate", requires=("attention", "neighbor"))
    n_neighbors: int = setting(32, ge=1, requires=("attention", "neighbor"))
    gate_type: GateType = "headwise"
    use_qk_norm: bool = True
    use_moe: bool = setting(False, off=("--no-moe", "--no-use-moe"))
    num_experts: int = setting(4, ge=1, requires=("use_moe", True))
    moe_top_k: int = setting(2, ge=1, requires=("use_moe", True))
    expert_width: ExpertWidth = setting("split", requires=("use_moe", True))
    residual: ResidualKind = "plain"
    n_streams: int = setting(4, ge=1, requires=("residual", "hyper"))
    layer_sharing: Sharing = "none"
    sharing_block: int = setting(4, ge=1, requires=("layer_sharing", "block"))
    bottleneck: int | None = setting(None, ge=1)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Mode, masking and contexts of a model.

    Parameters
    ----------
    mode
        What the model samples. ``expr_to_pos``: positions given expression. ``pos_to_expr``: expression given positions.
        ``joint``: both together. ``any``: each of these.
    enable_masking
        Mask entries of expression and positions in training and predict them.
    use_cell_types
        Use cell types, where they are known, as an input when cells are placed.
    use_gated_attention
        If true, same as ``attention`` ``full``; if false, same as ``attention`` ``linear``.
    context
        ``slice``: train on whole slices, or on the longest contexts that fit in memory. ``auto``: also choose ``attention`` and
        ``pair_features`` by the size of the largest slice. By default neither.
    """

    SECTION: ClassVar[str] = "model"

    mode: Mode = setting("any", key="training.mode", flags=("--training-mode",))
    enable_masking: bool = setting(False, key="masking.enable", off=("--disable-masking", "--no-enable-masking"))
    use_cell_types: bool = setting(False, off=("--no-use-cell-types",))
    use_gated_attention: bool | None = setting(None, off=("--no-gated-attention", "--no-use-gated-attention"))
    context: Literal["slice", "auto"] | None = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings:
    """Noise schedule and parameterization of the diffusion of expression.

    Parameters
    ----------
    schedule
        Noise schedule. ``cosine``: the signal is a squared cosine of time. ``cosine_nd``: the signal is a cosine of time.
    prediction_type
        What the network predicts: the clean value (``x0``), the noise (``epsilon``), or the velocity (``v``).
    nu
        Exponent of time. Values above 1 spend more steps at low noise.
    """

    SECTION: ClassVar[str] = "diffusion"

    schedule: ScheduleName = "cosine_nd"
    prediction_type: PredictionType = "v"
    nu: float = setting(1.0, gt=0)

    def __post_init__(self) -> None:
        check(self)
