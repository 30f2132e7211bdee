"""Sampling positions from expression: results and errors."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from alphastomics.metrics import distance_spearman
from alphastomics.tl import evaluate


def test_a_trained_model_places_cells_where_they_are(trained, reference):
    sampled = trained.sample(reference)
    for name in reference.obs["slice_id"].unique():
        cells = (reference.obs["slice_id"] == name).to_numpy()
        score = distance_spearman(reference.obsm["spatial"][cells], sampled.obsm["spatial_reconstructed"][cells])
        assert score > 0.35


def test_result_has_the_units_and_the_frame_of_the_first_slice(trained, reference):
    first = reference[reference.obs["slice_id"] == "slice_0"].copy()
    true, placed = first.obsm["spatial"], trained.sample(first).obsm["spatial_reconstructed"]
    assert np.linalg.norm(placed.mean(0) - true.mean(0)) < 1e-3 * true.std()
    assert 0.3 < placed.std() / true.std() < 1.2
    # The frame was turned onto this very slice, so that nothing is left to turn.
    from alphastomics.metrics import rigid_align

    rotation = rigid_align(placed, true)[1].rotation
    assert np.allclose(rotation, np.eye(2), atol=0.02)


def test_seed_decides_the_draw(trained, reference, positions_of):
    first = positions_of(trained.sample(reference, n_samples=2, random_state=3))
    np.random.seed(5)
    assert positions_of(trained.sample(reference, n_samples=2, random_state=3)) == first
    assert positions_of(trained.sample(reference, n_samples=2, random_state=4)) != first


def test_adata_none_is_the_reference(trained, positions_of):
    sampled = trained.sample()
    assert positions_of(sampled) == positions_of(trained.sample(trained.adata))


# -- slices of the query -----------------------------------------------------------------------------------------------


def test_dissociated_cells_are_one_set(trained, reference, positions_of):
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    expected = positions_of(trained.sample(one))
    del one.obs["slice_id"]
    result = trained.sample(one)
    assert positions_of(result) == expected
    assert "slice_id" not in result.obs


def test_cells_without_a_slice_are_a_set_of_their_own(trained, reference):
    expected = trained.sample(reference)
    last = (reference.obs["slice_id"] == "slice_2").to_numpy()
    reference.obs["slice_id"] = reference.obs["slice_id"].where(~last)
    result = trained.sample(reference)
    assert result.obsm["spatial_reconstructed"].tobytes() == expected.obsm["spatial_reconstructed"].tobytes()
    assert result.obs["slice_id"].isna().sum() == 300


@pytest.mark.parametrize("kind", ["string", "category", "integer"])
def test_slices_of_any_name_and_type(trained, reference, positions_of, kind):
    expected = positions_of(trained.sample(reference))
    codes = reference.obs["slice_id"].cat.codes.to_numpy()
    names = {"string": codes.astype(str), "integer": codes + 7, "category": pd.Categorical(codes.astype(str))}[kind]
    reference.obs["slice_id"] = names
    result = trained.sample(reference)
    assert positions_of(result) == expected
    pd.testing.assert_series_equal(result.obs["slice_id"], reference.obs["slice_id"])


def test_one_cell_is_placed(trained, reference):
    result = trained.sample(reference[:1].copy(), n_samples=2, reduce="mean")
    assert result.obsm["spatial_reconstructed"].shape == (1, 2)
    assert np.isfinite(result.obsm["spatial_reconstructed"]).all()


def test_a_query_without_cells_raises(trained, reference):
    with pytest.raises(ValueError, match="no cells"):
        trained.sample(reference[:0].copy())
    with pytest.raises(ValueError, match="no cells"):
        trained.get_latent_representation(reference[:0].copy())


def test_cells_without_counts_are_placed(trained, reference):
    reference.X = sp.vstack([sp.csr_matrix((5, 60), dtype=np.float32), reference.X[5:]], format="csr")
    with pytest.warns(UserWarning, match="5 of .* cells have no counts"):
        assert np.isfinite(trained.sample(reference).obsm["spatial_reconstructed"]).all()


def test_slices_have_independent_noise_whatever_is_drawn_beside_them(everything, reference):
    """Slices of equal positions: residuals of the draws around their mean do not correlate."""
    slices = [reference[reference.obs["slice_id"] == name].copy() for name in ("slice_0", "slice_1")]
    slices[1].obsm["spatial"] = slices[0].obsm["spatial"].copy()
    both = ad.concat(slices)
    drawn, alone = (everything.sample(each, mode="pos_to_expr", n_steps=4) for each in (both, slices[1]))
    first, second = np.split(np.log1p(drawn.X.toarray()), 2)
    assert abs(np.corrcoef((first - first.mean(0)).ravel(), (second - second.mean(0)).ravel())[0, 1]) < 0.5
    np.testing.assert_allclose(drawn[300:].X.toarray(), alone.X.toarray(), rtol=1e-4, atol=1e-4)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": 2}, "n_steps"),
        ({"sampler": "ddpm"}, "sampler"),
        ({"n_samples": 0}, "n_samples"),
        ({"mode": "pos_to_expr"}, "mode='expr_to_pos'.*mode='pos_to_expr'"),
        ({"mode": "joint", "n_cells": 10}, "mode='expr_to_pos'.*mode='joint'"),
    ],
)
def test_invalid_arguments_raise(trained, reference, arguments, message):
    with pytest.raises(ValueError, match=message):
        trained.sample(reference, **arguments)


def test_an_untrained_model_raises(make_model, reference):
    model = make_model(reference)
    with pytest.raises(RuntimeError, match="not trained"):
        model.sample(reference)
    with pytest.raises(RuntimeError, match="not trained"):
        model.get_latent_representation(reference)


@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN.*'gene"), (-1, "negative.*gene")])
def test_invalid_values_in_the_query_raise(trained, reference, value, message):
    reference.X.data[17] = value
    with pytest.raises(ValueError, match=message):
        trained.sample(reference)


def test_a_result_is_the_query_with_positions(trained, reference):
    query = reference[:200].copy()
    query.layers["twice"] = 2 * query.X
    query.obsm["X_pca"] = np.arange(400.0).reshape(200, 2)
    query.uns["cell_type_colors"] = ["#000000", "#ffffff"]
    before = query.copy()
    result = trained.sample(query, n_samples=3, reduce="mean", key_added="placed")
    assert query.obsm.keys() == before.obsm.keys()
    for part in (query, result):
        for name in before.obsm:
            np.testing.assert_array_equal(part.obsm[name], before.obsm[name])
        assert (part.layers["twice"] != before.layers["twice"]).nnz == 0
    assert set(result.obsm) - set(before.obsm) == {"placed"}
    assert [*result.obs] == [*before.obs, "placed_uncertainty", "placed_confidence"]
    assert result.uns["cell_type_colors"] == before.uns["cell_type_colors"]
    assert result.uns["placed"]["function"] == "sample"
    assert evaluate(result, prediction="placed")["distance_spearman"].notna().all()
    again = trained.sample(result, key_added="placed")
    assert [*again.obs] == [*before.obs, "placed_confidence"]
    draws = trained.sample(query, n_samples=2)
    assert draws.uns.keys() == result.uns.keys() - {"placed"} | {"spatial_reconstructed"}
    np.testing.assert_array_equal(draws.obsm["X_pca"], np.tile(query.obsm["X_pca"], (2, 1)))


def test_known_positions_are_marked(trained, reference):
    query = reference[:200].copy()
    query.obsm["spatial"][:50] = np.nan
    result = trained.sample(query, inpaint=True)
    assert result.obs["spatial_reconstructed_placed"].tolist() == [True] * 50 + [False] * 150
    assert "spatial_reconstructed_placed" not in trained.sample(query).obs


def test_sampled_expression_is_beside_what_the_query_has(everything, reference):
    places = reference[:100].copy()
    places.obsm["X_pca"] = np.ones((100, 3))
    colors = ["#000000"] * places.obs["cell_type"].nunique()
    places.obs["cell_type"] = places.obs["cell_type"].cat.remove_unused_categories()
    places.uns["cell_type_colors"] = colors
    result = everything.sample(places, mode="pos_to_expr", n_steps=2)
    assert result.obsm.keys() == places.obsm.keys()
    assert list(result.uns["cell_type_colors"]) == colors
    with pytest.raises(ValueError, match="key_added='placed' requires mode='expr_to_pos'"):
        everything.sample(places, mode="pos_to_expr", key_added="placed")
