"""What must hold of the denoiser whatever its weights are."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn import Denoiser, DenoiserConfig

GATES = ["headwise", "elementwise", "none"]


@pytest.mark.parametrize("gate_type", GATES)
@pytest.mark.parametrize("use_qk_norm", [True, False])
@pytest.mark.parametrize("n_dims", [2, 3])
def test_shapes(make_denoiser, make_inputs, gate_type, use_qk_norm, n_dims):
    denoiser = make_denoiser(gate_type=gate_type, use_qk_norm=use_qk_norm, n_dims=n_dims)
    expression, position, latent = denoiser(*make_inputs(n_dims=n_dims))
    assert expression.shape == (3, 10, 9)
    assert position.shape == (3, 10, n_dims)
    assert latent.shape == (3, 10, 32)
    assert denoiser.neighborhood(latent).shape == (3, 10, 8)


def test_unrequested_heads_do_not_run(make_denoiser, make_inputs):
    denoiser, inputs = make_denoiser(), make_inputs()
    both = denoiser(*inputs)
    only_position, only_expression = (denoiser(*inputs, predict=(name,)) for name in ("position", "expression"))
    assert only_position.expression is None
    assert only_expression.position is None
    assert torch.equal(only_position.position, both.position)
    assert torch.equal(only_expression.expression, both.expression)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_masked_values_have_no_effect_but_the_mask_does(make_denoiser, make_inputs, n_dims):
    denoiser, inputs = make_denoiser(mask_tokens=True, n_dims=n_dims), make_inputs(n_dims=n_dims)
    generator = torch.Generator().manual_seed(3)
    masked = tuple(torch.rand(x.shape, generator=generator) < 0.4 for x in inputs[:2])
    other = [torch.where(m, torch.nan, x) for x, m in zip(inputs[:2], masked, strict=True)]
    expected = denoiser(*inputs, masked=masked)
    for one, two in zip(denoiser(*other, *inputs[2:], masked=masked), expected, strict=True):
        assert torch.equal(one, two)
    torch.nn.init.normal_(denoiser.expression_mask)
    torch.nn.init.normal_(denoiser.position_mask)
    zeros = [x.masked_fill(m, 0.0) for x, m in zip(inputs[:2], masked, strict=True)]
    for i, name in enumerate(("expression", "position")):
        embed = getattr(denoiser, f"embed_{name}")
        with_tokens, without = embed(inputs[i], inputs[2] * 0, masked=masked[i]), embed(zeros[i], inputs[2] * 0)
        hit = masked[i].any(-1)
        assert bool(((with_tokens - without).abs().amax(-1) > 1e-3)[hit].all())
        torch.testing.assert_close(with_tokens[~hit], without[~hit])


def test_gradients_reach_the_mask_tokens_of_masked_features_alone(make_denoiser, make_inputs):
    denoiser, inputs = make_denoiser(mask_tokens=True), make_inputs()
    masked = torch.zeros_like(inputs.expression, dtype=torch.bool), torch.zeros_like(inputs.position, dtype=torch.bool)
    masked[0][:, 3, [2, 5]] = True
    masked[1][:, 4, 1] = True
    denoiser(*inputs, masked=masked).latent.square().sum().backward()
    assert denoiser.expression_mask.grad.nonzero().flatten().tolist() == [2, 5]
    assert denoiser.position_mask.grad.abs().sum(1).nonzero().flatten().tolist() == [1]


def test_without_masking_there_are_no_tokens(make_denoiser):
    plain, masking = make_denoiser(), make_denoiser(mask_tokens=True)
    tokens = {"expression_mask": (9,), "position_mask": (2, 32)}
    extra = masking.state_dict().keys() - plain.state_dict().keys()
    assert {name: tuple(masking.state_dict()[name].shape) for name in extra} == tokens
    for name, value in plain.state_dict().items():
        assert torch.equal(value, masking.state_dict()[name])


@pytest.mark.parametrize("modality", ["expression", "position"])
@pytest.mark.parametrize("value", [0.0, 1e6, float("nan"), float("inf")])
def test_values_of_an_absent_modality_change_no_byte(make_denoiser, make_inputs, modality, value):
    denoiser, inputs = make_denoiser(), make_inputs()
    timestep = {"expression": "t_expr", "position": "t_pos"}[modality]
    absent = inputs._replace(**{timestep: torch.ones(3)})
    poisoned = absent._replace(**{modality: torch.full_like(getattr(inputs, modality), value)})
    for one, other in zip(denoiser(*absent), denoiser(*poisoned), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("modality", ["expression", "position"])
def test_absence_is_decided_context_by_context(make_denoiser, make_inputs, modality):
    denoiser, inputs = make_denoiser(), make_inputs()
    timestep = {"expression": "t_expr", "position": "t_pos"}[modality]
    mixed = inputs._replace(**{timestep: torch.tensor([1.0, 0.5, 1.0])})
    moved = mixed._replace(**{modality: getattr(inputs, modality) + 1})
    same = (denoiser(*mixed).position == denoiser(*moved).position).flatten(1).all(1)
    assert same.tolist() == [True, False, True]


def test_an_absent_modality_leaves_no_gradient(make_denoiser, make_inputs):
    denoiser, inputs = make_denoiser(), make_inputs()
    expression = inputs.expression.requires_grad_()
    result = denoiser(expression, inputs.position, torch.ones(3), inputs.t_pos)
    result.position.sum().backward()
    assert not bool(expression.grad.any())
    assert not any(bool(p.grad.any()) for p in denoiser.expression_in.parameters())
    assert bool(denoiser.expression_missing.grad.any())


def test_embeddings_start_from_the_components(make_denoiser, make_inputs):
    denoiser, x = make_denoiser(n_components=4), make_inputs().expression
    before = denoiser.embed_expression(x, torch.zeros(3)).detach()
    components = torch.linalg.qr(torch.randn(9, 3, generator=torch.Generator().manual_seed(0))).Q
    denoiser.set_components(components)
    added = denoiser.embed_expression(x, torch.zeros(3)).detach() - before
    torch.testing.assert_close(added[..., :3], x @ components, atol=1e-5, rtol=1e-5)
    assert float(added[..., 3:].abs().max()) < 1e-5
    assert "components" not in dict(denoiser.named_parameters())


@pytest.mark.parametrize("timestep", ["t_expr", "t_pos"])
def test_timesteps_matter(make_denoiser, make_inputs, timestep):
    """A norm over features of the timesteps alone, or over the sum after them, would erase them."""
    denoiser, inputs = make_denoiser(), make_inputs()
    outputs = [denoiser(*inputs._replace(**{timestep: torch.full((3,), t)})).position for t in (0.1, 0.3, 0.6, 0.95)]
    outputs = [output.detach() for output in outputs]
    for one, other in zip(outputs[:-1], outputs[1:], strict=True):
        assert float((one - other).norm() / one.norm()) > 0.05


def test_at_first_the_timesteps_are_ignored(make_inputs):
    denoiser, inputs = Denoiser(DenoiserConfig(n_genes=9, n_dims=2, d_model=32, n_layers=2)), make_inputs()
    torch.testing.assert_close(
        denoiser(*inputs).position, denoiser(*inputs._replace(t_pos=torch.full((3,), 0.5))).position
    )


@pytest.mark.parametrize("modality", ["expression", "position"])
def test_each_cell_follows_its_own_values_most(make_denoiser, make_inputs, modality):
    denoiser, inputs = make_denoiser(), make_inputs(b=1)
    changed = getattr(inputs, modality).clone()
    changed[0, 4] += 1
    moved = (denoiser(*inputs._replace(**{modality: changed})).latent - denoiser(*inputs).latent)[0].norm(dim=-1)
    assert int(moved.argmax()) == 4
    assert bool((moved > 0).all())


@pytest.mark.parametrize(("gate_type", "more"), [("headwise", 4 * 256 * 8), ("elementwise", 4 * 256 * 256)])
def test_parameters_of_the_gates_of_a_network(gate_type, more):
    def count(gate_type: str) -> int:
        with torch.device("meta"):
            denoiser = Denoiser(
                DenoiserConfig(n_genes=5, n_dims=2, d_model=256, n_layers=4, n_heads=8, gate_type=gate_type)
            )
        return sum(p.numel() for p in denoiser.parameters())

    assert count(gate_type) - count("none") == more


def test_dropout_acts_in_training_alone(make_denoiser, make_inputs):
    denoiser, inputs = make_denoiser(dropout=0.5), make_inputs()
    assert torch.equal(denoiser(*inputs).position, denoiser(*inputs).position)
    denoiser.train()
    assert not torch.allclose(denoiser(*inputs).position, denoiser(*inputs).position)


def test_weights_alone_make_the_network(make_denoiser, make_inputs):
    denoiser, inputs = make_denoiser(), make_inputs()
    copy = Denoiser(denoiser.config).eval()
    copy.load_state_dict(denoiser.state_dict())
    for one, other in zip(denoiser(*inputs), copy(*inputs), strict=True):
        assert torch.equal(one, other)
    assert set(denoiser.state_dict()) == {name for name, _ in denoiser.named_parameters()} | {
        "gene_weight",
        "components",
    }


def test_genes_count_by_their_deviation(make_denoiser, make_inputs):
    denoiser, (expression, *rest) = make_denoiser(), make_inputs()
    scale = torch.linspace(0.5, 2, expression.shape[-1])
    weight = scale / scale.square().mean().sqrt()
    expected = denoiser(expression * weight, *rest).position
    denoiser.weigh_genes(scale.numpy())
    torch.testing.assert_close(denoiser(expression, *rest).position, expected)
    assert float(denoiser.gene_weight.square().mean()) == pytest.approx(1)


def test_observed_entries_are_clean_and_marked_at_any_time(make_denoiser, make_inputs):
    denoiser, inputs = make_denoiser(), make_inputs()
    torch.nn.init.normal_(denoiser.expression_observed)
    inputs = inputs._replace(t_expr=torch.ones(3))
    observed = torch.zeros_like(inputs.expression, dtype=torch.bool)
    expected = denoiser(*inputs)
    for one, other in zip(denoiser(*inputs, observed=observed), expected, strict=True):
        assert torch.equal(one, other)
    observed[:, 2, [1, 4]] = True
    one = denoiser(*inputs, observed=observed).position
    changed = inputs.expression.clone()
    changed[~observed] = torch.nan  # absent values have no effect
    assert torch.equal(denoiser(*inputs._replace(expression=changed), observed=observed).position, one)
    changed[:, 2, 4] = 7.0
    assert not torch.allclose(denoiser(*inputs._replace(expression=changed), observed=observed).position, one)
    marked = denoiser.embed_expression(inputs.expression, torch.zeros(3), observed)[:, 2]
    bare = denoiser.embed_expression(inputs.expression, torch.zeros(3))[:, 2]
    mark = denoiser.expression_observed[[1, 4]].sum(0) / inputs.expression.shape[-1] ** 0.5
    torch.testing.assert_close(marked - bare, mark.expand(3, -1))


@pytest.mark.parametrize(("t_pos", "seen"), [(0.0, True), (0.4, False), (1.0, False)])
def test_local_density_is_read_where_positions_are_known(make_denoiser, make_inputs, t_pos, seen):
    """It is a function of clean positions, on which the output must not depend where they are noisy or absent."""
    denoiser, inputs = make_denoiser(), make_inputs()
    inputs = inputs._replace(t_pos=torch.full((3,), t_pos))
    local_density = torch.randn(3, 10, 9, generator=torch.Generator().manual_seed(0))
    without, one, other = (denoiser(*inputs, local_density=c).latent for c in (None, local_density, -local_density))
    assert torch.equal(one, other) != seen
    assert torch.equal(one, without) != seen
