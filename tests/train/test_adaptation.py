"""Adaptation of a trained network to a query."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.small_models import SMALL

from alphastomics.data import AnnDataSource
from alphastomics.metrics import distance_spearman
from alphastomics.model import _adaptation
from alphastomics.train import adaptation, short_training
from alphastomics.train.adaptation import PASSES, ROUNDS, SHARE, placed_cells
from alphastomics.train.objective import Objective
from alphastomics.train.short_training import train_for_steps


@pytest.fixture(scope="module")
def parts(_reference):
    """Two slices as reference, and the third one as query."""
    last = _reference.obs["slice_id"] == _reference.obs["slice_id"].iloc[-1]
    return _reference[~last].copy(), _reference[last].copy()


@pytest.fixture(scope="module")
def trained_path(parts, train_well, tmp_path_factory):
    from alphastomics.model import AlphaSTomics

    AlphaSTomics.setup_anndata(parts[0], position_key="spatial", slice_key="slice_id")
    model = train_well(AlphaSTomics(parts[0], mode="expr_to_pos", random_state=0, **SMALL))
    path = tmp_path_factory.mktemp("trained") / "model"
    model.save(path)
    return path


@pytest.fixture
def model(parts, trained_path):
    from alphastomics.model import AlphaSTomics

    return AlphaSTomics.load(trained_path, adata=parts[0].copy())


@pytest.fixture
def query(parts):
    return parts[1].copy()


def placed(model, query):
    return model.sample(query, mode="expr_to_pos").obsm["spatial_reconstructed"]


def test_the_adapted_network_has_other_weights_and_the_query_is_not_changed(model, query):
    before, given = {k: v.clone() for k, v in model.module.state_dict().items()}, query.copy()
    second = model.fitted_.second.weights["position_out.weight"].clone()
    model.adapt(query)
    after = model.module.state_dict()
    assert not torch.equal(second, model.fitted_.second.weights["position_out.weight"])
    assert not torch.equal(before["position_out.weight"], after["position_out.weight"])
    assert all(value.isfinite().all() for value in after.values())
    assert np.array_equal(given.obsm["spatial"], query.obsm["spatial"])
    assert (given.X != query.X).sum() == 0
    assert not model.module.training
    assert [each["n_cells"] for each in model.trainings_[-1]["adaptations"]] == [query.n_obs]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_interruption_the_model_is_as_before(model, query, monkeypatch, error):
    before, steps = placed(model, query), iter(range(3))
    losses = Objective.losses

    def interrupted(self, batch, **kwargs):
        if next(steps, None) is None:
            raise error
        return losses(self, batch, **kwargs)

    monkeypatch.setattr(Objective, "losses", interrupted)
    with pytest.raises(error):
        model.adapt(query)
    assert not model.module.training
    np.testing.assert_array_equal(placed(model, query), before)


def test_an_interrupted_fit_leaves_the_model_as_before(model, query, monkeypatch):
    before, trainings = placed(model, query), model.trainings_

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(_adaptation, "fit_statistics", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.adapt(query)
    assert model.trainings_ == trainings
    np.testing.assert_array_equal(placed(model, query), before)


def test_positions_of_the_query_are_not_read(model, query, parts, trained_path):
    from alphastomics.model import AlphaSTomics

    poisoned = query.copy()
    poisoned.obsm["spatial"] = np.random.default_rng(0).normal(size=(query.n_obs, 2)) * 1e6
    other = AlphaSTomics.load(trained_path, adata=parts[0].copy())
    del query.obsm["spatial"]
    model.adapt(query)
    other.adapt(poisoned)
    assert all(torch.equal(v, other.module.state_dict()[k]) for k, v in model.module.state_dict().items())
    assert np.array_equal(placed(model, query), placed(other, query))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*have a confidence below:UserWarning")
def test_another_specimen_from_another_instrument_is_placed_better(train_briefly):
    """Other gains of the genes, and half of the counts; the reference is large enough for a network that generalizes."""
    from alphastomics.datasets import synthetic_tissue
    from alphastomics.model import AlphaSTomics

    tissue = synthetic_tissue(n_slices=3, n_cells=1500, n_genes=100, random_state=0)
    last = tissue.obs["slice_id"] == tissue.obs["slice_id"].iloc[-1]
    reference, query = tissue[~last].copy(), tissue[last].copy()
    rng = np.random.default_rng(0)
    gain = np.exp(rng.normal(size=query.n_vars))
    query.X = rng.poisson(query.X.toarray() * gain / (2 * gain.mean())).astype(np.float32)
    AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    model = train_briefly(
        AlphaSTomics(reference, mode="expr_to_pos", attention="linear"),
        context_size=512,
        batch_size=1024,
        max_epochs=100,
    )
    scores = []
    for adapted in (False, True):
        if adapted:
            model.adapt(query)
        scores.append(distance_spearman(query.obsm["spatial"], placed(model, query)))
    assert scores[1] > scores[0]


def test_the_number_of_steps_is_bounded_by_the_query_and_by_the_training(model, query):
    n_training = model.trainings_[-1]["n_steps"]
    model.adapt(query)
    by_query, by_training = PASSES * query.n_obs / 512, SHARE * n_training / ROUNDS
    assert model.trainings_[-1]["adaptations"][0]["n_steps"] == ROUNDS * max(1, round(min(by_query, by_training)))


def test_the_number_of_steps_is_bounded_by_all_trainings(model, query):
    model.trainings_ = 2 * model.trainings_
    n_training = 2 * model.trainings_[-1]["n_steps"]
    model.adapt(query)
    expected = ROUNDS * round(SHARE * n_training / ROUNDS)
    assert expected < ROUNDS * PASSES * query.n_obs / 512
    assert model.trainings_[-1]["adaptations"][0]["n_steps"] == expected


def test_a_limit_of_time_ends_the_training_of_both_networks(model, query, monkeypatch):
    """The clock advances by a second whenever it is read, and both networks have the same number of steps."""
    clock, made = count(), []

    def train(*args, **kwargs):
        made.append(train_for_steps(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(adaptation, "SHARE", 100)
    monkeypatch.setattr(adaptation, "train_for_steps", train)
    monkeypatch.setattr(short_training, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(adaptation, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    model.adapt(query, max_time=100)
    assert len(made) == 2 * ROUNDS
    assert 5 < min(made) < 20
    assert max(made) - min(made) <= 3
    assert next(clock) == pytest.approx(100, abs=10)
    (entry,) = model.trainings_[-1]["adaptations"]
    assert entry["n_steps"] == made[0] + made[2]


def test_without_time_nothing_changes(model, query):
    before = placed(model, query)
    model.adapt(query, max_time=1e-9)
    np.testing.assert_array_equal(placed(model, query), before)
    assert model.trainings_[-1]["adaptations"][0]["n_steps"] == 0
    with pytest.raises(ValueError, match="max_time must be positive"):
        model.adapt(query, max_time=0)


def placed_at(source, x):
    (cells,) = source.slices
    return placed_cells(source, [cells._replace(rows=cells.rows[::-1], position=x)]).slices[0]


def test_predicted_positions_have_the_radius_of_the_reference(model, query):
    source = AnnDataSource(query, model.schema, positions=False)
    x = np.random.default_rng(0).normal(size=(query.n_obs, 2)) * 0.01 + 7
    cells = placed_at(source, x)
    centered = cells.position - cells.position.mean(0)
    assert np.isclose(np.sqrt(np.square(centered).mean()), model.schema.scale)
    ratio = centered / (x - x.mean(0))
    assert np.allclose(ratio, ratio[0, 0])


def test_known_positions_are_not_scaled(model, query):
    query.obsm["spatial"][5:] = np.nan
    source = AnnDataSource(query, model.schema, positions=True)
    x = np.random.default_rng(0).normal(size=(query.n_obs, 2))
    assert np.array_equal(placed_at(source, x).position, x)


def test_the_order_of_the_query_does_not_matter(model, query, parts, trained_path):
    from alphastomics.model import AlphaSTomics

    order = np.random.default_rng(0).permutation(query.n_obs)
    other = AlphaSTomics.load(trained_path, adata=parts[0].copy())
    model.adapt(query)
    other.adapt(query[order].copy())
    assert all(torch.equal(v, other.module.state_dict()[k]) for k, v in model.module.state_dict().items())


def test_it_repeats_and_does_not_use_the_global_generator(model, query, parts, trained_path):
    from alphastomics.model import AlphaSTomics

    state = torch.get_rng_state()
    model.adapt(query)
    assert torch.equal(torch.get_rng_state(), state)
    again = AlphaSTomics.load(trained_path, adata=parts[0].copy())
    again.adapt(query)
    assert all(torch.equal(v, again.module.state_dict()[k]) for k, v in model.module.state_dict().items())


def test_an_adapted_model_is_saved_and_loaded(model, query, tmp_path):
    from alphastomics.model import AlphaSTomics

    model.adapt(query)
    model.adapt(query[:50].copy())
    assert [each["n_cells"] for each in model.trainings_[-1]["adaptations"]] == [query.n_obs, 50]
    model.save(tmp_path / "adapted")
    loaded = AlphaSTomics.load(tmp_path / "adapted", adata=False)
    assert loaded.trainings_[-1]["adaptations"] == model.trainings_[-1]["adaptations"]
    assert np.array_equal(placed(loaded, query), placed(model, query))


def test_values_that_are_not_counts_are_not_thinned(model, query, monkeypatch):
    query.X = query.X.astype(np.float32) * 0.5
    seen = []
    dataset = adaptation.ContextDataset
    monkeypatch.setattr(
        adaptation, "ContextDataset", lambda *a, **kw: seen.append(kw["augmentation"].thinning) or dataset(*a, **kw)
    )
    model.adapt(query)
    assert seen
    assert not any(seen)


def test_a_model_without_its_reference_raises(trained_path, query):
    from alphastomics.model import AlphaSTomics

    with pytest.raises(ValueError, match="loaded without data; load it with adata="):
        AlphaSTomics.load(trained_path, adata=False).adapt(query)


def test_a_model_that_does_not_place_cells_raises(small, query):
    from alphastomics.model import AlphaSTomics

    AlphaSTomics.setup_anndata(small, position_key="spatial", slice_key="slice_id")
    with pytest.raises(ValueError, match="cannot sample with mode='expr_to_pos'"):
        AlphaSTomics(small, mode="pos_to_expr", **SMALL).adapt(query)
