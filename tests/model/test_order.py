"""Positions and an order of the cells as inputs of the network: never the true positions of the cells being placed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from alphastomics.model import AlphaSTomics
from alphastomics.model._base import ModelBase
from alphastomics.nn import geometry
from alphastomics.sampling import _joint
from alphastomics.train.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData

NEIGHBOR = {"attention": "neighbor", "n_neighbors": 6}
PAIRED = {"attention": "geometric", "pair_features": "factorized"}
KINDS: dict[str, dict[str, Any]] = {"neighbor": NEIGHBOR, "geometric": PAIRED, "axial": {"attention": "axial"}}


@pytest.fixture
def ordered(small: AnnData) -> AnnData:
    """Cells with an order that is not that of their rows."""
    small.obs["order"] = 7 + np.random.default_rng(0).permutation(small.n_obs)
    return small


@pytest.fixture
def seen_positions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Positions among which neighbors are sought, and which of them count, call by call."""
    found, search = [], geometry.noisy_neighbors

    def spy(position: torch.Tensor, known: torch.Tensor, *arguments: Any) -> torch.Tensor:
        found.append((position.clone(), known.clone()))
        return search(position, known, *arguments)

    monkeypatch.setattr(geometry, "noisy_neighbors", spy)
    return found


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_true_positions_of_sampled_cells_have_no_effect(kind, small, make_model, train_briefly, positions_of):
    model = train_briefly(make_model(small, **KINDS[kind]))
    expected = positions_of(model.sample(small))
    moved, bare = small.copy(), small.copy()
    moved.obsm["spatial"] = np.random.default_rng(1).normal(size=moved.obsm["spatial"].shape)
    del bare.obsm["spatial"]
    assert positions_of(model.sample(moved)) == expected
    assert positions_of(model.sample(bare)) == expected


@pytest.mark.parametrize("inpaint", [False, True])
def test_no_position_reaches_the_network_that_places_cells(inpaint, small, make_model, train_briefly, seen_positions):
    model = train_briefly(make_model(small, **NEIGHBOR))
    partial = small[small.obs["slice_id"] == "slice_0"].copy()
    partial.obsm["spatial"][::2] = np.nan
    seen_positions.clear()
    result = model.sample(partial, inpaint=inpaint)
    assert np.array_equal(result.obsm["spatial_reconstructed"][1::2], partial.obsm["spatial"][1::2]) == inpaint
    assert seen_positions
    for position, known in seen_positions:
        assert not bool(known.any())
        assert not bool(position.any())


