from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.neighbors import NearestNeighbors

from benchmarks import embeddings


@pytest.fixture
def labeled():
    """Values of three separate groups, and labels that follow them."""
    rng = np.random.default_rng(0)
    group = rng.integers(3, size=120)
    obs = pd.DataFrame({"cell_type": pd.Categorical(np.array(["a", "b", "c"])[group])})
    return 10 * np.eye(3)[group] + rng.normal(size=(120, 3)), obs


def test_separate_groups_are_detected_and_noise_is_not(labeled):
    values, obs = labeled
    scores = embeddings.score(values, obs, seed=0)
    assert set(scores) == {"type_ari", "type_nmi", "type_ari_louvain", "type_nmi_louvain"}
    assert scores["type_ari"] == scores["type_nmi"] == 1
    assert scores["type_nmi_louvain"] > 0.6
    shuffled = obs.sample(frac=1, random_state=0).reset_index(drop=True)
    assert abs(embeddings.score(values, shuffled, seed=0)["type_ari"]) < 0.1


def test_layers_are_scored_where_there_are_some_and_cells_without_a_label_are_left_out(labeled):
    values, obs = labeled
    obs["layer"] = np.where(obs["cell_type"] == "a", "1", "2")
    obs.loc[:60, "cell_type"] = np.nan
    scores = embeddings.score(values, obs, seed=0)
    assert scores["type_ari"] == 1
    assert scores["layer_ari"] < 1
    assert len(scores) == 8


def test_components_match_a_plain_decomposition(make_tissue):
    tissue = make_tissue(0, n_slices=1)
    found = embeddings.components(tissue, seed=0)
    counts = np.asarray(tissue.X, dtype=np.float64)
    values = np.log1p(counts / counts.sum(1, keepdims=True) * np.median(counts.sum(1)))
    values = np.minimum((values - values.mean(0)) / values.std(0, ddof=1), 10)
    values -= values.mean(0)
    assert found.shape == (150, 39)
    np.testing.assert_allclose(found @ found.T, _truncated(values, 39), atol=1e-2)


def _truncated(values, k):
    u, s, _ = np.linalg.svd(values, full_matrices=False)
    return (u[:, :k] * s[:k] ** 2) @ u[:, :k].T


def test_average_is_over_the_cell_and_its_neighbors():
    rng = np.random.default_rng(0)
    values, position = rng.normal(size=(60, 4)), rng.normal(size=(60, 2))
    near = NearestNeighbors(n_neighbors=21).fit(position).kneighbors(position)[1]
    np.testing.assert_allclose(embeddings.averaged(values, position), values[near].mean(1))
    few = embeddings.averaged(values[:5], position[:5])
    np.testing.assert_allclose(few, np.broadcast_to(values[:5].mean(0), (5, 4)))


def test_without_positions_none_are_shown():
    class Model:
        def get_latent_representation(self, cells, *, layer, use_positions):
            assert ("spatial" in cells.obsm) == use_positions
            return layer

    import anndata as ad

    cells = ad.AnnData(np.ones((3, 2)), obsm={"spatial": np.zeros((3, 2))})
    for row, (layer, used) in embeddings.EMBEDDINGS.items():
        assert row == (f"{layer}, positions" if used else layer)
        assert embeddings.embed(Model(), cells, layer, use_positions=used) == layer
    assert "spatial" in cells.obsm
