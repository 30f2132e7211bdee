"""Simulated counts given cell type and position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from alphastomics.datasets._anatomy import SmoothFields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.datasets._anatomy import Anatomy

    Array = NDArray[np.float64]

__all__ = ["Programs", "draw_counts", "draw_depth", "draw_programs"]

_LENGTH_SCALES = (0.5, 0.25, 0.12)  # of the positional programs, in extents of the body
_FIELDS_PER_SCALE = 4
_DISPERSION = 4.0  # shape of the gamma: variance = mean + mean^2 / 4
_DEPTH_SPREAD = 0.4  # standard deviation of the log depth of the cells of a slice


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Log expression as a function of cell type and position, shared by all slices.

    Attributes
    ----------
    base
        Baseline of each gene, (n_genes,).
    markers
        Effect of each cell type on each gene, (n_types, n_genes).
    fields
        Positional programs, one group per length scale.
    response
        Weight of each positional program in each cell type, (n_types, n_fields).
    loadings
        Effect of each positional program on each gene, (n_fields, n_genes).
    var
        Annotation of the genes.
    """

    base: Array
    markers: Array
    fields: tuple[SmoothFields, ...]
    response: Array
    loadings: Array
    var: pd.DataFrame

    def log_rates(self, points: Array, types: NDArray[np.intp]) -> NDArray[np.float32]:
        r"""Unnormalized :math:`b_g + \beta_{kg} + \sum_j a_{kj} f_j(u) W_{jg}`, (n_points, n_genes)."""
        values = np.concatenate([group(points) for group in self.fields], axis=1) * self.response[types]
        positional = values.astype(np.float32) @ self.loadings.astype(np.float32)
        return positional + (self.base + self.markers).astype(np.float32)[types]


def draw_programs(anatomy: Anatomy, n_genes: int, unit: float, rng: np.random.Generator) -> Programs:
    """Draw the gene programs; lengths in the annotation are multiplied by ``unit``."""
    n_types, n_dims = len(anatomy.type_names), anatomy.centers.shape[1]
    n_fields = len(_LENGTH_SCALES) * _FIELDS_PER_SCALE
    n_markers = n_positional = round(0.4 * n_genes)
    marker_of = np.full(n_genes, -1)
    marker_of[:n_markers] = np.arange(n_markers) % n_types
    scale = np.full(n_genes, -1)
    scale[n_markers : n_markers + n_positional] = np.arange(n_positional) % len(_LENGTH_SCALES)
    order = rng.permutation(n_genes)
    marker_of, scale = marker_of[order], scale[order]
    response = rng.uniform(0.4, 1.0, size=(n_types, n_fields))
    # Scattered cells depend little on their position.
    response[[name.startswith("scattered") for name in anatomy.type_names]] *= 0.3
    return Programs(
        base=rng.normal(scale=1.0, size=n_genes),
        markers=_draw_markers(marker_of, n_types, rng),
        fields=tuple(SmoothFields.draw(n_dims, _FIELDS_PER_SCALE, length, rng) for length in _LENGTH_SCALES),
        response=response,
        loadings=_draw_loadings(scale, rng),
        var=_annotate(marker_of, scale, anatomy.type_names, unit),
    )


def draw_depth(n_cells: int, median: float, rng: np.random.Generator) -> Array:
    """Log-normal expected counts per cell, (n_cells,)."""
    return median * np.exp(_DEPTH_SPREAD * rng.normal(size=n_cells))


def draw_counts(
    log_rates: NDArray[np.float32], depth: Array, dropout: float, rng: np.random.Generator
) -> sparse.csr_matrix:
    r"""Gamma-Poisson counts with lost entries, CSR float32 of shape (n_cells, n_genes).

    :math:`x_{ng} \sim \mathrm{Bernoulli}(1 - q)\,\mathrm{Poisson}(\lambda_{ng} \gamma_{ng})`,
    :math:`\lambda_{ng} = \frac{L_n}{1 - q}\,\mathrm{softmax}_g(\eta_{ng})`,
    :math:`\gamma \sim \mathrm{Gamma}(r, 1 / r)`, with :math:`L_n` expected counts per cell.
    """
    rates = np.exp(log_rates - log_rates.max(1, keepdims=True))
    rates *= (depth[:, None] / (1 - dropout) / rates.sum(1, keepdims=True)).astype(np.float32)
    rates *= rng.standard_gamma(_DISPERSION, size=rates.shape, dtype=np.float32) / np.float32(_DISPERSION)
    counts = sparse.csr_matrix(rng.poisson(rates).astype(np.float32))
    counts.data[rng.random(counts.nnz) < dropout] = 0
    counts.eliminate_zeros()
    return counts


def _draw_markers(marker_of: NDArray[np.intp], n_types: int, rng: np.random.Generator) -> Array:
    """Effects of marker genes; a quarter of them is also raised, less, in a random second type."""
    effects = np.zeros((n_types, len(marker_of)))
    is_marker = marker_of >= 0
    genes = np.flatnonzero(is_marker & (rng.random(len(marker_of)) < 0.25))
    effects[rng.integers(n_types, size=len(genes)), genes] = 0.8
    effects[marker_of[is_marker], np.flatnonzero(is_marker)] = rng.uniform(1.0, 2.2, size=is_marker.sum())
    return effects


def _draw_loadings(scale: NDArray[np.intp], rng: np.random.Generator) -> Array:
    """Weights of the programs; a gene depends on programs of one length scale."""
    loadings = np.zeros((len(_LENGTH_SCALES) * _FIELDS_PER_SCALE, len(scale)))
    for k in range(len(_LENGTH_SCALES)):
        genes = np.flatnonzero(scale == k)
        mixture = rng.normal(size=(_FIELDS_PER_SCALE, len(genes)))
        mixture *= rng.uniform(0.7, 1.8, size=len(genes)) / np.linalg.norm(mixture, axis=0)
        loadings[k * _FIELDS_PER_SCALE : (k + 1) * _FIELDS_PER_SCALE, genes] = mixture
    return loadings


def _annotate(
    marker_of: NDArray[np.intp], scale: NDArray[np.intp], type_names: tuple[str, ...], unit: float
) -> pd.DataFrame:
    program = np.where(marker_of >= 0, "marker", np.where(scale >= 0, "positional", "none"))
    lengths = unit * np.array([*_LENGTH_SCALES, np.nan])  # a scale of -1 takes the last one
    return pd.DataFrame(
        {
            "program": pd.Categorical(program, categories=["marker", "positional", "none"]),
            "marker_of": pd.Categorical.from_codes(marker_of, categories=list(type_names)),
            "length_scale": lengths[scale],
        },
        index=[f"gene_{g}" for g in range(len(scale))],
    )
