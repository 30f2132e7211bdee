"""Training: reproducibility, length, history and logs."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import scvi
import torch

import alphastomics as asx
from alphastomics.data import AnnDataSource
from alphastomics.datasets import seqfish_embryo
from alphastomics.model import AlphaSTomics, _training
from alphastomics.sampling._held_out_score import HeldOutScores
from alphastomics.train import session
from alphastomics.train.defaults import default_steps
from alphastomics.train.distributed.devices import resolve_precision
from callbacks import Stop

MODES = ("expr_to_pos", "pos_to_expr", "joint", "any")


def finite(model):
    return all(bool(tensor.isfinite().all()) for tensor in model.module.state_dict().values())


# -- the same again ----------------------------------------------------------------------------------------------------


def test_same_seed_gives_the_same_bytes(small, make_model, train_briefly, weights_of, positions_of):
    results = []
    for disturbance, seed in ((1, 7), (2, 7), (3, 8)):
        torch.manual_seed(disturbance)
        np.random.seed(disturbance)
        model = train_briefly(make_model(small, random_state=seed, dropout=0.3), max_epochs=2)
        torch.manual_seed(disturbance + 10)
        results.append((weights_of(model), positions_of(model.sample()), model.history["train_loss"]))
    assert results[0][:2] == results[1][:2]
    pd.testing.assert_frame_equal(results[0][2], results[1][2])
    assert results[0][0] != results[2][0]
    assert results[0][1] != results[2][1]


def test_training_leaves_the_global_generators_and_the_data_alone(small, make_model, train_briefly, assert_same):
    before = small.copy()
    state = torch.get_rng_state(), np.random.get_state()[1]
    AlphaSTomics.setup_anndata(small)
    registered = set(small.uns) - set(before.uns)
    assert registered == {"_scvi_uuid", "_scvi_manager_uuid"}
    model = AlphaSTomics(small, mode="expr_to_pos", d_model=32, n_layers=1, n_heads=2, dropout=0.3)
    train_briefly(model)
    model.sample()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])
    for key in registered:
        del small.uns[key]
    assert_same(small, before)


def test_scvi_seed_is_honored(small, make_model, weights_of, monkeypatch):
    explicit = make_model(small, random_state=5)
    default = make_model(small)
    monkeypatch.setattr(scvi.settings, "_seed", None)
    scvi.settings.seed = 5
    seeded = make_model(small)
    assert weights_of(seeded) == weights_of(explicit) != weights_of(default)
    assert seeded.init_params_["non_kwargs"]["random_state"] == 5
    assert weights_of(make_model(small, random_state=0)) == weights_of(default)


# -- history and what scvi users expect --------------------------------------------------------------------------------


def test_history_is_kept_and_continued(small, make_model, train_briefly):
    model = make_model(small)
    train_briefly(model, max_epochs=2)
    first = {name: table.copy() for name, table in model.history.items()}
    assert {"train_loss", "train_aligned", "train_distance", "train_neighbor"} <= set(first)
    layers = {name: first.pop(name) for name in list(first) if name.startswith("train_layer_")}
    for name, table in layers.items():
        assert table.index.tolist() == [0]  # one step an epoch, and the layers are looked at in every tenth
        assert model.history[name].index.tolist() == [0]
    for name, table in first.items():
        assert isinstance(table, pd.DataFrame)
        assert list(table.columns) == [name]
        assert table.index.tolist() == [0, 1]
        assert table.index.name == "epoch"
        assert np.isfinite(table.to_numpy()).all()
    train_briefly(model, max_epochs=1, validation_size=0.5)
    for name, table in first.items():
        assert model.history[name].index.tolist() == [0, 1, 2]
        pd.testing.assert_frame_equal(model.history[name].iloc[:2], table)
    assert model.history["validation_loss"].index.tolist() == [2]


@pytest.mark.parametrize("mode", ["any", "expr_to_pos"])
def test_held_out_slices_influence_neither_the_networks_nor_what_is_fitted(small, make_model, train_briefly, mode):
    """The cells of the last slice exchange their positions, which keeps the scale of the tissue."""
    other, last = small.copy(), np.flatnonzero(small.obs["slice_id"] == small.obs["slice_id"].iloc[-1])
    other.obsm["spatial"][last] = other.obsm["spatial"][np.random.default_rng(0).permutation(last)]
    models = [
        train_briefly(make_model(cells, mode=mode), max_epochs=2, validation_size=0.5, plan_kwargs={"lr": 1e-3})
        for cells in (small, other)
    ]
    weights, tensors = (
        [value(m) for m in models] for value in (lambda m: m.module.state_dict(), lambda m: m.fitted_.to_tensors())
    )
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert tensors[0].keys() == tensors[1].keys()
    assert len(tensors[0]) > 5
    for name, value in tensors[0].items():
        np.testing.assert_array_equal(value, tensors[1][name], err_msg=name)
    assert models[0].fitted_.to_dict() == models[1].fitted_.to_dict()


def test_corrected_counts_are_not_thinned(small, make_model, train_briefly):
    corrected = small.copy()
    corrected.X = corrected.X * 0.93
    model = make_model(corrected, setup={"transform": "log1p"})
    assert model.default_augmentation().thinning == 0
    assert make_model(small).default_augmentation().thinning > 0
    train_briefly(model, max_epochs=1)


def test_a_share_for_training_replaces_a_validation_set(small, make_model, train_briefly):
    model = make_model(small)
    model._validation = AnnDataSource(small, model.schema, positions=True)
    validated = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            validated.append(trainer.datamodule.validation_set.source is model._validation)

    train_briefly(model, callbacks=[Watch()])
    train_briefly(model, callbacks=[Watch()], train_size=0.5)
    assert validated == [True, False]


def test_continued_training_trains(small, make_model, train_briefly, weights_of):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(all(module.training for module in pl_module.modules()))

    model = train_briefly(make_model(small, dropout=0.5), callbacks=[Watch()])
    before = weights_of(model)
    assert not model.module.training
    train_briefly(model, callbacks=[Watch()])
    assert seen == [True] * 2
    assert not any(module.training for module in model.module.modules())
    assert weights_of(model) != before


def test_scvi_views(small, make_model, train_briefly, capsys):
    model = make_model(small)
    assert "Not Trained" in model.summary_string
    assert repr(model) == ""
    assert "60 genes, 2D, 2 reference slices" in capsys.readouterr().out.replace("\n", "")
    train_briefly(model)
    assert model.summary_string.endswith("Training status: Trained")
    assert f"{sum(p.numel() for p in model.module.parameters()):,} parameters" in model.summary_string
    capsys.readouterr()
    model.view_anndata_setup()
    shown = capsys.readouterr().out
    for text in ("'frame': 'slice'", "adata.obsm['spatial']", "adata.obs['slice_id']", "200"):
        assert text in shown
    assert model.adata_manager.data_registry.position.attr_key == "spatial"
    assert isinstance(model.trainer, pl.Trainer)


def test_log_reports_the_size_of_the_data(small, make_model, train_briefly, caplog):
    model = make_model(small)
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        train_briefly(model)
        model.sample(n_samples=2)
    assert re.search("200 cells.*60 genes.*2 slices", caplog.text)
    assert re.search("200 cells.*2 slices.*cpu", caplog.text)


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_samples_its_own_modalities(small, make_model, train_briefly, mode):
    model = make_model(small, mode=mode)
    assert model.mode == mode
    train_briefly(model)
    assert finite(model)
    assert np.isfinite(model.history["train_loss"].to_numpy()).all()
    assert ("train_expression" in model.history) == (mode != "expr_to_pos")
    for other in MODES:
        if mode not in ("any", other):
            trained = "" if other == "any" else f"mode='{mode}'.*"
            with pytest.raises(ValueError, match=f"{trained}mode='{other}'"):
                model.sample(mode=other, n_cells=5 if other == "joint" else None)
    if mode in ("any", "expr_to_pos"):
        assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()


def test_unknown_mode_raises(small, make_model):
    with pytest.raises(ValueError, match="mode='positions'.*'expr_to_pos'"):
        make_model(small, mode="positions")


def test_three_dimensions(train_briefly, make_model):
    adata = asx.datasets.synthetic_tissue(n_slices=2, n_cells=80, n_genes=30, n_dims=3)
    model = train_briefly(make_model(adata))
    hidden = adata.copy()
    hidden.obsm["spatial"][:40] = np.nan
    assert model.sample(adata).obsm["spatial_reconstructed"].shape == (160, 3)
    result = model.sample(hidden, inpaint=True, n_samples=2, reduce="medoid").obsm["spatial_reconstructed"]
    assert result[40:].tobytes() == adata.obsm["spatial"][40:].tobytes()
    assert np.isfinite(result).all()


@pytest.mark.parametrize("arguments", [{"precision": "auto"}, {"precision": "bf16-mixed"}, {"context_kind": "patch"}])
def test_other_ways_to_train(small, make_model, train_briefly, arguments):
    model = train_briefly(make_model(small), context_size=32, limit_train_batches=3, **arguments)
    assert finite(model)
    assert all(tensor.dtype == torch.float32 for tensor in model.module.parameters())
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()


class ClippedGradients(pl.Callback):
    """Norms of the gradients that the optimizer was given."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if gradients:
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def test_gradients_are_accumulated_and_clipped_on_request(small, make_model, train_briefly):
    seen = ClippedGradients()
    model = train_briefly(
        make_model(small),
        max_epochs=3,
        context_size=50,
        batch_size=50,
        accumulate_grad_batches=2,
        gradient_clip_val=1e-3,
        callbacks=[seen],
    )
    assert model.trainer.num_training_batches == 4
    assert model.trainer.global_step == 3 * 4 / 2
    np.testing.assert_allclose(seen.norms, 1e-3, rtol=1e-3)


