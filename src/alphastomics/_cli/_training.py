"""From options to a trained model."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics._cli._options import ModelOptions, PlanOptions, SetupOptions, TrainingOptions
    from alphastomics.model import AlphaSTomics

logger = logging.getLogger(__name__)


def fit(
    reference: AnnData,
    setup: SetupOptions,
    model: ModelOptions,
    training: TrainingOptions,
    plan: PlanOptions,
    seed: int,
) -> AlphaSTomics:
    """Train a model on a reference.

    Raises
    ------
    RuntimeError
        If training was interrupted before its first step.
    """
    from alphastomics.model import AlphaSTomics

    AlphaSTomics.setup_anndata(reference, **asdict(setup))
    fitted = AlphaSTomics(reference, **model.arguments(), random_state=seed)
    fitted.train(**training.arguments(fitted), plan_kwargs=plan.arguments())
    if not fitted.is_trained:
        raise RuntimeError("Training ended before its first step; there is no model to keep")
    return fitted
