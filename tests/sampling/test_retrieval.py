"""Reference cells at whose positions a share of the cells of a draw starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from scipy.stats import chisquare

from alphastomics.data import AnnDataSource
from alphastomics.diffusion.losses import TEMPERATURE
from alphastomics.metrics import rigid_rmsd
from alphastomics.sampling import _position_draws
from alphastomics.sampling._cells import content_order, encode_cells
from alphastomics.sampling._fit import fit_reference_cells
from alphastomics.sampling._position import PositionSampler
from alphastomics.sampling._reference_cells import ReferenceCells
from alphastomics.sampling._retrieval import (
    N_AROUND,
    N_NEAREST,
    SHARE,
    average_positions,
    mode_positions,
    retrieve_positions,
)

N_CELLS = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit_vectors(n: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(n, 8, generator=generator(seed)), dim=-1)


N_GENES = 6


def reference_cells(feature: torch.Tensor, position: np.ndarray) -> ReferenceCells:
    n = len(position)
    return ReferenceCells(
        feature=feature.numpy(),
        cell_feature=feature.numpy()[:, ::-1].copy(),
        position=position,
        slice=np.zeros(n, np.float32),
        expression=np.random.default_rng(9).random((n, N_GENES), dtype=np.float32),
        sequence=np.zeros(n, np.float32),
    )


@pytest.fixture
def one(reference):
    """One slice."""
    return reference[reference.obs["slice_id"] == "slice_1"].copy()


def test_cells_are_retrieved_with_the_probabilities_of_the_contrastive_loss():
    reference = unit_vectors(12, seed=1)
    position = torch.stack([torch.arange(12.0), torch.zeros(12)], dim=1)
    cells = reference_cells(reference, position.numpy())
    feature = unit_vectors(1, seed=2)
    mean = torch.full((N_CELLS, 2), -1.0)
    start = retrieve_positions(cells, feature.expand(N_CELLS, -1), mean, generator())
    retrieved = start[:, 1] == 0
    assert float(retrieved.double().mean()) == pytest.approx(SHARE, abs=4 * np.sqrt(SHARE * (1 - SHARE) / N_CELLS))
    counts = np.bincount(start[retrieved, 0].long().numpy(), minlength=12)
    expected = (reference.double() @ feature[0].double() / TEMPERATURE).softmax(0).numpy()
    frequent = expected * counts.sum() >= 5
    groups = [np.append(x[frequent], x[~frequent].sum()) for x in (counts, expected * counts.sum())]
    assert chisquare(*groups).pvalue > 1e-3
    assert torch.equal(start[~retrieved], mean[~retrieved])


def test_a_cell_that_resembles_one_reference_cell_alone_retrieves_it():
    reference = torch.eye(8)
    position = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    cells = reference_cells(reference, position)
    mean = torch.zeros(8 * 100, 3)
    start = retrieve_positions(cells, reference.repeat(100, 1), mean, generator())
    own = torch.from_numpy(position).repeat(100, 1)
    kept = (start == 0).all(1)
    assert float((start == own).all(1)[~kept].float().mean()) > 0.99  # 7 exp(-1 / TEMPERATURE) = .0003 are others


def test_positions_of_the_reference_are_in_the_canonical_frame(trained):
    """Rotated reference slices give the same positions."""
    sampler = trained._make_sampler()
    source = AnnDataSource(trained.adata, trained.schema, positions=True)
    cells = fit_reference_cells(sampler, source, source.slices)
    n_genes = trained.schema.n_genes
    assert cells.is_valid(n_genes, 2)
    assert not cells.is_valid(n_genes, 3)
    assert not cells.is_valid(n_genes + 1, 2)
    for feature in (cells.feature, cells.cell_feature):
        assert np.allclose(np.linalg.norm(feature, axis=1), 1, atol=1e-5)
    turned = np.array([[0.0, 1.0], [-1.0, 0.0]])
    slices = [each._replace(position=each.position @ turned + 300) for each in source.slices]
    again = fit_reference_cells(sampler, source, slices)
    np.testing.assert_allclose(again.position, cells.position, atol=1e-4)
    first = cells.position[: len(source.slices[0].rows)]
    true = source.slices[0].position / trained.schema.scale
    assert rigid_rmsd(true, first, reflection=True) < 1e-5


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n_reference", [5, 200])
def test_the_mean_is_averaged_with_the_expectation_over_the_nearest_cells(n_reference, weight):
    reference, feature = unit_vectors(n_reference, seed=1), unit_vectors(1500, seed=2)
    position = np.random.default_rng(0).standard_normal((n_reference, 3)).astype(np.float32)
    mean = torch.randn(1500, 3, generator=generator(3))
    found = average_positions(reference_cells(reference, position), feature.flip(1), mean, weight)
    similarity = (feature.double() @ reference.double().T).numpy()
    probability = np.exp(similarity / TEMPERATURE)
    probability[similarity < np.sort(similarity, axis=1)[:, [-min(N_NEAREST, n_reference)]]] = 0
    retrieved = probability @ position / probability.sum(1, keepdims=True)
    expected = (1 - weight) * mean.numpy() + weight * retrieved
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_a_placement_starts_at_the_average(trained, weight):
    sampler, source = trained._make_sampler(), AnnDataSource(trained.adata, trained.schema, positions=False)
    cells = PositionSampler(sampler, encode_cells(trained.module, source, source.slices[0].rows, max_context=1000))
    start = cells.place(np.random.default_rng(0), refine=False, retrieval_weight=weight, separate=False)
    expected = average_positions(sampler.fitted.reference_cells, cells.cell_feature, cells.mean[0], weight)
    torch.testing.assert_close(start, expected)


def test_the_mode_is_where_the_cells_around_are_most_likely_retrieved():
    """Against dense computation in float64."""
    reference, feature, alone = unit_vectors(200, seed=1), unit_vectors(50, seed=2), unit_vectors(50, seed=3)
    position = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    cells = reference_cells(reference, position)
    expression = torch.randn(50, N_GENES, generator=generator(4))
    measured = torch.arange(N_GENES) != 2
    products = (
        feature.double() @ reference.double().T + alone.double() @ torch.from_numpy(cells.cell_feature).double().T
    )
    correlation = torch.from_numpy(
        1 - cdist(expression[:, measured].numpy(), cells.expression[:, measured.numpy()], "correlation")
    )
    probability = ((products / 4 + correlation / 2) / TEMPERATURE).softmax(1).numpy()
    around = np.argsort(cdist(position, position), axis=1)[:, :N_AROUND]
    density = probability[:, around].mean(2)
    found = mode_positions(cells, torch.cat([feature, alone], dim=1) / 2**0.5, expression, measured).numpy()
    number = cdist(found, position).argmin(1)
    assert np.array_equal(found, position[number])
    # Cells around one reference cell of high probability may be tied.
    np.testing.assert_allclose(density[np.arange(50), number], density.max(1), rtol=1e-5)
    assert density.max(1).min() > 1.5 * density.mean()


def test_a_reference_of_few_cells_has_a_mode():
    reference, position = unit_vectors(3, seed=1), np.eye(3, 2, dtype=np.float32)
    feature = unit_vectors(4, seed=2).repeat(1, 2) / 2**0.5
    expression, measured = torch.rand(4, N_GENES), torch.ones(N_GENES, dtype=torch.bool)
    assert mode_positions(reference_cells(reference, position), feature, expression, measured).shape == (4, 2)


def test_cells_that_are_placed_independently_lie_at_reference_cells(trained, one):
    sampler = trained._make_sampler()
    reference = sampler.to_user(sampler.fitted.reference_cells.position, in_user_frame=False)
    placed = trained.sample(one, independent=True).obsm["spatial_reconstructed"]
    assert cdist(placed, reference).min(1).max() < 1e-5 * np.ptp(reference)
    assert len(np.unique(placed, axis=0)) > 1


def test_the_shift_of_the_genes_is_removed_before_independent_cells_are_placed(trained, one, monkeypatch):
    shift = np.random.default_rng(0).normal(0, 0.5, trained.schema.n_genes).astype(np.float32)
    monkeypatch.setattr(_position_draws, "gene_shift", lambda cells, source, rows: shift)
    sampler, source = trained._make_sampler(), AnnDataSource(one, trained.schema, positions=False)
    rows = content_order(source, np.arange(one.n_obs))
    cells = encode_cells(trained.module, source, rows, max_context=1000, change=(np.ones_like(shift), -shift))
    profile = torch.from_numpy(source.expression(rows) - shift), torch.from_numpy(source.measured)
    expected = PositionSampler(sampler, cells).place(np.random.default_rng(0), refine=False, independent=profile)
    placed = trained.sample(one, independent=True).obsm["spatial_reconstructed"][rows]
    np.testing.assert_allclose(placed, sampler.to_user(expected.numpy(), in_user_frame=False), rtol=1e-5)
    monkeypatch.undo()
    plain = trained.sample(one).obsm["spatial_reconstructed"]
    monkeypatch.setattr(_position_draws, "gene_shift", lambda *args: pytest.fail("removed from a tissue"))
    assert np.array_equal(trained.sample(one).obsm["spatial_reconstructed"], plain)


def test_known_positions_stay_and_the_others_lie_at_reference_cells(trained, one):
    sampler = trained._make_sampler()
    reference = sampler.fitted.reference_cells.position * trained.schema.scale
    known = one.copy()
    known.obsm["spatial"] = known.obsm["spatial"].astype(float)
    known.obsm["spatial"][5:] = np.nan
    placed = trained.sample(known, independent=True, inpaint=True).obsm["spatial_reconstructed"]
    assert np.array_equal(placed[:5], known.obsm["spatial"][:5])
    between = cdist(reference, reference).ravel()  # a rigid motion of the frame keeps these
    found = cdist(placed[5:15], placed[5:15]).ravel()
    assert np.abs(found[:, None] - between).min(1).max() < 1e-4 * np.ptp(reference)


def test_a_layout_is_not_refined_for_independent_cells(trained, one):
    with pytest.raises(ValueError, match="refine=True has no effect with independent=True"):
        trained.sample(one, independent=True, refine=True)
