"""The second network: the average of two placements, where it is used, and what is stored of it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from alphastomics.data import AnnDataSource
from alphastomics.model import AlphaSTomics
from alphastomics.sampling import FittedStatistics, PositionSampler
from alphastomics.sampling._cells import encode_cells
from alphastomics.sampling._second import SecondNetwork, average_means
from rotations import random_rotation


@pytest.fixture
def one(trained):
    """Cells of one slice without their positions."""
    adata = trained.adata
    query = adata[adata.obs["slice_id"] == adata.obs["slice_id"].iloc[0]].copy()
    del query.obsm["spatial"]
    return query


def placed(model, query, **arguments):
    return model.sample(query.copy(), random_state=0, **arguments).obsm["spatial_reconstructed"]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_means_are_averaged_after_rigid_alignment(share):
    generator = torch.Generator().manual_seed(0)
    mean, error = torch.randn(2, 1, 500, 2, generator=generator, dtype=torch.float64)
    mean = mean - mean.mean(1, keepdim=True)
    rotated = (mean + 0.1 * error) @ random_rotation(2, generator).double() + 5
    found = average_means(mean, rotated, share, shared_frame=False)
    centered = (rotated - rotated.mean(1, keepdim=True))[0].numpy()
    aligned = centered @ orthogonal_procrustes(centered, mean[0].numpy())[0]
    np.testing.assert_allclose(found[0], (1 - share) * mean[0].numpy() + share * aligned, atol=1e-9)
    again = average_means(mean, rotated @ random_rotation(2, generator).double(), share, shared_frame=False)
    torch.testing.assert_close(again, found, atol=1e-6, rtol=0)
    shared = average_means(mean, rotated, share, shared_frame=True)
    torch.testing.assert_close(shared, (1 - share) * mean + share * rotated)


def test_similarities_are_averaged_with_the_share(trained, one):
    sampler, source = trained._make_sampler(), AnnDataSource(one, trained.schema, positions=False)
    rows = np.arange(one.n_obs)
    other = replace(sampler, module=sampler.second)
    first, second = (
        PositionSampler(each, encode_cells(each.module, source, rows, max_context=1000)) for each in (sampler, other)
    )
    both = PositionSampler(sampler, encode_cells(trained.module, source, rows, max_context=1000), second)
    share = trained.fitted_.second.share
    products = [x @ x.T for x in (first.layout_feature, second.layout_feature, both.layout_feature)]
    torch.testing.assert_close((1 - share) * products[0] + share * products[1], products[2])
    assert not torch.allclose(products[0], products[1], atol=0.05)
    torch.testing.assert_close(products[2].diagonal(), torch.ones(one.n_obs))
    assert second.layout_feature.shape == second.joint_feature.shape


def test_it_is_another_network_in_evaluation_mode(trained):
    second = trained._make_sampler().second
    assert not torch.equal(second.position_out.weight, trained.module.position_out.weight)
    assert not second.training


def test_only_placements_use_it(trained, one, monkeypatch):
    fitted, ways = trained.fitted_, {"draw": {"n_samples": 2, "reduce": None}, "independent": {"independent": True}}
    before = {name: placed(trained, one, **way) for name, way in (ways | {"placement": {}}).items()}
    monkeypatch.setattr(trained, "_fitted", replace(fitted, second=None))
    without = {name: placed(trained, one, **way) for name, way in (ways | {"placement": {}}).items()}
    for name in ways:
        assert np.array_equal(before[name], without[name]), name
    assert not np.allclose(before["placement"], without["placement"], rtol=1e-3)


def test_with_a_share_of_0_it_changes_nothing(trained, one, monkeypatch):
    fitted = trained.fitted_
    monkeypatch.setattr(trained, "_fitted", replace(fitted, second=replace(fitted.second, share=0.0)))
    ignored = placed(trained, one, refine=False)
    monkeypatch.setattr(trained, "_fitted", replace(fitted, second=None))
    np.testing.assert_allclose(ignored, placed(trained, one, refine=False), rtol=1e-4)


def test_it_is_saved_with_the_model(trained, one, folder):
    loaded = AlphaSTomics.load(folder, adata=False)
    saved, found = trained.fitted_.second, loaded.fitted_.second
    assert found.share == saved.share
    assert all(torch.equal(weight, found.weights[name]) for name, weight in saved.weights.items())
    assert np.array_equal(placed(loaded, one), placed(trained, one))


@pytest.mark.parametrize("share", [None, -0.1, 1.5, "0.5", True])
def test_an_invalid_share_is_refused(folder, share):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"second_share": share}))
    with pytest.raises(ValueError, match="does not contain a complete model"):
        AlphaSTomics.load(folder, adata=False)


def test_a_model_without_one_is_restored_without_one():
    empty = FittedStatistics()
    restored = FittedStatistics.restore(empty.to_dict(), empty.to_tensors(), n_genes=3, n_dims=2)
    assert restored.second is None
    with pytest.raises(ValueError, match="share"):
        SecondNetwork(weights={}, share=2.0)


@pytest.mark.parametrize(("offset", "kept"), [(0.0, True), (0.5, False)])
def test_only_models_of_detected_molecules_keep_it(small, make_model, offset, kept):
    values = small.copy()
    values.X = np.log1p(values.X.toarray()) + offset  # log-normalized, or without zeros
    model = make_model(values)
    model.train(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
    assert (model.fitted_.second is not None) is kept
    assert (model._make_sampler().second is not None) is kept
