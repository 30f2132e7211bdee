from __future__ import annotations

import logging
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings, strategies as st

from alphastomics.data import AnnDataSource, fit_schema
from alphastomics.data._encode import thin
from alphastomics.data._matrix import Moments, canonical
from dense_encoding import encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., ad.AnnData]

STORAGES = {
    "csr float64": lambda x: sp.csr_matrix(x, dtype=np.float64),
    "csr int32": lambda x: sp.csr_matrix(x, dtype=np.int32),
    "csr uint8": lambda x: sp.csr_matrix(x, dtype=np.uint8),
    "csr array": lambda x: sp.csr_array(x, dtype=np.float32),
    "csc": lambda x: sp.csc_matrix(x, dtype=np.float32),
    "dense": lambda x: np.asarray(x, dtype=np.float32),
    "dense float64": lambda x: np.asarray(x, dtype=np.float64),
    "dense int": lambda x: np.asarray(x, dtype=np.int64),
    "dense fortran": lambda x: np.asfortranarray(x, dtype=np.float32),
    "messy": lambda x: messy(x),
}


def messy(dense: np.ndarray) -> sp.csr_matrix:
    """The same matrix with unsorted columns and stored zeros."""
    n_rows, n_columns = dense.shape
    order = np.tile(np.arange(n_columns)[::-1], n_rows)
    data = dense[:, ::-1].ravel().astype(np.float32)
    return sp.csr_matrix((data, order, np.arange(n_rows + 1) * n_columns), shape=dense.shape)


def as_storage(adata: ad.AnnData, storage: str) -> ad.AnnData:
    result = adata.copy()
    result.X = STORAGES[storage](adata.X.toarray())
    return result


@pytest.mark.parametrize("transform", ["log1p", "none"])
@pytest.mark.parametrize("storage", STORAGES)
def test_storage_changes_no_bit(
    make_adata: Make, monkeypatch: pytest.MonkeyPatch, storage: str, transform: str
) -> None:
    monkeypatch.setattr("alphastomics.data._matrix._BLOCK_ROWS", 32)
    adata = make_adata()
    rows = np.array([5, 3, 99, 40, 3])
    reference = fit_schema(adata, transform=transform)
    expected = AnnDataSource(adata, reference, positions=True)
    other = as_storage(adata, storage)
    assert fit_schema(other, transform=transform) == reference
    source = AnnDataSource(other, reference, positions=True)
    assert source.expression(rows).tobytes() == expected.expression(rows).tobytes()
    np.testing.assert_array_equal(source.library_size(rows), expected.library_size(rows))
    if transform == "log1p":
        thinned = [s.values(rows, thinning=0.4, rng=np.random.default_rng(1)) for s in (source, expected)]
        assert all(one.tobytes() == other.tobytes() for one, other in zip(*thinned, strict=True))


def test_views_and_layers_change_no_bit(make_adata: Make) -> None:
    adata = make_adata()
    big = ad.concat([adata, adata], index_unique="-")
    view = big[: adata.n_obs]
    assert view.is_view
    view_schema = fit_schema(view)
    assert view_schema == fit_schema(adata)
    assert view.is_view
    rows = np.arange(adata.n_obs)
    expected = AnnDataSource(adata, view_schema, positions=True).expression(rows)
    assert AnnDataSource(view, view_schema, positions=True).expression(rows).tobytes() == expected.tobytes()
    adata.layers["raw"] = adata.X.copy()
    adata.X = adata.X * 0
    assert fit_schema(adata, layer="raw").gene_mean == view_schema.gene_mean


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(12)), storage=st.sampled_from(["csr float64", "csc", "dense", "messy"]))
def test_gene_order_changes_no_bit(make_adata: Make, order: list[int], storage: str) -> None:
    adata = make_adata()
    # Fractions: a sum in another order would show.
    adata.X = adata.X.multiply(0.1).tocsr()
    schema = fit_schema(adata, transform="log1p")
    query = as_storage(adata, storage)
    query.X = STORAGES[storage](adata.X.toarray())
    permuted = query[:, order].copy()
    rows = np.arange(adata.n_obs)
    results = [AnnDataSource(a, schema, positions=False).expression(rows).tobytes() for a in (query, permuted)]
    assert results[0] == results[1]