# -- when to stop ------------------------------------------------------------------------------------------------------


def test_early_stopping_holds_out_a_slice(small, make_model, train_briefly):
    model = make_model(small)
    train_briefly(model, max_epochs=30, early_stopping=True, early_stopping_patience=2, early_stopping_min_delta=1e9)
    assert model.history["validation_loss"].index.tolist() == [0, 1, 2]
    assert model.history["train_loss"].index.tolist() == [0, 1, 2]
    data = model.trainer.datamodule
    used = [
        {int(dataset[i].slice_index) for i in range(len(dataset))} for dataset in (data.train_set, data.validation_set)
    ]
    assert used == [{0}, {1}]


def test_early_stopping_needs_two_slices(small, make_model, train_briefly):
    model = make_model(small[:100].copy())
    with pytest.raises(ValueError, match="slice"):
        train_briefly(model, early_stopping=True)
    assert not model.is_trained_


@pytest.mark.parametrize("max_time", [0.5, "00:00:00:01", timedelta(seconds=0.5), {"seconds": 0.5}])
def test_max_time(small, make_model, train_briefly, max_time):
    model = make_model(small, d_model=16, n_layers=1)
    start = time.monotonic()
    train_briefly(model, max_epochs=None, max_time=max_time)
    assert time.monotonic() - start < 30
    assert model.is_trained_
    assert model.trainer.global_step > 0
    assert model.trainer.max_epochs == -1


