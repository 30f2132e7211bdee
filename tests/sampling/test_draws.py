"""Several draws: how they are returned, aligned and reduced."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.linalg import orthogonal_procrustes

from alphastomics.data import AnnDataSource
from alphastomics.metrics import aligned_rmsd, distance_spearman
from alphastomics.sampling import _position_draws
from alphastomics.sampling._cells import content_order, encode_cells
from alphastomics.sampling._draws import spread

STEPS = 4


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


def test_mean_and_uncertainty_match_draws_from_halves_of_the_genes(trained, reference, monkeypatch):
    seen = []

    def encode(module, source, rows, *, max_context, genes):
        seen.append(genes)
        return encode_cells(module, source, rows, max_context=max_context, genes=genes)

    monkeypatch.setattr(_position_draws, "encode_cells", encode)
    aligned = []
    monkeypatch.setattr(_position_draws, "spread", lambda draws: aligned.append(draws) or spread(draws))
    one = reference[reference.obs["slice_id"] == "slice_0"].copy()
    mean = trained.sample(one, n_steps=STEPS, n_samples=4, reduce="mean")
    assert [int(genes.sum()) for genes in seen] == [reference.n_vars // 2] * 4
    assert (seen[0] ^ seen[1]).all()
    assert (seen[2] ^ seen[3]).all()
    assert (seen[0] != seen[2]).any()
    medoid = trained.sample(one, n_steps=STEPS, n_samples=4, reduce="medoid")
    assert [genes is None for genes in seen[4:]] == [True] + 4 * [False]
    order = content_order(AnnDataSource(one, trained.schema, positions=False), np.arange(one.n_obs))
    for result, halves in zip((mean, medoid), aligned, strict=True):
        assert result.n_obs == one.n_obs
        assert "draw" not in result.obs
        returned, center = result.obsm["spatial"][order], halves.mean(0)
        turn, _ = orthogonal_procrustes(center - center.mean(0), returned - returned.mean(0))
        turned = (center - center.mean(0)) @ turn + returned.mean(0)
        expected = np.sqrt(halves.var(axis=0, ddof=1).sum(-1) + ((turned - returned) ** 2).sum(-1))
        np.testing.assert_allclose(result.obs["position_uncertainty"].to_numpy()[order], expected, rtol=1e-6)
        assert (expected > 0).all()
    np.testing.assert_allclose(np.sort(mean.obsm["spatial"], 0), np.sort(aligned[0].mean(0), 0), rtol=1e-9)
    draws = trained.sample(one, n_steps=STEPS, n_samples=4).obsm["spatial"].reshape(4, -1, 2)
    assert sum(np.array_equal(draw, medoid.obsm["spatial"]) for draw in draws) == 1


def test_one_draw_has_no_uncertainty(trained, reference):
    for reduce in ("mean", "medoid"):
        result = trained.sample(reference, n_steps=STEPS, reduce=reduce)
        np.testing.assert_array_equal(result.obsm["spatial"], trained.sample(reference, n_steps=STEPS).obsm["spatial"])
        assert result.obs["position_uncertainty"].isna().all()


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
