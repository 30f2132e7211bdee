"""One model samples in every mode; the sampled modality is never read."""

from __future__ import annotations

from dataclasses import replace

import anndata as ad
import numpy as np
import pytest
import torch

from alphastomics.model import AlphaSTomics
from alphastomics.sampling import ExpressionSampler
from alphastomics.sampling._canonical import candidate_positions
from alphastomics.train.defaults import default_deformation

N_STEPS = 4


def write(model, cells, **arguments):
    return model.sample(cells, mode="pos_to_expr", **{"n_steps": N_STEPS} | arguments)


def values(result) -> np.ndarray:
    return result.X.toarray()


# -- expression from positions -------------------------------------------------------------------------------------------


def test_expression_is_sampled_at_given_positions(everything, places):
    result = write(everything, places)
    assert list(result.var_names) == list(everything.schema.genes)
    assert list(result.obs_names) == list(places.obs_names)
    np.testing.assert_array_equal(result.obsm["spatial"], places.obsm["spatial"])
    assert np.isfinite(values(result)).all()
    assert (values(result) >= 0).all()
    assert values(result).std() > 0
    np.testing.assert_array_equal(result.obs["library_size"], everything.schema.library_size)
    assert result.obs["slice_id"].dtype == "category"


@pytest.mark.parametrize("poison", ["nan", "noise", "other genes"])
def test_expression_of_the_query_is_never_read(everything, places, poison):
    expected = values(write(everything, places)).tobytes()
    if poison == "nan":
        places.X = np.full(places.shape, np.nan)
    elif poison == "noise":
        places.X = np.random.default_rng(0).normal(size=places.shape)
    else:
        places = places[:, :1].copy()
        places.var_names = ["nonsense"]
    assert values(write(everything, places)).tobytes() == expected


@pytest.mark.parametrize("batch_size", [None, 120])
def test_permuted_rows_permute_the_expression(everything, places, batch_size):
    order = np.random.default_rng(0).permutation(places.n_obs)
    expected = values(write(everything, places, batch_size=batch_size))[order]
    np.testing.assert_array_equal(values(write(everything, places[order].copy(), batch_size=batch_size)), expected)


def test_slices_do_not_see_each_other(everything, reference, places):
    together = write(everything, reference)
    here = (together.obs["slice_id"] == "slice_1").to_numpy()
    np.testing.assert_allclose(values(together)[here], values(write(everything, places)), rtol=1e-4, atol=1e-4)


def test_shifting_a_slice_changes_nothing(everything, places):
    expected = values(write(everything, places))
    places.obsm["spatial"] = places.obsm["spatial"] + 1000.0
    np.testing.assert_allclose(values(write(everything, places)), expected, rtol=1e-2, atol=1e-2)


def test_a_cell_without_a_position_raises(everything, places):
    places.obsm["spatial"][3] = np.nan
    with pytest.raises(ValueError, match="'slice_1'"):
        write(everything, places)


def test_draws_of_expression(everything, places):
    every = write(everything, places, n_samples=4)
    assert every.obs["draw"].tolist() == np.repeat(range(4), places.n_obs).tolist()
    draws = values(every).reshape(4, places.n_obs, -1)
    mean = write(everything, places, n_samples=4, reduce="mean")
    assert (mean.layers["sd"] > 0).all()
    assert (mean.layers["sd"] ** 2).mean() == pytest.approx(
        draws.var(0, ddof=1).mean(), rel=0.1
    )  # pooled: see test_spread.py
    medoid = values(write(everything, places, n_samples=4, reduce="medoid"))
    assert any(np.array_equal(medoid, draw) for draw in draws)
    np.testing.assert_array_equal(draws[0], values(write(everything, places)))


def test_the_mean_matches_the_draws_without_their_noise(everything, places, monkeypatch):
    """On the scale on which the network works; the estimate of the clean value is a martingale along the chain."""
    monkeypatch.setattr(everything, "fitted_", replace(everything.fitted_, marginals=None))
    schema = everything.schema

    def network(x):
        return (np.log1p(x * schema.target_library_size() / schema.library_size) - schema.gene_mean) / schema.gene_scale

    mean = network(values(write(everything, places, n_samples=4, reduce="mean")))
    draws = network(values(write(everything, places, n_samples=32))).reshape(32, *mean.shape)
    assert ((mean - draws.mean(0)) ** 2).mean() < 0.2 * draws.var(0).mean()
    assert mean.var(0).mean() > 0.01  # it is not the same everywhere
    np.testing.assert_array_equal(mean, network(values(write(everything, places, n_samples=4, reduce="mean"))))


