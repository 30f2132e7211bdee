"""Architecture of a denoiser, and which of its parts go together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from alphastomics._details import DETAILS
from alphastomics.nn.pair.features import MAX_RANK, n_fixed_ranks

if TYPE_CHECKING:
    from alphastomics.nn.attention import AttentionKind, GateType
    from alphastomics.nn.experts import ExpertWidth
    from alphastomics.nn.neighbors import PairKind
    from alphastomics.nn.pair.factors import ResidualKind as PairResidual
    from alphastomics.nn.pair.stack import PairAttention
    from alphastomics.nn.residual import ResidualKind
    from alphastomics.nn.sharing import Sharing

PairFeatureKind = Literal["factorized"]

WITHOUT_PAIRS = {
    "full": "has no columns for them",
    "linear": "has no scores of pairs to which they could be added",
    "axial": "sees pairs of one row or column only",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserConfig:
    """Architecture of a :class:`Denoiser`.

    Parameters
    ----------
    n_genes, n_dims
        G, and D = 2 or 3.
    d_model, n_layers, n_heads
        Width d, number of blocks, attention heads.
    gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`.
    dropout
        Share of the branch outputs dropped in training.
    n_latent
        Width of the neighborhood embedding that the contrastive loss shapes.
    attention
        Kind of attention, see ``nn/attention``.
    pair_features
        ``"factorized"``: features of pairs of cells, which attention reads, see ``nn/pair/features.py``; None for none.
    rank
        How many ranks these have, up to 32; ``"auto"``: as many as are affordable for the cells at hand. It is no part of the
        weights: a trained network may be run with another one.
    pair_attention
        Attention in the layers on these features: ``"axial"`` or ``"cross"``, whose time grows with the square of the
        cells, or ``"triangle"``, whose time grows with their cube; None for none. See ``nn/pair/stack.py``.
    pair_residual, pair_dropout
        How the layers add their updates, ``"mix"``, ``"tangent"`` or ``"distribute"``, see ``nn/pair/factors.py``; and the
        share of the entries of an update dropped in training.
    sparse_pairs, n_neighbors
        With ``attention="neighbor"``: cells have this many neighbors, in space, along the order of the cells, or half of them
        each, see ``nn/neighbors.py``.
    use_moe, num_experts, moe_top_k, expert_width
        Whether a mixture of experts takes the place of the feed-forward networks, and which, see
        :class:`~alphastomics.nn.experts.Experts`.
    residual, n_streams, bottleneck
        As in ``Block``.
    layer_sharing, sharing_block
        Which blocks share their weights, all but norms and residual connections, and how many in a row where
        ``layer_sharing="block"``; see ``nn/sharing.py``.
    sequence
        Whether the cells have an order. Attention over neighbors and features of pairs read it.
    mask_tokens
        Whether there are tokens for masked entries.
    n_ranks
        K, the number of neighbors whose distances tell how crowded the surroundings of a cell are.
    n_components
        Principal components of the reference that the embedding of expression starts from.

    Raises
    ------
    ValueError
        If arguments do not go together; the message says why. What is wrong with one alone is refused where it is used.
    """

    n_genes: int
    n_dims: int
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    gate_type: GateType = "headwise"
    use_qk_norm: bool = True
    dropout: float = 0.0
    n_latent: int = 64
    attention: AttentionKind = "full"
    pair_features: PairFeatureKind | None = None
    rank: int | Literal["auto"] = "auto"
    pair_attention: PairAttention | None = None
    pair_residual: PairResidual = "mix"
    pair_dropout: float = 0.0
    sparse_pairs: PairKind = "coordinate"
    n_neighbors: int = 32
    use_moe: bool = False
    num_experts: int = 4
    moe_top_k: int = 2
    expert_width: ExpertWidth = "split"
    residual: ResidualKind = "plain"
    n_streams: int = 4
    layer_sharing: Sharing = "none"
    sharing_block: int = 4
    bottleneck: int | None = None
    sequence: bool = False
    mask_tokens: bool = False
    n_ranks: int = 9
    n_components: int = 20

    def __post_init__(self) -> None:
        self._refuse_unused()
        if self.pair_features is not None:
            self._check_pair_features()
        if self.n_neighbors < 1:
            raise ValueError(f"n_neighbors={self.n_neighbors} must be at least 1")
        if self.sparse_pairs not in ("coordinate", "sequence", "hybrid"):
            raise ValueError(
                f"sparse_pairs={self.sparse_pairs!r} is unknown; choose 'coordinate', 'sequence' or 'hybrid'"
            )
        if self.sparse_pairs != "coordinate" and not self.sequence:
            raise ValueError(
                f"sparse_pairs={self.sparse_pairs!r} needs an order of the cells, and they have none; name one with "
                "sequence_key=, or take sparse_pairs='coordinate'"
            )
        if self.bottleneck is not None and self.use_moe:
            raise ValueError(
                f"bottleneck={self.bottleneck} narrows a feed-forward network, which use_moe=True has none of"
            )

    @property
    def reads_sequence(self) -> bool:
        """Whether anything in the network reads the order of the cells."""
        return self.sequence and (self.attention == "neighbor" or self.pair_features is not None)

    def _refuse_unused(self) -> None:
        """Refuse details of what is not there; a default cannot be told from a choice."""
        usual = {field.name: field.default for field in fields(self)}
        for (name, value), details in DETAILS.items():
            if getattr(self, name) == value:
                continue
            given = [f"{each}={getattr(self, each)!r}" for each in details if getattr(self, each) != usual[each]]
            if given:
                what = "a model with experts" if name == "use_moe" else f"{name}={value!r}"
                raise ValueError(f"{', '.join(given)} is for {what}; pass {name}={value!r}, or leave it out")

    def _check_pair_features(self) -> None:
        if self.pair_features != "factorized":
            raise ValueError(f"pair_features={self.pair_features!r} is unknown; choose 'factorized' or None")
        if self.attention in WITHOUT_PAIRS:
            raise ValueError(
                f"attention={self.attention!r} does not read features of pairs: it {WITHOUT_PAIRS[self.attention]}; take "
                "attention='geometric' or 'neighbor', or pair_features=None"
            )
        fixed = n_fixed_ranks(self.n_dims, sequence=self.sequence)
        if self.rank != "auto" and not fixed < self.rank <= MAX_RANK:
            raise ValueError(
                f"rank={self.rank} must exceed {fixed}, the ranks of positions and order, and be at most {MAX_RANK}; "
                "or take 'auto'"
            )
