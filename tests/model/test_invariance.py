"""What a sample must not depend on: known positions, order and storage of the query, its company."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from alphastomics.metrics import distance_spearman


def reorder(adata: ad.AnnData, seed: int = 1) -> tuple[ad.AnnData, np.ndarray]:
    order = np.random.default_rng(seed).permutation(adata.n_obs)
    return adata[order].copy(), order


# -- what is never read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", ["nan", "infinity", "noise", "permuted", "five columns", "deleted"])
def test_positions_of_the_query_are_never_read(trained, reference, positions_of, poison):
    clean = positions_of(trained.sample(reference))
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
    assert positions_of(trained.sample(reference)) == clean


def test_query_is_unchanged(trained, reference, assert_same):
    reference.layers["other"] = reference.X.copy()
    reference.uns["note"] = {"key": [1, 2]}
    reference.obs["draw"] = "mine"
    reference.obs["slice_id"] = reference.obs["slice_id"].astype(str)
    before = reference.copy()
    for arguments in ({}, {"n_samples": 2}, {"n_samples": 2, "reduce": "medoid"}, {"inpaint": True}):
        trained.sample(reference, **arguments)
        trained.get_latent_representation(reference)
        assert_same(reference, before)


def test_result_shares_nothing_with_the_query(trained, reference, assert_same):
    before = reference.copy()
    sampled = trained.sample(reference)
    sampled.X.data[:] = -1
    sampled.obs["cell_type"] = "changed"
    sampled.var["marker_of"] = "changed"
    assert_same(reference, before)


# -- genes -------------------------------------------------------------------------------------------------------------


def test_order_of_the_genes_does_not_matter(trained, reference, positions_of):
    order = np.random.default_rng(2).permutation(reference.n_vars)
    expected = positions_of(trained.sample(reference))
    assert positions_of(trained.sample(reference[:, order].copy())) == expected


def test_other_genes_are_ignored(trained, reference, positions_of):
    other = ad.AnnData(
        X=sp.random(reference.n_obs, 7, density=0.5, format="csr", random_state=0, dtype=np.float32),
        obs=reference.obs,
        var=pd.DataFrame(index=[f"other_{i}" for i in range(7)]),
    )
    other.X.data[:] = 100
    wider = ad.concat([other, reference], axis="var", merge="same")
    assert wider.n_vars == 67
    assert positions_of(trained.sample(wider)) == positions_of(trained.sample(reference))


def test_missing_genes_are_reported_and_cost_little(trained, reference):
    whole = trained.sample(reference).obsm["spatial_reconstructed"]
    missing = list(reference.var_names[[3, 41]])
    fewer = reference[:, [name not in missing for name in reference.var_names]].copy()
    with pytest.warns(UserWarning, match=rf"2 of 60 genes.*'{missing[0]}', '{missing[1]}'"):
        part = trained.sample(fewer).obsm["spatial_reconstructed"]
    cells = (reference.obs["slice_id"] == "slice_1").to_numpy()
    assert distance_spearman(whole[cells], part[cells]) > 0.8
    assert part.tobytes() != whole.tobytes()


def test_half_of_the_genes_is_enough_and_fewer_are_not(trained, reference):
    with pytest.warns(UserWarning, match="30 of 60 genes"):
        assert np.isfinite(trained.sample(reference[:, :30].copy()).obsm["spatial_reconstructed"]).all()
    with pytest.raises(ValueError, match="31 of 60 genes"):
        trained.sample(reference[:, :29].copy())


def test_no_shared_gene_raises(trained, reference):
    reference.var_names = [f"ENSG{i}" for i in range(60)]
    with pytest.raises(ValueError, match=r"60 genes.*ENSG0"):
        trained.sample(reference)
    with pytest.raises(ValueError, match="60 genes"):
        trained.get_latent_representation(reference)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"refine": False}, {"n_samples": 3, "reduce": "medoid"}, {"n_samples": 3, "reduce": "mean"}],
    ids=["one", "not refined", "medoid", "mean"],
)
def test_permuted_rows_permute_the_result(trained, reference, arguments):
    permuted, order = reorder(reference)
    expected = trained.sample(reference, **arguments)
    result = trained.sample(permuted, **arguments)
    assert result.obsm["spatial_reconstructed"].tobytes() == expected.obsm["spatial_reconstructed"][order].tobytes()
    if "reduce" in arguments:
        assert result.obs["spatial_reconstructed_uncertainty"].equals(
            expected.obs["spatial_reconstructed_uncertainty"].iloc[order]
        )


def test_permuted_rows_permute_every_draw(trained, reference):
    permuted, order = reorder(reference)
    n = reference.n_obs
    expected = trained.sample(reference, n_samples=2).obsm["spatial_reconstructed"]
    result = trained.sample(permuted, n_samples=2).obsm["spatial_reconstructed"]
    assert result.tobytes() == np.concatenate([expected[:n][order], expected[n:][order]]).tobytes()


SAME = pytest.mark.filterwarnings("ignore:.*cells have the same expression:UserWarning")


@pytest.fixture
def twins(reference):
    """One slice of 300 cells and, after them, the first 20 again."""
    one = reference[reference.obs["slice_id"] == "slice_0"].copy()
    return ad.concat([one, one[:20]], index_unique="-", merge="same")


@SAME
def test_cells_of_equal_expression_change_places_at_most(trained, twins):
    permuted, order = reorder(twins)
    a = trained.sample(twins).obsm["spatial_reconstructed"][order]
    b = trained.sample(permuted).obsm["spatial_reconstructed"]
    single = order[(order >= 20) & (order < 300)]
    at = np.flatnonzero(np.isin(order, single))
    assert a[at].tobytes() == b[at].tobytes()
    assert np.array_equal(a[np.lexsort(a.T)], b[np.lexsort(b.T)])


@SAME
def test_the_seed_and_not_the_order_of_rows_chooses_between_cells_of_equal_expression(trained, twins):
    changed = []
    for seed in (0, 1):
        forward = trained.sample(twins, random_state=seed).obsm["spatial_reconstructed"]
        backward = trained.sample(twins[::-1].copy(), random_state=seed).obsm["spatial_reconstructed"][::-1]
        changed.append((forward[:20] != backward[:20]).any(axis=1))
        assert forward.tobytes() == trained.sample(twins, random_state=seed).obsm["spatial_reconstructed"].tobytes()
        assert 0 < changed[-1].sum() < 20
    assert not np.array_equal(*changed)


def test_cells_of_equal_expression_are_marked(trained, twins):
    key = "spatial_reconstructed_tied"
    with pytest.warns(UserWarning, match="40 of 320 cells have the same expression .* 60 genes"):
        marked = trained.sample(twins)
    assert np.flatnonzero(marked.obs[key]).tolist() == [*range(20), *range(300, 320)]
    assert key not in trained.sample(marked[20:300].copy()).obs  # of the earlier result


def test_cells_of_equal_expression_without_a_choice(trained, twins):
    apart = twins.copy()
    apart.obs["slice_id"] = np.repeat(["slice_0", "slice_1"], [300, 20])
    assert "spatial_reconstructed_tied" not in trained.sample(apart).obs
    twins.obsm["spatial"][300:310] = np.nan  # the other one is known
    assert "spatial_reconstructed_tied" not in trained.sample(twins, inpaint=True).obs
    result = trained.sample(twins, independent=True)  # at the same position: no warning
    assert result.obs["spatial_reconstructed_tied"].sum() == 40
    assert np.array_equal(*(result.obsm["spatial_reconstructed"][rows] for rows in (slice(20), slice(300, 320))))


def test_a_slice_is_placed_the_same_alone_or_beside_others(trained, reference):
    arguments = {"n_samples": 2, "reduce": "medoid"}
    together = trained.sample(reference, **arguments)
    for name in ("slice_0", "slice_2"):
        cells = (reference.obs["slice_id"] == name).to_numpy()
        alone = trained.sample(reference[cells].copy(), **arguments)
        assert alone.obsm["spatial_reconstructed"].tobytes() == together.obsm["spatial_reconstructed"][cells].tobytes()


def test_indices(trained, reference):
    rows = np.flatnonzero(reference.obs["slice_id"] == "slice_1")[::-1]
    expected = trained.sample(reference[rows].copy())
    result = trained.sample(reference, indices=rows)
    assert result.obs_names.tolist() == reference.obs_names[rows].tolist()
    assert result.obsm["spatial_reconstructed"].tobytes() == expected.obsm["spatial_reconstructed"].tobytes()
    in_reference = trained.sample(indices=list(rows))
    assert in_reference.obsm["spatial_reconstructed"].tobytes() == expected.obsm["spatial_reconstructed"].tobytes()


# -- storage -----------------------------------------------------------------------------------------------------------


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
    expected = positions_of(trained.sample(reference))
    other = ad.AnnData(X=store(reference.X), obs=reference.obs, var=reference.var)
    assert positions_of(trained.sample(other)) == expected


def test_a_view_gives_what_its_copy_gives(trained, reference, positions_of):
    view = reference[::2, ::-1]
    assert view.is_view
    sampled = trained.sample(view)
    assert view.is_view
    assert positions_of(sampled) == positions_of(trained.sample(view.copy()))


def test_backed_raises(trained, reference, tmp_path):
    reference.write_h5ad(tmp_path / "query.h5ad")
    backed = ad.read_h5ad(tmp_path / "query.h5ad", backed="r")
    with pytest.raises(ValueError, match=r"backed.*to_memory"):
        trained.sample(backed)
    backed.file.close()
