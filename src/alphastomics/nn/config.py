"""Architecture of the network."""

from __future__ import annotations

from dataclasses import dataclass

from alphastomics.config import NetworkConfig
from alphastomics.config._model import MAX_RANK
from alphastomics.config._setting import check, setting
from alphastomics.nn.pair.factors import n_fixed_ranks

READS_PAIRS = ("geometric", "neighbor")  # kinds of attention


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(NetworkConfig):
    """Architecture of a :class:`Denoiser`: the settings of the network, and what follows from the data.

    Parameters
    ----------
    n_genes, n_dims
        G, and D = 2 or 3.
    n_latent
        Width of the neighborhood embedding, which the contrastive loss trains.
    sequence
        Whether the cells have an order, which neighbor attention and pair features use.
    mask_tokens
        Whether there are tokens for masked entries.
    n_cell_types
        Number of cell types that are an input; 0 if none are.
    n_ranks
        K, the number of neighbors whose distances describe the local density of a cell.
    n_components
        Number of principal components of the reference whose scores are added to the embedding of expression.

    Raises
    ------
    ValueError
        If a value is not permitted, or settings cannot be combined.
    """

    n_genes: int
    n_dims: int
    dropout: float = setting(0.0, ge=0, lt=1)
    n_latent: int = 64
    sequence: bool = False
    mask_tokens: bool = False
    n_cell_types: int = setting(0, ge=0)
    n_ranks: int = 9
    n_components: int = 20

    def __post_init__(self) -> None:
        check(self)
        if self.n_dims not in (2, 3):
            raise ValueError(f"n_dims={self.n_dims} must be 2 or 3")
        if self.bottleneck is not None and self.d_model % self.bottleneck:
            raise ValueError(f"bottleneck={self.bottleneck} does not divide d_model={self.d_model}; pass another one")
        if self.pair_features is not None:
            self._check_pair_features()
        if self.sparse_pairs != "coordinate" and not self.sequence:
            raise ValueError(
                f"sparse_pairs={self.sparse_pairs!r} needs an order of the cells; name a column of obs with sequence_key=, or "
                "pass sparse_pairs='coordinate'"
            )
        if self.bottleneck is not None and self.use_moe:
            raise ValueError(
                f"bottleneck={self.bottleneck} narrows feed-forward networks, which use_moe=True replaces; pass one of them"
            )

    @property
    def reads_sequence(self) -> bool:
        """Whether any layer of the network uses the order of the cells."""
        return self.sequence and (self.attention == "neighbor" or self.pair_features is not None)

    def _check_pair_features(self) -> None:
        if self.attention not in READS_PAIRS:
            raise ValueError(
                f"attention={self.attention!r} does not use pair features; pass attention='geometric' or 'neighbor', or "
                "pair_features=None"
            )
        fixed = n_fixed_ranks(self.n_dims, sequence=self.sequence)
        if self.rank != "auto" and not fixed < self.rank <= MAX_RANK:
            raise ValueError(
                f"rank={self.rank} must exceed {fixed}, the ranks of positions and order, and be at most {MAX_RANK}; "
                "or pass 'auto'"
            )