def test_one_draw_has_no_standard_deviation_except_for_observed_values(everything, places):
    x = places.X.toarray().astype(np.float32)
    x[::2] = np.nan
    places.X = x
    sd = write(everything, places, inpaint=True, reduce="mean").layers["sd"]
    np.testing.assert_array_equal(np.isnan(sd), np.isnan(x))
    assert (sd[1::2] == 0).all()
    assert np.isnan(write(everything, places, reduce="mean").layers["sd"]).all()


def test_the_spread_of_a_slice_does_not_depend_on_others(everything, reference, places):
    together = write(everything, reference, n_samples=4, reduce="mean").layers["sd"]
    alone = write(everything, places, n_samples=4, reduce="mean").layers["sd"]
    np.testing.assert_allclose(
        together[(reference.obs["slice_id"] == "slice_1").to_numpy()], alone, rtol=1e-3, atol=1e-4
    )


def test_known_cells_are_kept_bit_by_bit(everything, places):
    x = places.X.toarray().astype(np.float32)
    hidden = np.arange(0, places.n_obs, 2)
    x[hidden] = np.nan
    places.X = x
    result = write(everything, places, inpaint=True, n_samples=2, reduce="mean")
    known = np.isfinite(x[:, 0])
    np.testing.assert_array_equal(values(result)[known], x[known])
    assert np.isfinite(values(result)).all()
    assert (result.layers["sd"][known] == 0).all()
    assert (result.layers["sd"][~known] > 0).any()
    np.testing.assert_allclose(result.obs["library_size"][known], x[known].sum(1))
    free = write(everything, places)
    assert not np.array_equal(values(free)[~known], values(result)[~known])


def test_known_genes_are_kept_and_the_others_sampled(everything, places):
    part = places[:, :40].copy()
    result = write(everything, part, inpaint=True)
    np.testing.assert_array_equal(values(result)[:, :40], part.X.toarray())
    assert values(result)[:, 40:].std() > 0
    np.testing.assert_allclose(
        result.obs["library_size"], part.X.toarray().sum(1) / np.asarray(everything.schema.gene_share)[:40].sum()
    )


def test_missing_values_of_genes_that_the_model_lacks_do_not_matter(everything, places):
    x = places.X.toarray().astype(np.float32)
    x[::2] = np.nan
    places.X = x
    other = places[:, :1].copy()
    other.var_names, other.X = ["other"], np.full((places.n_obs, 1), np.nan, dtype=np.float32)
    more = ad.concat([other, places], axis=1, merge="first")
    expected = values(write(everything, places, inpaint=True))
    np.testing.assert_array_equal(values(write(everything, more, inpaint=True)), expected)


def test_large_slices_are_split(everything, places):
    result = write(everything, places, batch_size=120)
    assert np.isfinite(values(result)).all()
    assert not np.array_equal(values(result), values(write(everything, places)))


def test_contexts_of_a_large_slice_are_random_subsets(everything):
    position, sampler = torch.linspace(-1, 1, 1000)[:, None].repeat(1, 2), everything._make_sampler()
    contexts = ExpressionSampler(sampler, position, max_context=200).contexts
    assert torch.cat(contexts).unique().equal(torch.arange(1000))
    for cells in contexts:
        assert len(cells) <= 200
        assert (cells.diff() > 0).all()
        assert position[cells].mean().abs() < 0.2
    (whole,) = ExpressionSampler(sampler, position, max_context=1000).contexts
    assert whole.equal(torch.arange(1000))


# -- both ----------------------------------------------------------------------------------------------------------------


def test_a_tissue_is_drawn(everything, reference):
    result = everything.sample(mode="joint", n_cells=150, n_steps=12, n_samples=2)
    assert result.shape == (300, reference.n_vars)
    assert result.obs["slice_id"].unique().tolist() == ["sample_0", "sample_1"]
    assert result.obs_names.is_unique
    assert np.isfinite(result.obsm["spatial"]).all()
    assert np.isfinite(values(result)).all()
    first, second = values(result)[:150], values(result)[150:]
    assert not np.array_equal(first, second)
    again = everything.sample(mode="joint", n_cells=150, n_steps=12, n_samples=2)
    np.testing.assert_array_equal(values(again), values(result))
    np.testing.assert_array_equal(again.obsm["spatial"], result.obsm["spatial"])
    size = np.linalg.norm(reference.obsm["spatial"] - reference.obsm["spatial"].mean(0), axis=1)
    drawn = result.obsm["spatial"][:150]
    assert np.linalg.norm(drawn - drawn.mean(0), axis=1).mean() < 3 * size.mean()


