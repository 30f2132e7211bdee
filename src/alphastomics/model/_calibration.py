"""What is fitted after training, by sampling expression at the places of the reference's own cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import KDTree

from alphastomics.data import crowding
from alphastomics.metrics import morans_i
from alphastomics.model._dependence import Dependence
from alphastomics.model._expression_chain import SliceExpression
from alphastomics.model._frames import evenly, to_canonical
from alphastomics.model._marginals import Marginals
from alphastomics.model._outline import Outlines
from alphastomics.model._position_chain import SamplerConfig, cell_order
from alphastomics.train.packing import smallest_time

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.model._model import AlphaSTomics


CELLS = 1024  # of a slice that are sampled
PATCHES, PATCH_CELLS = 8, 256  # that are sampled where neighbours count
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
) -> SliceExpression:
    """The chain of the cells ``few`` of a slice, all of them in one context."""
    assert cells.position is not None  # a training source reads them
    device = model.module.device
    return SliceExpression(
        model.module,
        model.diffusion,
        torch.from_numpy(to_canonical(model, source, cells, few)).to(device),
        max_context=len(few),
        crowding=torch.from_numpy(crowding(cells.position, few)).to(device),
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
    chosen = evenly(len(source.slices), MARGINAL_SLICES)
    for cells in (source.slices[i] for i in chosen):
        few = evenly(len(cells.rows), CELLS)
        chain = reference_chain(model, source, cells, few)
        sampled.append(chain.sample(SamplerConfig(n_steps=n_steps), generator).cpu().numpy())
        true.append(source.expression(cells.rows[few]))
    return Marginals.of(np.concatenate(sampled), np.concatenate(true))


def fit_dependence(model: AlphaSTomics, source: CellSource, *, n_steps: int = 10) -> Dependence:
    """Sample the expression of patches of the reference at their places, and compare how alike neighbours are.

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
    patches = [(slices[i], _patches(slices[i])) for i in evenly(len(slices), DEPENDENCE_SLICES)] if slices else []
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
    """Numbers of cells in patches all over a slice: cells chosen one by one would have lost their neighbours."""
    assert cells.position is not None  # a training source reads them
    n_cells = len(cells.position)
    if n_cells <= PATCHES * PATCH_CELLS:
        return np.arange(n_cells)
    middles = np.random.default_rng(0).choice(n_cells, PATCHES, replace=False)
    near = KDTree(cells.position).query(cells.position[middles], PATCH_CELLS)[1]
    return np.unique(near)


def fit_outlines(model: AlphaSTomics, source: CellSource) -> Outlines:
    """Outlines of the slices of the reference."""
    chosen = [source.slices[i] for i in evenly(len(source.slices), OUTLINE_SLICES)]
    return Outlines.of([to_canonical(model, source, cells, evenly(len(cells.rows), OUTLINE_CELLS)) for cells in chosen])
