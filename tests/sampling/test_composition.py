"""Contexts with the composition of the reference."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import torch
from tests.sampling.test_confidence import N_KINDS, reference_of, tissue

from alphastomics.data import AnnDataSource
from alphastomics.sampling import _position_draws
from alphastomics.sampling._cells import split_contexts
from alphastomics.sampling._composition import (
    MAX_RATIO,
    MAX_REPEATS,
    composed_contexts,
    composition_weights,
    relative_frequency,
)

CPU = torch.device("cpu")


def counted(contexts: list, n: int) -> np.ndarray:
    """Number of contexts of which each of n cells is part."""
    for cells, _ in contexts:
        assert len(np.unique(cells.numpy())) == len(cells)
    return np.bincount(np.concatenate([cells.numpy() for cells, _ in contexts]), minlength=n)


def test_frequent_cells_are_part_of_a_share_of_the_contexts():
    ratio = np.r_[np.full(500, 10.0), np.full(300, 4.0), np.full(400, 1.0), np.full(100, 0.1)]
    contexts = composed_contexts(ratio, 10_000, CPU)
    n = counted(contexts, len(ratio))
    assert len(contexts) == 10
    np.testing.assert_array_equal(np.unique(n[:500]), 1)
    np.testing.assert_array_equal(np.unique(n[500:800]), 2)  # of 10 / 4 = 2.5
    np.testing.assert_array_equal(np.unique(n[800:]), 10)
    sizes = [len(cells) for cells, _ in contexts]
    assert max(sizes) - min(sizes) <= 1
    for cells, n_anchors in contexts:
        np.testing.assert_array_equal(cells[:n_anchors].numpy(), np.arange(800, 1300))


@pytest.mark.parametrize("max_context", [1, 7, 64, 1000, 20_000])
@pytest.mark.parametrize("n_frequent", [30, 1500, 3000])
def test_all_cells_are_covered_by_contexts_of_limited_size(max_context, n_frequent):
    rng = np.random.default_rng(0)
    ratio = np.exp(rng.normal(-1, 0.3, 3000))
    ratio[rng.permutation(3000)[:n_frequent]] = rng.uniform(3, 200, n_frequent)
    contexts = composed_contexts(ratio, max_context, CPU)
    assert counted(contexts, 3000).min() >= 1
    assert max(len(cells) for cells, _ in contexts) <= max(max_context, 2)
    assert len({n_anchors for _, n_anchors in contexts}) == 1
    if max_context >= 3000:
        assert sum(len(cells) for cells, _ in contexts) <= (MAX_REPEATS + 1) * 3000


@pytest.mark.parametrize("max_context", [100, 5000])
def test_contexts_of_a_query_like_the_reference_do_not_change(max_context):
    ratio = np.full(1000, MAX_RATIO)
    ratio[:9] = 50.0
    for found, expected in zip(
        composed_contexts(ratio, max_context, CPU), split_contexts(1000, max_context, CPU), strict=True
    ):
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1]


def test_weights_restore_the_composition_of_the_reference_if_it_differs_much():
    ratio = np.r_[np.full(400, 10.0), np.full(300, 2.5), np.full(300, 0.8)]
    expected = np.r_[np.full(400, 0.1), np.full(300, 0.4), np.ones(300)]
    confidence = np.where(np.arange(1000) < 101, 0.5, 0.01)
    np.testing.assert_allclose(composition_weights(ratio, confidence), expected)
    for value in (0.01, np.nan):  # kinds that the reference lacks, and a reference of few cells
        confidence[:2] = value
        np.testing.assert_array_equal(composition_weights(ratio, confidence), np.ones(1000))


def test_the_relative_frequency_of_an_oversampled_kind_is_found():
    reference = reference_of(tissue(3000, 0))
    query = tissue(4000, 1)
    kind = query.obs["kind"].to_numpy()
    kept = (kind == 2) | (np.random.default_rng(0).random(len(kind)) < 0.1)
    query, kind = query[kept].copy(), kind[kept]
    ratio = relative_frequency(reference[0], AnnDataSource(query, reference[1], positions=False), np.arange(len(kind)))
    medians = [np.median(ratio[kind == k]) for k in range(N_KINDS)]
    assert 5 < medians[2] < 20  # 10
    np.testing.assert_allclose(np.delete(medians, 2), 1.0, atol=0.5)


def test_cells_of_the_reference_are_as_frequent_as_expected():
    reference = reference_of(tissue(3000, 0))
    source = AnnDataSource(tissue(1000, 1, depth=60), reference[1], positions=False)
    ratio = relative_frequency(reference[0], source, np.arange(1000))
    assert (ratio > MAX_RATIO).mean() < 0.01
    few = np.arange(20)
    np.testing.assert_array_equal(relative_frequency(reference[0], source, few), 1.0)


@pytest.mark.filterwarnings("ignore:.* have the same expression as another cell:UserWarning")
def test_a_placement_in_another_composition_is_reported(trained, reference, monkeypatch):
    query = ad.concat([reference] * 3, index_unique="-")
    ratio = np.where(np.arange(query.n_obs) % 2, 8.0, 1.0)
    used = []

    def compose(frequency: np.ndarray, *args: object) -> list:
        used.append(composed_contexts(frequency, *args))
        return used[-1]

    monkeypatch.setattr(_position_draws, "relative_frequency", lambda cells, source, rows: ratio[: len(rows)])
    monkeypatch.setattr(_position_draws, "composed_contexts", compose)
    with pytest.warns(UserWarning, match=r"50% of the cells .* reference \(median: 8 times\)"):
        placed = trained.sample(query, mode="expr_to_pos")
    assert np.isfinite(placed.obsm["spatial_reconstructed"]).all()
    assert all(len(contexts) > 1 for contexts in used)
