from __future__ import annotations

import subprocess
import sys

import anndata as ad
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import sparse, stats
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist, pdist

from alphastomics.datasets import _synthetic, synthetic_tissue
from alphastomics.datasets._anatomy import SmoothFields, draw_anatomy, draw_positions
from alphastomics.datasets._expression import draw_counts


@pytest.fixture(scope="module")
def tissue() -> ad.AnnData:
    return synthetic_tissue()


def in_slice(adata: ad.AnnData, name: str) -> ad.AnnData:
    return adata[(adata.obs["slice_id"] == name).to_numpy()]


def same(a: ad.AnnData, b: ad.AnnData) -> bool:
    return (
        all(
            np.array_equal(getattr(a.X, part), getattr(b.X, part))
            and getattr(a.X, part).dtype == getattr(b.X, part).dtype
            for part in ("data", "indices", "indptr")
        )
        and all(a.obsm[key].tobytes() == b.obsm[key].tobytes() for key in ("spatial", "spatial_anatomy"))
        and all((a.obs[key].astype(str) == b.obs[key].astype(str)).all() for key in ("slice_id", "cell_type"))
        and list(a.obs_names) == list(b.obs_names)
        and a.var.equals(b.var)
    )


def test_layout(tissue):
    assert tissue.shape == (4500, 150)
    assert sparse.issparse(tissue.X)
    assert tissue.X.format == "csr"
    assert tissue.X.dtype == np.float32
    assert (tissue.X.data > 0).all()
    assert (tissue.X.data == np.round(tissue.X.data)).all()
    assert list(tissue.obs["slice_id"].cat.categories) == ["slice_0", "slice_1", "slice_2"]
    assert (tissue.obs["slice_id"].value_counts() == 1500).all()
    assert len(tissue.obs["cell_type"].cat.categories) == 8 == tissue.obs["cell_type"].nunique()
    assert tissue.obsm["spatial"].shape == (4500, 2)
    assert tissue.obsm["spatial"].dtype == np.float64
    assert tissue.obs_names.is_unique
    assert tissue.var_names.is_unique
    assert tissue.uns["source"]["params"]["n_cells"] == [1500, 1500, 1500]
    assert tissue.var["program"].value_counts().to_dict() == {"marker": 60, "positional": 60, "none": 30}
    assert np.isclose(np.ptp(tissue.obsm["spatial_anatomy"], axis=0).max(), 1000, rtol=0.05)


def test_same_seed_gives_the_same_bytes(tissue):
    assert same(tissue, synthetic_tissue())
    assert not same(tissue, synthetic_tissue(random_state=1))


def test_a_slice_does_not_depend_on_the_others(tissue):
    fewer = synthetic_tissue(n_slices=2, n_cells=[40, 1500])
    assert same(in_slice(fewer, "slice_1"), in_slice(tissue, "slice_1"))


def test_slices_are_different_cells_of_one_body(tissue):
    first, second = (in_slice(tissue, name) for name in ("slice_0", "slice_1"))
    apart = KDTree(first.obsm["spatial_anatomy"]).query(second.obsm["spatial_anatomy"])[0]
    assert 2 < np.median(apart) < 15  # micrometers; cells of one slice are about 14 apart
    assert (first.X != second.X).nnz > 10_000
    shares = [part.obs["cell_type"].value_counts(normalize=True, sort=False) for part in (first, second)]
    np.testing.assert_allclose(*shares, atol=0.04)


def test_effects_are_switched_off_one_at_a_time(tissue):
    small = {"n_slices": 2, "n_cells": 300, "n_genes": 60}
    full = synthetic_tissue(**small)
    plain = synthetic_tissue(**small, rotate=False, warp=0)
    np.testing.assert_array_equal(plain.obsm["spatial"], plain.obsm["spatial_anatomy"])
    np.testing.assert_array_equal(plain.obsm["spatial_anatomy"], full.obsm["spatial_anatomy"])
    assert (plain.X != full.X).nnz == 0
    assert (synthetic_tissue(**small, batch_effect=0).X != full.X).nnz > 0


@pytest.mark.parametrize("n_dims", [2, 3])
def test_every_slice_has_its_own_frame(n_dims):
    adata = synthetic_tissue(n_slices=4, n_cells=100, n_genes=20, n_dims=n_dims, warp=0)
    frames = adata.uns["source"]["frames"]
    for name, frame in frames.items():
        part = in_slice(adata, name)
        np.testing.assert_allclose(frame["rotation"] @ frame["rotation"].T, np.eye(n_dims), atol=1e-12)
        assert np.linalg.det(frame["rotation"]) > 0
        np.testing.assert_allclose(pdist(part.obsm["spatial"]), pdist(part.obsm["spatial_anatomy"]), rtol=1e-9)
        back = (part.obsm["spatial"] - frame["shift"]) @ frame["rotation"]
        np.testing.assert_allclose(back, part.obsm["spatial_anatomy"], atol=1e-9)
    rotations = np.array([frame["rotation"].ravel() for frame in frames.values()])
    assert pdist(rotations).min() > 1e-3
    assert pdist(np.array([frame["shift"] for frame in frames.values()])).min() > 10


