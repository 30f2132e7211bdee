"""Small slices of different sizes, a tiny plan for them, and a way to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from alphastomics.data import AnnDataSource, Augmentation, ContextDataset, collate, fit_schema
from alphastomics.datasets import synthetic_tissue
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.nn.block import AdaptiveNorm
from alphastomics.train import ContextDataModule, ContextRunner, History, MovingAverage, TrainingPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from alphastomics.data import Batch

SIZES = (90, 70, 40)
PROGRAM = Path(__file__).with_name("strategy_program.py")
LIMIT = 400  # seconds of this program; processes that are spawned read all libraries anew for each model


@pytest.fixture(scope="session")
def sources() -> dict[str, AnnDataSource]:
    """The same cells, with a frame per slice and with one frame."""
    adata = synthetic_tissue(n_slices=3, n_cells=SIZES, n_genes=20, random_state=0)
    return {
        frame: AnnDataSource(adata, fit_schema(adata, frame=frame), positions=True) for frame in ("slice", "shared")
    }


@pytest.fixture(scope="session")
def source(sources) -> AnnDataSource:
    return sources["slice"]


@pytest.fixture
def make_batch(source) -> Callable[..., Batch]:
    """Whole slices of the given epochs as contexts, all in one batch."""

    def make(n_epochs: int = 4, **kwargs: Any) -> Batch:
        dataset = ContextDataset(source, context_size=100, seed=0, augmentation=Augmentation(), targets=True, **kwargs)
        contexts = []
        for epoch in range(n_epochs):
            dataset.set_epoch(epoch)
            contexts += [dataset[i] for i in range(len(dataset))]
        return collate(contexts)

    return make


def single(batch: Batch, i: int) -> Batch:
    """Context ``i`` alone, without its padding."""
    n = int(batch.mask[i].sum())
    per_cell = {"expression", "target", "local_density", "position", "mask", "rows"}
    return type(batch)(
        *(
            x[i : i + 1, :n] if name in per_cell else x[i : i + 1]
            for name, x in batch._asdict().items()
            if x is not None
        )
    )


@pytest.fixture
def singles() -> Callable[[Batch], list[Batch]]:
    return lambda batch: [single(batch, i) for i in range(len(batch.mask))]


@pytest.fixture
def make_plan(source) -> Callable[..., TrainingPlan]:
    """A plan whose adaptive norms do not start at zero."""

    def make(
        *, dropout: float = 0.0, seed: int = 1, network: dict[str, Any] | None = None, **kwargs: Any
    ) -> TrainingPlan:
        torch.manual_seed(seed)
        size = {"n_genes": 20, "n_dims": 2, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_latent": 8}
        tokens = kwargs.get("masking") is not None
        module = Denoiser(DenoiserConfig(**size, dropout=dropout, mask_tokens=tokens, **(network or {})))
        for part in module.modules():
            if isinstance(part, AdaptiveNorm):
                torch.nn.init.normal_(part.modulation.weight, std=0.1)
        spacing = source.schema.spacing / source.schema.scale
        slice_names = tuple(cells.name for cells in source.slices)
        return TrainingPlan(module, **{"spacing": spacing, "slice_names": slice_names, **kwargs})

    return make


@pytest.fixture
def fit(source) -> Callable[..., ContextRunner]:
    """Train a plan for some epochs on one thread, as a model would, and give back the runner."""

    def run(plan: TrainingPlan, *, data: dict[str, Any] | None = None, **kwargs: Any) -> ContextRunner:
        options: dict[str, Any] = {
            "batch_size": 100,
            "context_size": 45,
            "augmentation": Augmentation(),
            "seed": 0,
            "targets": True,
        }
        datamodule = ContextDataModule(**({"source": source} | options | (data or {})))
        model = SimpleNamespace(
            module=plan.module, history_=None, is_trained_=False, to_device=lambda _: None, trainer=None
        )
        trainer = {
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "precision": "32-true",
            "enable_progress_bar": False,
            "ema": MovingAverage(plan.config.ema_decay),
            "history": History(),
        }
        plan.module.train()  # the runner of an earlier training left it in eval mode, and Lightning keeps that
        runner = ContextRunner(model, training_plan=plan, data_splitter=datamodule, **(trainer | kwargs))
        runner()
        return runner

    return run


@pytest.fixture(scope="session")
def run_strategy() -> Callable[..., list[Any]]:
    """Train models by a strategy in a program of their own: the results of every process, by model in the folder."""

    def run(
        folder: Path, strategy: str, *, devices: int = 2, accumulation: int = 1, models: Any, **training: Any
    ) -> list[Any]:
        folder.mkdir()
        command = [sys.executable, str(PROGRAM), str(folder), strategy, str(devices), str(accumulation)]
        environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "MASTER_PORT")}
        done = subprocess.run(
            [*command, json.dumps(models), json.dumps(training)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stdout.decode()[-3000:]
        return [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]

    return run


@pytest.fixture
def autocast_without_data(monkeypatch) -> None:
    """Allow autocast on tensors without data, which has no settings of its own."""
    original = torch.autocast.__init__

    def autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    monkeypatch.setattr(torch.autocast, "__init__", autocast)
