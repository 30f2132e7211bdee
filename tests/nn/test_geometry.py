"""Geometry of the cells in the attention of the denoiser: every kind of attention, with and without pair features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.nn.block import AdaptiveNorm
from alphastomics.nn.diagnostics import watch_layers
from alphastomics.nn.neighbors import noisy_neighbors
from alphastomics.train.diagnostics import layer_statistics

SIZES: dict[str, Any] = {"n_genes": 7, "n_dims": 2, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_latent": 4}
KINDS: dict[str, dict[str, Any]] = {
    "geometric": {"attention": "geometric"},
    "geometric, elementwise": {"attention": "geometric", "gate_type": "elementwise", "use_qk_norm": False, "n_dims": 3},
    "geometric, pairs": {"attention": "geometric", "pair_features": "factorized"},
    "geometric, pairs, order": {"attention": "geometric", "pair_features": "factorized", "sequence": True},
    "geometric, axial": {"attention": "geometric", "pair_features": "factorized", "pair_attention": "axial"},
    "geometric, cross": {"attention": "geometric", "pair_features": "factorized", "pair_attention": "cross"},
    "neighbor": {"attention": "neighbor", "n_neighbors": 5},
    "neighbor, 3D": {"attention": "neighbor", "n_neighbors": 5, "n_dims": 3, "gate_type": "none"},
    "neighbor, order": {"attention": "neighbor", "n_neighbors": 4, "sparse_pairs": "sequence", "sequence": True},
    "neighbor, both": {
        "attention": "neighbor",
        "n_neighbors": 5,
        "sparse_pairs": "hybrid",
        "sequence": True,
        "pair_features": "factorized",
        "rank": 24,
    },
    "axial": {"attention": "axial"},
    "axial, 3D": {"attention": "axial", "n_dims": 3, "gate_type": "elementwise"},
}
OTHERS: dict[str, dict[str, Any]] = {  # without geometry
    "full": {},
    "full, elementwise": {"gate_type": "elementwise"},
    "full, no gates": {"gate_type": "none"},
    "full, experts": {"use_moe": True},
    "linear": {"attention": "linear"},
    "linear, one expert": {"attention": "linear", "use_moe": True, "moe_top_k": 1, "expert_width": "full"},
}
kinds = pytest.mark.parametrize("kind", KINDS)
every_kind = pytest.mark.parametrize("kind", KINDS | OTHERS)
close = {"atol": 1e-5, "rtol": 1e-5}
B, N = 4, 30
UNKNOWN = (("pair_attention", "grid"), ("pair_residual", "sum"), ("pair_dropout", 1.0))
T_POS = torch.tensor([0.6, 0.0, 1.0, 0.3])  # noisy, clean and absent


def network(kind: str, **more: Any) -> Denoiser:
    """A denoiser in which nothing starts at zero."""
    torch.manual_seed(1)
    denoiser = Denoiser(DenoiserConfig(**(SIZES | (KINDS | OTHERS)[kind] | {"mask_tokens": True} | more))).eval()
    for name, parameter in denoiser.named_parameters():
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.1)
        if name.endswith("position_mask"):
            torch.nn.init.normal_(parameter)
    for part in denoiser.modules():
        if isinstance(part, AdaptiveNorm):
            torch.nn.init.normal_(part.modulation.weight, std=0.3)
    return denoiser


def cells(denoiser: Denoiser) -> dict[str, torch.Tensor]:
    """Arguments of a denoiser."""
    generator = torch.Generator().manual_seed(2)
    return {
        "expression": torch.randn(B, N, 7, generator=generator),
        "position": torch.randn(B, N, denoiser.config.n_dims, generator=generator),
        "t_expr": torch.linspace(0, 0.5, B),
        "t_pos": T_POS,
        "sequence": 3 * torch.randn(B, N, generator=generator) + 100,
    }


def both(denoiser: Denoiser, inputs: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    """Both outputs and the embedding side by side, (B, N, G + D + C)."""
    output = denoiser(**inputs, **more)
    return torch.cat([output.expression, output.position, output.latent], dim=-1)


# -- invariance --------------------------------------------------------------------------------------------------------


@every_kind
@torch.no_grad()
def test_padding_changes_no_prediction(kind):
    denoiser = network(kind).double()
    inputs = {name: x.double() for name, x in cells(denoiser).items()}
    per_cell = ("expression", "position", "sequence")
    longer = {
        name: torch.cat([x, 50 * torch.ones_like(x[:, :7])], dim=1) if name in per_cell else x
        for name, x in inputs.items()
    }
    mask = (torch.arange(N + 7) < N).expand(B, -1)
    padded, alone = both(denoiser, longer, mask=mask)[:, :N], both(denoiser, inputs)
    torch.testing.assert_close(padded, alone, atol=1e-12, rtol=0)


@every_kind
@torch.no_grad()
def test_the_order_of_rows_carries_no_meaning(kind):
    denoiser = network(kind).double()
    inputs = {name: x.double() for name, x in cells(denoiser).items()}
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    turned = {name: x[:, order] if x.ndim > 1 else x for name, x in inputs.items()}
    torch.testing.assert_close(both(denoiser, turned), both(denoiser, inputs)[:, order], atol=1e-12, rtol=0)


@every_kind
@torch.no_grad()
def test_positions_that_are_absent_everywhere_may_be_left_out(kind):
    denoiser = network(kind).double()
    inputs = {name: x.double() for name, x in cells(denoiser).items()} | {"t_pos": torch.ones(B, dtype=torch.float64)}
    without = both(denoiser, inputs | {"position": None})
    torch.testing.assert_close(without, both(denoiser, inputs), atol=1e-12, rtol=0)


@every_kind
@torch.no_grad()
def test_contexts_of_a_batch_do_not_mix(kind):
    denoiser = network(kind)
    inputs = cells(denoiser)
    together = both(denoiser, inputs)
    for i in range(B):
        alone = both(denoiser, {name: x[i : i + 1] for name, x in inputs.items()})
        torch.testing.assert_close(alone[0], together[i], **close)


@every_kind
def test_a_context_of_padding_alone_is_finite_and_disturbs_no_other(kind):
    denoiser = network(kind)
    inputs, mask = cells(denoiser), torch.ones(B, N, dtype=torch.bool)
    expected = both(denoiser, inputs, mask=mask)
    mask[1] = False
    result = both(denoiser, inputs, mask=mask)
    others = [0, 2, 3]
    torch.testing.assert_close(result[others], expected[others], **close)
    assert bool(result.isfinite().all())
    result.sum().backward()
    gradients = [p.grad for p in denoiser.parameters() if p.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert any(bool(gradient.any()) for gradient in gradients)


# -- what is seen of positions -----------------------------------------------------------------------------------------


def seen_by_trunk(denoiser: Denoiser, position: torch.Tensor, **more: Any) -> torch.Tensor:
    """What the blocks make of the same embeddings elsewhere."""
    h = torch.randn(B, N, 16, generator=torch.Generator().manual_seed(4))
    arguments = {"sequence": cells(denoiser)["sequence"], "position": position} | more
    return denoiser.trunk(h, torch.zeros(B), T_POS, None, (), **arguments).latent.detach()


@kinds
@torch.no_grad()
def test_blocks_read_noisy_positions_and_no_absent_ones(kind):
    denoiser = network(kind)
    position = cells(denoiser)["position"]
    expected = seen_by_trunk(denoiser, position)
    moved = seen_by_trunk(denoiser, position + torch.randn(position.shape))
    same = (moved == expected).flatten(1).all(1).tolist()
    assert same == [False, False, True, False]
    nowhere = position.clone()
    nowhere[2] = torch.nan
    assert torch.equal(seen_by_trunk(denoiser, nowhere), expected)
    torch.testing.assert_close(seen_by_trunk(denoiser, None)[2], expected[2], **close)


@kinds
@torch.no_grad()
def test_values_of_masked_coordinates_have_no_effect(kind):
    denoiser = network(kind)
    inputs = cells(denoiser)
    masked = torch.rand(inputs["position"].shape, generator=torch.Generator().manual_seed(5)) < 0.3
    expected = both(denoiser, inputs, masked=(None, masked))
    other = inputs | {"position": inputs["position"].masked_fill(masked, torch.nan)}
    assert torch.equal(both(denoiser, other, masked=(None, masked)), expected)
    assert not torch.allclose(both(denoiser, inputs), expected)


def test_cells_with_a_masked_coordinate_are_not_neighbors_in_space():
    denoiser = network("neighbor")
    inputs, masked = cells(denoiser), torch.zeros(B, N, 2, dtype=torch.bool)
    masked[:, 3, 1] = masked[:, 8] = True
    with watch_layers(denoiser) as seen:
        denoiser(**inputs, masked=(None, masked))
    neighbors = seen[0].geometry.neighbors
    assert not bool(torch.isin(neighbors, torch.tensor([3, 8])).any())
    assert bool((neighbors[:, [3, 8]] == -1).all())
    assert bool((neighbors[2] == -1).all())
    assert bool((neighbors[[0, 1, 3]][:, [0, 1, 2, 9]] >= 0).all())


@torch.no_grad()
def test_neighbors_are_those_among_the_noisy_positions():
    denoiser = network("neighbor")
    inputs = cells(denoiser)
    with watch_layers(denoiser) as seen:
        denoiser(**inputs)
    distance = torch.cdist(inputs["position"], inputs["position"])
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    for i in (0, 1, 3):
        nearest = distance[i].topk(5, largest=False).indices
        assert torch.equal(seen[0].geometry.neighbors[i], nearest)
    torch.testing.assert_close(seen[0].geometry.trust, 1 - T_POS)


@torch.no_grad()
def test_hybrid_neighbors_keep_to_the_order_where_positions_are_absent():
    position, order = torch.randn(2, 9, 2), torch.arange(9.0).expand(2, 9)
    known, real = torch.tensor([[True] * 9, [False] * 9]), torch.ones(2, 9, dtype=torch.bool)
    found = noisy_neighbors(position, known, order, real, 5, "hybrid")
    assert found.shape == (2, 9, 5)
    assert found[1, 4].tolist() == [3, 5, 6, -1, -1]
    nearest = torch.cdist(position[0], position[0]).fill_diagonal_(torch.inf).topk(2, largest=False).indices
    for row, near in zip(found[0].tolist(), nearest.tolist(), strict=True):
        assert set(near) <= set(row)
        named = [cell for cell in row if cell >= 0]
        assert len(named) == len(set(named))


def test_neighbors_have_a_shape_where_tensors_have_no_data():
    """Bar 19 needs it."""
    with FakeTensorMode():
        real = torch.ones(2, 50_000, dtype=torch.bool)
        found = noisy_neighbors(torch.randn(2, 50_000, 3), real, None, real, 32, "coordinate")
    assert found.shape == (2, 50_000, 32)
    assert found.dtype == torch.int64
    position, real = torch.randn(1, 12, 2), torch.ones(1, 12, dtype=torch.bool)
    torch.library.opcheck(noisy_neighbors, (position, real, None, real, 3, "coordinate"))


# -- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["geometric, pairs, order", "neighbor, order", "neighbor, both"])
@torch.no_grad()
def test_only_differences_in_the_order_count(kind):
    denoiser = network(kind)
    inputs = cells(denoiser)
    outputs = lambda inputs: both(denoiser, inputs)[..., : -SIZES["d_model"]]  # without the embedding
    expected = outputs(inputs)
    shifted = inputs | {"sequence": inputs["sequence"] + 64}
    torch.testing.assert_close(outputs(shifted), expected, atol=1e-4, rtol=1e-4)
    reversed_ = inputs | {"sequence": -inputs["sequence"]}
    assert not torch.allclose(outputs(reversed_), expected, atol=1e-3)
    with pytest.raises(ValueError, match="sequence="):
        denoiser(**(inputs | {"sequence": None}))


# -- parameters --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_rank_is_no_part_of_the_weights():
    auto, low = network("geometric, pairs"), network("geometric, pairs", rank=6)
    found = [auto.surroundings.pairs.rank_for(n) for n in (512, 2**15, 50_000, 100_000, 10**7)]
    assert found == [16, 16, 10, 8, 8]
    low.load_state_dict(auto.state_dict())
    with watch_layers(low) as seen:
        result = both(low, cells(low))
    assert seen[0].geometry.pairs.left.shape == (B, 16, N, 6)
    assert not torch.allclose(result, both(auto, cells(auto)), atol=1e-4)


@pytest.mark.parametrize("layer_sharing", ["none", "universal", "block"])
def test_every_layer_turns_its_grid_even_where_weights_are_shared(layer_sharing):
    denoiser = network("axial", layer_sharing=layer_sharing, n_layers=3)
    axes = [block.attention.axes for block in denoiser.blocks]
    for i, one in enumerate(axes):
        torch.testing.assert_close(one @ one.T, torch.eye(2))
        assert all(float((one @ other.T).abs().max()) < 0.999 for other in axes[:i])
    if layer_sharing != "none":
        assert denoiser.blocks[0].attention.along_rows is denoiser.blocks[1].attention.along_rows
    copy = Denoiser(denoiser.config).eval()
    copy.load_state_dict(denoiser.state_dict())
    assert torch.equal(both(copy, cells(copy)), both(denoiser, cells(denoiser)))


@kinds
@torch.no_grad()
def test_layers_have_diagnostics(kind):
    denoiser = network(kind)
    with watch_layers(denoiser) as seen:
        denoiser(**cells(denoiser))
    values = layer_statistics(seen, torch.ones(B, N, dtype=torch.bool), [N] * B)
    assert 1 / N - 1e-6 <= float(values["train_layer_0_sink"]) <= 1
    weights = seen[1].attention.weights(seen[1].x, torch.arange(N), seen[1].geometry)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 2, N))
    torch.testing.assert_close(seen[1].attention.received(seen[1].x, seen[1].geometry), weights.mean(2))


# -- what does not go together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pair_features": "factorized"}, "attention='full'"),
        ({"pair_features": "factorized", "attention": "linear"}, "attention='linear'"),
        ({"pair_features": "factorized", "attention": "axial"}, "attention='axial'"),
        ({"pair_features": "dense", "attention": "geometric"}, "pair_features='dense'"),
        ({"rank": 8}, "rank.*pair_features"),
        ({"pair_attention": "axial"}, "pair_attention.*pair_features"),
        ({"pair_residual": "tangent"}, "pair_residual.*pair_features"),
        ({"pair_dropout": 0.1}, "pair_dropout.*pair_features"),
        ({"rank": 33, "pair_features": "factorized", "attention": "geometric"}, "rank"),
        ({"rank": 20, "pair_features": "factorized", "attention": "neighbor", "sequence": True}, "rank"),
        ({"attention": "geometric", "n_neighbors": 8}, "n_neighbors.*attention"),
        ({"attention": "neighbor", "n_neighbors": 0}, "n_neighbors"),
        ({"sparse_pairs": "hybrid"}, "sparse_pairs.*attention"),
        ({"attention": "neighbor", "sparse_pairs": "sequence"}, "sparse_pairs.*sequence_key"),
        ({"attention": "neighbor", "sparse_pairs": "near"}, "sparse_pairs='near'"),
        ({"n_streams": 2}, "n_streams.*residual"),
        ({"layer_sharing": "universal", "sharing_block": 2}, "sharing_block.*layer_sharing"),
        ({"use_moe": True, "bottleneck": 4}, "bottleneck.*use_moe"),
        ({"num_experts": 8}, "num_experts.*use_moe"),
        ({"moe_top_k": 1}, "moe_top_k.*use_moe"),
    ],
)
def test_incompatible_options_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        DenoiserConfig(**(SIZES | arguments))


@pytest.mark.parametrize("option", [{"attention": "dense"}, *({name: value} for name, value in UNKNOWN)])
def test_an_unknown_option_raises(option):
    pairs = {"attention": "geometric", "pair_features": "factorized"}
    with pytest.raises(ValueError, match=next(iter(option))):
        Denoiser(DenoiserConfig(**(SIZES | pairs | option)))