@pytest.mark.parametrize("n_dims", [2, 3])
def test_rotations_are_uniform(n_dims):
    adata = synthetic_tissue(n_slices=400, n_cells=1, n_genes=1, n_cell_types=1, n_dims=n_dims)
    rotations = np.array([frame["rotation"] for frame in adata.uns["source"]["frames"].values()])
    np.testing.assert_allclose(rotations.mean(0), 0, atol=4 * np.sqrt(1 / n_dims / 400))
    np.testing.assert_allclose((rotations**2).mean(0), 1 / n_dims, atol=0.08)


def test_reflection():
    adata = synthetic_tissue(n_slices=12, n_cells=5, n_genes=5, reflect=True)
    signs = [np.linalg.det(frame["rotation"]) for frame in adata.uns["source"]["frames"].values()]
    assert 0 < sum(sign < 0 for sign in signs) < 12


def test_the_warp_is_smooth_and_has_the_given_size():
    adata = synthetic_tissue(n_slices=20, n_cells=200, n_genes=5, rotate=False, warp=0.04)
    moved = adata.obsm["spatial"] - adata.obsm["spatial_anatomy"]
    assert np.sqrt((moved**2).mean()) == pytest.approx(40, rel=0.25)
    part = in_slice(adata, "slice_0")
    nearest = KDTree(part.obsm["spatial_anatomy"]).query(part.obsm["spatial_anatomy"], k=2)[1][:, 1]
    assert np.abs(moved[:200] - moved[:200][nearest]).mean() < 0.3 * moved[:200].std()


def test_depth_dropout_and_zeros():
    plain = synthetic_tissue(n_slices=1, batch_effect=0, dropout=0)
    lossy = synthetic_tissue(n_slices=1, batch_effect=0, dropout=0.4)
    for adata in (plain, lossy):
        total = np.asarray(adata.X.sum(1)).ravel()
        assert np.median(total) == pytest.approx(300, rel=0.06)
        assert np.log(total).std() == pytest.approx(0.4, abs=0.1)
    assert lossy.X.nnz < 0.8 * plain.X.nnz


def test_batch_effect_multiplies_genes():
    adata = synthetic_tissue(n_slices=2, n_cells=3000, n_genes=60, n_cell_types=1, depth=3000, batch_effect=0.3)
    means = np.array([np.asarray(in_slice(adata, name).X.mean(0)).ravel() for name in ("slice_0", "slice_1")])
    factor = np.log(means[1] / means[0])
    assert factor.std() == pytest.approx(0.3 * np.sqrt(2), rel=0.3)
    same = synthetic_tissue(n_slices=2, n_cells=3000, n_genes=60, n_cell_types=1, depth=3000, batch_effect=0)
    means = np.array([np.asarray(in_slice(same, name).X.mean(0)).ravel() for name in ("slice_0", "slice_1")])
    assert np.log(means[1] / means[0]).std() < 0.07


def test_counts_are_negative_binomial():
    n, genes, mean = 20_000, 5, 3.0
    rng = np.random.default_rng(0)
    rates, depth = np.zeros((n, genes), dtype=np.float32), np.full(n, mean * genes)
    drawn = draw_counts(rates, depth, 0.0, rng).toarray().ravel().astype(int)
    expected = stats.nbinom(4, 4 / (4 + mean)).pmf(np.arange(12)) * drawn.size
    seen = np.bincount(drawn, minlength=200)[:12]
    assert (
        stats.chisquare(np.append(seen, drawn.size - seen.sum()), np.append(expected, drawn.size - expected.sum()))[1]
        > 1e-3
    )
    lossy = draw_counts(rates, depth, 0.25, rng).toarray().ravel()
    m = mean / 0.75
    assert lossy.mean() == pytest.approx(mean, rel=0.02)
    assert lossy.var() == pytest.approx(0.75 * (m + m**2 * 1.25) - mean**2, rel=0.05)


def test_blocks_of_cells_are_put_together(monkeypatch):
    monkeypatch.setattr(_synthetic, "_BLOCK", 1000)
    adata = synthetic_tissue(n_slices=1, n_cells=503, n_genes=60, batch_effect=0)
    assert adata.shape == (503, 60)
    assert np.median(np.asarray(adata.X.sum(1))) == pytest.approx(300, rel=0.1)