def test_a_single_cell_is_drawn(everything):
    assert everything.sample(mode="joint", n_cells=1, n_steps=12).shape == (1, 60)


@pytest.mark.parametrize(("mode", "argument"), [("pos_to_expr", {"refine": True}), ("joint", {"reduce": "mean"})])
def test_an_argument_without_effect_raises(everything, mode, argument):
    n_cells = 5 if mode == "joint" else None
    with pytest.raises(ValueError, match=next(iter(argument))):
        everything.sample(mode=mode, n_cells=n_cells, **argument)


def test_a_query_for_new_slices_raises(everything, places):
    with pytest.raises(ValueError, match="adata"):
        everything.sample(places, mode="joint", n_cells=5)
    with pytest.raises(ValueError, match="indices"):
        everything.sample(mode="joint", n_cells=5, indices=[0])


@pytest.mark.parametrize("mode", ["pos_to_expr", "joint"])
def test_a_model_of_one_mode_samples_it_and_raises_for_others(small, model_of, mode):
    model = model_of(mode)
    arguments = {"mode": "joint", "n_cells": 20} if mode == "joint" else {"mode": mode, "adata": small}
    assert np.isfinite(model.sample(n_steps=2, **arguments).obsm["spatial"]).all()
    with pytest.raises(ValueError, match="mode="):
        model.sample(small, mode="expr_to_pos")


def test_a_shared_frame_is_sampled_in_every_direction(reference, train_on):
    model = train_on(reference, mode="any", setup={"frame": "shared"}, max_epochs=2)
    assert np.isfinite(values(write(model, reference))).all()
    assert np.isfinite(model.sample(mode="joint", n_cells=30, n_steps=10).obsm["spatial"]).all()
    assert np.isfinite(model.sample(reference).obsm["spatial_reconstructed"]).all()


def test_a_slice_that_overlaps_with_the_first_keeps_its_place(everything, places):
    """Cut at one side, it has another center, and its cells still lie where they lay in the whole slice."""
    rotation, scale = np.asarray(everything.fitted_.frame.rotation).T, everything.schema.scale
    x = places.obsm["spatial"] - places.obsm["spatial"].mean(0) + np.asarray(everything.fitted_.frame.centroid)
    part = x[:, 0] < np.quantile(x[:, 0], 0.6)
    whole, cut, away = (
        candidate_positions(everything._make_sampler(), p, None)[0] for p in (x, x[part], x[part] + 100 * scale)
    )
    np.testing.assert_allclose(whole[part], cut, atol=1e-5)
    np.testing.assert_allclose(whole, (x - x.mean(0)) / scale @ rotation, atol=1e-5)
    np.testing.assert_allclose(away, cut - cut.mean(0), atol=1e-3)


def test_views_of_the_mean_are_deformed_as_in_training_and_leave_the_sampler_unchanged(everything, places, monkeypatch):
    """Every view is of a slice of another shape; those of a registered frame keep theirs."""
    seen, mean = [], ExpressionSampler.mean

    def watched(self, local_density, position):
        seen.append(position)
        own = self.position
        found = mean(self, local_density, position)
        assert self.position is own
        return found

    monkeypatch.setattr(ExpressionSampler, "mean", watched)
    everything.sample(places, mode="pos_to_expr", n_samples=3, reduce="mean", n_steps=1)
    assert len(seen) == 3 * places.obs["slice_id"].nunique()
    assert not torch.allclose(seen[0], seen[1])
    assert float((seen[0] - seen[1]).abs().max()) < 2
    sampler = everything._make_sampler()
    assert sampler.deformation == default_deformation(everything.adata.n_obs) > 0
    assert replace(sampler, schema=replace(sampler.schema, frame="shared")).deformation == 0


def test_views_are_deformed_as_the_last_training_was(small, train_on, train_briefly, tmp_path):
    model = train_on(small, mode="pos_to_expr", max_epochs=1)
    assert model.fitted_.deformation == default_deformation(small.n_obs)
    train_briefly(model, plan_kwargs={"deformation": 0.37})
    assert model.fitted_.deformation == 0.37
    model.save(tmp_path / "m")
    loaded = AlphaSTomics.load(tmp_path / "m", adata=small)
    assert loaded.fitted_.deformation == 0.37
    train_briefly(loaded)
    assert loaded.fitted_.deformation == default_deformation(small.n_obs)
