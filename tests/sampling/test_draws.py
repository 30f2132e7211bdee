"""Placements and draws of positions: how they are returned, aligned and reduced."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.spatial import KDTree

from alphastomics.data import AnnDataSource
from alphastomics.metrics import distance_spearman, rigid_align
from alphastomics.sampling import _position_draws
from alphastomics.sampling._cells import content_order, encode_cells
from alphastomics.sampling._position_draws import uncertainty


@pytest.fixture
def one(reference):
    """One slice."""
    return reference[reference.obs["slice_id"] == "slice_1"].copy()


def draws_of(model, cells, n_samples, **arguments):
    return (
        model.sample(cells, n_samples=n_samples, **arguments)
        .obsm["spatial_reconstructed"]
        .reshape(n_samples, cells.n_obs, -1)
    )


def test_draws_come_one_after_the_other(trained, reference):
    result = trained.sample(reference, n_samples=3)
    n = reference.n_obs
    assert result.n_obs == 3 * n
    assert result.obs["draw"].tolist() == [0] * n + [1] * n + [2] * n
    assert result.obs_names.is_unique
    assert isinstance(result.obs["slice_id"].dtype, pd.CategoricalDtype)
    pd.testing.assert_frame_equal(result.var, reference.var)
    for k in range(3):
        part = result[result.obs["draw"] == k]
        assert (part.X != reference.X).nnz == 0
        assert part.obs["cell_type"].tolist() == reference.obs["cell_type"].tolist()
    draws = result.obsm["spatial_reconstructed"].reshape(3, n, 2)
    assert not np.array_equal(draws[0], draws[1])


def test_one_sample_is_the_placement_which_is_not_a_draw(trained, reference):
    placement = trained.sample(reference)
    assert "draw" not in placement.obs
    assert list(placement.obs) == [*reference.obs, "spatial_reconstructed_confidence"]
    pd.testing.assert_frame_equal(placement.var, reference.var)
    np.testing.assert_array_equal(placement.obsm["spatial"], reference.obsm["spatial"])
    for draw in draws_of(trained, reference, 2):
        assert not np.array_equal(draw, placement.obsm["spatial_reconstructed"])


def test_the_seed_moves_a_placement_by_less_than_the_distance_of_neighbors(trained, one):
    """It chooses the radii of the cells, not where the cells belong."""
    first, second = (trained.sample(one, random_state=seed).obsm["spatial_reconstructed"] for seed in (0, 1))
    spacing = np.median(KDTree(one.obsm["spatial"]).query(one.obsm["spatial"], 2)[0][:, 1])
    moved = np.linalg.norm(first - second, axis=1)
    draws = draws_of(trained, one, 2)
    assert np.median(moved) < spacing
    assert np.median(moved) < np.median(np.linalg.norm(draws[0] - draws[1], axis=1))


def test_a_placement_has_the_distances_of_a_tissue_and_a_mean_has_not(trained, one):
    nearest = {
        name: np.median(KDTree(x).query(x, 2)[0][:, 1])
        for name, x in (
            ("true", one.obsm["spatial"]),
            ("placement", trained.sample(one).obsm["spatial_reconstructed"]),
            ("mean", trained.sample(one, n_samples=2, reduce="mean", refine=False).obsm["spatial_reconstructed"]),
        )
    }
    assert nearest["placement"] == pytest.approx(nearest["true"], rel=0.15)
    assert nearest["mean"] < 0.8 * nearest["true"]


def test_draws_are_aligned_to_their_medoid(trained, one):
    draws = draws_of(trained, one, 4)
    medoid = trained.sample(one, n_samples=4, reduce="medoid").obsm["spatial_reconstructed"]
    which = [np.array_equal(draw, medoid) for draw in draws]
    assert sum(which) == 1
    for draw in draws:
        assert np.allclose(draw.mean(0), medoid.mean(0), atol=1e-6 * medoid.std())
        assert np.allclose(rigid_align(draw, medoid)[1].rotation, np.eye(2), atol=1e-6)
    # The draw that is nearest to all others, each pair aligned.
    far = [[np.square(rigid_align(a, b)[0] - b).sum() for a in draws] for b in draws]
    assert which[int(np.argmin(np.sum(far, axis=1)))]


def test_the_uncertainty_of_the_medoid_is_its_distance_from_the_other_draws(trained, one):
    draws = draws_of(trained, one, 4)
    result = trained.sample(one, n_samples=4, reduce="medoid")
    assert result.n_obs == one.n_obs
    assert "draw" not in result.obs
    distance = np.sort(np.linalg.norm(draws - result.obsm["spatial_reconstructed"], axis=2), axis=0)
    assert not distance[0].any()  # the medoid itself
    expected = distance[2] / np.sqrt(np.log(2))  # two dimensions: the squared distance over its mean is exponential
    np.testing.assert_allclose(result.obs["spatial_reconstructed_uncertainty"], expected, rtol=1e-6)
    assert (expected > 0).all()


def test_the_uncertainty_of_the_mean_is_the_distance_of_the_draws_from_it(trained, one):
    draws = draws_of(trained, one, 4)
    result = trained.sample(one, n_samples=4, reduce="mean")
    assert "draw" not in result.obs
    mean = result.obsm["spatial_reconstructed"]
    moved = [rigid_align(draw, mean)[0] for draw in draws]
    expected = np.median(np.linalg.norm(moved - mean, axis=2), axis=0) / np.sqrt(np.log(2))
    np.testing.assert_allclose(result.obs["spatial_reconstructed_uncertainty"], expected, rtol=1e-4)
    assert (expected > 0).all()


@pytest.mark.parametrize("n_dims", [2, 3])
def test_the_uncertainty_of_normal_draws_is_their_root_mean_square_distance(n_dims):
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(2001, 50, n_dims)) * np.linspace(1, 5, 50)[:, None]
    expected = np.linspace(1, 5, 50) * np.sqrt(n_dims)
    np.testing.assert_allclose(uncertainty(draws, np.zeros((50, n_dims))), expected, rtol=0.12)
    draws[:200] += 1e6  # a tenth of the draws lies elsewhere
    np.testing.assert_allclose(uncertainty(draws, np.zeros((50, n_dims))), expected, rtol=0.25)


def test_the_mean_does_not_depend_on_the_draws(trained, one):
    two, three = (trained.sample(one, n_samples=n, reduce="mean") for n in (2, 3))
    np.testing.assert_array_equal(two.obsm["spatial_reconstructed"], three.obsm["spatial_reconstructed"])
    assert (two.obs["spatial_reconstructed_uncertainty"] != three.obs["spatial_reconstructed_uncertainty"]).all()
    assert distance_spearman(two.obsm["spatial_reconstructed"], trained.sample(one).obsm["spatial_reconstructed"]) > 0.9


def test_one_sample_has_no_uncertainty(trained, reference):
    placement = trained.sample(reference).obsm["spatial_reconstructed"]
    for reduce in ("mean", "medoid"):
        result = trained.sample(reference, reduce=reduce)
        np.testing.assert_array_equal(result.obsm["spatial_reconstructed"], placement)
        assert result.obs["spatial_reconstructed_uncertainty"].isna().all()


def test_each_draw_reads_other_genes_and_a_placement_all(trained, one, monkeypatch):
    seen = []

    def encode(module, source, rows, *, max_context, change=None):
        seen.append(change)
        return encode_cells(module, source, rows, max_context=max_context, change=change)

    monkeypatch.setattr(_position_draws, "encode_cells", encode)
    trained.sample(one)
    trained.sample(one, n_samples=3)
    assert seen[:2] == [None, None]  # of both networks
    assert all(change is not None for change in seen[2:])
    gains, offsets = zip(*seen[2:], strict=True)
    assert len({gain.tobytes() for gain in gains}) == len({offset.tobytes() for offset in offsets}) == 3


def test_a_draw_does_not_depend_on_how_many_follow(trained, one):
    two, four = draws_of(trained, one, 2), draws_of(trained, one, 4)
    for k in range(2):
        np.testing.assert_allclose(rigid_align(four[k], two[k])[0], two[k], atol=1e-6 * two.std())


def test_a_model_without_a_perturbation_places_cells_and_raises_for_draws(trained, one, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(trained, "fitted_", replace(trained.fitted_, perturbation=None))
    assert np.isfinite(trained.sample(one).obsm["spatial_reconstructed"]).all()
    with pytest.raises(RuntimeError, match="perturbation"):
        trained.sample(one, n_samples=2)


@pytest.mark.filterwarnings("ignore:.*cells have (no counts|the same expression):UserWarning")
def test_draws_of_very_few_genes(make_model, train_briefly, reference):
    model = train_briefly(make_model(reference[:, :1].copy()))
    assert np.isfinite(model.sample(n_samples=2).obsm["spatial_reconstructed"]).all()


def test_content_order_sorts_rows_by_their_expression(trained, one):
    source = AnnDataSource(one, trained.schema, positions=False)
    order = content_order(source, np.arange(one.n_obs))
    permuted = np.random.default_rng(0).permutation(one.n_obs)
    other = content_order(AnnDataSource(one[permuted].copy(), trained.schema, positions=False), np.arange(one.n_obs))
    np.testing.assert_array_equal(permuted[other], order)
