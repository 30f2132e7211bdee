"""References whose positions have three columns, one of which is constant: placed as in 2D, and the column is kept."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import alphastomics as asx
from alphastomics.model import AlphaSTomics
from alphastomics.tl._compare_runs import PREDICTED, Scoring, sample_expression

HEIGHT, OTHER = 5.0, 9.0


def raised(adata, value=HEIGHT):
    """The cells with a third coordinate."""
    result = adata.copy()
    result.obsm["spatial"] = np.c_[result.obsm["spatial"], np.broadcast_to(value, adata.n_obs)]
    return result


def heights(adata):
    """Another height for each slice: 5, 6 and 7."""
    return HEIGHT + pd.factorize(adata.obs["slice_id"], sort=True)[0]


@pytest.fixture(scope="module")
def cells(_reference):
    """Two slices of 100 cells, in 2D."""
    return _reference[np.r_[0:100, 300:400]].copy()


@pytest.fixture(scope="module")
def flat(cells, train_on):
    """A model of the cells in 2D."""
    return train_on(cells, mode="any", max_epochs=2)


@pytest.fixture(scope="module")
def planar(cells, train_on):
    """A model of the same cells, all at one height."""
    return train_on(raised(cells), mode="any", max_epochs=2)


@pytest.fixture
def query(places):
    """Another 60 cells in 2D."""
    return places[200:260].copy()


def assert_raised(result, expected, height=HEIGHT):
    assert result.tobytes() == np.c_[expected, np.broadcast_to(height, len(expected))].tobytes()


def test_cells_are_placed_as_in_2d(planar, flat, cells, query):
    assert (planar.schema.n_dims, planar.schema.plane) == (2, (2, HEIGHT))
    expected = flat.sample(query).obsm["spatial_reconstructed"]
    for each in (query, raised(query, OTHER)):
        assert_raised(planar.sample(each).obsm["spatial_reconstructed"], expected)
    del query.obsm["spatial"]
    assert_raised(planar.sample(query).obsm["spatial_reconstructed"], expected)
    assert_raised(planar.sample().obsm["spatial_reconstructed"], flat.sample(cells).obsm["spatial_reconstructed"])


@pytest.mark.parametrize("arguments", [{}, {"reduce": "mean"}, {"reduce": "medoid"}], ids=["draws", "mean", "medoid"])
def test_draws_and_their_uncertainty_are_those_in_2d(planar, flat, query, arguments):
    result, expected = (model.sample(query, n_samples=2, **arguments) for model in (planar, flat))
    assert_raised(result.obsm["spatial_reconstructed"], expected.obsm["spatial_reconstructed"])
    pd.testing.assert_frame_equal(result.obs, expected.obs)


def test_cells_that_are_not_placed_have_no_coordinate(planar, query):
    result = planar.sample(query, min_confidence=0.5).obsm["spatial_reconstructed"]
    missing = np.isnan(result)
    assert 0 < missing.all(axis=1).sum() < len(result)
    assert (missing.all(axis=1) == missing.any(axis=1)).all()


def test_a_saved_model_places_the_same(planar, query, cells, tmp_path):
    expected = planar.sample(query).obsm["spatial_reconstructed"].tobytes()
    planar.save(tmp_path / "model")
    for adata in (False, raised(cells, OTHER), cells.copy()):
        loaded = AlphaSTomics.load(tmp_path / "model", adata)
        assert loaded.schema == planar.schema
        assert loaded.sample(query).obsm["spatial_reconstructed"].tobytes() == expected
    loaded.save(tmp_path / "again")
    assert AlphaSTomics.load(tmp_path / "again").schema == planar.schema


@pytest.mark.parametrize("height", [HEIGHT, OTHER])
def test_known_positions_keep_their_values_and_others_share_their_height(planar, flat, query, height):
    query.obsm["spatial"][:20] = np.nan
    result = planar.sample(raised(query, height), inpaint=True).obsm["spatial_reconstructed"]
    assert_raised(result, flat.sample(query, inpaint=True).obsm["spatial_reconstructed"], height)
    assert result[20:].tobytes() == raised(query, height).obsm["spatial"][20:].tobytes()
    assert_raised(planar.sample(query, inpaint=True).obsm["spatial_reconstructed"], result[:, :2])


def test_expression_and_new_slices_are_those_of_2d(planar, flat, query):
    expected = flat.sample(query, mode="pos_to_expr", n_steps=2)
    for each in (query, raised(query, OTHER)):
        result = planar.sample(each, mode="pos_to_expr", n_steps=2)
        assert (result.X != expected.X).nnz == 0
        assert result.obsm["spatial"].tobytes() == each.obsm["spatial"].tobytes()
    result, expected = (model.sample(mode="joint", n_cells=30, n_steps=2) for model in (planar, flat))
    assert (result.X != expected.X).nnz == 0
    assert_raised(result.obsm["spatial"], expected.obsm["spatial"])


def test_embeddings_are_those_of_2d(planar, flat, query):
    embeddings = [
        model.get_latent_representation(each, use_positions=True).tobytes()
        for model, each in ((flat, query), (planar, query), (planar, raised(query, OTHER)))
    ]
    assert len(set(embeddings)) == 1


def test_adaptation_is_that_in_2d(cells, query, make_model, train_briefly):
    placed = []
    for adata in (cells, raised(cells)):
        model = train_briefly(make_model(adata), max_epochs=2)
        model.adapt(query)
        placed.append(model.sample(query).obsm["spatial_reconstructed"])
    assert_raised(placed[1], placed[0])


def test_sections_are_placed_at_the_height_of_the_first(cells, flat, query, train_on):
    model = train_on(raised(cells, heights(cells)), mode="any", max_epochs=2)
    expected = flat.sample(query).obsm["spatial_reconstructed"]
    assert_raised(model.sample(raised(query, OTHER)).obsm["spatial_reconstructed"], expected)
    hidden = cells.copy()
    hidden.obsm["spatial"][::3] = np.nan
    result = model.sample(raised(hidden, heights(cells)), inpaint=True).obsm["spatial_reconstructed"]
    assert_raised(result, flat.sample(hidden, inpaint=True).obsm["spatial_reconstructed"], heights(cells))


@pytest.mark.parametrize("frame", ["slice", "shared"])
def test_sections_are_placed_in_3d_in_a_shared_frame_only(cells, make_model, frame):
    schema = make_model(raised(cells, heights(cells)), setup={"frame": frame}).schema
    assert schema.n_dims == (3 if frame == "shared" else 2)


def test_a_query_that_is_not_planar_is_an_error(planar, query):
    with pytest.raises(ValueError, match="differs between the cells"):
        planar.sample(raised(query, np.arange(60)), mode="pos_to_expr", n_steps=1)


def test_reconstruction_and_scores_are_those_in_2d(planar, flat, query):
    scores = []
    for model, each in ((flat, query), (planar, raised(query, OTHER))):
        asx.tl.reconstruct(each, model=model, n_samples=2)
        scores.append(asx.tl.evaluate(each, baselines=True, cell_type_key="cell_type", niches=True))
    assert_raised(each.obsm["spatial_reconstructed"], query.obsm["spatial_reconstructed"])
    pd.testing.assert_frame_equal(scores[1], scores[0])
    assert "coverage" in scores[0]


def test_cells_without_a_position_are_placed_among_the_known_ones(cells):
    scores = []
    for height in (None, heights(cells)):
        adata = cells.copy() if height is None else raised(cells, height)
        adata.obsm["truth"] = adata.obsm["spatial"].copy()
        adata.obsm["spatial"][::4] = np.nan
        options = {"d_model": 16, "n_layers": 1, "n_heads": 2, "mode": "expr_to_pos", "max_epochs": 1, "adapt": False}
        asx.tl.reconstruct(adata, accelerator="cpu", enable_progress_bar=False, **options)
        scores.append(asx.tl.evaluate(adata, truth="truth"))
    known = np.arange(len(cells)) % 4 > 0
    result = adata.obsm["spatial_reconstructed"]
    assert result[known].tobytes() == adata.obsm["spatial"][known].tobytes()
    assert (result[:, 2] == heights(cells)).all()
    pd.testing.assert_frame_equal(scores[1], scores[0])


def test_expression_at_true_positions_is_scored_as_in_2d(planar, flat, query):
    scoring = Scoring(expression=True, n_samples=1, n_steps=1, max_cells=1000, cell_type_key=None)
    values = []
    for model, each in ((flat, query), (planar, raised(query, OTHER))):
        asx.tl.reconstruct(each, model=model)
        values.append(sample_expression(model, each, scoring, seed=0).layers[PREDICTED])
    assert (values[0] != values[1]).nnz == 0
