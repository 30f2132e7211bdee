"""The runs of a comparison: what is to be trained, and what each training left."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from alphastomics._provenance import versions
from alphastomics.tl._compare_results import CURVE, MEASURES, SIZES, as_json
from alphastomics.tl._compare_scores import baseline_scores, score_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from alphastomics.tl._compare_folds import Fold
    from alphastomics.tl._compare_scores import Scoring
    from alphastomics.tl._configurations import Configuration

# Arguments that change nothing about a result: a run that differs in them alone is the same run.
INDIFFERENT = {"callbacks", "default_root_dir", "enable_progress_bar", "logger", "num_workers"}


class Trial(NamedTuple):
    """One run that is to be done.

    Attributes
    ----------
    name
        Configuration.
    seed
        Of the first weights, and of every draw.
    fold
        Cells.
    model
        Arguments of the model, its width settled.
    train
        Arguments of its training.
    settings
        Everything that decides the result, as plain values.
    """

    name: str
    seed: int
    fold: Fold
    model: dict[str, Any]
    train: dict[str, Any]
    settings: dict[str, Any]


def make_trials(
    chosen: Mapping[str, Configuration],
    folds: Mapping[int, Fold],
    arguments: Mapping[str, dict[str, Any]],
    scoring: Scoring,
) -> list[Trial]:
    """All runs, seed by seed. Every model is made once, so that an argument it refuses costs no training."""
    from alphastomics.model._trial import device_kind

    common = dict(arguments["train"])
    plan = common.pop("plan_kwargs", None) or {}
    shared = {
        "train": {name: value for name, value in common.items() if name not in INDIFFERENT},
        "setup": arguments["setup"],
        "scoring": scoring._asdict(),
        "device": device_kind(common["accelerator"], common["devices"]),
    }
    made = {
        (name, fold.fingerprint): _init(fold, arguments["init"], each)
        for fold in folds.values()
        for name, each in chosen.items()
    }
    trials = []
    for seed, fold in folds.items():
        for name in chosen:
            init = made[name, fold.fingerprint] | {"random_state": seed}
            data = {"fingerprint": fold.fingerprint, "held_out": fold.held_out}
            whole = _plan(fold, {**plan, **chosen[name].plan})
            settings = shared | {"model": init, "plan": whole, "data": data}
            trials.append(Trial(name, seed, fold, init, common | {"plan_kwargs": whole}, as_json(settings)))
    return trials


def _init(fold: Fold, common: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """All arguments of a model."""
    from alphastomics.model._trial import make_trial_model

    model = make_trial_model(fold.reference, {**common, **configuration.model}, match=configuration.match)
    return dict(model.init_params_["non_kwargs"])


def _plan(fold: Fold, given: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of the training plan."""
    from alphastomics.train import PlanConfig
    from alphastomics.train.defaults import default_deformation

    return asdict(PlanConfig(**{"deformation": default_deformation(fold.reference.n_obs), **given}))


def run_trial(trial: Trial, scoring: Scoring) -> dict[str, Any]:
    """Train and score."""
    import torch

    from alphastomics.model._trial import make_trial_model, parameters_of, train_trial

    model = make_trial_model(trial.fold.reference, trial.model)
    record = train_trial(model, trial.fold.query, **trial.train)
    recorder, count = record.recorder, parameters_of(model)
    last = recorder.points[-1] if recorder.points else None
    return {
        "configuration": trial.name,
        "seed": trial.seed,
        "held_out": trial.fold.held_out,
        "failure": record.failure,
        "parameters": count.total,
        "active_parameters": count.active,
        "d_model": model.module.config.d_model,
        "n_steps": record.n_steps,
        "train_seconds": last.seconds if last else None,
        "step_seconds": recorder.step_seconds,
        "step_processor_seconds": recorder.step_processor_seconds,
        "train_loss": last.train_loss if last else None,
        "validation_loss": last.validation_loss if last else None,
        "curve": {name: [getattr(point, name) for point in recorder.points] for name in CURVE},
        "scores": {} if record.failure else score_model(model, trial.fold.query, scoring, seed=trial.seed),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "settings": trial.settings,
    }


def baseline_runs(fold: Fold, scoring: Scoring, seed: int) -> list[dict[str, Any]]:
    """What needs no training, in the form of runs."""
    empty: dict[str, Any] = dict.fromkeys((*SIZES, *MEASURES)) | {"failure": "", "curve": {name: [] for name in CURVE}}
    return [
        empty | {"configuration": kind, "seed": seed, "held_out": fold.held_out, "scores": scores}
        for kind, scores in baseline_scores(fold.query, fold.schema, scoring, seed=seed).items()
    ]
