"""Sampling positions from expression: what the result depends on, and what it must not depend on."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from alphastomics.metrics import aligned_rmsd, distance_spearman

STEPS = 4


def reorder(adata: ad.AnnData, seed: int = 1) -> tuple[ad.AnnData, np.ndarray]:
    order = np.random.default_rng(seed).permutation(adata.n_obs)
    return adata[order].copy(), order


def test_a_trained_model_places_cells_where_they_are(trained, reference):
    sampled = trained.sample(reference, n_steps=1)
    for name in reference.obs["slice_id"].unique():
        cells = (reference.obs["slice_id"] == name).to_numpy()
        score = distance_spearman(reference.obsm["spatial"][cells], sampled.obsm["spatial"][cells])
        assert score > 0.35


def test_result_has_the_units_and_the_frame_of_the_first_slice(trained, reference):
    first = reference[reference.obs["slice_id"] == "slice_0"].copy()
    true, placed = first.obsm["spatial"], trained.sample(first, n_steps=1).obsm["spatial"]
    assert np.linalg.norm(placed.mean(0) - true.mean(0)) < 1e-3 * true.std()
    assert 0.3 < placed.std() / true.std() < 1.2
    # The frame was turned onto this very slice, so that nothing is left to turn.
    from alphastomics.metrics import rigid_align

    rotation = rigid_align(placed, true)[1].rotation
    assert np.allclose(rotation, np.eye(2), atol=0.02)


def test_seed_decides_the_draw(trained, reference, positions_of):
    first = positions_of(trained.sample(reference, n_steps=STEPS, random_state=3))
    np.random.seed(5)
    assert positions_of(trained.sample(reference, n_steps=STEPS, random_state=3)) == first
    assert positions_of(trained.sample(reference, n_steps=STEPS, random_state=4)) != first


def test_adata_none_is_the_reference(trained, positions_of):
    sampled = trained.sample(n_steps=STEPS)
    assert positions_of(sampled) == positions_of(trained.sample(trained.adata, n_steps=STEPS))


# -- what is never read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", ["nan", "infinity", "noise", "permuted", "five columns", "deleted"])
def test_positions_of_the_query_are_never_read(trained, reference, positions_of, poison):
    clean = positions_of(trained.sample(reference, n_steps=STEPS))
    rng = np.random.default_rng(0)
    position = reference.obsm["spatial"]
    if poison == "deleted":
        del reference.obsm["spatial"]
    else:
        reference.obsm["spatial"] = {
            "nan": np.full_like(position, np.nan),
            "infinity": np.full_like(position, np.inf),
            "noise": rng.normal(size=position.shape) * 1e6,
            "permuted": rng.permutation(position),
            "five columns": rng.normal(size=(len(position), 5)),
        }[poison]
    assert positions_of(trained.sample(reference, n_steps=STEPS)) == clean


def test_query_is_unchanged(trained, reference, assert_same):
    reference.layers["other"] = reference.X.copy()
    reference.uns["note"] = {"key": [1, 2]}
    reference.obs["draw"] = "mine"
    reference.obs["slice_id"] = reference.obs["slice_id"].astype(str)
    before = reference.copy()
    for arguments in ({}, {"n_samples": 2}, {"n_samples": 2, "reduce": "medoid"}, {"inpaint": True}):
        trained.sample(reference, n_steps=2, **arguments)
        trained.get_latent_representation(reference)
        assert_same(reference, before)


def test_result_shares_nothing_with_the_query(trained, reference, assert_same):
    before = reference.copy()
    sampled = trained.sample(reference, n_steps=1)
    sampled.X.data[:] = -1
    sampled.obs["cell_type"] = "changed"
    sampled.var["marker_of"] = "changed"
    assert_same(reference, before)


# -- genes --------------------------------------------------------------------------------------------------------------


def test_order_of_the_genes_does_not_matter(trained, reference, positions_of):
    order = np.random.default_rng(2).permutation(reference.n_vars)
    expected = positions_of(trained.sample(reference, n_steps=STEPS))
    assert positions_of(trained.sample(reference[:, order].copy(), n_steps=STEPS)) == expected


def test_other_genes_are_ignored(trained, reference, positions_of):
    other = ad.AnnData(
        X=sp.random(reference.n_obs, 7, density=0.5, format="csr", random_state=0, dtype=np.float32),
        obs=reference.obs,
        var=pd.DataFrame(index=[f"other_{i}" for i in range(7)]),
    )
    other.X.data[:] = 100
    wider = ad.concat([other, reference], axis="var", merge="same")
    assert wider.n_vars == 67
    assert positions_of(trained.sample(wider, n_steps=STEPS)) == positions_of(trained.sample(reference, n_steps=STEPS))


def test_missing_genes_are_named_and_cost_little(trained, reference):
    whole = trained.sample(reference, n_steps=1).obsm["spatial"]
    missing = list(reference.var_names[[3, 41]])
    fewer = reference[:, [name not in missing for name in reference.var_names]].copy()
    with pytest.warns(UserWarning, match=rf"2 of 60 genes are missing.*'{missing[0]}', '{missing[1]}'"):
        part = trained.sample(fewer, n_steps=1).obsm["spatial"]
    cells = (reference.obs["slice_id"] == "slice_1").to_numpy()
    assert distance_spearman(whole[cells], part[cells]) > 0.8
    assert part.tobytes() != whole.tobytes()


def test_half_of_the_genes_is_enough_and_fewer_are_not(trained, reference):
    with pytest.warns(UserWarning, match="30 of 60 genes are missing"):
        assert np.isfinite(trained.sample(reference[:, :30].copy(), n_steps=1).obsm["spatial"]).all()
    with pytest.raises(ValueError, match="31 of 60 genes are missing .*more than half"):
        trained.sample(reference[:, :29].copy(), n_steps=1)


def test_no_shared_gene_is_refused(trained, reference):
    reference.var_names = [f"ENSG{i}" for i in range(60)]
    with pytest.raises(ValueError, match=r"None of the 60 genes.*ENSG0.*identifiers"):
        trained.sample(reference, n_steps=1)
    with pytest.raises(ValueError, match="None of the 60 genes"):
        trained.get_latent_representation(reference)


# -- rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"n_views": 3}, {"n_samples": 3, "reduce": "medoid"}, {"n_samples": 3, "reduce": "mean"}],
    ids=["one", "views", "medoid", "mean"],
)
def test_permuted_rows_permute_the_result(trained, reference, arguments):
    permuted, order = reorder(reference)
    expected = trained.sample(reference, n_steps=STEPS, **arguments)
    result = trained.sample(permuted, n_steps=STEPS, **arguments)
    assert result.obsm["spatial"].tobytes() == expected.obsm["spatial"][order].tobytes()
    if "reduce" in arguments:
        assert result.obs["position_uncertainty"].equals(expected.obs["position_uncertainty"].iloc[order])


def test_permuted_rows_permute_every_draw(trained, reference):
    permuted, order = reorder(reference)
    n = reference.n_obs
    expected = trained.sample(reference, n_steps=STEPS, n_samples=2).obsm["spatial"]
    result = trained.sample(permuted, n_steps=STEPS, n_samples=2).obsm["spatial"]
    assert result.tobytes() == np.concatenate([expected[:n][order], expected[n:][order]]).tobytes()


def test_cells_of_equal_expression_change_places_at_most(trained, reference):
    one = reference[reference.obs["slice_id"] == "slice_0"].copy()
    twins = ad.concat([one, one[:20]], index_unique="-", merge="same")
    permuted, order = reorder(twins)
    a = trained.sample(twins, n_steps=STEPS).obsm["spatial"][order]
    b = trained.sample(permuted, n_steps=STEPS).obsm["spatial"]
    single = order[(order >= 20) & (order < 300)]
    at = np.flatnonzero(np.isin(order, single))
    assert a[at].tobytes() == b[at].tobytes()
    assert np.array_equal(a[np.lexsort(a.T)], b[np.lexsort(b.T)])


def test_a_slice_is_placed_the_same_alone_or_beside_others(trained, reference):
    arguments = {"n_steps": STEPS, "n_samples": 2, "reduce": "medoid", "n_views": 2}
    together = trained.sample(reference, **arguments)
    for name in ("slice_0", "slice_2"):
        cells = (reference.obs["slice_id"] == name).to_numpy()
        alone = trained.sample(reference[cells].copy(), **arguments)
        assert alone.obsm["spatial"].tobytes() == together.obsm["spatial"][cells].tobytes()


def test_indices(trained, reference):
    rows = np.flatnonzero(reference.obs["slice_id"] == "slice_1")[::-1]
    expected = trained.sample(reference[rows].copy(), n_steps=STEPS)
    result = trained.sample(reference, indices=rows, n_steps=STEPS)
    assert result.obs_names.tolist() == reference.obs_names[rows].tolist()
    assert result.obsm["spatial"].tobytes() == expected.obsm["spatial"].tobytes()
    in_reference = trained.sample(indices=list(rows), n_steps=STEPS)
    assert in_reference.obsm["spatial"].tobytes() == expected.obsm["spatial"].tobytes()


# -- storage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "store",
    [
        lambda x: x.tocsc(),
        lambda x: sp.csr_array(x),
        lambda x: x.toarray(),
        lambda x: x.toarray().astype(np.float64),
        lambda x: np.asfortranarray(x.toarray()),
        lambda x: x.toarray().astype(np.int64),
        lambda x: x.astype(np.int32),
        lambda x: x.astype(np.uint16),
    ],
    ids=["csc", "csr_array", "dense", "float64", "fortran", "int64", "sparse int32", "sparse uint16"],
)
def test_storage_of_the_matrix_does_not_matter(trained, reference, positions_of, store):
    expected = positions_of(trained.sample(reference, n_steps=2))
    other = ad.AnnData(X=store(reference.X), obs=reference.obs, var=reference.var)
    assert positions_of(trained.sample(other, n_steps=2)) == expected


def test_a_view_gives_what_its_copy_gives(trained, reference, positions_of):
    view = reference[::2, ::-1]
    assert view.is_view
    sampled = trained.sample(view, n_steps=2)
    assert view.is_view
    assert positions_of(sampled) == positions_of(trained.sample(view.copy(), n_steps=2))


def test_backed_is_refused(trained, reference, tmp_path):
    reference.write_h5ad(tmp_path / "query.h5ad")
    backed = ad.read_h5ad(tmp_path / "query.h5ad", backed="r")
    with pytest.raises(ValueError, match=r"backed.*to_memory"):
        trained.sample(backed, n_steps=1)
    backed.file.close()


# -- slices of the query ------------------------------------------------------------------------------------------------


def test_dissociated_cells_are_one_set(trained, reference, positions_of):
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    expected = positions_of(trained.sample(one, n_steps=STEPS))
    del one.obs["slice_id"]
    result = trained.sample(one, n_steps=STEPS)
    assert positions_of(result) == expected
    assert "slice_id" not in result.obs


def test_cells_without_a_slice_are_a_set_of_their_own(trained, reference):
    expected = trained.sample(reference, n_steps=STEPS)
    last = (reference.obs["slice_id"] == "slice_2").to_numpy()
    reference.obs["slice_id"] = reference.obs["slice_id"].where(~last)
    result = trained.sample(reference, n_steps=STEPS)
    assert result.obsm["spatial"].tobytes() == expected.obsm["spatial"].tobytes()
    assert result.obs["slice_id"].isna().sum() == 300


@pytest.mark.parametrize("kind", ["string", "category", "integer"])
def test_slices_of_any_name_and_type(trained, reference, positions_of, kind):
    expected = positions_of(trained.sample(reference, n_steps=2))
    codes = reference.obs["slice_id"].cat.codes.to_numpy()
    names = {"string": codes.astype(str), "integer": codes + 7, "category": pd.Categorical(codes.astype(str))}[kind]
    reference.obs["slice_id"] = names
    result = trained.sample(reference, n_steps=2)
    assert positions_of(result) == expected
    assert isinstance(result.obs["slice_id"].dtype, pd.CategoricalDtype)
    assert list(result.obs["slice_id"]) == list(reference.obs["slice_id"])


def test_one_cell_is_placed(trained, reference):
    result = trained.sample(reference[:1].copy(), n_steps=2, n_samples=2, reduce="mean")
    assert result.obsm["spatial"].shape == (1, 2)
    assert np.isfinite(result.obsm["spatial"]).all()


def test_no_cells_are_refused(trained, reference):
    with pytest.raises(ValueError, match="no cells"):
        trained.sample(reference[:0].copy(), n_steps=1)
    with pytest.raises(ValueError, match="no cells"):
        trained.get_latent_representation(reference[:0].copy())


def test_cells_without_counts_are_placed(trained, reference):
    reference.X = sp.vstack([sp.csr_matrix((5, 60), dtype=np.float32), reference.X[5:]], format="csr")
    assert np.isfinite(trained.sample(reference, n_steps=2).obsm["spatial"]).all()


# -- draws --------------------------------------------------------------------------------------------------------------


def test_draws_come_one_after_the_other(trained, reference):
    result = trained.sample(reference, n_steps=STEPS, n_samples=3)
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
    draws = result.obsm["spatial"].reshape(3, n, 2)
    assert not np.array_equal(draws[0], draws[1])
    single = trained.sample(reference, n_steps=STEPS)
    assert "draw" not in single.obs
    assert list(single.obs) == list(reference.obs)
    pd.testing.assert_frame_equal(single.var, reference.var)


def test_draws_are_aligned_to_their_medoid(trained, reference):
    from alphastomics.metrics import rigid_align

    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    draws = trained.sample(one, n_steps=STEPS, n_samples=4).obsm["spatial"].reshape(4, 300, 2)
    medoid = trained.sample(one, n_steps=STEPS, n_samples=4, reduce="medoid").obsm["spatial"]
    which = [np.array_equal(draw, medoid) for draw in draws]
    assert sum(which) == 1
    for draw in draws:
        assert np.allclose(draw.mean(0), medoid.mean(0), atol=1e-6 * medoid.std())
        assert np.allclose(rigid_align(draw, medoid)[1].rotation, np.eye(2), atol=1e-6)
    # The draw that is nearest to all others, each pair aligned.
    far = [[np.square(rigid_align(a, b)[0] - b).sum() for a in draws] for b in draws]
    assert which[int(np.argmin(np.sum(far, axis=1)))]


def test_mean_and_uncertainty_are_those_of_the_draws(trained, reference):
    draws = trained.sample(reference, n_steps=STEPS, n_samples=3).obsm["spatial"].reshape(3, -1, 2)
    mean = trained.sample(reference, n_steps=STEPS, n_samples=3, reduce="mean")
    medoid = trained.sample(reference, n_steps=STEPS, n_samples=3, reduce="medoid")
    np.testing.assert_allclose(mean.obsm["spatial"], draws.mean(0), rtol=1e-12)
    rms = np.sqrt(np.square(draws - draws.mean(0)).sum(2).mean(0))
    for result in (mean, medoid):
        assert result.n_obs == reference.n_obs
        assert "draw" not in result.obs
        np.testing.assert_allclose(result.obs["position_uncertainty"], rms, rtol=1e-9)
    assert (rms > 0).all()


def test_first_draw_does_not_depend_on_how_many_follow(trained, reference):
    cells = (reference.obs["slice_id"] == "slice_0").to_numpy()
    one = reference[cells].copy()
    single = trained.sample(one, n_steps=STEPS).obsm["spatial"]
    first = trained.sample(one, n_steps=STEPS, n_samples=3).obsm["spatial"][:300]
    assert aligned_rmsd(single, first) < 1e-6


@pytest.mark.parametrize("sampler", [{"sampler": "ddim"}, {"sampler": "ddim", "eta": 0.5}, {"sampler": "dpm++2m"}])
def test_other_samplers_agree_on_the_tissue(trained, reference, sampler):
    one = reference[reference.obs["slice_id"] == "slice_0"].copy()
    mean = trained.sample(one, n_steps=1).obsm["spatial"]
    result = trained.sample(one, n_steps=3, **sampler).obsm["spatial"]
    assert distance_spearman(mean, result) > 0.2


def test_views_are_averaged(trained, reference):
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    whole, few, many, other = (
        trained.sample(one, n_steps=1, n_views=n, random_state=seed).obsm["spatial"]
        for n, seed in ((1, 0), (2, 0), (16, 0), (16, 1))
    )
    assert aligned_rmsd(whole, many) < 0.5
    # The mean of many views depends on which they are less than that of few.
    assert 0 < aligned_rmsd(many, other) < aligned_rmsd(many, few)


def test_views_of_very_few_genes(make_model, train_briefly, reference):
    model = train_briefly(make_model(reference[:, :1].copy()))
    assert np.isfinite(model.sample(n_steps=1, n_views=20).obsm["spatial"]).all()


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_samples": 0}, "n_samples must be at least 1"),
        ({"n_steps": 0}, "n_steps must be at least 1"),
        ({"reduce": "median"}, "reduce='median' is unknown"),
        ({"sampler": "euler"}, "sampler='euler' is unknown"),
        ({"eta": 1.5}, "eta=1.5 must lie between 0 and 1"),
        ({"n_views": 0}, "n_views must be at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -5}, "batch_size"),
        ({"mode": "positions"}, "mode='positions' is unknown"),
        ({"mode": "pos_to_expr"}, "trained with mode='expr_to_pos'.*train one with mode='pos_to_expr'"),
        ({"mode": "joint", "n_cells": 10}, "trained with mode='expr_to_pos'"),
        ({"n_cells": 10}, "n_cells is for mode='joint'"),
    ],
)
def test_bad_arguments_are_refused(trained, reference, arguments, message):
    with pytest.raises(ValueError, match=message):
        trained.sample(reference, **arguments)


def test_an_untrained_model_refuses(make_model, reference):
    model = make_model(reference)
    with pytest.raises(RuntimeError, match="not trained; call train"):
        model.sample(reference)
    with pytest.raises(RuntimeError, match="not trained; call train"):
        model.get_latent_representation(reference)


def test_bad_values_in_the_query_are_refused(trained, reference):
    reference.X.data[17] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite values, the first for gene 'gene"):
        trained.sample(reference, n_steps=1)


def test_negative_values_in_the_query_are_refused(trained, reference):
    reference.X.data[17] = -1
    with pytest.raises(ValueError, match="negative values, the first for gene"):
        trained.sample(reference, n_steps=1)


def test_depth_far_from_the_reference_is_told(trained, reference):
    reference.X = reference.X * 100
    with pytest.warns(UserWarning, match="median library size"):
        trained.sample(reference, n_steps=1)
