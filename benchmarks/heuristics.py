"""Effect of each correction of the output of a trained network: one is left out at a time.

Models have ``mode="any"`` and are those of the other benchmarks. Tasks, each with the scores of the benchmark in parentheses:

- ``samples``, ``mean``: expression at the positions of the held-out slice, four single samples and the conditional mean
  (``pos_to_expr.py``). ``known``: 5 % of the cells are observed. ``turned``: the held-out slice is turned by half a turn;
- ``genes``, ``entries``: 30 % of the genes, or of the entries, are hidden (``gene_inpainting.py``);
- ``sd``: ``layers["sd"]`` against the error (``uncertainty.py``);
- ``joint``: one sampled slice for each fold (``joint.py``), for counts only;
- ``placement``, and ``known positions`` with 5 % of the positions (``known_positions.py``).

Values that are not counts are scored as they are, at the true positions. With ``--cells`` the tasks of expression use a random part of
the held-out slice. ``changes`` in the output has the relative change of every score without each correction, means over folds. Run as
``python -m benchmarks.heuristics --benchmark starmap_mpfc --model-dir DIR``.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from benchmarks import _held_out, _models, _placement, gene_inpainting, joint, known_positions, pos_to_expr, uncertainty
from benchmarks._data import BENCHMARKS, find_data, labeled_folds
from benchmarks._report import Results, markdown, summarize
from benchmarks.pos_to_expr import Task, dense

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold

    Array = NDArray[np.float64]
    Change = Callable[[AlphaSTomics], AbstractContextManager[Any]]

ALL = "all corrections"
SLICES = 1  # that are sampled for each fold


def statistics(**changes: Any) -> Change:
    """Other fitted statistics."""

    @contextmanager
    def changed(model: AlphaSTomics) -> Iterator[None]:
        fitted = model._with_expression(model._make_sampler()).fitted
        model.fitted_ = dataclasses.replace(fitted, **changes)
        try:
            yield
        finally:
            model.fitted_ = fitted

    return changed


def patched(name: str, value: Any) -> Change:
    """Another object at a name below ``alphastomics.sampling``."""
    return lambda _: patch(f"alphastomics.sampling.{name}", value)


@contextmanager
def full_drift(_: AlphaSTomics) -> Iterator[None]:
    """The residual of known positions is kriged, without a factor of the mean."""
    from alphastomics.sampling import _kriging

    fit = _kriging._fit
    with patch.object(_kriging, "_fit", lambda *arguments: (*fit(*arguments)[:3], 1.0)):
        yield


@contextmanager
def one_embedding(model: AlphaSTomics) -> Iterator[None]:
    """A layout is refined by the embedding of the last block alone, of each network."""
    from alphastomics.sampling import _position

    refine = _position.refine_layout

    def refined(mean: Tensor, feature: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        of_networks = feature.unflatten(1, (-1, 2, model.module.config.n_latent))
        return refine(mean, 2**0.5 * of_networks[:, :, 0].flatten(1), *args, **kwargs)

    with patch.object(_position, "refine_layout", refined):
        yield


MEANS = ("mean", "mean, known", "genes", "entries")
PLACED = ("placement", "known positions")
CORRECTIONS: dict[str, tuple[tuple[str, ...], Change]] = {
    "marginals": (("samples", "sd", "joint"), statistics(marginals=None)),
    "shared noise": (("samples", "sd", "joint"), statistics(dependence=None)),
    "exact moments of noise": (("samples", "joint"), patched("_calibration.MIN_CELLS", 10**9)),
    "pooled variance": (("sd",), patched("_expression_draws.pooled_sd", lambda draws, *_, **__: draws.std(0, ddof=1))),
    "variance of single values": (("sd",), patched("_calibration._reliability", lambda *_: 0.0)),
    "location of the slice": (MEANS, patched("_canonical.OVERLAP", 0.0)),
    "deformed views": (MEANS, statistics(deformation=0.0)),
    "views of the density": (MEANS, patched("_expression_draws.MIN_DENSITY", 1.0)),
    "kriging of expression": (
        ("samples, known", "mean, known"),
        patched("_expression.krige", lambda x, _, residual: residual.new_zeros(len(x), residual.shape[1])),
    ),
    "choice of the frame": (
        ("mean, known", "mean, known, turned"),
        patched("_expression_draws._better_frame", lambda frames: frames[0]),
    ),
    "exemplars": (
        ("genes", "entries"),
        patched("_expression.ExpressionSampler._exemplar_shift", lambda sampler: sampler.value[0].new_zeros(())),
    ),
    "start from reference cells": (("joint",), patched("_joint.START_TIME", 1.0)),
    "removal of overlaps in new slices": (("joint",), patched("_joint.remove_overlaps", lambda x, *_: x)),
    "scale of the reference": (("placement",), patched("_position.restore_radius", lambda x, **_: x)),
    "embedding of each cell alone": (PLACED, one_embedding),
    "refinement": (PLACED, patched("_position.refine_layout", lambda mean, *_, **__: mean)),
    "removal of overlaps": (PLACED, patched("_position.remove_overlaps", lambda x, *_: x)),
    "kriging of positions": (
        ("known positions",),
        patched("_position.krige_positions", lambda _, mean, *__: (mean, 1.0)),
    ),
    "fitted drift": (("known positions",), full_drift),
    "unexplained variance of the kriging": (("known positions",), patched("_layout.LEAST", 1.0)),
}
"""Tasks that a correction affects, and the change that leaves it out."""
TASKS = tuple(dict.fromkeys(task for tasks, _ in CORRECTIONS.values() for task in tasks))


class HeldOut:
    """A model and its held-out slice, the expression of ``n_cells`` random cells of which is scored, or of all cells."""

    def __init__(
        self, tissue: str, fold: Fold, model: AlphaSTomics, folder: Path, *, n_cells: int | None, seed: int
    ) -> None:
        self.fold, self.model, self.seed = fold, model, seed
        self.counts = model.schema.transform == "log1p"
        if self.counts:
            reference, self.cells = labeled_folds(tissue, folder)[fold.name]
            part = np.sort(np.random.default_rng(0).permutation(self.cells.n_obs)[:n_cells])
            self.task = pos_to_expr.make_task(reference, self.cells[part], seed=seed)
        else:
            query, known = fold.query.copy(), known_positions.split(len(fold.truth), seed)[0]
            query.obsm["spatial"] = fold.truth[fold.order]
            self.task = Task(fold.reference, query, fold.reference.obsm["spatial"], known)
        self.true = self.values(self.task.query.X)

    def values(self, x: Any) -> Array:
        """Values as they are scored: counts as log1p at the library size of the reference."""
        return pos_to_expr.normalized(x, self.model.schema.library_size) if self.counts else dense(x)

    def score(self, name: str) -> dict[str, float]:
        """Scores of a task."""
        model, task, seed, true = self.model, self.task, self.seed, self.true
        if name in PLACED:
            rest, placed = np.arange(len(self.fold.truth)), known_positions.UNCONDITIONED
            known = rest[:0]
            if name == "known positions":
                placed, (known, rest) = known_positions.PLACEMENT, known_positions.split(len(rest), seed)
            positions = known_positions.place(model, self.fold, placed, known, seed=seed)
            return _placement.score(self.fold.truth[rest], positions[rest])
        if name == "joint":
            return self.joint()
        if name == "sd":
            arguments = uncertainty.EXPRESSION_ROWS['expression, layers["sd"]']
            drawn = pos_to_expr._sample(model, task.query, None, random_state=seed, **arguments)
            error = np.abs(dense(drawn.X) - (np.expm1(true) if self.counts else true))
            rows = np.setdiff1d(np.arange(len(true)), task.known)
            return uncertainty.score(error[rows], dense(drawn.layers["sd"])[rows])
        if name in gene_inpainting.QUESTIONS:
            hidden = gene_inpainting.hide(true.shape, name, np.random.default_rng(seed))
            mean = self.mean(np.where(hidden, np.nan, dense(task.query.X)))
            moran = pos_to_expr.morans_i(true, task.query.obsm["spatial"])
            return gene_inpainting.score(mean, true, gene_inpainting.scored_entries(task, hidden), moran)
        observed = None
        if "known" in name:
            observed = np.full(true.shape, np.nan)
            observed[task.known] = dense(task.query.X)[task.known]
        if name.startswith("mean"):
            scores = pos_to_expr.score(self.mean(observed, turned=name.endswith("turned")), true, task)
            return {score: scores[score] for score in ("pearson", "mse")}
        draws = pos_to_expr.draw_expression(model, task.query, observed, seed=seed, n_samples=pos_to_expr.SINGLES)
        each = [pos_to_expr.score(self.values(draw), true, task) for draw in draws]
        return {score: float(np.mean([scores[score] for scores in each])) for score in pos_to_expr.SCORES}

    def mean(self, observed: Array | None, *, turned: bool = False) -> Array:
        """Conditional mean (N, G), given ``observed`` values, NaN elsewhere."""
        query = self.task.query.copy()
        if turned:
            query.obsm["spatial"] = 2 * query.obsm["spatial"].mean(0) - query.obsm["spatial"]
        if self.counts:
            depth = self.model.schema.library_size
            return pos_to_expr.mean_expression(self.model, query, observed, depth, seed=self.seed)
        arguments = {"n_samples": pos_to_expr.SAMPLES, "reduce": "mean", "n_steps": 1, "random_state": self.seed}
        return dense(pos_to_expr._sample(self.model, query, observed, **arguments).X)

    def joint(self) -> dict[str, float]:
        """Areas of ``joint.py``, means over sampled slices."""
        components, cells = joint.fit_components(self.values(self.task.reference.X)), self.cells
        truth, areas = components(self.values(cells.X)), {score: [] for score in joint.MOMENTS}
        for k in range(SLICES):
            drawn = self.model.sample(mode="joint", n_cells=cells.n_obs, random_state=SLICES * self.seed + k)
            for score, change in joint.MOMENTS.items():
                pair = (components(self.values(drawn.X)), drawn), (truth, cells)
                tissues = [
                    joint.describe(change(x), np.asarray(of.obsm["spatial"], dtype=np.float64)) for x, of in pair
                ]
                areas[score].append(joint.auc(*tissues, cells.n_obs, seed=self.seed))
        return {score: float(np.mean(values)) for score, values in areas.items()}


def relative_changes(summary: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Correction -> task -> score -> relative change of the score without the correction."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row, line in summary.items():
        task, _, name = row.partition(": ")
        if name != ALL:
            whole = {score: value[0] for score, value in summary[f"{task}: {ALL}"].items() if isinstance(value, list)}
            change = {score: line[score][0] / value - 1 for score, value in whole.items()}
            found.setdefault(name.removeprefix("without "), {})[task] = change
    return found


def run(results: Results, held_out: HeldOut, options: argparse.Namespace) -> None:
    """Score the tasks of one fold with all corrections and without each."""
    parameters = _models.training_parameters(options.minutes) | {"cells": options.cells}
    fold, seed = held_out.fold.name, held_out.seed
    for task in options.tasks:
        changes = {f"without {name}": change for name, (tasks, change) in CORRECTIONS.items() if task in tasks}
        for row, change in {ALL: nullcontext, **changes}.items():
            method = f"{task}: {row}"
            if results.find(parameters, method=method, fold=fold, seed=seed):
                continue
            start = time.perf_counter()
            with change(held_out.model):
                scores = held_out.score(task)
            _held_out.keep(
                results, method, fold, seed, parameters=parameters, scores=scores,
                seconds=time.perf_counter() - start, model=_models.fingerprint(held_out.model),
            )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the changes."""
    parser = _held_out.parser("heuristics", tissues=(*_held_out.MINUTES, "starmap3d"))
    parser.add_argument("--cells", type=int, help="number of cells of the held-out slice whose expression is scored")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.set_defaults(seeds=[0])
    options = _held_out.parse(parser, argv)
    folder = find_data(options.data_dir)
    folds = BENCHMARKS[options.benchmark](folder)
    results = Results(options.output, {"benchmark": options.name, "tissue": options.benchmark})
    for seed in options.seeds:
        for fold in folds:
            path = _models.model_path(options.model_dir, options.benchmark, fold.name, mode=_models.MODE, seed=seed)
            model, _ = _models.obtain_model(fold, seed=seed, minutes=options.minutes, path=path)
            run(results, HeldOut(options.benchmark, fold, model, folder, n_cells=options.cells, seed=seed), options)
    methods = list(dict.fromkeys(entry["method"] for entry in results.entries))
    summary = summarize(results.entries, methods, [fold.name for fold in folds], options.seeds)
    found = relative_changes(summary)
    results.write(summary=summary, changes=found)
    lines = [["without", "task", "relative change of the scores"]]
    for name, tasks in found.items():
        lines += [[name, task, ", ".join(f"{s} {v:+.1%}" for s, v in change.items())] for task, change in tasks.items()]
    print(markdown(lines))


if __name__ == "__main__":
    main()
