"""Settings of sampling: what is sampled, the number of draws, and the reverse process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphastomics import _keys
from alphastomics.config._setting import check, setting

SampledMode = Literal["expr_to_pos", "pos_to_expr", "joint"]
Reduction = Literal["medoid", "mean"]
SamplerName = Literal["ddpm", "ddim", "dpm++2m"]
EmbeddingLayer = Literal["encoder", "transformer", "all"]
_OF_A_QUERY = ("mode", "expr_to_pos", "pos_to_expr")
_OF_POSITIONS = ("mode", "expr_to_pos")
_OF_DIFFUSION = ("mode", "pos_to_expr", "joint")
MAX_CONTEXT = 32_768  # cells; pairs of as many fit on a large GPU
PLACED_CONTEXT = 8192  # cells; larger contexts take more time and place their cells hardly better


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Modality that is sampled, the values that are returned, and the reverse process of expression.

    Parameters
    ----------
    mode
        ``expr_to_pos``: positions given expression. ``pos_to_expr``: expression given positions. ``joint``: new slices, with
        ``n_cells`` cells each or with as many cells as the slices of the input.
    n_cells
        Number of cells of a new slice, if there is no input.
    inpaint
        Keep observed values of the modality that is sampled, and sample those that are NaN.
    reduce
        How several samples are reduced. ``medoid``: the sample nearest to all others. ``mean``: the conditional mean. By
        default all samples are returned.
    n_steps
        Number of network evaluations per sample of expression; 1 returns the conditional mean.
    n_samples
        Number of samples. For positions, 1 returns the placement, which is not a random draw.
    random_state
        Seed of all samples.
    sampler
        Reverse step of expression.
    eta
        Noise of ``ddim``, from 0 (none) to 1 (that of ``ddpm``).
    """

    mode: SampledMode = setting("expr_to_pos", flag="--sample-mode")
    n_cells: int | None = setting(None, ge=1, requires=("mode", "joint"))
    inpaint: bool = setting(False, requires=_OF_A_QUERY)
    reduce: Reduction | None = setting(None, requires=_OF_A_QUERY)
    n_steps: int = setting(30, ge=1, requires=_OF_DIFFUSION)
    n_samples: int = setting(1, ge=1)
    random_state: int = setting(0, ge=0, flag="--seed")
    sampler: SamplerName = setting("dpm++2m", requires=_OF_DIFFUSION)
    eta: float = setting(0.0, ge=0, le=1, requires=("sampler", "ddim"), python_only=True)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How positions follow from expression.

    Parameters
    ----------
    refine
        Move each cell towards the cells with similar neighborhood embeddings. By default for counts, log-normalized and binary values.
    independent
        Place each cell by itself, at the position in the reference where the expression is most similar, instead of all cells as
        one tissue. For dissociated cells, of which there may be many more or fewer than a tissue has. A shift of
        each gene from the reference, as between techniques, is removed first. The layout is not refined, overlaps are not removed, and random draws do not change.
    min_confidence
        Cells with a smaller confidence, from 0 to 1, are not placed: their position is NaN.
    """

    refine: bool | None = setting(None, requires=_OF_POSITIONS)
    independent: bool = setting(False, requires=_OF_POSITIONS)
    min_confidence: float = setting(0.0, ge=0, le=1, requires=_OF_POSITIONS)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Size of the contexts of a trained network.

    Parameters
    ----------
    batch_size
        Largest number of cells that attend to each other. By default 8,192 when positions are sampled, which a larger context makes
        hardly more accurate, and 32,768 otherwise.
    """

    batch_size: int | None = setting(None, ge=1, python_only=True)

    @property
    def max_context(self) -> int:
        """Largest number of cells that attend to each other."""
        return self.batch_size or MAX_CONTEXT


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(InferenceConfig, PlacementConfig, DrawConfig):
    """Arguments of :meth:`~alphastomics.model.AlphaSTomics.sample`, except for its query.

    Parameters
    ----------
    key_added
        Key of ``obsm`` for sampled positions, and prefix of the columns of ``obs``.
    """

    key_added: str = setting(_keys.RECONSTRUCTED, requires=_OF_POSITIONS, python_only=True)

    @property
    def max_context(self) -> int:
        """Largest number of cells that attend to each other."""
        return self.batch_size or (PLACED_CONTEXT if self.mode == "expr_to_pos" else MAX_CONTEXT)

    def __post_init__(self) -> None:
        check(self)
        if self.mode == "joint" and self.n_cells is None:
            raise ValueError("mode='joint' requires n_cells, the number of cells of a new slice")
        if self.independent and self.refine:
            raise ValueError(
                "refine=True has no effect with independent=True, which has no layout; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(InferenceConfig):
    """Arguments of :meth:`~alphastomics.model.AlphaSTomics.get_latent_representation`, except for its query.

    Parameters
    ----------
    layer
        ``encoder``: the embedding before the first block, of each cell alone. ``transformer``: the embedding after the last
        block. ``all``: both, concatenated.
    use_positions
        Use the positions of the cells, which are not read otherwise.
    """

    layer: EmbeddingLayer = "transformer"
    use_positions: bool = False

    def __post_init__(self) -> None:
        check(self)
