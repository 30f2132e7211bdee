"""What the tests of strategies run, one process after the other: train, sample, save, load; and tell as JSON how it went.

``python strategy_program.py FOLDER STRATEGY DEVICES ACCUMULATION [ARGUMENTS]`` trains a model for each entry of ARGUMENTS, a JSON
object of named arguments of models.
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np

import alphastomics as asx

SIZES = (90, 70, 20)  # 7 contexts of 30 cells: two processes have one of padding in the last step of an epoch
MODELS: dict[str, dict[str, Any]] = {"moe": {"use_moe": True, "moe_top_k": 1, "dropout": 0.1}}
SMALL = {"mode": "any", "d_model": 16, "n_layers": 2, "n_heads": 2}


class Steps(pl.Callback):
    """Keeps the loss of every step of the optimiser, over all processes."""

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
    return sha256(np.ascontiguousarray(adata.obsm["spatial"]).tobytes()).hexdigest()


def one(folder: Path, name: str, arguments: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    """Train a model, and use it as one does."""
    adata = tissue()
    asx.model.AlphaSTomics.setup_anndata(adata, slice_key="slice_id")
    model = asx.model.AlphaSTomics(adata, **(SMALL | arguments))
    steps = Steps()
    model.train(
        max_epochs=3,
        accelerator="cpu",
        batch_size=60,
        context_size=30,
        precision="32-true",
        enable_progress_bar=False,
        callbacks=[steps],
        **trainer,
    )
    placed = model.sample(n_steps=2)
    model.save(folder / name)
    loaded = asx.model.AlphaSTomics.load(folder / name, adata=tissue(), accelerator="cpu")
    return {
        "losses": steps.losses,
        "n_steps": model.trainer.global_step,
        "history": {key: table[key].tolist() for key, table in model.history.items() if key != "train_layer"},
        "weights": [p.detach().double().sum().item() for p in model.module.parameters()],
        "placed": placed.obsm["spatial"].tolist(),
        "same": digest(loaded.sample(n_steps=2)) == digest(placed),
        "plain": sorted({type(p).__name__ for p in model.module.parameters()}),
    }


def main() -> None:
    folder, strategy, devices, accumulation = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    models = json.loads(sys.argv[5]) if len(sys.argv) > 5 else MODELS
    trainer = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": accumulation}
    told = {name: one(folder, name, arguments, **trainer) for name, arguments in models.items()}
    rank = os.environ.get("LOCAL_RANK", "0")
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