@pytest.mark.parametrize(
    ("max_time", "message"),
    [("5 minutes", "DD:HH:MM:SS"), ("00:05:00", "DD:HH:MM:SS"), (0, "positive"), (-1, "positive")],
)
def test_invalid_max_time_raises(small, make_model, train_briefly, max_time, message):
    with pytest.raises(ValueError, match=message):
        train_briefly(make_model(small), max_time=max_time)


@pytest.mark.parametrize(("mode", "n_steps"), [("expr_to_pos", 2000), ("any", 4000)])
@pytest.mark.slow
def test_the_default_number_of_epochs_is_fixed(small, make_model, train_briefly, mode, n_steps):
    model = train_briefly(make_model(small, mode=mode), max_epochs=None, callbacks=[Stop(1)])
    assert model.trainer.max_epochs == default_steps(mode) == n_steps  # one step an epoch
    assert model.trainer.global_step == 1


# -- kinds of attention and experts -----------------------------------------------------------------------------------

MOE = {"attention": "linear", "use_moe": True, "num_experts": 4, "moe_top_k": 1}


def test_history_has_layer_statistics(small, make_model, train_briefly):
    model = train_briefly(make_model(small, use_moe=True), max_epochs=11, context_size=50)
    per_layer = {f"train_layer_{i}_{name}" for i in range(2) for name in ("gate_mean", "gate_sd", "sink")}
    usage = [f"train_layer_1_expert_usage_{expert}" for expert in range(4)]
    assert per_layer | set(usage) <= set(model.history)
    for name in per_layer | set(usage):
        assert model.history[name].index.tolist() == [0, 10]
        assert ((model.history[name] >= 0) & (model.history[name] <= 1)).all(axis=None)
    np.testing.assert_allclose(sum(model.history[name].to_numpy() for name in usage), 1, rtol=1e-5)
    assert ((model.history["train_balance"] > 0.5) & (model.history["train_balance"] < 4)).all(axis=None)
    assert (model.history["train_layer_0_sink"] >= 1 / 50 - 1e-6).all(axis=None)
    other = train_briefly(make_model(small, attention="linear"))
    assert not {name for name in other.history if "gate" in name or "expert" in name or name == "train_balance"}