def test_cell_types_have_regions_that_overlap(tissue):
    part = in_slice(tissue, "slice_0")
    codes, points = part.obs["cell_type"].cat.codes.to_numpy(), part.obsm["spatial_anatomy"]
    neighbors = KDTree(points).query(points, k=11)[1][:, 1:]
    same = (codes[neighbors] == codes[:, None]).mean(1)
    shares = np.bincount(codes) / len(codes)
    for code, name in enumerate(part.obs["cell_type"].cat.categories):
        lift = same[codes == code].mean() / shares[code]
        assert lift < 1.6 if name.startswith("scattered") else 1.4 < lift < 0.9 / shares[code]


def test_regional_composition():
    anatomy = draw_anatomy(2, 8, np.random.default_rng(3))
    points = draw_positions(anatomy, 4000, np.random.default_rng(0))
    probability = anatomy.type_probabilities(points)
    np.testing.assert_allclose(probability.sum(1), 1)
    np.testing.assert_allclose(probability.mean(0), anatomy.shares, rtol=0.15)
    kinds = [name.split("_")[0] for name in anatomy.type_names]
    assert kinds == ["layer"] * 2 + ["patch"] * 5 + ["scattered"]
    patches = np.flatnonzero(~np.isnan(anatomy.patch_centers[:, 0]))
    probability = anatomy.type_probabilities(anatomy.patch_centers[patches])
    assert (probability[np.arange(len(patches)), patches] > anatomy.shares[patches]).all()


def test_markers_are_highest_in_their_type(tissue):
    types = tissue.obs["cell_type"].to_numpy()
    mean = np.stack([tissue.X[types == name].mean(0).A1 for name in tissue.obs["cell_type"].cat.categories])
    markers = np.flatnonzero(tissue.var["program"] == "marker")
    own = tissue.var["marker_of"].cat.codes.to_numpy()[markers]
    assert (own >= 0).all()
    assert (mean[:, markers].argmax(0) == own).mean() > 0.9


def test_positional_genes_vary_inside_a_type(tissue):
    counts = tissue.X.toarray()
    values = np.log1p(counts / counts.sum(1, keepdims=True) * 300)

    def explained(values, points):
        x, y = (points / 500).T
        design = np.stack([np.ones_like(x), x, y, x * y, x**2, y**2], axis=1)
        residual = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
        return 1 - residual.var(0) / values.var(0)

    positional, none = ((tissue.var["program"] == kind).to_numpy() for kind in ("positional", "none"))
    for name in tissue.obs["cell_type"].cat.categories[:-1]:  # the last is scattered
        own = (tissue.obs["cell_type"] == name).to_numpy()
        points = tissue.obsm["spatial_anatomy"][own]
        seen = explained(values[own], points)
        chance = explained(np.random.default_rng(0).permutation(values[own]), points)
        assert seen[positional].mean() > 3 * chance[positional].mean()
        assert seen[positional].mean() > 3 * seen[none].mean()


@pytest.mark.parametrize("n_dims", [2, 3])
def test_fields_have_the_covariance_of_their_length_scale(n_dims):
    rng = np.random.default_rng(0)
    points = rng.uniform(size=(6, n_dims))
    values = SmoothFields.draw(n_dims, 20_000, 0.3, rng)(points)
    expected = np.exp(-(cdist(points, points) ** 2) / (2 * 0.3**2))
    np.testing.assert_allclose(values.mean(1), 0, atol=0.03)
    np.testing.assert_allclose(np.cov(values), expected, atol=0.04)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_cells_have_a_minimum_spacing_inside_the_body(n_dims):
    rng = np.random.default_rng(0)
    anatomy = draw_anatomy(n_dims, 3, rng)
    points = draw_positions(anatomy, 1000, rng)
    assert (anatomy.depth(points) > 0).all()
    nearest = KDTree(points).query(points, k=2)[0][:, 1]
    # Of a Poisson process the spread is .52 of the mean in 2D and .36 in 3D, the mean .5 and .55 of (V / n)^(1 / D).
    assert nearest.std() / nearest.mean() < 0.25
    assert nearest.mean() > 0.7 * (anatomy.volume / len(points)) ** (1 / n_dims)


def test_volume_of_the_body():
    rng = np.random.default_rng(0)
    anatomy = draw_anatomy(2, 3, rng)
    grid = np.stack(np.meshgrid(*[np.linspace(-0.6, 0.6, 400)] * 2), axis=-1).reshape(-1, 2)
    covered = (cdist(grid, anatomy.centers) < anatomy.radii).any(1).mean() * 1.2**2
    assert anatomy.volume == pytest.approx(covered, rel=0.05)


