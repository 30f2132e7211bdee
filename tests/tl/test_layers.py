"""Attention gates, sinks and maps and expert usage against the layers themselves."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics
from alphastomics.sampling import _layers
from alphastomics.sampling._layers import query_source, record_contexts
from alphastomics.tl import attention_gates, attention_maps, attention_sinks, expert_usage

N = 70  # cells of a slice
KINDS = {"moe": {"use_moe": True, "gate_type": "elementwise"}, "linear": {"attention": "linear"}, "headwise": {}}


@pytest.fixture(scope="module")
def _tissue() -> ad.AnnData:
    return synthetic_tissue(n_slices=2, n_cells=N, n_genes=20, random_state=0)


@pytest.fixture
def tissue(_tissue) -> ad.AnnData:
    return _tissue.copy()


@pytest.fixture(scope="module")
def models(_tissue) -> dict[str, AlphaSTomics]:
    result = {}
    for name, arguments in KINDS.items():
        adata = _tissue.copy()
        AlphaSTomics.setup_anndata(adata, slice_key="slice_id")
        model = AlphaSTomics(adata, mode="expr_to_pos", d_model=16, n_layers=2, n_heads=2, **arguments)
        model.train(max_epochs=2, accelerator="cpu", precision="32-true", enable_progress_bar=False, context_size=64)
        result[name] = model
    return result


@pytest.fixture
def layers(tissue, models):
    """Dense attention (H, N, N), gates and routing of each slice and layer, and the rows of the slice in their order."""

    def look(kind: str) -> list[tuple[np.ndarray, list]]:
        result = []
        sampler = models[kind]._make_sampler()
        for context in record_contexts(sampler, query_source(sampler, tissue)):
            seen = [context.layers[i] for i in range(2)]
            with torch.no_grad():
                dense = [
                    (s.attention.weights(s.x, torch.arange(N))[0], s.attention.gates(s.x), s.routing) for s in seen
                ]
            result.append((context.rows, dense))
        return result

    return look


@pytest.mark.parametrize("kind", ["moe", "headwise"])
def test_gates(tissue, models, layers, kind):
    assert attention_gates(models[kind], tissue) is None
    table, summary = tissue.obsm["attention_gates"], tissue.uns["attention_gates"]["summary"]
    assert list(table.columns) == [f"layer_{i}_head_{h}" for i in range(2) for h in range(2)]
    by_layer = [np.zeros((2 * N, 2, 8 if kind == "moe" else 1)) for _ in range(2)]
    for rows, dense in layers(kind):
        for i, (_, gates, _) in enumerate(dense):
            by_layer[i][rows] = gates[0].reshape(N, 2, -1)
    for i, gates in enumerate(by_layer):
        np.testing.assert_allclose(table[[f"layer_{i}_head_0", f"layer_{i}_head_1"]], gates.mean(2), rtol=1e-5)
        for h in range(2):
            (row,) = summary[(summary["layer"] == i) & (summary["head"] == h)].itertuples()
            assert row.mean == pytest.approx(gates[:, h].mean(), rel=1e-5)
            assert row.sd == pytest.approx(gates[:, h].std(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sinks(tissue, models, layers, kind):
    attention_sinks(models[kind], tissue, key_added="received")
    table, summary = tissue.obsm["received"], tissue.uns["received"]["summary"]
    assert summary.shape == (2 * 2 * 2, 5)
    np.testing.assert_allclose(summary["uniform"], 1 / N)
    for name, (rows, dense) in zip(("slice_0", "slice_1"), layers(kind), strict=True):
        for i, (weights, _, _) in enumerate(dense):
            received = weights.mean(1).numpy()
            np.testing.assert_allclose(table[f"layer_{i}"].to_numpy()[rows], received.mean(0), rtol=1e-4)
            shares = summary[(summary["slice"] == name) & (summary["layer"] == i)]["share"]
            np.testing.assert_allclose(shares, received.max(1), rtol=1e-4)
    assert (summary["share"] >= summary["uniform"]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [None, 1])
def test_maps(tissue, models, layers, kind, head):
    chosen = [3, N + 5]
    attention_maps(models[kind], tissue, tissue.obs_names[chosen], layer=0, head=head)
    table = tissue.obsm["attention_maps"]
    assert list(table.columns) == list(tissue.obs_names[chosen])
    assert tissue.uns["attention_maps"]["params"] == {"layer": 0, "head": "mean" if head is None else 1}
    for cell, (rows, dense) in zip(chosen, layers(kind), strict=True):
        weights = dense[0][0].mean(0) if head is None else dense[0][0][head]
        column = table[tissue.obs_names[cell]].to_numpy()
        np.testing.assert_allclose(column[rows], weights[rows.tolist().index(cell)], rtol=1e-4)
        assert column[rows].sum() == pytest.approx(1, rel=1e-5)
        assert np.isnan(np.delete(column, rows)).all()


def test_maps_by_number_or_mask(tissue, models):
    by_name, *others = (
        attention_maps(models["headwise"], tissue, cells, copy=True).obsm["attention_maps"]
        for cells in (list(tissue.obs_names[[2, 9]]), [2, 9], np.isin(np.arange(2 * N), [2, 9]))
    )
    for other in others:
        pd.testing.assert_frame_equal(other, by_name)


def test_maps_of_a_cell_of_several_contexts_are_those_of_one(tissue, models, monkeypatch):
    """A large slice is covered by contexts that share anchors, the attention of which sums to 1, too."""
    monkeypatch.setattr(_layers, "MAX_CONTEXT", 32)
    weights = attention_maps(models["headwise"], tissue, np.arange(N), copy=True).obsm["attention_maps"]
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)
    assert (weights.notna().sum() <= 32).all()


def test_experts(tissue, models, layers):
    expert_usage(models["moe"], tissue)
    summary = tissue.uns["experts"]["summary"]
    looked = layers("moe")
    for i in range(2):
        probability, assigned = (
            np.concatenate([dense[i][2][part][0].numpy() for _, dense in looked]) for part in (0, 1)
        )
        rows = np.concatenate([rows for rows, _ in looked])
        first = tissue.obs[f"experts_layer_{i}"]
        assert list(first.cat.categories) == ["0", "1", "2", "3"]
        assert (first.cat.codes.to_numpy()[rows] == probability.argmax(1)).all()
        of_layer = summary[summary["layer"] == i]
        np.testing.assert_allclose(of_layer["usage"], assigned.mean(0) / 2, rtol=1e-6)
        np.testing.assert_allclose(of_layer["probability"], probability.mean(0), rtol=1e-5)
        assert of_layer["usage"].sum() == pytest.approx(1)


TOOLS = {
    "gates": attention_gates,
    "sinks": attention_sinks,
    "maps": lambda model, adata, **kwargs: attention_maps(model, adata, ["slice_0_cell_1"], **kwargs),
    "experts": expert_usage,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_results_survive_a_file_and_a_copy_leaves_the_original(tissue, models, tmp_path, tool):
    tissue.obs_names = [f"slice_0_cell_{i}" for i in range(2 * N)]
    before = [set(getattr(tissue, part)) for part in ("obs", "obsm", "uns")]
    result = TOOLS[tool](models["moe"], tissue, copy=True)
    assert [set(getattr(tissue, part)) for part in ("obs", "obsm", "uns")] == before
    (result_key,) = set(result.uns) - set(tissue.uns)
    result.write_h5ad(tmp_path / "x.h5ad")
    read = ad.read_h5ad(tmp_path / "x.h5ad")
    for key in result.obsm:
        if isinstance(result.obsm[key], pd.DataFrame):
            np.testing.assert_array_equal(read.obsm[key], result.obsm[key])
    if tool != "maps":
        np.testing.assert_array_equal(read.uns[result_key]["summary"], result.uns[result_key]["summary"])


@pytest.mark.parametrize("tool", ["gates", "sinks"])
def test_positions_are_not_read_and_row_order_does_not_matter(tissue, models, tool):
    order = np.random.default_rng(0).permutation(2 * N)
    expected = TOOLS[tool](models["headwise"], tissue, copy=True).obsm[f"attention_{tool}"]
    shuffled = tissue[order].copy()
    del shuffled.obsm["spatial"]
    TOOLS[tool](models["headwise"], shuffled)
    pd.testing.assert_frame_equal(shuffled.obsm[f"attention_{tool}"], expected.iloc[order])


def test_unsuitable_models_raise(tissue, models):
    with pytest.raises(ValueError, match="attention='linear'"):
        attention_gates(models["linear"], tissue)
    with pytest.raises(ValueError, match="use_moe=True"):
        expert_usage(models["linear"], tissue)
    untrained = AlphaSTomics(models["moe"].adata, d_model=16, n_layers=1, n_heads=2)
    with pytest.raises(RuntimeError, match="not trained"):
        attention_sinks(untrained, tissue)


def test_models_of_expression_have_attention(tissue, models):
    model = AlphaSTomics(models["moe"].adata, mode="pos_to_expr", d_model=16, n_layers=1, n_heads=2)
    model.is_trained_ = True
    attention_sinks(model, tissue)
    assert tissue.obsm["attention_sinks"].notna().all(axis=None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cells": ["nobody"]}, KeyError, "nobody"),
        ({"cells": [2 * N]}, KeyError, "cells"),
        ({"cells": np.ones(3, dtype=bool)}, ValueError, "cells"),
        ({"cells": np.zeros(2 * N, dtype=bool)}, ValueError, "cells="),
        ({"cells": [4, 4]}, ValueError, "more than once"),
        ({"cells": [0], "layer": 2}, ValueError, "layer=2"),
        ({"cells": [0], "head": 2}, ValueError, "head=2"),
    ],
)
def test_invalid_cells_layers_and_heads_raise(tissue, models, arguments, error, message):
    with pytest.raises(error, match=message):
        attention_maps(models["headwise"], tissue, **arguments)