def test_moments_equal_dense_ones(make_adata: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphastomics.data._matrix._BLOCK_ROWS", 17)
    adata = make_adata()
    schema = fit_schema(adata, cell_type_key="label")
    counts = adata.X.toarray().astype(np.float64)
    size = counts.sum(1)
    normal = np.log1p(counts * (np.median(size) / size)[:, None])
    assert schema.transform == "log1p"
    assert schema.library_size == np.median(size)
    np.testing.assert_allclose(schema.gene_mean, normal.mean(0), rtol=1e-12)
    np.testing.assert_allclose(schema.gene_scale, normal.std(0), rtol=1e-12)
    np.testing.assert_allclose(schema.gene_share, counts.sum(0) / counts.sum(), rtol=1e-12)
    assert schema.slices == schema.cell_types == ("s0", "s1")
    network = AnnDataSource(adata, schema, positions=True).expression(np.arange(adata.n_obs))
    np.testing.assert_allclose(network, (normal - normal.mean(0)) / normal.std(0), atol=1e-5)


@pytest.mark.parametrize("transform", ["log1p", "none"])
def test_a_difference_between_slices_reaches_the_network_and_comes_back(make_adata: Make, transform: str) -> None:
    """Standardized slice by slice, both slices would look the same; here half of the genes are thrice as high in one."""
    low = make_adata((80,)).X.toarray().astype(np.float64)
    values = np.concatenate([low, low * np.where(np.arange(12) < 6, 3, 1)])
    position = np.random.default_rng(0).normal(size=(160, 2))
    adata = ad.AnnData(values, obs={"slice_id": np.repeat(["low", "high"], 80)}, obsm={"spatial": position})
    source = AnnDataSource(adata, fit_schema(adata, transform=transform), positions=True)
    network = source.expression(np.arange(160))
    size = values.sum(1, keepdims=True)
    normal = np.log1p(values * np.median(size) / size) if transform == "log1p" else values
    first, second = np.split(network, 2)
    difference = (normal[80:].mean(0) - normal[:80].mean(0)) / normal.std(0)
    np.testing.assert_allclose(second.mean(0) - first.mean(0), difference, atol=1e-5)
    assert difference[:6].min() > 0.25
    back = source.schema.decode_expression(network, source.library_size(np.arange(160)))
    ratio = back[80:].sum(0) / back[:80].sum(0)
    np.testing.assert_allclose(ratio, np.where(np.arange(12) < 6, 3, 1), rtol=1e-4)


def test_moments_survive_a_large_offset() -> None:
    rng = np.random.default_rng(0)
    values = 1e8 + rng.normal(size=(1000, 2))
    moments = Moments(2)
    for start in range(0, 1000, 100):
        moments.add(canonical(values[start : start + 100]))
    np.testing.assert_allclose(moments.sd, values.std(0), rtol=1e-6)


def test_constant_gene_does_not_blow_up(make_adata: Make) -> None:
    adata = make_adata()
    dense = adata.X.toarray()
    dense[:, 4] = 0
    adata.X = sp.csr_matrix(dense)
    schema = fit_schema(adata)
    varying = np.delete(np.array(schema.gene_scale), 4)
    assert schema.gene_scale[4] == pytest.approx(0.1 * np.median(varying))


def test_frame_and_scale(make_adata: Make) -> None:
    adata = make_adata(n_dims=3)
    free = fit_schema(adata)
    position, names = adata.obsm["spatial"], adata.obs["slice_id"].to_numpy()
    radii = [np.sqrt(position[names == name].var(0).sum()) for name in ("s0", "s1")]
    assert free.scale == pytest.approx(np.median(radii) / np.sqrt(3))
    assert free.center == (0.0, 0.0, 0.0)
    shared = fit_schema(adata, frame="shared")
    model = shared.encode_position(position)
    np.testing.assert_allclose(model.mean(0), 0, atol=1e-5)
    assert np.mean(model**2) == pytest.approx(1, abs=1e-5)


def test_a_warning_for_differing_radii(make_adata: Make) -> None:
    adata = make_adata()
    adata.obsm["spatial"][adata.obs["slice_id"].to_numpy() == "s1"] *= 1000
    with pytest.warns(UserWarning, match=r"\('s0'\).*\('s1'\)"):
        fit_schema(adata)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_schema(adata, frame="shared")


def test_slice_rule(make_adata: Make, caplog: pytest.LogCaptureFixture) -> None:
    adata = make_adata()
    with caplog.at_level(logging.INFO, "alphastomics"):
        assert fit_schema(adata).slice_key == "slice_id"
    assert 'obs["slice_id"]' in caplog.text
    caplog.clear()
    alone = adata.copy()
    del alone.obs["slice_id"]
    with caplog.at_level(logging.INFO, "alphastomics"):
        schema = fit_schema(alone)
    assert "one slice" in caplog.text
    assert schema.slice_key is None
    assert len(schema.slices) == 1
    assert [cells.name for cells in AnnDataSource(alone, schema, positions=True).slices] == list(schema.slices)


@pytest.mark.parametrize("column", ["text", "categorical", "number"])
def test_slices_do_not_depend_on_the_column_type(make_adata: Make, column: str) -> None:
    adata = make_adata()
    schema = fit_schema(adata, slice_key="slice_id")
    names = adata.obs["slice_id"].astype(str).to_numpy()
    if column == "categorical":
        adata.obs["slice_id"] = pd.Categorical(names, categories=["unused", "s1", "s0"])
    elif column == "number":
        adata.obs["slice_id"] = (names == "s1").astype(int)
    source = AnnDataSource(adata, schema, positions=True)
    assert [cells.name for cells in source.slices] == (["0", "1"] if column == "number" else ["s0", "s1"])
    for cells, name in zip(source.slices, ("s0", "s1"), strict=True):
        np.testing.assert_array_equal(cells.rows, np.flatnonzero(names == name))
        np.testing.assert_array_equal(cells.position, adata.obsm["spatial"][cells.rows])
        assert cells.position.dtype == np.float64


def test_cells_without_slice_or_position_are_one_set(make_adata: Make) -> None:
    adata = make_adata()
    schema = fit_schema(adata, slice_key="slice_id")
    query = adata.copy()
    query.obs["slice_id"] = query.obs["slice_id"].astype(object).where(query.obs["slice_id"] == "s0", None)
    loose = AnnDataSource(query, schema, positions=False)
    assert [cells.name for cells in loose.slices] == ["s0", "unassigned"]
    del query.obs["slice_id"]
    assert [len(cells.rows) for cells in AnnDataSource(query, schema, positions=False).slices] == [query.n_obs]
    with pytest.raises(KeyError, match="slice_key"):
        AnnDataSource(query, schema, positions=True)


class Poison(dict):
    """Raises on any access to a key."""

    def __getitem__(self, key: str) -> object:
        raise AssertionError(f"{key} was read")

    def __contains__(self, key: object) -> bool:
        raise AssertionError(f"{key} was read")


def test_only_requested_data_are_read(make_adata: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    adata = make_adata()
    schema = fit_schema(adata)
    with monkeypatch.context() as patch:
        patch.setattr(ad.AnnData, "obsm", property(lambda self: Poison()))
        source = AnnDataSource(adata, schema, positions=False)
        assert all(cells.position is None for cells in source.slices)
    query = ad.AnnData(obs=adata.obs, obsm={"spatial": adata.obsm["spatial"]})
    blind = AnnDataSource(query, schema, positions=True, expression=False)
    assert not blind.measured.any()
    np.testing.assert_array_equal(blind.expression(np.array([0, 1])), np.zeros((2, 12), np.float32))
    with pytest.raises(ValueError, match="no genes"):
        AnnDataSource(query, schema, positions=True)


def test_positions_of_a_query(make_adata: Make) -> None:
    adata = make_adata()
    schema = fit_schema(adata)
    adata.obsm["spatial"][4] = np.nan
    source = AnnDataSource(adata, schema, positions=True)
    assert sum(np.isnan(cells.position).any(1).sum() for cells in source.slices) == 1
    adata.obsm["spatial"][4] = np.inf
    with pytest.raises(ValueError, match="infinite.* 1 cells"):
        AnnDataSource(adata, schema, positions=True)
    with pytest.raises(ValueError, match="2 columns.* 3\\b"):
        AnnDataSource(adata, fit_schema(make_adata(n_dims=3)), positions=True)


def test_missing_genes(make_adata: Make) -> None:
    adata = make_adata()
    schema = fit_schema(adata)
    query = adata[:, 2:].copy()
    with pytest.warns(UserWarning, match="2 of 12 genes.*'g0', 'g1'"):
        source = AnnDataSource(query, schema, positions=False)
    np.testing.assert_array_equal(source.measured, np.arange(12) > 1)
    rows = np.arange(20)
    result = source.expression(rows)
    assert (result[:, :2] == 0).all()
    counts = query.X[:20].toarray().astype(np.float64)
    target = schema.library_size * sum(schema.gene_share[2:])
    normal = np.log1p(counts * (target / counts.sum(1))[:, None])
    np.testing.assert_allclose(
        result[:, 2:], (normal - schema.gene_mean[2:]) / np.array(schema.gene_scale[2:]), atol=1e-5
    )
    np.testing.assert_array_equal(source.library_size(rows), counts.sum(1))
    with pytest.raises(ValueError, match="7 of 12 genes"):
        AnnDataSource(adata[:, 7:], schema, positions=False)
    foreign = adata.copy()
    foreign.var_names = [f"ENSG{i}" for i in range(12)]
    with pytest.raises(ValueError, match="12 genes.*'ENSG0'"):
        AnnDataSource(foreign, schema, positions=False)


def test_extra_genes_change_nothing(make_adata: Make) -> None:
    adata = make_adata()
    schema = fit_schema(adata[:, :8])
    small = AnnDataSource(adata[:, :8], schema, positions=False)
    large = AnnDataSource(adata, schema, positions=False)
    rows = np.arange(adata.n_obs)
    assert small.expression(rows).tobytes() == large.expression(rows).tobytes()


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_warning_for_a_distant_library_size(make_adata: Make, factor: float) -> None:
    adata = make_adata()
    schema = fit_schema(adata, transform="log1p")
    query = adata.copy()
    query.X = np.random.default_rng(0).poisson(factor * query.X.toarray()).astype(np.float32)
    with pytest.warns(UserWarning, match="library size"):
        AnnDataSource(query, schema, positions=False)
    # Half of the genes at the same depth is no other depth.
    with pytest.warns(UserWarning, match="6 of 12 genes") as seen:
        AnnDataSource(adata[:, :6], schema, positions=False)
    assert len(seen) == 1


def test_thinning(make_adata: Make) -> None:
    adata = make_adata()
    source = AnnDataSource(adata, fit_schema(adata), positions=False)
    rows = np.arange(adata.n_obs)
    counts = adata.X.toarray().astype(np.int64)
    result = source.encode(*source.values(rows, thinning=0.3, rng=np.random.default_rng(5)), 0)
    kept = np.zeros_like(counts)
    kept[counts > 0] = thin(counts[counts > 0].astype(np.float32), 0.3, np.random.default_rng(5))
    np.testing.assert_allclose(result, encode(source.schema, kept), rtol=1e-5, atol=1e-5)
    assert kept.sum() / counts.sum() == pytest.approx(0.7, abs=0.03)
    np.testing.assert_array_equal(source.values(rows, thinning=0.0)[0], counts)
    with pytest.raises(ValueError, match="rng"):
        source.values(rows, thinning=0.3)
    plain = AnnDataSource(adata, fit_schema(adata, transform="none"), positions=False)
    with pytest.raises(ValueError, match="counts"):
        plain.values(rows, thinning=0.3, rng=np.random.default_rng(0))


def test_nothing_is_densified(make_adata: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    adata = make_adata()
    adata.X = sp.csc_matrix(adata.X)

    def only_rows_asked_for(function: Callable[..., Any]) -> Callable[..., Any]:
        def densify(matrix: Any, *args: Any, **kwargs: Any) -> Any:
            assert matrix.shape[0] <= 2, "a sparse matrix was densified"
            return function(matrix, *args, **kwargs)

        return densify

    for kind in (sp.csr_matrix, sp.csc_matrix, sp.coo_matrix):
        for name in ("toarray", "todense"):
            monkeypatch.setattr(kind, name, only_rows_asked_for(getattr(kind, name)))
    schema = fit_schema(adata)
    source = AnnDataSource(adata[:, ::-1], schema, positions=True)
    assert source.expression(np.array([1, 2])).shape == (2, 12)


def test_adata_is_left_alone(make_adata: Make) -> None:
    adata = make_adata()
    adata.X = messy(adata.X.toarray())
    before = adata.copy()
    source = AnnDataSource(adata, fit_schema(adata), positions=True)
    source.values(np.arange(10), thinning=0.5, rng=np.random.default_rng(0))
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(adata.X, name), getattr(before.X, name))
    np.testing.assert_array_equal(adata.obsm["spatial"], before.obsm["spatial"])
    pd.testing.assert_frame_equal(adata.obs, before.obs)
    assert not adata.uns


def test_empty_cells_are_finite(make_adata: Make) -> None:
    adata = make_adata()
    dense = adata.X.toarray()
    dense[:3] = 0
    adata.X = sp.csr_matrix(dense)
    source = AnnDataSource(adata, fit_schema(adata), positions=True)
    assert np.isfinite(source.expression(np.arange(5))).all()
    assert source.schema.library_size == np.median(dense[3:].sum(1))


def test_pickles(make_adata: Make) -> None:
    adata = make_adata()
    source = AnnDataSource(adata, fit_schema(adata), positions=True)
    again = pickle.loads(pickle.dumps(source))
    rows = np.array([4, 1])
    assert again.expression(rows).tobytes() == source.expression(rows).tobytes()


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "transform", "n_dims", "n_slices"),
    [("starmap_mpfc", "log1p", 2, 3), ("drosophila_bdtnp_3d", "none", 3, 1)],
)
def test_real_tissues(real_data: Path, name: str, transform: str, n_dims: int, n_slices: int) -> None:
    adata = ad.read_h5ad(real_data / f"{name}.h5ad")
    schema = fit_schema(adata)
    assert (schema.transform, schema.n_dims, len(schema.slices)) == (transform, n_dims, n_slices)
    source = AnnDataSource(adata, schema, positions=True)
    network = source.expression(np.arange(adata.n_obs))
    np.testing.assert_allclose(network.mean(0), 0, atol=0.02)
    np.testing.assert_allclose(network.std(0), 1, atol=0.15)
    back = schema.decode_expression(network[:200], source.library_size(np.arange(200)))
    unclipped = np.abs(network[:200]) < 10
    np.testing.assert_allclose(back[unclipped], adata.X[:200].toarray()[unclipped], rtol=1e-4, atol=1e-3)
