"""Synthetic chains against the formulas they are made by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy import sparse
from scipy.spatial.distance import pdist, squareform

from alphastomics.chains import synthetic_chains
from alphastomics.chains._data import LENGTHS, PROPENSITIES, STRUCTURES, Segment, lay_backbone
from alphastomics.metrics import rigid_align

if TYPE_CHECKING:
    import anndata as ad


@pytest.fixture(scope="module")
def chains() -> ad.AnnData:
    return synthetic_chains(n_chains=40, noise=0)


def in_order(adata: ad.AnnData, k: int) -> ad.AnnData:
    """One chain, from its first residue to its last."""
    chain = adata[(adata.obs["slice_id"] == f"chain_{k}").to_numpy()]
    return chain[np.argsort(chain.obs["residue"].to_numpy())]


def dihedrals(points: np.ndarray) -> np.ndarray:
    """Angles in degrees between the planes of points i to i + 2 and i + 1 to i + 3, (n - 3,); positive to the right."""
    steps = np.diff(points, axis=0)
    normals = np.cross(steps[:-1], steps[1:])
    sine = np.einsum("ij,ij->i", np.cross(normals[:-1], normals[1:]), steps[1:-1]) / np.linalg.norm(steps[1:-1], axis=1)
    return np.degrees(np.arctan2(sine, np.einsum("ij,ij->i", normals[:-1], normals[1:])))


def test_layout(chains):
    assert list(chains.obs["slice_id"].cat.categories) == [f"chain_{k}" for k in range(40)]
    assert list(chains.obs["structure"].cat.categories) == ["helix", "strand", "loop"]
    assert sparse.issparse(chains.X)
    assert chains.X.dtype == np.float32
    assert list(chains.var_names) == list(PROPENSITIES)
    np.testing.assert_array_equal(np.asarray(chains.X.sum(1)).ravel(), 50)
    assert chains.obsm["spatial"].shape == (chains.n_obs, 3)
    assert chains.obs_names.is_unique
    for k in range(40):
        np.testing.assert_array_equal(in_order(chains, k).obs["residue"], np.arange(len(in_order(chains, k))))


def test_rows_do_not_reveal_the_order(chains):
    for k in range(40):
        chain = chains[(chains.obs["slice_id"] == f"chain_{k}").to_numpy()]
        assert abs(np.corrcoef(chain.obs["residue"], np.arange(chain.n_obs))[0, 1]) < 5 / np.sqrt(chain.n_obs)


def test_consecutive_residues_are_one_bond_apart_and_no_others_as_close(chains):
    for k in range(40):
        points = in_order(chains, k).obsm["spatial"]
        np.testing.assert_allclose(np.linalg.norm(np.diff(points, axis=0), axis=1), 3.8, atol=0.031)
        assert squareform(pdist(points))[np.triu_indices(len(points), 2)].min() > 4.2


def test_helices_are_right_handed_with_the_expected_rise(chains):
    for k in range(40):
        chain = in_order(chains, k)
        points, structure = chain.obsm["spatial"], chain.obs["structure"].to_numpy()
        helix = structure == "helix"
        four = helix[:-3] & helix[1:-2] & helix[2:-1] & helix[3:]
        np.testing.assert_allclose(dihedrals(points)[four], 50.1, atol=0.1)
        # Three residues on: 300 degrees around, a chord of the circle, and 4.5 Å up.
        apart = np.linalg.norm(points[3:] - points[:-3], axis=1)[four]
        np.testing.assert_allclose(apart, np.hypot(2 * 2.3 * np.sin(np.radians(150)), 4.5), atol=1e-9)


def test_strands_are_flat_and_rise_by_more(chains):
    for k in range(40):
        chain = in_order(chains, k)
        points, structure = chain.obsm["spatial"], chain.obs["structure"].to_numpy()
        three = (structure[:-2] == "strand") & (structure[1:-1] == "strand") & (structure[2:] == "strand")
        np.testing.assert_allclose(np.linalg.norm(points[2:] - points[:-2], axis=1)[three], 6.6, atol=1e-9)


def test_segments_lie_side_by_side_with_alternating_directions():
    kinds = ("strand", "strand", "helix", "helix", "strand")
    backbone = lay_backbone([Segment(kind=kind, length=LENGTHS[kind][0] + k) for k, kind in enumerate(kinds)])
    bounds = np.flatnonzero(np.diff(backbone.structure, prepend=-1))
    parts = [part for part in np.split(backbone.points, bounds[1:]) if len(part)]
    kind = [STRUCTURES[i] for i in backbone.structure[bounds]]
    segments = [part for part, name in zip(parts, kind, strict=True) if name != "loop"]
    assert [name for name in kind if name != "loop"] == list(kinds)
    places = [(part[0] + part[-1])[0] / 2 for name, part in zip(kinds, segments, strict=True) if name == "strand"]
    np.testing.assert_allclose(places, [0, 4.8, 4.8 + 7.4 + 10 + 7.4], atol=1e-9)
    ends = np.array([part[-1] - part[0] for part in segments])
    assert (np.einsum("ij,ij->i", ends[:-1], ends[1:]) < 0).all()


def test_without_noise_kinds_and_lengths_decide_the_fold():
    adata = synthetic_chains(n_chains=300, n_segments=(1, 2), noise=0)
    folds: dict[str, list[np.ndarray]] = {}
    for k in range(300):
        chain = in_order(adata, k)
        folds.setdefault("".join(s[0] for s in chain.obs["structure"]), []).append(chain.obsm["spatial"])
    twins = [points for points in folds.values() if len(points) > 1]
    assert len(twins) > 20
    for first, *others in twins:
        for other in others:
            np.testing.assert_allclose(rigid_align(other, first, reflection=False)[0], first, atol=1e-9)


def test_noise_and_frames_are_switched_off_one_at_a_time():
    plain, noisy, turned = (
        synthetic_chains(n_chains=3, noise=noise, rotate=rotate)
        for noise, rotate in ((0, False), (0.5, False), (0, True))
    )
    away = noisy.obsm["spatial"] - plain.obsm["spatial"]
    assert away.std() == pytest.approx(0.5, rel=0.15)
    assert abs(plain.obsm["spatial"] - turned.obsm["spatial"]).max() > 10
    for k in range(3):
        points = in_order(plain, k).obsm["spatial"], in_order(turned, k).obsm["spatial"]
        np.testing.assert_allclose(rigid_align(*points, reflection=False)[0], points[1], atol=1e-9)
    assert (plain.X != turned.X).nnz == 0


def test_expression_depends_on_structure_and_not_on_place():
    adata = synthetic_chains(n_chains=200, depth=50)
    X, structure = adata.X.toarray(), adata.obs["structure"].cat.codes.to_numpy()
    propensity = np.array(list(PROPENSITIES.values())).T
    expected = propensity / propensity.sum(1, keepdims=True)
    guess = (X @ np.log(expected).T).argmax(1)
    assert (guess == structure).mean() > 0.9
    for s in range(3):
        mean = X[structure == s].mean(0) / 50
        np.testing.assert_allclose(mean, expected[s], atol=5 * np.sqrt(0.1 / 50 / (structure == s).sum()))
    helix = structure == 0
    late = adata.obs["residue"].to_numpy()[helix] > np.median(adata.obs["residue"][helix])
    np.testing.assert_allclose(X[helix][late].mean(0), X[helix][~late].mean(0), atol=0.25)


def test_the_same_seed_gives_the_same_chains_however_many_there_are():
    few, many = (synthetic_chains(n_chains=n, random_state=3) for n in (2, 5))
    np.testing.assert_array_equal(few.obsm["spatial"], many.obsm["spatial"][: few.n_obs])
    np.testing.assert_array_equal(few.X.toarray(), many.X[: few.n_obs].toarray())
    assert list(few.obs_names) == list(many.obs_names[: few.n_obs])
    other = synthetic_chains(n_chains=2, random_state=4)
    assert other.n_obs != few.n_obs or not np.array_equal(other.obsm["spatial"], few.obsm["spatial"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"n_chains": 0}, "n_chains=0"),
        ({"depth": 0}, "depth=0"),
        ({"n_segments": (0, 3)}, r"n_segments\[0\]=0"),
        ({"n_segments": (4, 3)}, "n_segments"),
        ({"n_segments": 4}, "n_segments=4"),
        ({"n_segments": (3, 4.5)}, r"n_segments\[1\]=4.5"),
        ({"noise": -1}, "noise=-1"),
        ({"random_state": -1}, "random_state=-1"),
    ],
)
def test_arguments_out_of_range_raise(argument, message):
    with pytest.raises(ValueError, match=message):
        synthetic_chains(**argument)
