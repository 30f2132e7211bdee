r"""Sampled expression with the marginals of the reference.

.. math:: x_{ig} \leftarrow Q_g\big(F_g(x_{ig})\big)

with :math:`Q_g` the quantile function of gene g in the reference and :math:`F_g` the distribution of what the trained
model samples at the same cells' positions. The map is monotone: it moves no cell past another, and a query that differs
from the reference keeps its difference. It gives counts back what a short chain of Gaussian steps smooths away, the many
zeros above all.

Standard deviation of sampled expression, from a few draws of each value.

.. math::

    s_{ig}^2 = (1 - w)\, V_g(m_{ig}) + w\, v_{ig}, \qquad V_g(m) = a_g + b_g m + c_g m^2

v is the variance over the draws of one value and m the mean that is returned for it. Where most counts are zero, eight draws
of a value are often all zero, which says nothing: v alone hardly ranks the errors of values. The variance of counts is a
function of their mean (Poisson and negative binomial are cases of V, with a = 0), and all cells of a slice together tell it.
Where expression is not of counts b and c are 0.

What a value has of its own beyond V counts as far as it is reproduced: with :math:`\rho` the correlation over cells of
:math:`v - V` between two halves of the draws, mean over genes, and n the number of such halves in all draws,

.. math:: w = \frac{n \rho}{1 + (n - 1) \rho}

is the reliability of v - V (Spearman-Brown), with which the best linear estimate shrinks it. Variances that share
information among many were introduced for genes by :cite:t:`smyth2004`.

Draws come in pairs that share their noise up to its sign. Where a draw is linear in its noise, the mean of a pair is the
conditional mean whatever the noise was, and v is the mean square about the mean of the draws.

What is fitted after training, by sampling expression at the places of the reference's own cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import nnls
from scipy.spatial import KDTree

from alphastomics.data import local_density
from alphastomics.diffusion import smallest_time
from alphastomics.metrics import morans_i
from alphastomics.sampling._dependence import Dependence
from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._frames import evenly_spaced_indices, to_canonical
from alphastomics.sampling._outline import Outlines
from alphastomics.sampling._position import SamplerConfig, cell_order

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.model._model import AlphaSTomics

LEVELS = np.unique(np.concatenate([np.linspace(0, 1, 65), 1 - np.logspace(-3, -1.5, 12)]))
"""Where quantiles are taken: finer at the top, which holds the cells that express a gene."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Marginals:
    """Quantiles of every gene in network units.

    Parameters
    ----------
    sampled, true
        (K, G), ascending along K.
    """

    sampled: NDArray[np.float32]
    true: NDArray[np.float32]

    @classmethod
    def of(cls, sampled: ArrayLike, true: ArrayLike) -> Marginals:
        """Quantiles of samples (M, G) and of cells (N, G)."""
        quantiles = (np.quantile(np.asarray(x, dtype=np.float64), LEVELS, axis=0) for x in (sampled, true))
        return cls(**dict(zip(("sampled", "true"), (q.astype(np.float32) for q in quantiles), strict=True)))

    def fits(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shapes are those of a tissue of so many genes and axes."""
        return self.sampled.shape == self.true.shape == (len(LEVELS), n_genes)

    def apply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map values (N, G) that the model sampled."""
        columns = [np.interp(x[:, g], self.sampled[:, g], self.true[:, g]) for g in range(x.shape[1])]
        return np.stack(columns, axis=1).astype(np.float32)


TINY = 1e-12


def pooled_sd(
    draws: NDArray[np.float32], mean: NDArray[np.float32], drawn: NDArray[np.bool_] | None = None, *, counts: bool
) -> NDArray[np.float32]:
    """Standard deviation (N, G) of expression in one slice.

    Parameters
    ----------
    draws
        Mirrored draws (K, N, G); a single one has no spread, and NaN is returned.
    mean
        The mean that is returned for them, (N, G).
    drawn
        Values that were drawn, (N, G); the others are held, and their standard deviation is 0. All by default.
    counts
        Whether expression is of counts, and its variance a function of its mean.
    """
    drawn = np.ones(mean.shape, dtype=bool) if drawn is None else drawn
    if len(draws) == 1:
        return np.where(drawn, np.float32(np.nan), np.float32(0))
    own = mirrored_variance(draws)
    trend = np.zeros_like(own)
    for gene in range(mean.shape[1]):
        rows = drawn[:, gene]
        if rows.any():
            trend[rows, gene] = _trend(own[rows, gene], mean[rows, gene].astype(np.float64), counts=counts)
    w = _reliability(draws, trend, drawn)
    return np.where(drawn, np.sqrt((1 - w) * trend + w * own), 0).astype(np.float32)


def mirrored_variance(draws: NDArray[np.float32]) -> NDArray[np.float64]:
    """Variance over mirrored draws (K, N, G), (N, G)."""
    n = len(draws)
    # A draw without its mirror image shifts the mean of all by its share of the noise.
    return np.var(draws, axis=0, dtype=np.float64, ddof=(n % 2) / n)


def _trend(own: NDArray[np.float64], mean: NDArray[np.float64], *, counts: bool) -> NDArray[np.float64]:
    """V (N,) of one gene: non-negative least squares, relative to the mean, by which counts scatter."""
    if not counts:
        return np.full_like(own, own.mean())
    basis = np.stack([np.ones_like(mean), mean, mean**2], axis=1)
    weight = 1 / (mean + max(mean.mean(), TINY))
    return basis @ nnls(weight[:, None] * basis, weight * own)[0]


def _reliability(draws: NDArray[np.float32], trend: NDArray[np.float64], drawn: NDArray[np.bool_]) -> float:
    """w, the share of own - trend that other draws would reproduce; 0 where there are not two pairs to tell it."""
    half = len(draws) // 4 * 2  # of whole pairs
    if half == 0:
        return 0.0
    first, second = (
        np.where(drawn, mirrored_variance(part) - trend, 0) for part in (draws[:half], draws[half : 2 * half])
    )
    n_cells = np.maximum(drawn.sum(0), 1)
    first, second = (np.where(drawn, x - x.sum(0) / n_cells, 0) for x in (first, second))
    norm = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    varies = norm > 0
    if not varies.any():
        return 0.0
    rho = max(0.0, float(((first * second).sum(0)[varies] / norm[varies]).mean()))
    n = len(draws) / half
    return n * rho / (1 + (n - 1) * rho)


CELLS = 1024  # of a slice that are sampled
PATCHES, PATCH_CELLS = 8, 256  # that are sampled where neighbors count
MOST_CELLS = 16_384  # of a slice that are read at once
MARGINAL_SLICES, DEPENDENCE_SLICES = 4, 2
OUTLINE_SLICES, OUTLINE_CELLS = 16, 8192
DRAWS, ROUNDS = 4, 2  # over which Moran's I of samples is averaged; of corrections
FEWEST = 50  # cells of a slice below which Moran's I is mostly chance
LEAST_EFFECT = 0.05  # of all noise being shared, where the samples of a gene hardly follow their noise


def place_time(model: AlphaSTomics) -> float:
    """Clock of positions that are given: 0, or the smallest that a model of joint samples alone was trained for."""
    if model.mode != "joint":
        return 0.0
    return smallest_time(model.diffusion.position.schedule, model.schema.spacing / model.schema.scale)


def reference_chain(
    model: AlphaSTomics, source: CellSource, cells: SliceCells, few: NDArray[np.int64]
) -> ExpressionSampler:
    """The chain of the cells ``few`` of a slice, all of them in one context."""
    assert cells.position is not None  # a training source reads them
    device = model.module.device
    return ExpressionSampler(
        model.module,
        model.diffusion,
        torch.from_numpy(to_canonical(model, source, cells, few)).to(device),
        max_context=len(few),
        local_density=torch.from_numpy(local_density(cells.position, few)).to(device),
        t_pos=place_time(model),
        sequence=cell_order(model.module, source, cells.rows[few]),
    )


def fit_marginals(model: AlphaSTomics, source: CellSource, *, n_steps: int = 20) -> Marginals:
    """Sample the expression of some cells of the reference at their positions, and compare.

    Parameters
    ----------
    model
        A trained model that samples expression.
    source
        Its reference, with positions.
    n_steps
        Steps of the chain.
    """
    generator = torch.Generator().manual_seed(0)
    sampled, true = [], []
    chosen = evenly_spaced_indices(len(source.slices), MARGINAL_SLICES)
    for cells in (source.slices[i] for i in chosen):
        few = evenly_spaced_indices(len(cells.rows), CELLS)
        chain = reference_chain(model, source, cells, few)
        sampled.append(chain.sample(SamplerConfig(n_steps=n_steps), generator).cpu().numpy())
        true.append(source.expression(cells.rows[few]))
    return Marginals.of(np.concatenate(sampled), np.concatenate(true))


def fit_dependence(model: AlphaSTomics, source: CellSource, *, n_steps: int = 10) -> Dependence:
    """Sample the expression of patches of the reference at their places, and compare how alike neighbors are.

    Parameters
    ----------
    model
        A trained model that samples expression, with marginals.
    source
        Its reference, with positions.
    n_steps
        Steps of the chain.
    """
    marginals = model.marginals_
    assert marginals is not None  # they are fitted before
    slices = [cells for cells in source.slices if len(cells.rows) >= FEWEST]
    patches = (
        [(slices[i], _patches(slices[i])) for i in evenly_spaced_indices(len(slices), DEPENDENCE_SLICES)]
        if slices
        else []
    )
    nothing = np.zeros(model.schema.n_genes, dtype=np.float32)
    if not patches:
        return Dependence(share=nothing)
    chains = [reference_chain(model, source, cells, few) for cells, few in patches]
    places = [cells.position[few] for cells, few in patches if cells.position is not None]

    def moran(share: NDArray[np.float32]) -> NDArray[np.float64]:
        generator, found = torch.Generator().manual_seed(0), []
        for chain, place in zip(chains, places, strict=True):
            chain.dependence = Dependence(share=share)
            for _ in range(DRAWS):
                x = marginals.apply(chain.sample(SamplerConfig(n_steps=n_steps), generator).cpu().numpy())
                found.append(np.nan_to_num(morans_i(x, place)))
        return np.mean(found, axis=0)

    # Of whole slices: patches are too few to tell how a pattern of the size of an organ differs between genes.
    true = np.mean([_moran(source, cells) for cells, _ in patches], axis=0)
    low, high = moran(nothing), moran(nothing + 1)
    effect = np.maximum(high - low, LEAST_EFFECT)
    share = np.clip((true - low) / effect, 0, 1)
    for _ in range(ROUNDS):
        share = np.clip(share + (true - moran(share.astype(np.float32))) / effect, 0, 1)
    return Dependence(share=share.astype(np.float32))


def _moran(source: CellSource, cells: SliceCells) -> NDArray[np.float64]:
    """Moran's I (G,) of a slice, or of as many of its cells about the middle as are read at once; 0 for a constant gene."""
    assert cells.position is not None  # a training source reads them
    away = np.linalg.norm(cells.position - np.median(cells.position, axis=0), axis=1)
    few = np.sort(np.argsort(away, kind="stable")[:MOST_CELLS])
    return np.nan_to_num(morans_i(source.expression(cells.rows[few]), cells.position[few]))


def _patches(cells: SliceCells) -> NDArray[np.int64]:
    """Numbers of cells in patches all over a slice: cells chosen one by one would have lost their neighbors."""
    assert cells.position is not None  # a training source reads them
    n_cells = len(cells.position)
    if n_cells <= PATCHES * PATCH_CELLS:
        return np.arange(n_cells)
    middles = np.random.default_rng(0).choice(n_cells, PATCHES, replace=False)
    near = KDTree(cells.position).query(cells.position[middles], PATCH_CELLS)[1]
    return np.unique(near)


def fit_outlines(model: AlphaSTomics, source: CellSource) -> Outlines:
    """Outlines of the slices of the reference."""
    chosen = [source.slices[i] for i in evenly_spaced_indices(len(source.slices), OUTLINE_SLICES)]
    return Outlines.of(
        [to_canonical(model, source, cells, evenly_spaced_indices(len(cells.rows), OUTLINE_CELLS)) for cells in chosen]
    )
