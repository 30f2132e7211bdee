"""What the tests of strategies run, one process after the other: train, sample, save, load; and write the results as JSON.

``python strategy_program.py FOLDER STRATEGY DEVICES ACCUMULATION [ARGUMENTS [TRAINING]]`` trains a model for each entry of
ARGUMENTS, a JSON object of named arguments of models; ``"trials"`` are other ways to train the first of them. TRAINING are further
arguments of training.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np

import alphastomics as asx

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import brief_fits

FITS = ExitStack()  # stays open, in every process that imports this file
FITS.enter_context(brief_fits())

SIZES = (90, 70, 20)  # 7 contexts of 30 cells: two processes have one of padding in the last step of an epoch
MODELS: dict[str, dict[str, Any]] = {"moe": {"use_moe": True, "moe_top_k": 1, "dropout": 0.1}}
SMALL = {"mode": "any", "d_model": 16, "n_layers": 2, "n_heads": 2}


class Steps(pl.Callback):
    """Keeps the loss of every step of the optimizer, over all processes."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.now, self.last = 0.0, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        loss = outputs["loss"].detach().clone()
        self.now += float(trainer.strategy.reduce(loss, reduce_op="mean"))
        if trainer.global_step != self.last:
            self.losses.append(self.now)
            self.now, self.last = 0.0, trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]


def tissue():
    adata = asx.datasets.synthetic_tissue(n_slices=3, n_cells=SIZES, n_genes=20, random_state=0)
    adata.obs["order"] = np.arange(adata.n_obs) % 30
    return adata


def digest(adata) -> str:
    return sha256(np.ascontiguousarray(adata.obsm["spatial_reconstructed"]).tobytes()).hexdigest()


class Poison(pl.Callback):
    """Spoils the loss of the last process in the third step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            pl_module.objective.total = lambda losses, *_: sum((loss * float("nan")).sum() for loss in losses.values())


def make(arguments: dict[str, Any]) -> asx.model.AlphaSTomics:
    adata = tissue()
    asx.model.AlphaSTomics.setup_anndata(adata, slice_key="slice_id")
    return asx.model.AlphaSTomics(adata, **(SMALL | arguments))


def fit(model: asx.model.AlphaSTomics, **arguments: Any) -> None:
    size = {"batch_size": 60, "context_size": 30, "max_epochs": 3, "precision": "32-true"}
    model.train(accelerator="cpu", enable_progress_bar=False, **(size | arguments))


def total(model: asx.model.AlphaSTomics) -> float:
    return sum(p.detach().double().abs().sum().item() for p in model.module.parameters())


def trials(folder: Path, arguments: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    """Validation in 16 bits with early stopping; growing contexts in parts, recomputed; a loss that is not finite; resuming."""
    told: dict[str, Any] = {}
    model = make(arguments)
    stop = {"early_stopping": True, "early_stopping_patience": 1, "validation_size": 0.3}
    fit(model, precision="bf16-mixed", sync_batchnorm=True, gradient_clip_val=0.1, **stop, **trainer)
    told["validation"] = model.history["validation_loss"]["validation_loss"].tolist()
    model = make(arguments)
    grow = {"context_growth": "linear", "shortest_context": 15, "growth_steps": 3}
    fit(model, recompute="all", micro_batch_size=30, **grow, **trainer)
    told["grown"] = total(model)
    model = make(arguments)
    try:
        fit(model, callbacks=[Poison()], **trainer)
    except asx.train.NonFiniteLossError as error:
        told["error"] = str(error)
    told["kept"] = [model.is_trained_, model.trainer.global_step, total(model)]
    resume_state, resumed = make(arguments), make(arguments)
    fit(resume_state, max_epochs=2, checkpoint=folder / "last.ckpt", **trainer)
    told["resume_state"] = total(resume_state)
    fit(resumed, max_epochs=4, checkpoint=folder / "last.ckpt", resume=folder / "last.ckpt", **trainer)
    told["resumed"] = [resumed.trainer.global_step, total(resumed)]
    return told


def one(folder: Path, name: str, arguments: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    """Train a model, and use it as one does."""
    model, steps = make(arguments), Steps()
    fit(model, callbacks=[steps], **trainer)
    placed = digest(model.sample())
    model.save(folder / name)
    loaded = asx.model.AlphaSTomics.load(folder / name, adata=tissue(), accelerator="cpu")
    return {
        "losses": steps.losses,
        "n_steps": model.trainer.global_step,
        "history": {key: table[key].tolist() for key, table in model.history.items()},
        "weights": [p.detach().double().sum().item() for p in model.module.parameters()],
        "mean": model.sample(n_samples=2, reduce="mean", refine=False).obsm["spatial_reconstructed"].tolist(),
        "placed": placed,
        "same": digest(loaded.sample()) == placed,
        "plain": sorted({type(p).__name__ for p in model.module.parameters()}),
    }


def main() -> None:
    folder, strategy, devices, accumulation = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    models = json.loads(sys.argv[5]) if len(sys.argv) > 5 else MODELS
    trainer = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": accumulation}
    trainer |= json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
    wanted = models.pop("trials", None)
    told = {name: one(folder, name, arguments, **trainer) for name, arguments in models.items()}
    if wanted is not None:
        told["trials"] = trials(folder, wanted, **trainer)
    rank = os.environ.get("LOCAL_RANK", "0")
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