@pytest.mark.parametrize(("mode", "located"), [("expr_to_pos", {False}), ("any", {True, False})])
def test_training_uses_noisy_positions_only(mode, located, small, make_model, train_briefly, monkeypatch):
    """What neighbors are sought among is what the network was given, and where positions are absent it is nothing."""
    given, sought, search = [], [], geometry.noisy_neighbors
    losses = Objective.losses

    def watched(objective: Objective, *arguments: Any, **keywords: Any) -> Any:
        handle = objective.module.register_forward_pre_hook(lambda _, inputs: given.append(inputs))
        try:
            return losses(objective, *arguments, **keywords)
        finally:
            handle.remove()

    def spy(position: torch.Tensor, known: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sought.append((position.clone(), known.clone()))
        return search(position, known, *arguments)

    def before_training(*arguments: Any, **keywords: Any) -> Any:
        fit_draws(*arguments, **keywords)
        given.clear()
        sought.clear()

    fit_draws = ModelBase._fit_draws
    monkeypatch.setattr(ModelBase, "_fit_draws", before_training)
    monkeypatch.setattr(Objective, "losses", watched)
    monkeypatch.setattr(geometry, "noisy_neighbors", spy)
    train_briefly(make_model(small, mode=mode, **NEIGHBOR), max_epochs=6)
    assert len(given) >= 6
    states = set()
    for (_, noisy, _, t_pos, *_), (position, known) in zip(given, sought, strict=False):
        expected = (t_pos < 1)[:, None].expand(position.shape[:2])
        assert torch.equal(known, expected)
        assert torch.equal(position, torch.zeros_like(position) if noisy is None else noisy * expected[..., None])
        assert noisy is not None or not expected.any()
        states |= {bool(t < 1) for t in t_pos}
    assert states == located


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def train_ordered(make_model: Callable, train_briefly: Callable) -> Callable[..., AlphaSTomics]:
    def train(cells: AnnData, **options: Any) -> AlphaSTomics:
        return train_briefly(make_model(cells, setup={"sequence_key": "order"}, **options))

    return train


READING = {
    "neighbors": NEIGHBOR,
    "neighbors in the order": NEIGHBOR | {"sparse_pairs": "sequence"},
    "both": NEIGHBOR | {"sparse_pairs": "hybrid", "pair_features": "factorized"},
    "pairs": PAIRED,
}


@pytest.mark.parametrize("kind", READING)
def test_the_order_reaches_the_network(kind, ordered, train_ordered):
    # Neighbors by position alone are those of cells whose positions are a condition.
    mode, steps = ("pos_to_expr", {"n_steps": 2}) if kind == "neighbors" else ("expr_to_pos", {})
    model = train_ordered(ordered, mode=mode, **READING[kind])

    def sampled(cells: AnnData) -> np.ndarray:
        result = model.sample(cells, mode=mode, **steps)
        return result.obsm["spatial_reconstructed"] if mode == "expr_to_pos" else result.X.toarray()

    expected = sampled(ordered)
    later, other = ordered.copy(), ordered.copy()
    later.obs["order"] += 1000
    other.obs["order"] = np.random.default_rng(2).permutation(other.n_obs)
    np.testing.assert_array_equal(sampled(later), expected)
    assert (sampled(other) != expected).any()
    del other.obs["order"]
    with pytest.raises(KeyError, match=r'obs\["order"\]'):
        sampled(other)
    latent = model.get_latent_representation(ordered)
    np.testing.assert_array_equal(model.get_latent_representation(later), latent)


def test_the_order_is_optional_if_the_network_does_not_use_it(ordered, train_ordered, positions_of):
    model = train_ordered(ordered, attention="axial")
    expected = positions_of(model.sample(ordered))
    del ordered.obs["order"]
    assert positions_of(model.sample(ordered)) == expected


def test_expression_sampling_reads_the_order(ordered, train_ordered):
    model = train_ordered(ordered, mode="any", **READING["both"])
    result = model.sample(ordered, mode="pos_to_expr", n_steps=2)
    turned = ordered.copy()
    turned.obs["order"] *= -1
    other = model.sample(turned, mode="pos_to_expr", n_steps=2)
    assert np.abs(result.X.toarray() - other.X.toarray()).max() > 1e-3


def test_cells_of_a_new_slice_have_the_order_of_the_reference(ordered, train_ordered, monkeypatch):
    seen, real = [], _joint.ExpressionSampler
    monkeypatch.setattr(
        _joint, "ExpressionSampler", lambda *args, **kwargs: seen.append(kwargs["sequence"]) or real(*args, **kwargs)
    )
    model = train_ordered(ordered, mode="joint", **READING["both"])
    drawn = model.sample(n_cells=100, mode="joint", n_steps=2)
    found = drawn.obs["order"].to_numpy()
    of_slices = [np.sort(order - order.min()) for _, order in ordered.obs.groupby("slice_id", observed=True)["order"]]
    assert any(np.array_equal(found, order) for order in of_slices)
    np.testing.assert_array_equal(seen[0], found)


def test_the_encoder_does_not_require_the_order(ordered, train_ordered):
    model = train_ordered(ordered, **READING["both"])
    expected = model.get_latent_representation(ordered, layer="encoder")
    del ordered.obs["order"]
    np.testing.assert_array_equal(model.get_latent_representation(ordered, layer="encoder"), expected)
    with pytest.raises(KeyError, match=r'obs\["order"\]'):
        model.get_latent_representation(ordered)


@pytest.mark.parametrize("values", [["a", "b"], [np.nan, 1.0], [np.inf, 1.0]])
def test_a_non_numeric_order_raises(small, values):
    small.obs["order"] = [values[i % 2] for i in range(small.n_obs)]
    with pytest.raises(ValueError, match=r'obs\["order"\]'):
        AlphaSTomics.setup_anndata(small, sequence_key="order")


def test_an_order_of_strings_and_categories_is_read(small):
    small.obs["order"] = [str(i) for i in range(small.n_obs)]
    small.obs["order"] = small.obs["order"].astype("category")
    AlphaSTomics.setup_anndata(small, sequence_key="order")
    assert AlphaSTomics(small, d_model=16, n_layers=1, n_heads=2, **NEIGHBOR).module.config.sequence


def test_sequence_neighbors_without_an_order_raise(small, make_model):
    with pytest.raises(ValueError, match="sparse_pairs='sequence'.*sequence_key="):
        make_model(small, attention="neighbor", sparse_pairs="sequence")
