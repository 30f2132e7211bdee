"""One training step: what it draws, and that neither padding, nor batching, nor the frame of a slice changes it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alphastomics.data import Augmentation, ContextDataset, collate
from alphastomics.diffusion import CosineSchedule, Process
from alphastomics.diffusion.geometry import align, center
from alphastomics.train import MODES, PlanConfig
from alphastomics.train.draws import DEFORMATION, OBSERVED, TRAINING, TYPES, VALIDATION, DrawContexts
from alphastomics.train.objective import PAIRS
from alphastomics.train.plan import DROPOUT
from alphastomics.train.timesteps import MASKING
from rotations import random_rotation

modes = pytest.mark.parametrize("mode", MODES)


def turned(batch, reflect: bool):
    """Every context rotated, reflected and shifted on its own; padding stays at zero."""
    turns = torch.stack([random_rotation(2, torch.Generator().manual_seed(i)) for i in range(len(batch.mask))])
    if not reflect:
        turns[:, 0] *= torch.linalg.det(turns).sign()[:, None]
    slice_center = (batch.center[:, None] @ turns)[:, 0] + 3
    return batch._replace(position=(batch.position @ turns + 3) * batch.mask[..., None], center=slice_center)


def without_padding(losses: dict, i: int) -> dict:
    return {name: float(value[i].detach()) for name, value in losses.items()}


@modes
def test_draws_do_not_depend_on_the_batch(make_plan, make_batch, singles, mode):
    plan, batch = make_plan(mode=mode), make_batch()
    together = plan.objective.draw(batch, 0)
    assert mode == "expr_to_pos" or len({float(t) for t in together[0]} | {float(t) for t in together[1]}) > 2
    for i, alone in enumerate(singles(batch)):
        n = alone.mask.shape[1]
        for one, other in zip(plan.objective.draw(alone, 0)[:4], together, strict=False):
            assert torch.equal(one[0], other[i] if other.ndim == 1 else other[i, :n])


def test_draws_depend_on_the_key_and_the_purpose(make_plan, make_batch):
    plan, batch = make_plan(mode="any", modality_dropout=0.0), make_batch(n_epochs=4)
    torch.manual_seed(7)
    first = plan.objective.draw(batch, 0)[:4]
    assert all(torch.equal(one, other) for one, other in zip(first, plan.objective.draw(batch, 0), strict=False))
    for changed in (plan.objective.draw(batch, 1), plan.objective.draw(batch._replace(key=batch.key + 1), 0)):
        assert not any(torch.equal(one, other) for one, other in zip(first, changed, strict=False))


def test_every_purpose_has_its_own_generator():
    both = TRAINING, VALIDATION
    purposes = [*both, DEFORMATION, *(OBSERVED + p for p in both), MASKING, *(PAIRS + p for p in both), DROPOUT, TYPES]
    assert len(set(purposes)) == len(purposes)


def test_hidden_types_do_not_depend_on_padding(make_batch, singles):
    draw, batch = DrawContexts(mode="any", config=PlanConfig(), cell_types=True), make_batch()
    together = draw(batch).hidden_type
    assert 0 < int(together.sum()) < int(batch.mask.sum())
    for i, alone in enumerate(singles(batch)):
        assert torch.equal(draw(alone).hidden_type[0], together[i, : alone.mask.shape[1]])


def test_noise_is_standard_and_independent(make_plan, make_batch):
    plan, batch = make_plan(mode="joint", modality_dropout=0.0), make_batch(n_epochs=20)
    t_expr, _, noise, *_ = plan.objective.draw(batch, 0)
    assert not bool(noise[(t_expr == 0) | (t_expr == 1)].any())
    noise = noise[batch.mask & ((t_expr > 0) & (t_expr < 1))[:, None]]
    assert float(noise.mean()) == pytest.approx(0, abs=0.06)
    assert float(noise.var()) == pytest.approx(1, rel=0.06)
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 0.1


@modes
def test_losses_of_a_batch_match_its_contexts(make_plan, make_batch, singles, mode):
    plan, batch = make_plan(mode=mode), make_batch()
    together = plan.objective.losses(batch)
    for i, alone in enumerate(singles(batch)):
        assert without_padding(plan.objective.losses(alone), 0) == pytest.approx(
            without_padding(together, i), abs=1e-5, rel=1e-4
        )


@modes
def test_padding_values_change_nothing(make_plan, make_batch, mode):
    plan, batch = make_plan(mode=mode), make_batch()
    rubbish = {
        name: torch.where(batch.mask[..., None], getattr(batch, name), 77.0)
        for name in ("expression", "target", "position")
    }
    expected, actual = plan.objective.losses(batch), plan.objective.losses(batch._replace(**rubbish))
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=1e-4)


def test_draws_share_no_memory_with_the_batch(make_batch):
    """A loader process moves the memory of the tensors that it sends."""
    batch = make_batch()
    draws = DrawContexts(mode="any", config=PlanConfig(), cell_types=True, purpose=TRAINING)(batch)
    assert not np.shares_memory(draws.key, batch.key.numpy())


def canonical(plan, batch):
    return plan.objective.canonical(batch, center(batch.position, batch.mask))


def test_the_canonical_frame_does_not_depend_on_padding(make_plan, make_batch, singles, monkeypatch):
    """The few cells that fix it are chosen among the cells of the context."""
    monkeypatch.setattr("alphastomics.train.forward.FRAME_CELLS", 32)
    plan, batch = make_plan(), make_batch(n_epochs=1)
    together = canonical(plan, batch)
    for i, alone in enumerate(singles(batch)):
        expected = canonical(plan, alone)[0]
        torch.testing.assert_close(together[i, : len(expected)], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reflect", [False, True])
def test_the_canonical_frame_does_not_depend_on_the_frame_of_the_slice(make_plan, make_batch, reflect):
    plan, batch = make_plan(), make_batch()
    expected = canonical(plan, batch)
    actual = canonical(plan, turned(batch, reflect))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(turned(batch, reflect).position, batch.position, atol=0.1)


def test_the_canonical_frame_is_a_rigid_motion_onto_the_conditional_mean(make_plan, make_batch):
    plan, batch = make_plan(), make_batch()
    plan.module.eval()
    mean = plan.objective.conditional_mean(batch.expression, batch.mask).detach()
    expected = center(align(batch.position, mean, batch.mask), batch.mask)
    torch.testing.assert_close(canonical(plan, batch), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["expr_to_pos", "joint", "any"])
@pytest.mark.parametrize("reflect", [False, True])
def test_the_frame_of_a_slice_changes_no_loss(make_plan, make_batch, mode, reflect):
    """The key property: where a slice lies, and its orientation, have no effect."""
    plan, batch = make_plan(mode=mode), make_batch()
    expected, actual = plan.objective.losses(batch), plan.objective.losses(turned(batch, reflect))
    assert bool((sum(expected.values()) > 0).all())
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-3, rtol=1e-3)


def test_canonical_frame_leaves_the_network_unchanged(make_plan, make_batch):
    """Dropout is off while the frame is found, or the frame would be random, and on afterwards."""
    plan, batch = make_plan(dropout=0.5), make_batch()
    plan.module.train()
    frames = [canonical(plan, batch) for _ in range(2)]
    assert torch.equal(*frames)
    assert all(module.training for module in plan.module.modules())
    plan.module.eval()
    canonical(plan, batch)
    assert not any(module.training for module in plan.module.modules())
    assert not frames[0].requires_grad


def test_a_shared_frame_is_left_alone(make_plan, sources):
    """Registered positions are neither centered nor turned: moving the truth changes the loss."""
    from alphastomics.data import ContextDataset

    dataset = ContextDataset(sources["shared"], context_size=100, seed=0)
    batch = collate([dataset[i] for i in range(3)])
    plan = make_plan(mode="expr_to_pos", shared_frame=True, modality_dropout=1.0)
    predicted = plan.objective.conditional_mean(batch.expression, batch.mask).detach()
    expected = ((predicted - batch.position) ** 2).mean(-1)
    for i, loss in enumerate(plan.objective.losses(batch)["aligned"].detach()):
        assert float(loss) == pytest.approx(float(expected[i][batch.mask[i]].mean()), rel=1e-4)
    assert not torch.allclose(
        plan.objective.losses(turned(batch, False))["aligned"], plan.objective.losses(batch)["aligned"], rtol=1e-2
    )


def test_each_loss_depends_on_its_timestep(make_plan, make_batch):
    plan, batch = make_plan(mode="any"), make_batch(n_epochs=8)
    t_expr, t_pos, *_ = plan.objective.draw(batch, 0)
    losses = plan.objective.losses(batch)
    applies = dict.fromkeys(("aligned", "distance", "neighbor", "layout"), t_pos == 1) | {"expression": t_expr > 0}
    for name, where in applies.items():
        assert 0 < int(where.sum()) < len(where)
        assert torch.equal(losses[name] > 0, where), name


def test_names_of_the_losses_are_in_one_order(make_plan, make_batch, singles):
    """Processes add their epoch means by their order."""
    plan = make_plan()
    orders = {(len(plan.objective.draw(one).absent), *plan.objective.losses(one)) for one in singles(make_batch())}
    assert {order[0] for order in orders} == {0, 1}
    assert len({order[1:] for order in orders}) == 1


def test_both_embeddings_have_the_loss_of_neighbors(make_plan, make_batch):
    plan, batch = make_plan(mode="expr_to_pos", modality_dropout=1.0), make_batch()
    plan.objective.losses(batch)["neighbor"].sum().backward()
    for part in (plan.module.neighbor_out, plan.module.cell_encoder):
        assert all(bool(p.grad.any()) for p in part.parameters())


def test_validation_neither_deforms_nor_repeats_the_noise_of_training(make_plan, make_batch):
    plan, batch = make_plan(mode="joint", modality_dropout=0.0), make_batch()
    training, validation = (plan.objective.draw(batch, purpose) for purpose in (0, 1))
    moved, still = (
        plan.objective.moved_positions(batch, draws._replace(given=training.given)) for draws in (training, validation)
    )
    assert 0 < len(training.given) < len(batch.mask)
    assert not torch.allclose(moved[training.given], still[training.given], atol=0.05)
    assert torch.equal(moved[training.absent], center(batch.position, batch.mask)[training.absent])
    assert validation.deformation is None


def test_validation_has_noise_of_its_own(make_plan, make_batch, monkeypatch):
    plan, batch, purposes = make_plan(), make_batch(n_epochs=1), []
    losses = plan.objective.losses
    monkeypatch.setattr(
        plan.objective,
        "losses",
        lambda batch, purpose=0, step=0: purposes.append(purpose) or losses(batch, purpose=purpose),
    )
    monkeypatch.setattr(plan, "log", lambda *_, **__: None)
    monkeypatch.setattr(plan, "log_dict", lambda *_, **__: None)
    counts = SimpleNamespace(n_trained=lambda _: 3, n_validated=lambda _: 3)
    trainer = {"world_size": 1, "accumulate_grad_batches": 1, "num_training_batches": 1, "datamodule": counts}
    plan._trainer = SimpleNamespace(global_step=0, current_epoch=0, strategy=None, **trainer)
    plan.training_step(batch, 0)
    plan.validation_step(batch, 0)
    assert purposes == [0, 1]


def test_expression_to_be_sampled_is_as_it_was_measured(make_plan, make_batch):
    """Augmentation is for what is given; the target is all genes of the cells without observed expression."""
    plan, batch = make_plan(mode="pos_to_expr", modality_dropout=1.0, deformation=0.0), make_batch(n_epochs=12)
    t_expr, t_pos, _, drawn, *_ = plan.objective.draw(batch, 0)
    asked, (observed, value) = t_expr == 1, plan.objective.observed_values(batch, batch.target, drawn)
    observed = observed.bool()
    assert 0 < int(observed[asked].any(2).any(1).sum()) < int(asked.sum())
    position = plan.objective.canonical(batch, plan.objective.centered(batch, t_pos))
    given = torch.where(observed, value, 0.0)
    output = plan.module(
        given, position, t_expr, t_pos, batch.mask, observed=observed, local_density=batch.local_density
    ).expression
    x_0 = plan.objective.diffusion.x0(output, torch.zeros_like(output), t_expr)
    losses = plan.objective.losses(batch)["expression"].detach()
    for i in asked.nonzero()[:, 0].tolist():
        error = ((x_0 - batch.target)[i][batch.mask[i][:, None] & ~observed[i]] ** 2).detach()
        assert float(losses[i]) == pytest.approx(float(error.mean()) if len(error) else 0.0, rel=1e-4)


def test_observed_entries_match_sampled_contexts(make_plan, make_batch, singles):
    plan, batch = make_plan(mode="pos_to_expr", modality_dropout=1.0), make_batch(n_epochs=20)
    t_expr, _, _, observed, *_ = plan.objective.draw(batch, 0)
    assert not bool(observed[t_expr == 0].any())
    assert not bool(observed[~batch.mask].any())
    none = ~observed[t_expr > 0].any(2).any(1)
    assert 0.1 < float(none.float().mean()) < 0.5
    assert not torch.equal(observed, plan.objective.draw(batch, 1).observed)
    for i, alone in enumerate(singles(batch)):
        assert torch.equal(plan.objective.draw(alone, 0).observed[0], observed[i, : alone.mask.shape[1]])


def test_observed_genes_match_the_input_panel(make_plan, source):
    """Whole cells are given as measured; some genes of a cell thinned, and only where the input has them."""
    augmentation = Augmentation(gene_dropout=0.8, thinning=0.9, gene_noise=0.4)
    dataset = ContextDataset(source, context_size=30, seed=0, augmentation=augmentation, targets=True)
    batch = collate([dataset[i] for i in range(len(dataset))])
    plan = make_plan(mode="pos_to_expr", modality_dropout=1.0)
    observed, value = plan.objective.observed_values(batch, batch.target, plan.objective.draw(batch, 0).observed)
    observed = observed.bool()
    whole = observed.all(-1)
    assert bool(whole.any())
    assert torch.equal(value[whole], batch.target[whole])
    part = observed & ~whole[..., None]
    assert bool(part.any())
    assert not bool((part & ~batch.measured[:, None]).any())
    expected = batch.expression * (1 - batch.dropout).sqrt()[:, None, None]
    torch.testing.assert_close(value[part], expected[part], rtol=0, atol=0)
    assert not torch.allclose(value[part], batch.target[part])


def test_given_positions_match_the_slice(make_plan, source):
    """A context is a part of a slice that is known as a whole: its cells lie about the center of the slice."""
    dataset = ContextDataset(source, context_size=30, seed=0, augmentation=Augmentation(composition=20.0), targets=True)
    batch = collate([dataset[i] for i in range(len(dataset))])
    plan = make_plan()
    about_context, about_slice = (
        plan.objective.centered(batch, torch.ones(len(batch.mask))),
        plan.objective.centered(batch, torch.zeros(len(batch.mask))),
    )
    torch.testing.assert_close(about_context, center(batch.position, batch.mask))
    for i, cells in enumerate(source.slices):
        here = (batch.slice_index == i).nonzero()[:, 0]
        whole = torch.cat([about_slice[j][batch.mask[j]].square().sum(1).sqrt() for j in here])
        rows = torch.cat([batch.rows[j][batch.mask[j]] for j in here])
        x = cells.position[np.searchsorted(cells.rows, rows.numpy())] - cells.position.mean(0)
        np.testing.assert_allclose(whole, np.linalg.norm(x, axis=1) / source.schema.scale, atol=1e-4)


@modes
def test_a_context_of_padding_alone_weighs_nothing(make_plan, make_batch, mode):
    plan, batch = make_plan(mode=mode), make_batch(n_epochs=2)
    mask = batch.mask.clone()
    mask[[1, 4]] = False
    real = [0, 2, 3, 5]
    masked = batch._replace(mask=mask)
    kept = type(batch)(*(x[real] for x in batch[:-1]))
    total = plan.objective.total(plan.objective.losses(masked), masked)
    torch.testing.assert_close(total, plan.objective.total(plan.objective.losses(kept), kept), atol=1e-5, rtol=1e-4)
    total.backward()
    assert all(bool(p.grad.isfinite().all()) for p in plan.parameters() if p.grad is not None)


def test_one_context_for_two_processes_counts_in_full(make_plan, make_batch):
    plan, batch = make_plan(mode="expr_to_pos"), make_batch()
    first = type(batch)(*(x[:1] for x in batch[:-1]))
    losses = plan.objective.losses(first)
    alone = plan.objective.total(losses, first)
    # The other process has padding alone: Lightning halves the sum of the gradients, and the mean count is a half.
    torch.testing.assert_close(plan.objective.total(losses, first, 0.5) / 2, alone)


def test_total_is_the_weighted_mean_over_real_contexts(make_plan, make_batch):
    plan = make_plan(
        lambda_position=2.0, lambda_distance=3.0, lambda_neighbor=5.0, lambda_expression=7.0, lambda_layout=11.0
    )
    batch = make_batch(n_epochs=1)
    names = ("aligned", "distance", "neighbor", "expression", "layout")
    losses = {name: torch.tensor([1.0, 2.0, 300.0]) * 10**i for i, name in enumerate(names)}
    mask = batch.mask.clone()
    mask[2] = False
    weights = [2, 3, 5, 7, 11]
    expected = sum(weight * 10**i for i, weight in enumerate(weights)) * 1.5
    assert float(plan.objective.total(losses, batch._replace(mask=mask))) == pytest.approx(expected)
    mask[:] = False
    assert float(plan.objective.total(losses, batch._replace(mask=mask))) == 0


MOE = {"use_moe": True, "moe_top_k": 1}


@pytest.mark.parametrize("network", [{}, MOE, MOE | {"attention": "linear", "moe_top_k": 2}])
def test_every_parameter_is_trained(make_plan, make_batch, network):
    """With registered parameters that no loss reaches, several processes would wait for each other for ever."""
    plan, batch = make_plan(mode="any", network=network), make_batch(n_epochs=8)
    plan.objective.total(plan.objective.losses(batch), batch).backward()
    assert [name for name, p in plan.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_is_a_loss_of_its_own(make_plan, make_batch, top_k):
    """It is that of the real cells, reaches the total with its weight, and is 0 for a context of padding alone."""
    plan = make_plan(network={"use_moe": True, "moe_top_k": top_k}, moe_load_balance_loss_weight=0.25)
    plan.eval()
    batch = make_batch(n_epochs=1)
    losses = plan.objective.losses(batch)
    assert losses["balance"].shape == (3,)
    without = {name: loss for name, loss in losses.items() if name != "balance"}
    expected = plan.objective.total(without, batch) + 0.25 * losses["balance"].mean()
    torch.testing.assert_close(plan.objective.total(losses, batch), expected)
    mask = batch.mask.clone()
    mask[1] = False
    assert plan.objective.losses(batch._replace(mask=mask))["balance"][1] == 0
    assert "balance" not in make_plan().objective.losses(batch)


def test_losses_with_experts_do_not_depend_on_padding(make_plan, make_batch, singles):
    plan, batch = make_plan(network=MOE), make_batch(n_epochs=1)
    plan.eval()
    together = plan.objective.losses(batch)
    for i, alone in enumerate(singles(batch)):
        one = plan.objective.losses(alone)
        for name in set(together) - {"balance"}:
            assert float(one[name][0].detach()) == pytest.approx(float(together[name][i].detach()), rel=1e-3, abs=1e-5)


def test_learning_rate_warms_up_and_falls_to_its_final_share(make_plan):
    plan = make_plan(warmup_steps=10, final_lr=0.1)
    plan._trainer = SimpleNamespace(world_size=1, estimated_stepping_batches=100, global_step=0)
    factors = []
    for step in range(101):
        plan._trainer.global_step = step
        factors.append(plan._learning_rate_factor(step))
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(101) / 100))
    np.testing.assert_allclose(factors[10:], expected[10:], rtol=1e-5)
    np.testing.assert_allclose(factors[:10], expected[:10] * np.arange(1, 11) / 10, rtol=1e-5)
    assert make_plan(warmup_steps=0).config.warmup_steps == 0


def test_learning_rate_follows_max_time(make_plan, monkeypatch):
    plan = make_plan(max_seconds=100.0)
    plan._trainer = SimpleNamespace(world_size=1, estimated_stepping_batches=float("inf"), global_step=3)
    monkeypatch.setattr("alphastomics.train.plan.time.monotonic", lambda: plan._started + 40)
    assert plan.progress() == pytest.approx(0.4)
    plan._trainer.estimated_stepping_batches = 4
    assert plan.progress() == pytest.approx(0.75)
    monkeypatch.setattr("alphastomics.train.plan.time.monotonic", lambda: plan._started + 1000)
    assert plan.progress() == 1


def test_warm_up_can_be_disabled(make_plan):
    plan = make_plan(warmup_steps=0)
    plan._trainer = SimpleNamespace(world_size=1, estimated_stepping_batches=100, global_step=0)
    assert plan._learning_rate_factor(0) == pytest.approx(1)


def test_configuration_survives_json():
    process = Process(schedule=CosineSchedule(name="cosine", nu=2.0), prediction_type="x0")
    assert Process.from_dict(process.to_dict()) == process
    with pytest.raises(TypeError, match="learning_rate"):
        PlanConfig(learning_rate=1.0)
