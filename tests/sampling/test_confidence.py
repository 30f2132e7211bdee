"""Confidence of a query cell: conformal p-values of distances to the reference."""

from __future__ import annotations

from dataclasses import replace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import kstest
from sklearn.metrics import roc_auc_score

from alphastomics.data import AnnDataSource, fit_schema
from alphastomics.sampling import _confidence
from alphastomics.sampling._cells import content_order
from alphastomics.sampling._confidence import (
    N_SMOOTHED,
    OWN_RANK,
    SEARCHED_RANK,
    ConfidenceCells,
    compare_query,
    fit_confidence_cells,
    measure_confidence,
    p_values,
    remove_shift,
    scores,
)

N_GENES, N_KINDS = 40, 5


def tissue(n: int, seed: int, *, kinds: range = range(N_KINDS), depth: float = 150) -> ad.AnnData:
    """Counts of kinds of cells with profiles of their own, at random positions."""
    profiles = np.random.default_rng(99).dirichlet(np.full(N_GENES, 0.4), size=N_KINDS + 1)
    rng = np.random.default_rng(seed)
    kind = rng.choice(np.asarray(kinds), n)
    counts = rng.poisson(profiles[kind] * depth * rng.lognormal(sigma=0.4, size=(n, 1)))
    return ad.AnnData(
        X=sp.csr_matrix(counts.astype(np.float32)),
        obs=pd.DataFrame({"kind": kind}, index=[f"cell_{i}" for i in range(n)]),
        var=pd.DataFrame(index=[f"gene_{g}" for g in range(N_GENES)]),
        obsm={"spatial": rng.normal(size=(n, 2))},
    )


def reference_of(adata: ad.AnnData) -> tuple[ConfidenceCells, object]:
    schema = fit_schema(adata)
    cells = fit_confidence_cells(AnnDataSource(adata, schema, positions=True))
    assert cells is not None
    return cells, schema


def confidence_of(query: ad.AnnData, reference: tuple[ConfidenceCells, object]) -> np.ndarray:
    source = AnnDataSource(query, reference[1], positions=False)
    return measure_confidence(reference[0], source, np.arange(query.n_obs))


# -- definitions -------------------------------------------------------------------------------------------------------


def test_a_p_value_is_the_share_of_held_out_cells_that_are_as_far():
    rng = np.random.default_rng(0)
    held_out, tested = rng.integers(0, 9, 50).astype(float), rng.integers(-1, 10, 30).astype(float)
    expected = [(1 + sum(h >= t for h in held_out)) / 51 for t in tested]
    np.testing.assert_allclose(p_values(held_out, tested), expected, rtol=1e-15)


def test_scores_are_mean_ratios_of_neighbor_distances():
    rng = np.random.default_rng(1)
    searched, compared = (rng.gamma(2, size=(n, 12)).astype(np.float32) for n in (90, 180))
    z = np.concatenate([searched, compared]).astype(float)
    z -= z.mean(0)  # all 12 components: a rotation, after which directions have unit length
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    x, y = z[:90], z[90:]
    outer = np.sort(np.linalg.norm(y[:, None] - x, axis=2), axis=1)[:, SEARCHED_RANK - 1]
    among = np.linalg.norm(y[:, None] - y, axis=2)
    order = np.argsort(among, axis=1)  # the first is the cell itself
    ratio = np.log(outer / np.sort(among, axis=1)[:, OWN_RANK])
    expected = np.array([ratio[row[: N_SMOOTHED + 1]].mean() for row in order])
    np.testing.assert_allclose(scores(searched, compared), expected, atol=1e-4)


def test_a_shift_of_all_genes_is_removed_as_far_as_it_is_small():
    rng = np.random.default_rng(2)
    centers = 4 * rng.normal(size=(4, 12))
    searched, held_out, query = (
        (centers[rng.integers(0, 4, n)] + rng.normal(size=(n, 12))).astype(np.float32) for n in (2000, 500, 900)
    )
    shift = rng.uniform(-0.4, 0.4, 12).astype(np.float32)
    moved = remove_shift(searched, held_out, query + shift)
    assert np.linalg.norm((moved - query).mean(0)) < 0.75 * np.linalg.norm(shift)
    assert np.ptp(moved - query, axis=0).max() < 1e-5
    far = remove_shift(searched, held_out, query[:1] + 3)
    assert np.abs(far - query[:1] - 3).max() < 0.01


def test_the_stored_cells_are_disjoint_rows_of_the_reference():
    adata = tissue(400, 0)
    cells, schema = reference_of(adata)
    assert cells.is_valid(N_GENES, 2)
    assert not cells.is_valid(N_GENES - 1, 2)
    assert cells.has_counts
    assert not replace(cells, searched=cells.searched * np.float32(1e30)).has_counts
    stored = {row.tobytes() for row in np.concatenate([cells.searched, cells.held_out])}
    assert (len(cells.searched), len(cells.held_out)) == (320, 80)
    assert stored == {row.tobytes() for row in adata.X.toarray()}
    assert schema.n_genes == N_GENES


