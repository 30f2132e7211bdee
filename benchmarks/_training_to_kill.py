"""A training that can be killed at any time and run again with the same arguments until it has finished.

``python -m benchmarks._training_to_kill FOLDER DEVICES`` writes ``FOLDER/model``. Before every step each process writes its process
number and its step to ``FOLDER/RANK.step``, for the process that kills it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import alphastomics as asx

SIZES = (90, 70, 20)  # cells of the slices
MODEL: dict[str, Any] = {"mode": "any", "d_model": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.1}
MODEL |= {"use_moe": True, "moe_top_k": 1, "enable_masking": True}
TRAINING: dict[str, Any] = {"max_epochs": 8, "batch_size": 30, "context_size": 30, "precision": "32-true"}
TRAINING |= {"context_growth": "linear", "shortest_context": 15, "growth_steps": 20}
EVERY = 3  # steps between two checkpoints


class Progress(pl.Callback):
    """Writes process number and step to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write the file atomically."""
        temporary = self.folder / f".{trainer.global_rank}.step"
        temporary.write_text(f"{os.getpid()} {trainer.global_step}")
        temporary.replace(self.folder / f"{trainer.global_rank}.step")


def main() -> None:
    """Train, or resume, and save the model."""
    folder, devices = Path(sys.argv[1]), int(sys.argv[2])
    adata = asx.datasets.synthetic_tissue(n_slices=len(SIZES), n_cells=SIZES, n_genes=20, random_state=0)
    asx.model.AlphaSTomics.setup_anndata(adata, slice_key="slice_id")
    model = asx.model.AlphaSTomics(adata, **MODEL)
    model.train(
        **TRAINING,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=3 - devices,  # the same steps
        checkpoint=folder / "last.ckpt",
        checkpoint_every=EVERY,
        resume="last",
        callbacks=[Progress(folder)],
        enable_progress_bar=False,
    )
    model.save(folder / "model", overwrite=True)


if __name__ == "__main__":
    main()
