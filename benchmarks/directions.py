"""One model for all modes compared with one model per mode, with the same training time and reference.

Three models for every fold and seed: ``any``, ``expr_to_pos`` and ``pos_to_expr``, scored in the modes that they support:

- placement: the held-out slice is placed by the default call, ``tl.reconstruct(query, model=model)``, and scored as in the
  placement benchmarks (``_placement.py``): ``distance_spearman``, ``knn_20``, ``contact_5``;
- expression: it is predicted at the registered positions of the held-out slice, task (a) of ``pos_to_expr.py`` with
  its scores: ``pearson`` of the mean of 16 samples, ``moran`` of a single one.

The table has the mean over folds, then mean ± standard deviation over seeds, of both models; their ratio; the mean
difference over all pairs of the same fold and seed, any - specialized, with its standard error (standard deviation of
the pairs over the root of their number); and whether the difference is no worse than 5 % of the specialized score or two
standard errors, whichever is more. All five scores are better when larger. The models have the same training time and not the
same number of steps, so run no other program meanwhile; every entry has the number of epochs. Run as
``python -m benchmarks.directions --benchmark starmap_mpfc``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _held_out, _models, _placement, pos_to_expr
from benchmarks._data import make_fold
from benchmarks._report import markdown, mean_sd

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

    from alphastomics.model import AlphaSTomics
    from benchmarks._report import Results

KINDS = {"any": ("placed", "mean", "sample"), "expr_to_pos": ("placed",), "pos_to_expr": ("mean", "sample")}
"""Tasks: predict positions, and predict expression, scored for the mean of the samples and for one sample."""
COMPARED = {
    "distance_spearman": ("expr_to_pos", "placed"),
    "knn_20": ("expr_to_pos", "placed"),
    "contact_5": ("expr_to_pos", "placed"),
    "pearson": ("pos_to_expr", "mean"),
    "moran": ("pos_to_expr", "sample"),
}
"""Score -> the specialized model and the task."""
TOLERANCE = 0.05


def row(mode: str, kind: str) -> str:
    """Name of a row of the results."""
    return f"{mode}, {kind}"


def answers(
    model: AlphaSTomics, fold: str, reference: AnnData, held_out: AnnData, *, mode: str, seed: int
) -> dict[str, tuple[dict[str, float], float]]:
    """Scores of all tasks of the model, and their seconds."""
    found: dict[str, tuple[dict[str, float], float]] = {}
    if "placed" in KINDS[mode]:
        question = make_fold(fold, reference, held_out)
        start = time.perf_counter()
        placed = question.in_source_order(_models.place(model, question.query, "not_adapted", seed=seed))
        found["placed"] = _placement.score(question.truth, placed), time.perf_counter() - start
    if "mean" in KINDS[mode]:
        task, depth = pos_to_expr.make_task(reference, held_out, seed=seed), model.schema.library_size
        start = time.perf_counter()
        written = pos_to_expr.score_model(model, task, depth, inpaint=False, seed=seed)
        seconds = time.perf_counter() - start
        found |= {kind: (scores, seconds) for kind, scores in written.items()}
    return found


def compare(
    entries: Sequence[Mapping[str, Any]], summary: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Score -> both models, their ratio, and the paired difference with its standard error; see the head of this file."""
    scores = {(e["method"], e["fold"], e["seed"]): e["scores"] for e in entries if e["seed"] in seeds}
    compared = {}
    for score, (mode, kind) in COMPARED.items():
        shared, other = row("any", kind), row(mode, kind)
        if shared not in summary or other not in summary:
            continue
        pairs = [
            (values[score], scores[other, fold, seed][score])
            for (method, fold, seed), values in scores.items()
            if method == shared and (other, fold, seed) in scores
        ]
        delta = np.array([a - b for a, b in pairs])
        se = float(delta.std(ddof=1) / np.sqrt(len(delta))) if len(delta) > 1 else None
        specialized = float(np.mean([b for _, b in pairs]))
        compared[score] = {
            "any": summary[shared][score],
            "specialized": summary[other][score],
            "ratio": float(np.mean([a for a, _ in pairs])) / specialized,
            "difference": float(delta.mean()),
            "standard_error": se,
            "n_pairs": len(pairs),
            "within": bool(delta.mean() >= -max(TOLERANCE * abs(specialized), 2 * (se or 0.0))),
        }
    return compared


def comparison_table(compared: Mapping[str, Mapping[str, Any]]) -> str:
    """The comparison as a Markdown table."""
    lines = [["score", "any", "specialized", "ratio", "difference", "s.e.", "pairs", "within"]]
    for score, line in compared.items():
        se = line["standard_error"]
        lines.append([
            score, mean_sd(*line["any"]), mean_sd(*line["specialized"]), f"{line['ratio']:.3f}",
            f"{line['difference']:+.4f}", "" if se is None else f"{se:.4f}", str(line["n_pairs"]),
            "yes" if line["within"] else "no",
        ])  # fmt: skip
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and score every unfinished model and print the comparison."""
    options = _held_out.parse(_held_out.parser("directions"), argv)
    results, summary = _held_out.run_folds(run, options)
    compared = compare(results.entries, summary, options.seeds)
    results.write(summary=summary, compared=compared)
    print(comparison_table(compared))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """Score the three models of one fold and seed."""
    for mode, kinds in KINDS.items():
        training = _models.training_parameters(options.minutes, mode=mode)
        parameters = {kind: pos_to_expr.row_parameters(training, kind) for kind in kinds}
        if all(results.find(parameters[kind], method=row(mode, kind), fold=name, seed=seed) for kind in kinds):
            continue
        model, train_seconds = _held_out.trained(reference, name, mode=mode, seed=seed, options=options)
        for kind, (scores, seconds) in answers(model, name, reference, held_out, mode=mode, seed=seed).items():
            _held_out.keep(
                results, row(mode, kind), name, seed, parameters=parameters[kind], scores=scores, seconds=seconds,
                train_seconds=round(train_seconds, 1), model=_models.fingerprint(model),
                epochs=len(model.history["train_loss"]),
            )  # fmt: skip


if __name__ == "__main__":
    main()
