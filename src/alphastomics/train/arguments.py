"""Arguments of a training: all of them, their checks, and those of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from numbers import Integral
from os import PathLike  # noqa: TC003  read at run time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from alphastomics.config import PlanConfig, TrainingConfig
from alphastomics.config._setting import check_names, settings_of, unexpected_argument
from alphastomics.diffusion import MaskingConfig
from alphastomics.train.defaults import default_deformation
from alphastomics.train.runner import ContextTrainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.data import TissueSchema
    from alphastomics.diffusion import Mode, Process
    from alphastomics.nn import Denoiser


# Arguments of the trainer that are not the user's.
SET_BY_TRAINING = {"ema", "history", "max_seconds", "used_seconds", "kwargs"}


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(TrainingConfig):
    """Arguments of :meth:`AlphaSTomics.train`, which describes them, except for those of the trainer."""

    plan_kwargs: dict[str, Any] | None
    checkpoint: str | PathLike[str] | None
    resume: str | PathLike[str] | None


def training_argument_names() -> tuple[set[str], set[str]]:
    """Names of the arguments of a training: those of :class:`TrainingArguments`, and those of the trainer."""
    trainer = {*signature(pl.Trainer).parameters, *signature(ContextTrainer).parameters, "max_time"}
    declared = set(settings_of(TrainingArguments))
    return declared, trainer - declared - SET_BY_TRAINING


def check_arguments(trainer_kwargs: Mapping[str, Any], plan_kwargs: Mapping[str, Any] | None) -> None:
    """Raise errors that Lightning or the plan would raise after the second network was trained.

    Raises
    ------
    TypeError
        If an argument is unknown, or ``callbacks`` is not a list of callbacks.
    ValueError
        If ``max_epochs`` is invalid.
    """
    declared, trainer = training_argument_names()
    for name in trainer_kwargs:
        if name not in trainer:
            raise unexpected_argument(name, sorted(declared | trainer), "train")
    check_names(plan_kwargs or {}, PlanConfig)
    callbacks = trainer_kwargs.get("callbacks") or []
    if not isinstance(callbacks, list | tuple) or not all(isinstance(each, pl.Callback) for each in callbacks):
        raise TypeError(f"callbacks={callbacks!r} must be callbacks of Lightning in a list; pass callbacks=[…]")
    max_epochs = trainer_kwargs["max_epochs"]
    if max_epochs is not None and not (isinstance(max_epochs, Integral) and (int(max_epochs) > 0 or max_epochs == -1)):
        raise ValueError(f"max_epochs={max_epochs!r} must be a whole number of at least 1, or -1 for no limit")


def plan_arguments(
    module: Denoiser,
    mode: Mode,
    diffusion: Process,
    schema: TissueSchema,
    n_cells: int,
    masking: MaskingConfig | None,
    plan_kwargs: dict[str, Any] | None,
) -> dict[str, Any]:
    """Arguments shared by the training plan and the estimate of its memory, for a reference of ``n_cells`` cells."""
    return {
        "mode": mode,
        "diffusion": diffusion,
        "shared_frame": schema.frame == "shared",
        "spacing": schema.spacing / schema.scale,
        "masking": (masking or MaskingConfig()) if module.config.mask_tokens else None,
        "deformation": default_deformation(n_cells),
        **(plan_kwargs or {}),
    }
