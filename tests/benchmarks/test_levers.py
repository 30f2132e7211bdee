from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks._report import Results
from benchmarks.levers import (
    ADAPTED,
    ROWS,
    changed_adaptation,
    place_adapted,
    place_averaged,
    ranks,
    run,
    train,
    without_gains,
)

from alphastomics.datasets import synthetic_tissue
from benchmarks import _data, levers


@pytest.fixture(scope="module")
def fold() -> _data.Fold:
    return _data.make_fold(
        "fold", *_data._last_slice(synthetic_tissue(n_slices=3, n_cells=300, n_genes=60, random_state=0))
    )


@pytest.fixture(scope="module")
def model(fold):
    return train(fold.reference, {"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}}, seed=0, steps=14)


def test_gains_are_removed(fold):
    rng = np.random.default_rng(0)
    gain = rng.lognormal(sigma=0.8, size=fold.query.n_vars)
    query = fold.query.copy()
    query.X = rng.poisson(query.X.toarray() * gain).astype(np.float32)
    total = np.asarray(fold.query.X.sum(0)).ravel()
    removed = (
        np.asarray(query.X.sum(0)).ravel() / np.asarray(without_gains(fold.reference, query, seed=0).X.sum(0)).ravel()
    )
    frequent = total > 200
    assert np.corrcoef(np.log(removed[frequent]), np.log(gain[frequent]))[0, 1] > 0.9


def test_the_average_of_one_network_is_its_placement(model, fold):
    alone, twice = (place_averaged([model] * n, fold.query, seed=0) for n in (1, 2))
    distances = [np.linalg.norm(x - x.mean(0), axis=1) for x in (alone, twice)]
    # The embeddings are equal up to rounding errors, which the iterations of the refinement amplify.
    assert np.corrcoef(*distances)[0, 1] > 0.99


def test_every_change_of_the_adaptation_has_an_effect_and_ends(model, fold):
    placed = {}
    for row in (*ADAPTED, "adapted"):
        with changed_adaptation(row):
            position = place_adapted(model, fold.query, seed=0)
        if row in placed:
            np.testing.assert_array_equal(placed[row], position)
        placed[row] = position
    for row in ADAPTED[1:]:
        assert not np.array_equal(placed[row], placed["adapted"])


def test_rows_are_kept_and_ranked(fold, tmp_path, monkeypatch):
    trained = []
    schema = SimpleNamespace(transform="log1p")
    monkeypatch.setattr(levers, "train", lambda *a, **kw: trained.append(kw["steps"]) or SimpleNamespace(schema=schema))
    truth, sd = fold.truth[fold.order], dict(zip(ROWS, range(1, 99), strict=False))

    def noisy(row: str):
        return truth + np.random.default_rng(0).normal(scale=40.0 * sd[row], size=truth.shape)

    calls = iter(ROWS)
    for module, name in ((levers._models, "sample"), (levers, "place_adapted"), (levers, "place_averaged")):
        monkeypatch.setattr(module, name, lambda *a, **kw: noisy(next(calls)))
    monkeypatch.setattr(levers, "without_gains", lambda reference, query, seed: query)
    results = Results(tmp_path / "levers.json", {"benchmark": "levers"})
    run(results, fold, ROWS, seed=0, steps=6)
    assert trained == [6, 3, 3, 2, 2, 2, 6, 6, 6, 6, 6]
    run(results, fold, ROWS, seed=0, steps=6)
    assert len(trained) == 11
    found = ranks(results, ROWS, [0])
    assert min(found, key=found.get) == ROWS[0]
    assert max(found, key=found.get) == ROWS[-1]
