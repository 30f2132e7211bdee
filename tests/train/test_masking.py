"""Masked diffusion in training: targets, masked entries, masked contexts, and that masked values are learned."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics.data import AnnDataSource, Augmentation, ContextDataset, collate, fit_schema
from alphastomics.datasets import synthetic_tissue
from alphastomics.diffusion import MaskingConfig
from alphastomics.nn import Denoiser, DenoiserConfig, Prediction
from alphastomics.train import MODES, TrainingPlan
from alphastomics.train.draws import TRAINING, VALIDATION
from alphastomics.train.timesteps import Masks, draw_masks

ALWAYS = MaskingConfig(masking_probability=1.0)
modes = pytest.mark.parametrize("mode", MODES)


def clocks_and_masks(plan: TrainingPlan, batch) -> tuple[torch.Tensor, torch.Tensor, Masks]:
    draws = plan.objective.draw(batch, TRAINING)
    masking, values = plan.objective.masking, (batch.expression, batch.position, batch.measured)
    return draws.t_expr, draws.t_pos, draw_masks(masking, batch, *values, draws, share=masking.share(0))


@modes
def test_ratios_are_exact_and_absent_modalities_have_no_masks(make_plan, make_batch, mode):
    plan, batch = make_plan(mode=mode, masking=ALWAYS), make_batch()
    t_expr, t_pos, masks = clocks_and_masks(plan, batch)
    n, genes = batch.mask.sum(1).tolist(), batch.measured.sum(1).tolist()
    for i in range(len(n)):
        assert int(masks.expression[i].sum()) == (round(0.3 * n[i] * genes[i]) if t_expr[i] < 1 else 0)
        assert int(masks.position[i].sum()) == (round(0.33 * n[i] * 2) if t_pos[i] < 1 else 0)
    assert len(set(genes)) > 1  # some genes were dropped
    assert not bool((masks.expression & ~batch.measured[:, None, :]).any())
    assert not bool(masks.expression[~batch.mask].any())


@pytest.mark.parametrize("strategy", ["random", "block", "structured"])
def test_masks_do_not_depend_on_the_batch(make_plan, make_batch, singles, strategy):
    masking = MaskingConfig(mask_strategy=strategy, masking_probability=0.7)
    plan, batch = make_plan(mode="joint", modality_dropout=0.0, masking=masking), make_batch()
    *_, together = clocks_and_masks(plan, batch)
    assert 0 < int(together.expression.any(2).any(1).sum()) < len(batch.mask)
    for i, alone in enumerate(singles(batch)):
        n = alone.mask.shape[1]
        for one, other in zip(clocks_and_masks(plan, alone)[2], together, strict=True):
            assert torch.equal(one[0], other[i, :n])


def test_masks_depend_on_the_key_and_move_no_other_draw(make_plan, make_batch):
    plan, batch = make_plan(mode="joint", modality_dropout=0.0, masking=ALWAYS), make_batch()
    first, again = clocks_and_masks(plan, batch)[2], clocks_and_masks(plan, batch)[2]
    other = draw_masks(
        ALWAYS,
        batch,
        batch.expression,
        batch.position,
        batch.measured,
        plan.objective.draw(batch._replace(key=batch.key + 1)),
        share=1.0,
    )
    for one, same, changed in zip(first, again, other, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, changed)
    plain = make_plan(mode="joint", modality_dropout=0.0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(plan.objective.draw(batch, 0)[:4], plain.objective.draw(batch, 0), strict=False)
    )


def test_contexts_are_masked_with_the_given_probability(make_plan, make_batch):
    plan = make_plan(mode="joint", modality_dropout=0.0, masking=MaskingConfig(masking_probability=0.25))
    _, t_pos, masks = clocks_and_masks(plan, make_batch(n_epochs=60))
    hit = masks.expression.any(2).any(1)
    assert torch.equal(hit & (t_pos < 1), masks.position.any(2).any(1))
    assert float(hit.float().mean()) == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / len(hit)))


class FixedPrediction(torch.nn.Module):
    """Returns the given prediction."""

    def __init__(self, module: Denoiser, expression: torch.Tensor, position: torch.Tensor) -> None:
        super().__init__()
        self.module, self.expression, self.position = module, expression, position

    def forward(self, *args, masked=(None, None), observed=None, **kwargs) -> Prediction:
        self.masked, self.observed = masked, observed
        return self.module(*args, masked=masked, observed=observed, **kwargs)._replace(
            expression=self.expression, position=self.position
        )

    def __getattr__(self, name: str):
        return (
            getattr(self._modules["module"], name)
            if name in ("neighborhood", "cell_neighborhood", "config", "gene_weight")
            else super().__getattr__(name)
        )


@pytest.mark.parametrize("mode", ["any", "pos_to_expr", "joint", "expr_to_pos"])
def test_the_target_is_clean_and_only_masked_entries_are_compared(make_plan, make_batch, sources, mode):
    """In a shared frame nothing is turned, so that the truth is known; v at t = 1 is -x_0."""
    plan = make_plan(mode=mode, masking=ALWAYS, shared_frame=True, deformation=0.0, spacing=0.0)
    batch = make_batch()
    true = batch.target
    plan.objective.module = answer = FixedPrediction(plan.module, -true, batch.position)
    exact = plan.objective.losses(batch)
    masks = answer.masked
    dropped = (plan.objective.draw(batch, TRAINING)[0] <= 0)[:, None] & ~batch.measured
    assert not bool((masks[0] & dropped[:, None]).any())
    assert float(exact["masked"].abs().max()) == pytest.approx(0, abs=1e-10)
    n_expr, n_pos = masks[0].sum((1, 2)), masks[1].sum((1, 2))
    answer.expression = torch.where(masks[0], -true, 7.0)
    answer.position = torch.where(masks[1], batch.position, 7.0)
    assert float(plan.objective.losses(batch)["masked"].abs().max()) == pytest.approx(0, abs=1e-10)
    answer.expression = torch.where(masks[0], -true + 2, -true)
    answer.position = torch.where(masks[1], batch.position + 1, batch.position)
    wrong = plan.objective.losses(batch)
    torch.testing.assert_close(wrong["masked"], 4.0 * (n_expr > 0) + 1.0 * (n_pos > 0))
    for name in exact.keys() - {"masked"}:  # masked entries are judged once
        torch.testing.assert_close(wrong[name], exact[name])


def test_masked_positions_are_relative_to_the_center_of_the_context(make_plan, make_batch, monkeypatch):
    """As the prediction is in a free frame: a context that lies beside the center of its slice has no loss for that."""
    masking = MaskingConfig(masking_probability=1.0, expression_mask_ratio=0.0)
    plan = make_plan(mode="pos_to_expr", masking=masking, deformation=0.0, spacing=0.0, modality_dropout=0.0)
    batch = make_batch()
    batch = batch._replace(center=batch.center + 2.0)
    noised = plan.objective.noised(batch, plan.objective.draw(batch), TRAINING)
    monkeypatch.setattr(plan.objective, "noised", lambda *_: noised)
    assert float(noised.x_pos.abs().mean()) > 1
    assert bool(noised.masks.position.any())
    plan.objective.module = FixedPrediction(plan.module, batch.target, noised.x_pos)
    assert float(plan.objective.losses(batch)["masked"].abs().max()) == pytest.approx(0, abs=1e-9)


def test_masked_entries_are_not_marked_as_observed(make_plan, make_batch):
    batch, observed = make_batch(n_epochs=20), []
    for masking in (None, ALWAYS):
        plan = make_plan(mode="pos_to_expr", masking=masking, shared_frame=True, deformation=0.0, spacing=0.0)
        plan.objective.module = answer = FixedPrediction(plan.module, batch.target, batch.position)
        plan.objective.losses(batch)
        observed.append(answer.observed.bool())
    masks = answer.masked[0]
    assert bool((observed[0] & masks).any())
    assert torch.equal(observed[1], observed[0] & ~masks)


@modes
@pytest.mark.parametrize("shared_frame", [False, True])
def test_losses_of_a_batch_match_its_contexts(make_plan, make_batch, singles, mode, shared_frame):
    plan, batch = make_plan(mode=mode, masking=ALWAYS, shared_frame=shared_frame), make_batch()
    together = plan.objective.losses(batch)
    assert bool((together["masked"] > 0).any())
    assert ("expression" in together) == (mode != "expr_to_pos")
    for i, alone in enumerate(singles(batch)):
        for name, value in plan.objective.losses(alone).items():
            assert float(value[0].detach()) == pytest.approx(float(together[name][i].detach()), abs=1e-5, rel=1e-4)


@modes
def test_validation_masks_nothing(make_plan, make_batch, mode):
    masking, plain, batch = make_plan(mode=mode, masking=ALWAYS), make_plan(mode=mode), make_batch()
    expected, actual = (
        plain.objective.losses(batch, purpose=VALIDATION),
        masking.objective.losses(batch, purpose=VALIDATION),
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@modes
def test_unmasked_contexts_are_trained_as_without_masking(make_plan, make_batch, mode):
    """With masking that never happens every other loss and gradient is the same to the bit."""
    plain, batch = make_plan(mode=mode), make_batch()
    never = make_plan(mode=mode, masking=MaskingConfig(masking_probability=0.0))
    expected, actual = plain.objective.losses(batch), never.objective.losses(batch)
    assert actual.keys() - expected.keys() == {"masked"}
    assert not bool(actual["masked"].any())
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    plain.objective.total(expected, batch).backward()
    never.objective.total(actual, batch).backward()
    for (name, one), other in zip(
        plain.named_parameters(), (p for n, p in never.named_parameters() if not n.endswith("_mask")), strict=True
    ):
        if one.grad is not None:
            assert torch.equal(one.grad, other.grad), name
        elif other.grad is not None:  # of a head that only masked entries use
            assert not bool(other.grad.any()), name


def test_tokens_have_a_gradient_in_every_step_and_learn_where_they_are_used(make_plan, make_batch):
    batch = make_batch()
    for probability in (0.0, 1.0):
        plan = make_plan(mode="joint", modality_dropout=0.0, masking=MaskingConfig(masking_probability=probability))
        plan.objective.total(plan.objective.losses(batch), batch).backward()
        for token in (plan.module.expression_mask, plan.module.position_mask):
            assert bool(token.grad.any()) == bool(probability)


def test_the_loss_has_the_given_weight(make_plan, make_batch):
    batch = make_batch()
    plans = [make_plan(masking=ALWAYS, reconstruction_weight=weight) for weight in (0.0, 3.0)]
    losses = [plan.objective.losses(batch) for plan in plans]
    low, high = (float(plan.objective.total(loss, batch).detach()) for plan, loss in zip(plans, losses, strict=True))
    assert high - low == pytest.approx(3 * float(losses[0]["masked"].detach().mean()), rel=1e-4)


def test_a_denoiser_without_tokens_raises(make_plan):
    with pytest.raises(ValueError, match="mask_tokens=True"):
        TrainingPlan(make_plan().module, masking=ALWAYS)


class Shares(pl.Callback):
    """Share of masked entries among those there are, at every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_train_start(self, trainer, pl_module):
        add_noise = pl_module.objective.noised

        def noised(batch, *args):
            result = add_noise(batch, *args)
            if result.masks.expression is not None:
                n_entries = int((batch.mask.sum(1) * batch.measured.sum(1)).sum())
                self.seen.append((trainer.global_step, int(result.masks.expression.sum()) / n_entries))
            return result

        pl_module.objective.noised = noised


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_training_continues_the_ratio(make_plan, fit, tmp_path):
    masking = MaskingConfig(masking_probability=1.0, initial_mask_share=0.1, mask_ramp_steps=10)

    def run(*callbacks: pl.Callback, **kwargs):
        shares, plan = Shares(), make_plan(mode="expr_to_pos", masking=masking, warmup_steps=1)
        fit(plan, max_epochs=4, callbacks=[shares, *callbacks], **kwargs)
        return shares.seen, [p.detach().clone() for p in plan.parameters()]

    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    whole, weights = run(saver, enable_checkpointing=True)
    rest, resumed = run(ckpt_path=tmp_path / "epoch=1.ckpt")
    half = len(whole) // 2
    assert rest == whole[half:]
    assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))
    for step, share in whole:
        assert share == pytest.approx(0.3 * masking.share(step), abs=2e-3)
    assert whole[0][1] < rest[0][1] < 0.299 < rest[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["random", "block"])