def test_the_most_variable_genes_are_stored(monkeypatch):
    monkeypatch.setattr(_confidence, "MAX_GENES", 10)
    adata = tissue(400, 0)
    cells, schema = reference_of(adata)
    assert cells.searched.shape[1] == 10
    assert set(cells.genes) == set(np.argsort(schema.gene_scale)[-10:])
    np.testing.assert_array_equal(np.diff(cells.genes) > 0, True)


def test_a_reference_of_few_cells_has_none():
    adata = tissue(49, 0)
    assert fit_confidence_cells(AnnDataSource(adata, fit_schema(adata), positions=True)) is None


def test_the_share_of_unmatched_cells_shows_whether_a_query_differs():
    cells, schema = reference_of(tissue(1500, 0))
    share = lambda query: compare_query(cells, AnnDataSource(query, schema, positions=False))
    query = tissue(600, 1)
    assert share(query) < 0.1
    assert share(query[np.random.default_rng(0).permutation(600)].copy()) == share(query)
    gains = np.random.default_rng(2).lognormal(sigma=0.8, size=N_GENES)
    query.X = query.X.multiply(gains).tocsr().rint().astype(np.float32)
    assert share(query) > 0.2
    assert share(query[:40].copy()) == 0  # too few cells


# -- calibration -------------------------------------------------------------------------------------------------------


def test_the_confidence_of_cells_like_the_reference_is_uniform():
    found = np.concatenate([confidence_of(tissue(300, 100 + i), reference_of(tissue(1500, i))) for i in range(4)])
    for alpha in (0.05, 0.1, 0.5):
        assert (found <= alpha).mean() == pytest.approx(alpha, abs=0.03 + 0.1 * alpha)
    assert kstest(found, "uniform").statistic < 0.08


def test_a_single_cell_has_a_confidence():
    reference = reference_of(tissue(800, 0))
    query = tissue(20, 1)
    alone = [float(confidence_of(query[[i]].copy(), reference)[0]) for i in range(20)]
    assert np.mean(alone) > 0.25
    assert all(0 < c <= 1 for c in alone)


@pytest.mark.parametrize("depth", [40, 600])
def test_depth_alone_does_not_lower_the_confidence(depth):
    found = confidence_of(tissue(600, 1, depth=depth), reference_of(tissue(1500, 0)))
    assert (found < 0.05).mean() < 0.15


# -- cells that the reference lacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [600, 1800])
@pytest.mark.parametrize("depth", [60, 150])
def test_a_kind_that_the_reference_lacks_is_found(depth, n):
    query = tissue(n, 1, kinds=range(N_KINDS + 1), depth=depth)
    found = confidence_of(query, reference_of(tissue(1500, 0)))
    foreign = (query.obs["kind"] == N_KINDS).to_numpy()
    assert roc_auc_score(foreign, -found) > 0.97
    assert np.median(found[foreign]) < 0.02
    assert (found[~foreign] < 0.05).mean() < 0.15


def test_values_that_are_not_counts():
    def logarithm(adata: ad.AnnData) -> ad.AnnData:
        adata.X = np.log1p(adata.X.toarray()) - 0.5
        return adata

    query = logarithm(tissue(600, 1, kinds=range(N_KINDS + 1)))
    found = confidence_of(query, reference_of(logarithm(tissue(1500, 0))))
    assert roc_auc_score(query.obs["kind"] == N_KINDS, -found) > 0.97


@pytest.mark.filterwarnings("ignore:.*genes are missing")
def test_fewer_genes_are_compared_with_the_same_genes_of_the_reference():
    query = tissue(600, 1, kinds=range(N_KINDS + 1))[:, 10:].copy()
    found = confidence_of(query, reference_of(tissue(1500, 0)))
    foreign = (query.obs["kind"] == N_KINDS).to_numpy()
    assert roc_auc_score(foreign, -found) > 0.95
    assert (found[~foreign] < 0.05).mean() < 0.15


def test_blocks_of_a_large_slice(monkeypatch):
    query = tissue(1800, 1, kinds=range(N_KINDS + 1))
    reference = reference_of(tissue(1500, 0))
    whole = confidence_of(query, reference)
    monkeypatch.setattr(_confidence, "MAX_BLOCK", 700)
    blocks = confidence_of(query, reference)
    assert np.corrcoef(whole, blocks)[0, 1] > 0.5
    assert roc_auc_score(query.obs["kind"] == N_KINDS, -blocks) > 0.97


# -- placements --------------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(reference):
    """Cells of one slice, 40 of which express other genes than any cell of the reference."""
    one = reference[reference.obs["slice_id"] == "slice_0"].copy()
    counts = one.X.toarray()
    order = np.random.default_rng(3).permutation(counts.shape[1])
    counts[:40] = counts[:40, order]
    one.X = sp.csr_matrix(counts)
    return one


