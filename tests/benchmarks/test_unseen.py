from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks._shifts import CHANGES, SHIFTS, ceilings, shifted
from benchmarks.baselines import BASELINES

from benchmarks import _data, _models, _shifts, unseen


@pytest.fixture(scope="module")
def folds() -> list[_data.Fold]:
    return _data.synthetic(None)


@pytest.fixture(scope="module")
def fold(folds) -> _data.Fold:
    return folds[0]


def changed(fold: _data.Fold, name: str) -> _data.Fold:
    (found,) = [each for each in shifted(fold, seed=0) if each.name == f"{fold.name}, {name}"]
    return found


def content(fold: _data.Fold) -> tuple[tuple[str, ...], bytes]:
    return tuple(fold.query.var_names), fold.query.X.toarray().tobytes()


def test_every_shift_changes_the_query_only(fold):
    folds = shifted(fold, seed=0)
    assert [each.name for each in folds] == [f"{fold.name}, {name}" for name in SHIFTS]
    for each in folds:
        assert each.reference is fold.reference
        assert list(each.query.obs) == ["slice_id"]
        assert not each.query.obsm
    for each in folds[: len(CHANGES)]:
        np.testing.assert_array_equal(each.truth, fold.truth)
        assert content(each) != content(fold)


def test_a_seed_determines_the_shift(fold):
    first, again, other = (shifted(fold, seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(first[: len(CHANGES)], again, other, strict=False):
        assert content(a) == content(b) != content(c)


def test_depth_and_ambient_molecules(fold):
    total = fold.query.X.sum()
    assert changed(fold, "depth").query.X.sum() / total == pytest.approx(_shifts.DEPTH, rel=0.02)
    assert changed(fold, "ambient").query.X.sum() / total == pytest.approx(1 + _shifts.AMBIENT, rel=0.01)


def test_gains_of_the_genes(fold):
    before, after = (np.asarray(each.query.X.sum(0)).ravel() for each in (fold, changed(fold, "gains")))
    log_gain = np.log(after[before > 500] / before[before > 500])
    assert log_gain.std() == pytest.approx(_shifts.GAIN_SD, rel=0.15)


def test_panel(fold):
    query = changed(fold, "panel").query
    assert query.n_vars == round(_shifts.PANEL * fold.query.n_vars)
    assert (query.X != fold.query[:, query.var_names].X).nnz == 0


def test_composition(fold):
    others, sampled = changed(fold, "others"), changed(fold, "composition")
    names, counts = np.unique(fold.labels, return_counts=True)
    frequent = names[counts.argmax()]
    n_others = int((fold.labels != frequent).sum())
    assert (sampled.labels == frequent).sum() == counts.max()
    assert (sampled.labels != frequent).sum() == len(sampled.scored) == n_others // _shifts.OVERSAMPLING
    assert (sampled.labels[sampled.scored] != frequent).all()
    # The same cells are scored, and rows of the query still belong to their positions.
    np.testing.assert_array_equal(others.truth[others.scored], sampled.truth[sampled.scored])
    total = fold.in_source_order(np.asarray(fold.query.X.sum(1)))
    kept = sampled.in_source_order(np.asarray(sampled.query.X.sum(1)))
    np.testing.assert_array_equal(total[others.scored], kept[sampled.scored])


def test_mirrored_tissue_lies_on_both_sides(folds):
    fold = folds[-1]
    x = fold.truth[:, 0]
    assert fold.name == "mirrored"
    assert np.mean(x > 0) == pytest.approx(0.5, abs=0.05)
    for half in (x[x > 0], -x[x < 0]):
        assert np.quantile(half, [0.25, 0.5, 0.75]) == pytest.approx(np.quantile(np.abs(x), [0.25, 0.5, 0.75]), rel=0.1)


@pytest.mark.real
def test_folds_of_real_tissue(real_data):
    for tissue in ("seqfish_reverse", "hypothalamus_sections"):
        (fold,) = _data.BENCHMARKS[tissue](real_data)
        assert not set(fold.reference.obs["slice_id"]) & set(fold.query.obs["slice_id"])
        assert fold.query.n_obs == len(fold.truth) > 5000


def test_in_a_ceiling_the_reference_has_the_change_of_the_query(fold):
    folds = ceilings(fold, seed=0)
    assert [each.name for each in folds] == [f"{fold.name}, {name}, ceiling" for name in CHANGES]
    for each, name in zip(folds, CHANGES, strict=True):
        assert content(each) == content(changed(fold, name))
        assert list(each.reference.var_names) == list(each.query.var_names)
        assert (each.reference.X != fold.reference[:, each.reference.var_names].X).nnz or name == "panel"
        np.testing.assert_array_equal(each.reference.obsm["spatial"], fold.reference.obsm["spatial"])
    before, after = (
        np.asarray(each.reference.X.sum(0)).ravel() for each in (fold, folds[list(CHANGES).index("gains")])
    )
    others = np.asarray(changed(fold, "gains").query.X.sum(0)).ravel() / np.asarray(fold.query.X.sum(0)).ravel()
    frequent = before > 500
    assert np.corrcoef(np.log(after / before)[frequent], np.log(others)[frequent])[0, 1] > 0.95


def test_a_changed_query_is_compared_with_its_ceiling():
    lines = {_models.DEFAULT: {name: [0.4, None] for name in unseen.COMPARED}}
    best = {_models.DEFAULT: {name: [0.5, None] for name in unseen.COMPARED}}
    found = unseen.shares({"tissue, fold, depth": lines, "tissue, fold, depth, ceiling": best, "tissue, fold": lines})
    assert found == {"tissue, fold, depth": dict.fromkeys(unseen.COMPARED, 0.8)}


@pytest.mark.slow
def test_results_are_kept_and_compared(fold, tmp_path, monkeypatch, capsys):
    calls = []

    def noisy(sd: float):
        def place(reference, query, *, seed):
            calls.append(sd)
            truth = truths[query.n_obs, query.n_vars]
            return truth + np.random.default_rng(seed).normal(scale=sd, size=truth.shape)

        return place

    truths = {(each.query.n_obs, each.query.n_vars): each.truth[each.order] for each in (fold, *shifted(fold, seed=0))}
    monkeypatch.setitem(_data.BENCHMARKS, "synthetic", lambda folder: [fold])
    monkeypatch.setattr(unseen, "SHIFTED", ("synthetic",))
    for number, name in enumerate(unseen.BASELINES):
        monkeypatch.setitem(BASELINES, name, noisy(100.0 + 50 * number))
    monkeypatch.setattr(_models, "obtain_model", lambda *args, **kwargs: (None, 1.0))
    monkeypatch.setattr(_models, "fingerprint", lambda model: "model")
    sd = {_models.DEFAULT: 20.0, "not_adapted": 50.0}
    monkeypatch.setattr(
        _models, "place", lambda model, query, method, *, seed: noisy(sd[method])(None, query, seed=seed)
    )
    arguments = ["--tissues", "synthetic", "--seeds", "0", "--data-dir", str(tmp_path)]
    arguments += ["--output", str(tmp_path / "unseen.json")]
    unseen.main(arguments)
    assert len(calls) == (len(SHIFTS) + 1) * (len(unseen.BASELINES) + len(unseen.OURS))
    found = json.loads((tmp_path / "unseen.json").read_text())
    assert list(found["ranks"]) == list(unseen.METHODS)
    assert found["ranks"][_models.DEFAULT] == 1
    assert found["ranks"]["chance"] == len(unseen.METHODS)
    assert len(found["ratios"]) == len(SHIFTS) + 1
    best = found["summary"]["synthetic, anatomy0"]
    assert found["ratios"]["synthetic, anatomy0"]["knn_20"] == pytest.approx(
        best[_models.DEFAULT]["knn_20"][0] / best["knn_25"]["knn_20"][0]
    )
    assert "mean rank: chance 7.00" in capsys.readouterr().out
    calls.clear()
    unseen.main(arguments)
    assert not calls