def test_genes_are_filled_better_than_by_their_mean(fit, strategy):
    """In a slice that was not trained on, from the other genes; 0 in network units is the mean of a gene."""
    tissue = {"n_slices": 3, "n_cells": 400, "n_genes": 40, "depth": 2e4, "dropout": 0.0, "batch_effect": 0.0}
    adata = synthetic_tissue(**tissue, random_state=0)
    held_out = (adata.obs["slice_id"] == adata.obs["slice_id"].cat.categories[-1]).to_numpy()
    known, unknown = adata[~held_out].copy(), adata[held_out].copy()
    schema = fit_schema(known)
    sources = [AnnDataSource(cells, schema, positions=True) for cells in (known, unknown)]
    masking = MaskingConfig(mask_strategy=strategy, masking_probability=1.0, position_mask_ratio=0.0)
    torch.manual_seed(0)
    config = DenoiserConfig(n_genes=40, n_dims=2, d_model=64, n_layers=2, n_heads=4, mask_tokens=True)
    plan = TrainingPlan(Denoiser(config), mode="expr_to_pos", masking=masking, reconstruction_weight=1.0, lr=3e-3)
    augmentation = Augmentation(gene_dropout=0.0)
    data = {"source": sources[0], "batch_size": 400, "context_size": 200, "augmentation": augmentation}
    fit(plan, data=data, max_epochs=40)
    batch = collate([ContextDataset(sources[1], context_size=400, seed=5)[0]])
    zero, one = torch.zeros(1), torch.ones(1)
    masks = draw_masks(
        masking, batch, batch.expression, batch.position, batch.measured, plan.objective.draw(batch), share=1.0
    )
    with torch.no_grad():
        output = plan.module(batch.expression, batch.position, zero, one, masked=masks).expression
    true, m = batch.expression[0], masks.expression[0]
    error, own_mean = ((((value - true)[m]) ** 2).mean() for value in (-output[0], true.mean(0).expand_as(true)))
    assert float(error) < 0.9 * float(own_mean)
    assert float(error) < 0.9 * float((true[m] ** 2).mean())
