"""Models of this package: training, saving and sampling through the public interface."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks._report import write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold

DEFAULT = "alphastomics"
MODE = "any"  # the default of the package: one model for all benchmarks of a tissue
PRECISION = "32-true"  # of a training; the default depends on the device
READ_OUT: dict[str, dict[str, Any]] = {"placement": {}, "mean": {"n_samples": 2, "reduce": "mean"}}
"""Arguments of ``model.sample``: the placement and the conditional mean."""


def training_parameters(minutes: float | None, *, mode: str = MODE, **network: Any) -> dict[str, Any]:
    """Settings that determine a trained model besides data and seed; the device determines the steps per minute.

    Without ``minutes``, the package chooses the length of the training. ``network`` are arguments of the model, if they are not the default.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"mode": mode, "minutes": minutes, "device": device, **network}


def model_path(folder: Path | None, tissue: str, fold: str, *, mode: str, seed: int) -> Path | None:
    """Path of the model of a tissue, fold, mode and seed, shared by all benchmarks; None without a folder."""
    return folder and folder / tissue / f"{fold}_{mode}_seed{seed}"


def obtain_model(
    fold: Fold, *, seed: int, minutes: float | None, path: Path | None, mode: str = MODE, **network: Any
) -> tuple[AlphaSTomics, float]:
    """A model of the fold's reference and the seconds its training took, loaded from ``path`` if it was saved there.

    A saved model counts only if it was trained with the same parameters. A new one is saved when ``path`` is given.
    """
    return train_or_load(fold.reference, seed=seed, minutes=minutes, mode=mode, path=path, **network)


def train_or_load(
    reference: AnnData, *, seed: int, minutes: float | None, mode: str, path: Path | None, **network: Any
) -> tuple[AlphaSTomics, float]:
    """As :func:`obtain_model`, for a reference and a mode."""
    import alphastomics as asx

    parameters = training_parameters(minutes, mode=mode, **network) | {"seed": seed, "n_cells": reference.n_obs}
    record = None if path is None else path.with_name(f"{path.name}.json")
    if path is not None and record is not None and record.is_file():
        saved = json.loads(record.read_text())
        if saved["parameters"] == parameters:
            return asx.model.AlphaSTomics.load(path, adata=reference.copy()), saved["seconds"]
    reference = reference.copy()
    start = time.perf_counter()
    asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    model = asx.model.AlphaSTomics(reference, mode=mode, random_state=seed, **network)
    model.train(max_time=minutes and 60 * minutes, precision=PRECISION, enable_progress_bar=False)
    seconds = time.perf_counter() - start
    if path is not None and record is not None:
        # The record is removed first and written last, so that an incomplete model is never loaded.
        record.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(path, overwrite=True)
        write_json(record, {"parameters": parameters, "seconds": seconds})
    return model, seconds


def fingerprint(model: AlphaSTomics) -> str:
    """Short hash of the weights, which identifies the model of a result: training for a fixed time is not repeatable."""
    digest = hashlib.sha256()
    for name, value in sorted(model.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def adapted(model: AlphaSTomics, query: AnnData, *, always: bool = False) -> Iterator[AlphaSTomics]:
    """The model, adapted to a query as :func:`alphastomics.tl.reconstruct` adapts the models that it trains; restored afterwards.

    With ``always``, it is also adapted to a query that does not differ from the reference.
    """
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    fitted, trainings = model.fitted_, model.trainings_
    if always or model._differs(query):
        model.adapt(query)
    try:
        yield model
    finally:
        model.module.load_state_dict(weights)
        model.fitted_, model.trainings_ = fitted, trainings


def place(model: AlphaSTomics, query: AnnData, method: str, *, seed: int) -> NDArray[np.float64]:
    """Predicted positions of the query by a model that is adapted to it or, with another method, is not, ``(n_query, n_dims)``."""
    if method != DEFAULT:
        return sample(model, query, seed=seed)
    import alphastomics as asx

    placed = query.copy()
    with adapted(model, query):
        asx.tl.reconstruct(placed, model=model, random_state=seed)
    return placed.obsm["spatial_reconstructed"]


def sample(model: AlphaSTomics, query: AnnData, *, seed: int, **arguments: Any) -> NDArray[np.float64]:
    """Positions by ``model.sample`` with its arguments, in the order of the query's rows; the first of several draws."""
    tissue = model.sample(query.copy(), mode="expr_to_pos", random_state=seed, **arguments)
    return tissue.obsm["spatial_reconstructed"][: query.n_obs]