def test_noise_of_the_router_follows_the_seed(small, make_model, train_briefly, weights_of):
    first, second, other = (
        train_briefly(make_model(small, random_state=seed, **MOE), max_epochs=2) for seed in (7, 7, 8)
    )
    assert weights_of(first) == weights_of(second) != weights_of(other)


def test_linear_attention_with_experts_is_saved_and_loaded(small, make_model, train_briefly, tmp_path, positions_of):
    model = train_briefly(make_model(small, expert_width="full", **MOE))
    model.save(tmp_path / "m")
    loaded = AlphaSTomics.load(tmp_path / "m", adata=False)
    assert loaded.module.config == model.module.config
    assert loaded.module.config.expert_width == "full"
    assert positions_of(loaded.sample(small)) == positions_of(model.sample())


def test_parameters_are_logged_with_advice_for_few_cells(small, make_model, caplog):
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        model = make_model(small, use_moe=True)
    assert re.search("num_experts=4.*moe_top_k=2.*200 cells.*4 and 1", caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        assert "active" not in make_model(small)._model_summary_string
        make_model(small, **MOE)
    assert "moe_top_k" not in caplog.text
    ffn = model.module.blocks[0].ffn
    idle = 2 * 2 * sum(p[0].numel() for p in (ffn.weight_1, ffn.bias_1, ffn.weight_2, ffn.bias_2))
    total = sum(p.numel() for p in model.module.parameters())
    assert f"{total:,} parameters, {total - idle:,} active" in model._model_summary_string


def test_more_steps_than_by_default_are_trained(small, make_model, train_briefly, monkeypatch):
    monkeypatch.setattr(session, "default_steps", lambda mode: 2)
    model = train_briefly(make_model(small), max_epochs=None, max_steps=5)
    assert model.trainer.global_step == 5


def test_invalid_experts_raise(small, make_model):
    with pytest.raises(ValueError, match="moe_top_k=5.*num_experts=4"):
        make_model(small, use_moe=True, moe_top_k=5)
    for argument in ({"num_experts": 8}, {"moe_top_k": 1}, {"expert_width": "full"}):
        with pytest.raises(ValueError, match=f"{next(iter(argument))}=.*use_moe=True"):
            make_model(small, **argument)
    with pytest.raises(ValueError, match="gate_type='elementwise'.*attention='linear'"):
        make_model(small, attention="linear", gate_type="elementwise")


@pytest.mark.parametrize(("tiles", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_a_processor_uses_16_bits_only_where_it_multiplies_matrices_of_them(monkeypatch, tiles, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # but it is not used
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == expected
    assert resolve_precision("16-mixed", cpu) == "16-mixed"


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true", 64])
def test_precisions_of_weights_other_than_32_bits_are_refused(small, make_model, precision):
    with pytest.raises(ValueError, match=f"precision={precision!r}.*'32-true', 'bf16-mixed' or '16-mixed'"):
        make_model(small).train(max_epochs=1, precision=precision)


@pytest.mark.parametrize(("spearman", "warns"), [(0.05, True), (0.5, False)])
def test_held_out_scores_are_logged_with_a_warning_near_chance(
    small, make_model, train_briefly, monkeypatch, caplog, spearman, warns
):
    found = HeldOutScores(101, 0.25, spearman, 0.06)
    monkeypatch.setattr(_training, "score_held_out", lambda *_: found)
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        model = train_briefly(make_model(small))
    assert (
        f"held-out cells of the reference were placed by a second network with a distance Spearman of {spearman:.2f} (chance: 0)"
        in caplog.text
    )
    assert ("Do not rely on the placement" in caplog.text) == warns
    chance = {"knn_preservation_chance": 0.2, "contact_precision_chance": 0.05}
    assert model.trainings_[-1]["held_out"] == found._asdict() | chance


@pytest.mark.slow
@pytest.mark.real
def test_a_training_ends_within_its_time(real_data):
    """All that is fitted included, with the default model on two slices of a mouse embryo."""
    reference = seqfish_embryo(real_data / "seqfish_mouse_embryo_dev.h5ad")
    reference = reference[reference.obs["slice_id"].str.startswith("embryo1")].copy()
    AlphaSTomics.setup_anndata(reference)
    model = AlphaSTomics(reference)
    start, processor_start = time.monotonic(), time.process_time()
    model.train(max_time=120, enable_progress_bar=False)
    seconds = time.monotonic() - start
    load = max(1.0, seconds / (time.process_time() - processor_start))  # above 1 if other processes use the cores
    assert seconds < 120 + 10 * load
