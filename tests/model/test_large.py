"""Slices larger than a context, and matrices larger than memory would like."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, strategies as st

from alphastomics.config import _sampling
from alphastomics.data import AnnDataSource
from alphastomics.datasets import synthetic_tissue
from alphastomics.metrics import aligned_rmsd, distance_spearman, rigid_align
from alphastomics.sampling import PositionSampler
from alphastomics.sampling._cells import EncodedCells, content_order, split_contexts
from position_oracle import Oracle, sampler_of
from rotations import random_rotation

# -- contexts -----------------------------------------------------------------------------------------------------------


@given(n_cells=st.integers(1, 500), max_context=st.integers(1, 200))
def test_contexts_cover_all_cells_and_share_their_anchors(n_cells, max_context):
    contexts = split_contexts(n_cells, max_context, torch.device("cpu"))
    sizes = [len(cells) for cells, _ in contexts]
    assert max(sizes) <= max_context
    assert max(sizes) - min(sizes) <= 1
    if len(contexts) == 1:
        assert contexts[0][0].tolist() == list(range(n_cells))
        return
    (n_anchors,) = {n for _, n in contexts}
    assert n_anchors == int(0.25 * max_context)
    seen = [cell for cells, _ in contexts for cell in cells[n_anchors:].tolist()]
    assert sorted(seen) == list(range(n_anchors, n_cells))
    assert all(cells[:n_anchors].tolist() == list(range(n_anchors)) for cells, _ in contexts)


def contexts_of_64(embedding: torch.Tensor) -> EncodedCells:
    return EncodedCells(embedding, torch.eye(len(embedding)), split_contexts(len(embedding), 64, embedding.device))


@pytest.mark.parametrize("n_dims", [2, 3])
def test_contexts_are_fused_without_seams(n_dims):
    true = torch.randn(230, n_dims, generator=torch.Generator().manual_seed(1))
    oracle = Oracle(n_dims, rigid=True)
    positions = PositionSampler(sampler_of(oracle), contexts_of_64(true))
    assert oracle.n_calls == 5  # 16 anchors and 48 others in each
    assert aligned_rmsd(true.numpy(), positions.mean[0].numpy()) < 1e-5
    assert torch.equal(positions.latent, true)


def test_contexts_of_a_shared_frame_are_not_moved():
    true = 3 + torch.randn(230, 2, generator=torch.Generator().manual_seed(1))
    positions = PositionSampler(sampler_of(Oracle(2, rigid=False), frame="shared"), contexts_of_64(true))
    np.testing.assert_allclose(positions.mean[0], true, rtol=1e-5)


def test_known_cells_fix_the_frame_of_fused_contexts():
    true = torch.randn(230, 2, generator=torch.Generator().manual_seed(1))
    observed = (true @ random_rotation(2, torch.Generator().manual_seed(5)) + 7).clone()
    expected = observed.clone()
    observed[::2] = torch.nan
    positions = PositionSampler(sampler_of(Oracle(2, rigid=True)), contexts_of_64(true))
    x = positions.place(np.random.default_rng(0), refine=False, known=observed)
    np.testing.assert_allclose(x, expected, atol=1e-4)


# -- the model ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_set(reference):
    """900 dissociated cells."""
    del reference.obs["slice_id"]
    return reference


def blocks_of(trained, adata, max_context):
    source = AnnDataSource(adata, trained.schema, positions=False)
    order = content_order(source, np.arange(adata.n_obs))
    return [order[cells.numpy()] for cells, _ in split_contexts(adata.n_obs, max_context, torch.device("cpu"))]


def test_fused_mean_is_near_the_whole(trained, one_set):
    mean = {"n_samples": 2, "reduce": "mean", "refine": False}
    whole = trained.sample(one_set, **mean).obsm["spatial_reconstructed"]
    fused = trained.sample(one_set, batch_size=300, **mean).obsm["spatial_reconstructed"]
    assert fused.tobytes() != whole.tobytes()
    assert distance_spearman(whole, fused) > 0.95
    assert aligned_rmsd(whole, fused) < 0.2
    radius = np.sqrt(((whole - whole.mean(0)) ** 2).sum(1).mean())
    residual = rigid_align(fused, whole)[0] - whole
    blocks = blocks_of(trained, one_set, 300)
    assert len(blocks) == 4
    for block in blocks:  # a seam would show as a context that is shifted or turned as one
        assert np.linalg.norm(residual[block].mean(0)) < 0.1 * radius
        turned = rigid_align(fused[block], whole[block])[1].rotation @ rigid_align(fused, whole)[1].rotation.T
        assert np.allclose(turned, np.eye(2), atol=0.1)


@pytest.mark.parametrize("n_samples", [1, 2])
@pytest.mark.slow
def test_fused_placements_and_draws_are_of_the_same_tissue(trained, one_set, n_samples):
    mean = trained.sample(one_set, n_samples=2, reduce="mean", refine=False).obsm["spatial_reconstructed"]
    whole, fused = (
        trained.sample(one_set, n_samples=n_samples, batch_size=size).obsm["spatial_reconstructed"][-900:]
        for size in (None, 300)
    )
    assert distance_spearman(mean, fused) > distance_spearman(mean, whole) - 0.1
    assert 0.8 < fused.std() / whole.std() < 1.25


def test_fused_result_depends_on_the_cells_not_on_their_order(trained, one_set):
    order = np.random.default_rng(0).permutation(900)
    expected = trained.sample(one_set, batch_size=250).obsm["spatial_reconstructed"]
    result = trained.sample(one_set[order].copy(), batch_size=250).obsm["spatial_reconstructed"]
    assert result.tobytes() == expected[order].tobytes()


def test_batch_size_limits_attention(trained, one_set, monkeypatch):
    sizes = []
    trunk = trained.module.trunk

    def watch(h, *args, **kwargs):
        sizes.append(h.shape[1])
        return trunk(h, *args, **kwargs)

    monkeypatch.setattr(trained.module, "trunk", watch)
    few = one_set[:40].copy()
    monkeypatch.setattr(_sampling, "PLACED_CONTEXT", 15)
    for batch_size in (1, 2, None, 40):
        sizes.clear()
        result = trained.sample(few, batch_size=batch_size)
        assert max(sizes) <= (batch_size or 15)
        assert np.isfinite(result.obsm["spatial_reconstructed"]).all()


# -- a large sparse matrix ----------------------------------------------------------------------------------------------

FORBIDDEN = 5000  # rows that nothing may make dense at once


@pytest.fixture(scope="module")
def large():
    adata = synthetic_tissue(n_slices=1, n_cells=6000, n_genes=60, random_state=2)
    assert sp.issparse(adata.X)
    return adata


@pytest.fixture
def never_dense(monkeypatch):
    """Refuse to make more than 5000 rows dense, through scipy or through our own encoding."""
    largest = []

    def guarded(name, original):
        def method(self, *args, **kwargs):
            if self.shape[0] > FORBIDDEN:
                raise AssertionError(f"{name} of {self.shape[0]} rows")
            return original(self, *args, **kwargs)

        return method

    for kind in (sp.csr_matrix, sp.csc_matrix, sp.coo_matrix, sp.csr_array, sp.csc_array, sp.coo_array):
        for name in ("toarray", "todense"):
            monkeypatch.setattr(kind, name, guarded(name, getattr(kind, name)))
    read = AnnDataSource.values

    def watched(self, rows, **kwargs):
        result = read(self, rows, **kwargs)
        largest.append(len(result[0]))
        return result

    monkeypatch.setattr(AnnDataSource, "values", watched)
    return largest


def test_densification_guard_raises(never_dense, large):
    with pytest.raises(AssertionError, match="6000"):
        large.X.toarray()
    assert large.X[:10].toarray().shape == (10, 60)


@pytest.mark.parametrize("layout", ["csr", "csc"])
@pytest.mark.slow
def test_large_sparse_matrix_is_never_made_dense(never_dense, large, layout, make_model, train_briefly):
    adata = large.copy()
    adata.X = adata.X.asformat(layout)
    model = train_briefly(make_model(adata), context_size=500, batch_size=3000)
    result = model.sample(adata, batch_size=1000)
    assert result.X.shape == (6000, 60)
    assert result.X.format == layout
    model.get_latent_representation(adata, batch_size=1000)
    model.sample(adata, batch_size=1000, n_samples=2, indices=np.arange(5500))
    assert len(never_dense) > 10
    assert max(never_dense) <= FORBIDDEN
