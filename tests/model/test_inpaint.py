"""Positions that are held, and the frame that they or a registration fix."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from alphastomics.datasets import synthetic_tissue
from alphastomics.metrics import distance_spearman
from alphastomics.model import AlphaSTomics
from alphastomics.sampling import _position


def hide(adata, rows):
    """Take the positions of some cells away; give those that there were."""
    true = adata.obsm["spatial"].copy()
    adata.obsm["spatial"][rows] = np.nan
    return true


@pytest.fixture
def partly(reference):
    """slice_0 is known but for 90 cells, slice_1 all known, slice_2 all unknown."""
    true = hide(reference, np.r_[0:90, 600:900])
    return reference, true, np.isfinite(reference.obsm["spatial"]).all(1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"n_samples": 3, "reduce": "medoid"},
        {"n_samples": 3, "reduce": "mean"},
        {"batch_size": 100},
        {"refine": False},
    ],
    ids=["one", "medoid", "mean", "contexts", "not refined"],
)
def test_known_positions_are_kept_bit_by_bit(trained, partly, arguments):
    adata, true, known = partly
    result = trained.sample(adata, inpaint=True, **arguments)
    assert result.obsm["spatial_reconstructed"][known].tobytes() == true[known].tobytes()
    placed = result.obsm["spatial_reconstructed"][~known]
    assert np.isfinite(placed).all()
    assert (placed != true[~known]).any(axis=1).all()
    if "reduce" in arguments:
        assert (result.obs["spatial_reconstructed_uncertainty"][known] == 0).all()
        assert (result.obs["spatial_reconstructed_uncertainty"][~known] > 0).all()


def test_one_draw_has_zero_spread_only_at_known_positions(trained, partly):
    adata, _, known = partly
    for reduce in ("mean", "medoid"):
        result = trained.sample(adata, inpaint=True, reduce=reduce)
        np.testing.assert_array_equal(result.obs["spatial_reconstructed_uncertainty"], np.where(known, 0, np.nan))


def test_every_draw_keeps_the_known_positions(trained, partly):
    adata, true, known = partly
    draws = trained.sample(adata, inpaint=True, n_samples=2).obsm["spatial_reconstructed"].reshape(2, 900, 2)
    for draw in draws:
        assert draw[known].tobytes() == true[known].tobytes()
    assert (draws[0][~known] != draws[1][~known]).all()


def test_cells_are_placed_among_the_known_ones(trained, partly):
    adata, true, _ = partly
    placed = trained.sample(adata, inpaint=True).obsm["spatial_reconstructed"][:90]
    for axis in range(2):
        assert np.corrcoef(placed[:, axis], true[:90, axis])[0, 1] > 0.5


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("reflected", [False, True])
def test_a_moved_input_gives_the_moved_output(trained, reference, reflected, refine):
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    hide(one, np.arange(0, 300, 3))
    angle = 2.1
    rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    rotation[:, 1] *= -1 if reflected else 1
    shift = np.array([4000.0, -700.0])
    still = trained.sample(one, inpaint=True, refine=refine).obsm["spatial_reconstructed"]
    one.obsm["spatial"] = one.obsm["spatial"] @ rotation + shift
    moved = trained.sample(one, inpaint=True, refine=refine).obsm["spatial_reconstructed"]
    error = np.linalg.norm(moved - (still @ rotation + shift), axis=1)
    # Refinement and removal of overlaps follow rounding errors: a step of Adam does not depend on the gradient's size, and a cell in
    # contact with several others moves to either side.
    assert np.quantile(error, 0.85 if refine else 0.95) < 2e-3 * still.std()


def test_a_moved_input_gives_the_moved_output_of_every_cell_without_contacts(trained, reference, monkeypatch):
    monkeypatch.setattr(_position, "remove_overlaps", lambda x, *_: x)
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    hide(one, np.arange(0, 300, 3))
    rotation, shift = np.array([[0.0, 1.0], [-1.0, 0.0]]), np.array([4e6, -7e5])
    still = trained.sample(one, inpaint=True, refine=False).obsm["spatial_reconstructed"]
    one.obsm["spatial"] = one.obsm["spatial"] @ rotation + shift
    moved = trained.sample(one, inpaint=True, refine=False).obsm["spatial_reconstructed"]
    assert np.linalg.norm(moved - (still @ rotation + shift), axis=1).max() < 2e-4 * still.std()


def test_all_known_is_returned_and_none_known_is_free(trained, reference, positions_of):
    true = reference.obsm["spatial"].tobytes()
    assert positions_of(trained.sample(reference, inpaint=True)) == true
    free = positions_of(trained.sample(reference))
    hide(reference, slice(None))
    assert positions_of(trained.sample(reference, inpaint=True)) == free


@pytest.mark.parametrize("arguments", [{}, {"n_samples": 2, "reduce": "medoid"}], ids=["one", "medoid"])
def test_a_slice_without_known_positions_is_placed_as_without_inpaint(trained, partly, arguments):
    adata, *_ = partly
    free, beside = (trained.sample(adata, inpaint=inpaint, **arguments)[600:] for inpaint in (False, True))
    np.testing.assert_array_equal(beside.obsm["spatial_reconstructed"], free.obsm["spatial_reconstructed"])
    assert beside.obs.pop("spatial_reconstructed_placed").all()
    pd.testing.assert_frame_equal(beside.obs, free.obs)


def test_known_cells_reduce_the_uncertainty_of_the_others(trained, partly):
    adata, _, known = partly
    free, among = (
        trained.sample(adata, inpaint=inpaint, n_samples=3, reduce="mean").obs["spatial_reconstructed_uncertainty"][:90]
        for inpaint in (False, True)
    )
    assert not known[:90].any()
    assert among.mean() < free.mean()


def test_a_partial_position_counts_as_missing(trained, partly):
    adata, true, known = partly
    adata.obsm["spatial"][200, 1] = np.nan
    result = trained.sample(adata, inpaint=True).obsm["spatial_reconstructed"]
    assert np.isfinite(result).all()
    assert (result[200] != true[200]).all()
    known[200] = False
    assert result[known].tobytes() == true[known].tobytes()


@pytest.mark.parametrize("n_known", [1, 2])
def test_few_known_cells_are_enough(trained, reference, n_known):
    true = hide(reference, np.arange(n_known, 300))
    result = trained.sample(reference, inpaint=True).obsm["spatial_reconstructed"]
    assert np.isfinite(result).all()
    assert result[:n_known].tobytes() == true[:n_known].tobytes()
    spread = np.linalg.norm(result[:300] - result[:300].mean(0), axis=1)
    assert 0.1 < np.sqrt((spread**2).mean()) / trained.schema.scale < 3


def test_permuted_rows_permute_the_result(trained, partly):
    adata, *_ = partly
    order = np.random.default_rng(0).permutation(900)
    expected = trained.sample(adata, inpaint=True).obsm["spatial_reconstructed"]
    result = trained.sample(adata[order].copy(), inpaint=True).obsm["spatial_reconstructed"]
    assert result.tobytes() == expected[order].tobytes()


def test_invalid_observed_positions_raise(trained, reference):
    for position, error in ((np.inf, "infinite values in 1 cells"), (None, "3 columns")):
        query = reference.copy()
        if position is None:
            query.obsm["spatial"] = query.obsm["spatial"][:, [0, 1, 1]]
        else:
            query.obsm["spatial"][5] = position
        with pytest.raises(ValueError, match=error):
            trained.sample(query, inpaint=True)
    del query.obsm["spatial"]
    with pytest.raises(KeyError, match=r'obsm\["spatial"\].*position_key'):
        trained.sample(query, inpaint=True)
    del reference.obs["slice_id"]
    with pytest.raises(KeyError, match=r'obs\["slice_id"\]'):
        trained.sample(reference, inpaint=True)


# -- a registered tissue ------------------------------------------------------------------------------------------------

OFFSET = np.array([5000.0, -3000.0])


@pytest.fixture(scope="module")
def registered_tissue():
    adata = synthetic_tissue(n_slices=2, n_cells=250, n_genes=60, rotate=False, random_state=1)
    adata.obsm["spatial"] = adata.obsm["spatial"] + OFFSET
    return adata


@pytest.fixture(scope="module")
def registered(registered_tissue, make_model, train_well):
    return train_well(make_model(registered_tissue, setup={"frame": "shared"}))


def test_shared_frame_needs_no_alignment(registered, registered_tissue):
    assert registered.fitted_.frame is None
    query = registered_tissue[250:].copy()
    true = query.obsm["spatial"]
    query.obsm["spatial"] = np.full_like(true, np.nan)
    placed = registered.sample(query).obsm["spatial_reconstructed"]
    assert np.abs(placed.mean(0) - true.mean(0)).max() < 0.35 * true.std()
    for axis in range(2):
        assert np.corrcoef(placed[:, axis], true[:, axis])[0, 1] > 0.5
    assert distance_spearman(true, placed) > 0.4


def test_shared_frame_holds_and_does_not_follow_the_known_cells(registered, registered_tissue):
    query = registered_tissue.copy()
    true = hide(query, np.arange(0, 500, 2))
    result = registered.sample(query, inpaint=True).obsm["spatial_reconstructed"]
    assert result[1::2].tobytes() == true[1::2].tobytes()
    for axis in range(2):
        assert np.corrcoef(result[::2, axis], true[::2, axis])[0, 1] > 0.5


def test_shared_frame_draws_are_not_moved(registered, registered_tissue):
    two, three = (registered.sample(registered_tissue, n_samples=n).obsm["spatial_reconstructed"] for n in (2, 3))
    assert three[:1000].tobytes() == two.tobytes()
    centers = three.reshape(3, 500, 2)[:, :250].mean(1)
    assert np.linalg.norm(centers - centers[0], axis=1)[1:].min() > 1e-3 * registered.schema.scale


def test_shared_frame_survives_the_disk(registered, registered_tissue, tmp_path, positions_of):
    registered.save(tmp_path / "m")
    loaded = AlphaSTomics.load(tmp_path / "m", adata=False)
    assert loaded.fitted_.frame is None
    expected = positions_of(registered.sample(registered_tissue))
    assert positions_of(loaded.sample(registered_tissue)) == expected
