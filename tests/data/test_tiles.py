"""Fields of view that are taken for slices."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from alphastomics.data import fit_schema
from alphastomics.data._tiles import n_tiles
from alphastomics.datasets import synthetic_tissue


def section(n: int = 3000) -> tuple[np.ndarray, float]:
    """Positions in a disk, and their spacing."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(2 * n, 2))
    x = x[(x**2).sum(1) < 1][:n]
    return x, 1 / np.sqrt(n)


@pytest.mark.parametrize("n_rows", [2, 3, 4])
def test_tiles_of_a_section_adjoin_each_other(n_rows):
    x, spacing = section()
    tile = np.minimum((n_rows * (x + 1) / 2).astype(int), n_rows - 1) @ [n_rows, 1]
    tiles = [x[tile == k] for k in np.unique(tile)]
    assert n_tiles(tiles, spacing) == len(tiles)
    apart = [part + 20 * spacing * np.array(divmod(k, n_rows)) for k, part in enumerate(tiles)]
    assert n_tiles(apart, spacing) == 0


def test_sections_are_no_tiles():
    x, spacing = section()
    own_frames = [x + shift for shift in np.random.default_rng(1).uniform(-0.5, 0.5, size=(6, 2))]
    on_a_slide = [x + [2.2 * i, 0] for i in range(6)]
    for sections in (own_frames, on_a_slide):
        assert n_tiles(sections, spacing) == 0


def test_fields_of_view_are_reported():
    tissue = synthetic_tissue(n_slices=1, n_cells=1500, n_genes=5, random_state=0)
    x = tissue.obsm["spatial"]
    rank = x.argsort(0).argsort(0) * 3 // len(x)
    tissue.obs["fov"] = [f"fov_{i}_{j}" for i, j in rank]
    tissue = tissue[tissue.obs["fov"].map(tissue.obs["fov"].value_counts()) >= 10].copy()
    with pytest.warns(UserWarning, match=r'slices of obs\["fov"\] adjoin others.*slice_key'):
        fit_schema(tissue, slice_key="fov")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_schema(tissue, slice_key="fov", frame="shared")
        fit_schema(synthetic_tissue(n_slices=8, n_cells=100, n_genes=5, random_state=0))
