"""The frame-aligned point error as a loss of training."""

from __future__ import annotations

import pytest
import torch

from alphastomics.chains import chain_fape, synthetic_chains
from alphastomics.chains.fape import CLAMP, chain_losses
from alphastomics.config import PlanConfig
from alphastomics.data import AnnDataSource, ContextDataset, collate, fit_schema
from alphastomics.model import AlphaSTomics
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train.objective import Objective


@pytest.fixture(scope="module")
def chain():
    """Two chains of shuffled residues in one padded batch: true and predicted positions, mask and places."""
    adata = synthetic_chains(n_chains=2, random_state=0)
    rows = [(adata.obs["slice_id"] == name).to_numpy() for name in adata.obs["slice_id"].cat.categories]
    n = max(row.sum() for row in rows)
    x, mask, place = torch.zeros(2, n, 3), torch.zeros(2, n, dtype=torch.bool), torch.zeros(2, n)
    for b, row in enumerate(rows):
        k = int(row.sum())
        x[b, :k] = torch.from_numpy(adata.obsm["spatial"][row])
        mask[b, :k], place[b, :k] = True, torch.from_numpy(adata.obs["residue"].to_numpy()[row]).float()
    torch.manual_seed(0)
    return x, x + torch.randn(x.shape), mask, place


def test_loss_is_the_score(chain):
    x, predicted, mask, place = chain
    losses = chain_losses(predicted, x, mask, place, 3.8)
    for loss, true, found, real, index in zip(losses, x, predicted, mask, place, strict=True):
        score = chain_fape(true[real], found[real], index[real].long())
        assert loss.item() == pytest.approx(score, rel=1e-4)
    assert CLAMP * 3.8 == pytest.approx(10)


def test_positions_that_are_an_input_have_no_loss_and_absent_ones_have():
    adata = synthetic_chains(n_chains=6, random_state=0)
    source = AnnDataSource(adata, fit_schema(adata, sequence_key="residue", frame="shared"), positions=True)
    dataset = ContextDataset(source, context_size=100, seed=0, targets=True)
    batch = collate([dataset[i] for i in range(len(dataset))])
    network = Denoiser(DenoiserConfig(n_genes=20, n_dims=3, d_model=16, n_layers=1, n_heads=2, sequence=True))
    objective = Objective(network, PlanConfig(lambda_fape=1.0), mode="any", shared_frame=True, spacing=0.1)
    t = objective.draw(batch).t_pos
    assert set(t.tolist()) == {0, 1}
    assert torch.equal(objective.losses(batch)["fape"] > 0, t == 1)


def test_a_straight_prediction_has_a_loss(chain):
    x, _, mask, place = chain
    straight = place[..., None] * torch.tensor([3.8, 0.0, 0.0])
    assert bool((chain_losses(straight, x, mask, place, 3.8) > 0.4).all())


def test_gradient_leads_to_right_handed_helices(chain):
    x, predicted, mask, place = chain
    mirrored = (x * torch.tensor([1.0, 1.0, -1.0])).requires_grad_()
    assert bool((chain_losses(mirrored, x, mask, place, 3.8) > 0.05).all())  # distances alone are equal for both
    chain_losses(predicted.requires_grad_(), x, mask, place, 3.8).sum().backward()
    assert bool(predicted.grad[mask].isfinite().all())
    assert bool((predicted.grad[mask].abs().sum(1) > 0).any())


def make(sequence_key, attention="neighbor"):
    adata = synthetic_chains(n_chains=8, random_state=0)
    AlphaSTomics.setup_anndata(adata, slice_key="slice_id", sequence_key=sequence_key, frame="shared")
    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "attention": attention}
    pairs = {"sparse_pairs": "coordinate"} if attention == "neighbor" else {}
    return AlphaSTomics(adata, mode="expr_to_pos", **small, **pairs)


def test_training_adds_the_loss_on_request():
    model = make("residue")
    brief = {
        "max_epochs": 1,
        "batch_size": 640,
        "context_size": 160,
        "accelerator": "cpu",
        "enable_progress_bar": False,
    }
    model.train(**brief, plan_kwargs={"lambda_fape": 0.5})
    assert model.history["train_fape"].iloc[-1].item() > 0
    plain = make("residue")
    plain.train(**brief)
    assert "train_fape" not in plain.history


def test_a_query_without_an_order_is_adapted_to_without_the_loss():
    """A network that reads no order places such a query, too."""
    model = make("residue", attention="full")
    brief = {"batch_size": 640, "context_size": 160, "accelerator": "cpu", "enable_progress_bar": False}
    model.train(max_epochs=1, **brief, plan_kwargs={"lambda_fape": 0.5})
    query = model.adata.copy()
    del query.obs["residue"]
    before = model.module.position_out.weight.clone()
    model.adapt(query)
    assert not torch.equal(before, model.module.position_out.weight)


def test_the_estimate_of_memory_includes_the_loss():
    """The error of N points in N frames, of each coordinate in 32 bits."""
    model, n = make("residue"), 600
    without, included = (model.estimate_memory(n, plan_kwargs=plan).peak for plan in ({}, {"lambda_fape": 1.0}))
    assert included - without > 4 * 3 * n**2


def test_cells_without_an_order_have_no_frames():
    with pytest.raises(ValueError, match="lambda_fape"):
        make(None).train(max_epochs=1, plan_kwargs={"lambda_fape": 1.0})