def test_the_confidence_of_a_placement_is_that_of_its_slices(trained, reference):
    found = trained.sample(reference).obs["spatial_reconstructed_confidence"].to_numpy()
    source = AnnDataSource(reference, trained.schema, positions=False)
    for each in source.slices:
        rows = content_order(source, each.rows)
        expected = measure_confidence(trained.fitted_.confidence_cells, source, rows)
        assert found[rows].tobytes() == expected.tobytes()


def test_cells_below_the_smallest_confidence_are_not_placed(trained, foreign, caplog):
    everywhere = trained.sample(foreign)
    confidence = everywhere.obs["spatial_reconstructed_confidence"].to_numpy()
    assert roc_auc_score(np.arange(300) < 40, -confidence) > 0.9
    with caplog.at_level("INFO", logger="alphastomics"):
        some = trained.sample(foreign, min_confidence=0.1)
    np.testing.assert_array_equal(some.obs["spatial_reconstructed_confidence"], confidence)
    unplaced = np.isnan(some.obsm["spatial_reconstructed"]).all(axis=1)
    np.testing.assert_array_equal(unplaced, confidence < 0.1)
    assert f"{unplaced.sum()} of 300 cells" in caplog.text
    assert (
        some.obsm["spatial_reconstructed"][~unplaced].tobytes()
        == everywhere.obsm["spatial_reconstructed"][~unplaced].tobytes()
    )
    draws = trained.sample(foreign, min_confidence=0.1, n_samples=2).obsm["spatial_reconstructed"]
    np.testing.assert_array_equal(np.isnan(draws).all(axis=1), np.tile(unplaced, 2))
    mean = trained.sample(foreign, min_confidence=0.1, n_samples=2, reduce="mean")
    np.testing.assert_array_equal(mean.obs["spatial_reconstructed_uncertainty"].isna(), unplaced)


def test_known_positions_are_kept_whatever_the_confidence(trained, foreign):
    foreign.obsm["spatial"][20:200] = np.nan
    placed = trained.sample(foreign, inpaint=True, min_confidence=0.1)
    known = np.isfinite(foreign.obsm["spatial"]).all(axis=1)
    assert (placed.obs["spatial_reconstructed_confidence"][known] == 1).all()
    assert placed.obsm["spatial_reconstructed"][known].tobytes() == foreign.obsm["spatial"][known].tobytes()
    assert np.isnan(placed.obsm["spatial_reconstructed"][20:40]).mean() > 0.5


def test_order_and_positions_of_the_query_do_not_matter(trained, foreign):
    expected = trained.sample(foreign).obs["spatial_reconstructed_confidence"]
    order = np.random.default_rng(1).permutation(foreign.n_obs)
    moved = foreign[order].copy()
    moved.obsm["spatial"] *= np.nan
    assert trained.sample(moved).obs["spatial_reconstructed_confidence"].equals(expected.iloc[order])


def test_a_saved_model_gives_the_same_confidence(trained, foreign, folder):
    loaded = type(trained).load(folder, adata=False)
    expected = trained.sample(foreign).obs["spatial_reconstructed_confidence"]
    assert loaded.sample(foreign).obs["spatial_reconstructed_confidence"].equals(expected)


def test_a_query_of_other_cells_is_reported(trained, foreign):
    with pytest.warns(UserWarning, match=r"confidence below 0.05.*min_confidence"):
        trained.sample(foreign[:60].copy())


def test_values_that_were_transformed_are_refused(trained, reference):
    reference.X = np.log1p(reference.X.toarray())
    with pytest.raises(ValueError, match="those of the reference are counts"):
        trained.sample(reference)


def test_cells_without_counts_are_reported_and_have_no_confidence(trained, reference):
    x = reference.X.toarray()
    x[[4, 9]] = 0
    reference.X = x
    name = reference.obs_names[4]
    with pytest.warns(UserWarning, match=f"2 of {reference.n_obs} cells have no counts, the first '{name}'"):
        placed = trained.sample(reference, min_confidence=1e-9)
    np.testing.assert_array_equal(np.flatnonzero(placed.obs["spatial_reconstructed_confidence"] == 0), [4, 9])
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(placed.obsm["spatial_reconstructed"]).any(1)), [4, 9])


def test_without_a_confidence_no_cell_can_be_left_out(trained, foreign):
    fitted = trained.fitted_
    trained.fitted_ = replace(fitted, confidence_cells=None)
    try:
        assert trained.sample(foreign).obs["spatial_reconstructed_confidence"].isna().all()
        with pytest.raises(ValueError, match="min_confidence"):
            trained.sample(foreign, min_confidence=0.1)
    finally:
        trained.fitted_ = fitted