def test_the_body_is_not_its_own_turned_or_mirrored_image():
    adata = synthetic_tissue(n_slices=2, n_cells=800, n_genes=2, rotate=False, warp=0)
    still, other = (in_slice(adata, name).obsm["spatial"] for name in ("slice_0", "slice_1"))
    still, other = still - still.mean(0), other - other.mean(0)
    tree = KDTree(still)

    def gap(points):
        return tree.query(points)[0].mean() + KDTree(points).query(still)[0].mean()

    def turned(points, angle):
        return points @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])

    own = gap(other)
    assert all(gap(turned(other, angle)) > 1.5 * own for angle in np.linspace(0, 2 * np.pi, 13)[1:-1])
    mirrored = other * [1, -1]
    assert min(gap(turned(mirrored, angle)) for angle in np.linspace(0, 2 * np.pi, 72)) > 1.5 * own


@pytest.mark.parametrize("n_dims", [2, 3])
def test_expression_predicts_positions_in_part(n_dims):
    from sklearn.decomposition import PCA
    from sklearn.neighbors import KNeighborsRegressor

    adata = synthetic_tissue(n_dims=n_dims)
    counts = adata.X.toarray()
    total = counts.sum(1, keepdims=True)
    expression = np.log1p(counts / total * np.median(total))
    query = (adata.obs["slice_id"] == "slice_2").to_numpy()
    pca = PCA(30, svd_solver="randomized", random_state=0).fit(expression[~query])
    positions = adata.obsm["spatial_anatomy"]
    regression = KNeighborsRegressor(25).fit(pca.transform(expression[~query]), positions[~query])
    predicted, true = regression.predict(pca.transform(expression[query])), positions[query]
    rows = np.random.default_rng(0).permutation(len(true))[:300]
    pairs = zip(cdist(true[rows], true), cdist(predicted[rows], predicted), strict=True)
    assert 0.55 < np.mean([stats.spearmanr(a, b)[0] for a, b in pairs]) < 0.8
    near, guessed = (KDTree(x).query(x, k=21)[1][:, 1:] for x in (true, predicted))
    kept = np.mean([len(np.intersect1d(a, b)) / 20 for a, b in zip(near, guessed, strict=True)])
    assert kept > 4 * 20 / 1499


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    n_genes=st.integers(1, 30),
    n_cell_types=st.integers(1, 10),
    n_dims=st.sampled_from([2, 3]),
    random_state=st.integers(0, 2**32),
)
def test_any_size(sizes, n_genes, n_cell_types, n_dims, random_state):
    adata = synthetic_tissue(
        n_slices=len(sizes),
        n_cells=sizes,
        n_genes=n_genes,
        n_cell_types=n_cell_types,
        n_dims=n_dims,
        random_state=random_state,
    )
    assert adata.shape == (sum(sizes), n_genes)
    assert adata.obs["slice_id"].value_counts(sort=False).tolist() == sizes
    assert len(adata.obs["cell_type"].cat.categories) == n_cell_types
    assert np.isfinite(adata.obsm["spatial"]).all()
    assert adata.obsm["spatial"].shape[1] == n_dims
    assert (adata.X.data == np.round(adata.X.data)).all()


def test_written_and_read(tmp_path):
    adata = synthetic_tissue(n_slices=2, n_cells=[20, 30], n_genes=12, n_dims=3)
    adata.write_h5ad(tmp_path / "tissue.h5ad")
    back = ad.read_h5ad(tmp_path / "tissue.h5ad")
    assert same(adata, back)
    frames, stored = adata.uns["source"]["frames"], back.uns["source"]["frames"]
    np.testing.assert_array_equal(stored["slice_1"]["rotation"], frames["slice_1"]["rotation"])
    assert list(back.uns["source"]["params"]["n_cells"]) == [20, 30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_slices": 0}, "n_slices=0"),
        ({"n_cells": 0}, "n_cells of slice_0=0"),
        ({"n_cells": 10.5}, "n_cells of slice_0=10.5"),
        ({"n_cells": [10, 10]}, "n_cells .*n_slices=3"),
        ({"n_cells": [10, 10, -1]}, "n_cells of slice_2=-1"),
        ({"n_genes": 0}, "n_genes=0"),
        ({"n_cell_types": 0}, "n_cell_types=0"),
        ({"n_dims": 4}, "n_dims=4"),
        ({"depth": 0}, "depth=0"),
        ({"depth": float("nan")}, "depth=nan"),
        ({"dropout": 1}, "dropout=1 "),
        ({"warp": -0.1}, "warp=-0.1"),
        ({"batch_effect": float("inf")}, "batch_effect=inf"),
        ({"random_state": -1}, "random_state=-1"),
        ({"random_state": None}, "random_state=None"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic_tissue(**arguments)


def test_import_loads_nothing_heavy():
    code = (
        "import sys, alphastomics.datasets as d; d.synthetic_tissue(n_slices=1, n_cells=5, n_genes=5);"
        "assert not {'torch', 'scanpy', 'squidpy', 'scvi', 'pooch'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
