from __future__ import annotations

import numpy as np
import pytest

from benchmarks import _report, directions


def entries_of(any_scores, specialized_scores, folds=("x", "y")):
    """Entries of every kind; scores are by (fold, seed) and the same for every kind."""
    found = []
    for seed in (0, 1, 2):
        for i, fold in enumerate(folds):
            for mode, values in (
                ("any", any_scores),
                ("expr_to_pos", specialized_scores),
                ("pos_to_expr", specialized_scores),
            ):
                for kind in directions.KINDS[mode]:
                    scores = dict.fromkeys(directions.COMPARED, values[i][seed])
                    method = directions.row(mode, kind)
                    found.append({"method": method, "fold": fold, "seed": seed, "scores": scores, "seconds": 0.0})
    return found


def compare(entries, seeds=(0, 1, 2), folds=("x", "y")):
    methods = list(dict.fromkeys(e["method"] for e in entries))
    return directions.compare(entries, _report.summarize(entries, methods, list(folds), seeds), seeds)


def test_differences_are_paired_by_fold_and_seed():
    any_scores, other = np.array([[0.5, 0.6, 0.7], [0.2, 0.3, 0.1]]), np.array([[0.6, 0.6, 0.6], [0.2, 0.2, 0.2]])
    compared = compare(entries_of(any_scores, other))
    assert set(compared) == set(directions.COMPARED)
    delta = any_scores - other
    for line in compared.values():
        assert line["difference"] == pytest.approx(delta.mean())
        assert line["standard_error"] == pytest.approx(delta.std(ddof=1) / np.sqrt(6))
        assert line["ratio"] == pytest.approx(any_scores.mean() / other.mean())
        assert line["any"] == pytest.approx([0.4, any_scores.mean(0).std(ddof=1)])
        assert line["n_pairs"] == 6
    assert directions.comparison_table(compared).count("yes") == len(directions.COMPARED)


@pytest.mark.parametrize(
    ("loss", "jitter", "within"), [(0.02, 0, True), (0.03, 0, False), (0.03, 0.1, True), (-1, 0, True)]
)
def test_within_five_percent_or_two_standard_errors(loss, jitter, within):
    other = np.full((2, 3), 0.5)
    noise = jitter * np.array([[1, -1, 1], [-1, 1, -1]])
    for line in compare(entries_of(other - loss + noise, other)).values():
        assert line["within"] is within


def test_only_complete_pairs_count():
    entries = entries_of(np.ones((2, 3)), np.ones((2, 3)))
    left = [e for e in entries if not (e["method"] == "expr_to_pos, placed" and e["seed"] == 2)]
    compared = compare(left)
    assert compared["knn_20"]["n_pairs"] == 4
    assert compared["pearson"]["n_pairs"] == 6
    assert set(compare([e for e in entries if e["method"] != "expr_to_pos, placed"])) == {"pearson", "moran"}
    single = compare(entries, seeds=[0], folds=["x"])
    assert single["moran"]["standard_error"] is not None
    assert compare([e for e in entries if e["fold"] == "x"], seeds=[0], folds=["x"])["moran"]["standard_error"] is None
