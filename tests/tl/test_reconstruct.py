"""``tl.reconstruct`` in its three forms: a trained model, a reference, one object."""

from __future__ import annotations

import inspect
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics.data import Augmentation
from alphastomics.datasets import synthetic_tissue
from alphastomics.tl import evaluate, reconstruct
from alphastomics.tl._reconstruct import SHORT, sort_arguments
from alphastomics.train.adaptation import LEAST_SECONDS
from small_models import BRIEF, SMALL

QUICK = SMALL | BRIEF | {"max_epochs": 1}
WELL = BRIEF | {
    "max_epochs": 20,
    "augmentation": Augmentation(),
    "plan_kwargs": {"lr": 6e-3, "warmup_steps": 5},
}
KEY = "spatial_reconstructed"

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture(scope="module")
def _cells():
    return synthetic_tissue(n_slices=3, n_cells=200, n_genes=60, random_state=0)


@pytest.fixture
def cells(_cells):
    return _cells.copy()


@pytest.fixture
def reference(_cells):
    return _cells[:400].copy()


@pytest.fixture
def query(_cells):
    """Cells of the third slice, dissociated."""
    query = _cells[400:].copy()
    del query.obsm["spatial"], query.obs["slice_id"]
    return query


@pytest.fixture(scope="module")
def model(_cells):
    from alphastomics.model import AlphaSTomics

    adata = _cells[:400].copy()
    AlphaSTomics.setup_anndata(adata, cell_type_key="cell_type")
    model = AlphaSTomics(adata, mode="expr_to_pos", **SMALL)
    model.train(**WELL)
    return model


def same(a, b):
    """Whether two AnnData hold the same, to the bit."""
    assert (a.X != b.X).nnz == 0
    assert a.X.dtype == b.X.dtype
    pd.testing.assert_frame_equal(a.obs, b.obs)
    pd.testing.assert_frame_equal(a.var, b.var)
    assert list(a.obsm) == list(b.obsm)
    assert all(a.obsm[key].tobytes() == b.obsm[key].tobytes() for key in a.obsm)
    assert repr(a.uns) == repr(b.uns)
    return True


def without_result(adata, key=KEY):
    """A copy without what reconstruct writes, and the names of that."""
    rest = adata.copy()
    written = []
    for where in (rest.obsm, rest.uns):
        if key in where:
            written.append(key)
            del where[key]
    columns = [name for name in rest.obs if name.startswith(key)]
    rest.obs = rest.obs.drop(columns=columns)
    return rest, sorted([*written, *columns])


# -- form 3: a trained model --------------------------------------------------------------------------------------------


def test_with_a_model(model, query):
    before = query.copy()
    assert reconstruct(query, model=model) is None
    rest, written = without_result(query)
    assert same(rest, before)
    assert written == [KEY, KEY, KEY + "_confidence"]
    placed = query.obsm[KEY]
    assert placed.shape == (200, 2)
    assert placed.dtype == np.float64
    assert np.array_equal(placed, model.sample(query).obsm["spatial_reconstructed"])


def test_positions_are_better_than_chance(model, cells):
    reconstruct(cells, model=model)
    table = evaluate(cells, baselines=True)["distance_spearman"].unstack()
    assert table.index.tolist() == ["slice_0", "slice_1", "slice_2"]
    assert (table["prediction"] > table["chance"] + [0.25, 0.25, 0.1]).all()  # two slices were trained on


def test_positions_of_the_query_are_not_read(model, cells):
    reconstruct(cells, model=model)
    expected = cells.obsm[KEY].tobytes()
    cells.obsm["spatial"][:] = np.nan
    reconstruct(cells, model=model)
    assert cells.obsm[KEY].tobytes() == expected


@pytest.mark.parametrize("adapt", [None, True])
def test_positions_of_the_query_are_not_read_in_training(query, reference, adapt):
    poisoned = query.copy()
    poisoned.obsm["spatial"] = np.random.default_rng(0).normal(size=(query.n_obs, 2)) * 1e6
    for each in (query, poisoned):
        reconstruct(each, reference, adapt=adapt, **QUICK)
    assert query.obsm[KEY].tobytes() == poisoned.obsm[KEY].tobytes()


def change_gains(query):
    """Multiply the counts of each gene by a factor, so that the query differs from the reference."""
    gains = np.random.default_rng(0).lognormal(sigma=0.8, size=query.n_vars)
    query.X = query.X.multiply(gains).tocsr().rint().astype(np.float32)


@pytest.mark.filterwarnings("ignore:.*have a confidence below:UserWarning")
def test_a_model_is_adapted_to_a_query_that_differs_from_the_reference(query, reference):
    change_gains(query)
    adapted, not_adapted = (reconstruct(query, reference, adapt=adapt, copy=True, **QUICK) for adapt in (None, False))
    assert not np.array_equal(adapted.obsm[KEY], not_adapted.obsm[KEY])
    assert adapted.uns[KEY]["params"]["adapt"]
    assert "adaptations" in adapted.uns[KEY]["training"]


@pytest.mark.filterwarnings("ignore:.*have a confidence below:UserWarning")
@pytest.mark.parametrize(
    ("seconds", "adapt", "adapted"), [(LEAST_SECONDS - 1, None, False), (LEAST_SECONDS, None, True), (60, True, True)]
)
def test_time_is_reserved_for_an_adaptation_unless_it_is_short(query, reference, seconds, adapt, adapted, monkeypatch):
    from alphastomics.model import AlphaSTomics

    limits, method = [], AlphaSTomics.adapt

    def adapt_within(self, adata, *, inpaint, max_time):
        limits.append(max_time)
        method(self, adata, inpaint=inpaint, max_time=max_time)

    change_gains(query)
    monkeypatch.setattr(AlphaSTomics, "adapt", adapt_within)
    reconstruct(query, reference, adapt=adapt, max_time=seconds, **QUICK)
    assert limits == [pytest.approx(0.3 * seconds)] * adapted
    training = query.uns[KEY]["training"]
    assert ("adaptations" in training) == query.uns[KEY]["params"]["adapt"] == adapted
    assert training["arguments"]["max_time"] == pytest.approx((0.7 if adapted else 1) * seconds)


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ({}, "any"),
        ({"max_time": SHORT}, "any"),
        ({"max_time": SHORT - 1}, "expr_to_pos"),
        ({"max_time": 60, "mode": "any"}, "any"),
        ({"mode": "expr_to_pos"}, "expr_to_pos"),
    ],
)
def test_a_model_with_a_short_time_only_places_cells(query, reference, arguments, mode):
    assert reconstruct(query, reference, adapt=False, return_model=True, **QUICK, **arguments).mode == mode


def test_a_model_is_not_adapted_to_a_query_like_the_reference(cells):
    query = cells[::2].copy()
    reconstruct(query, cells[1::2].copy(), **QUICK)
    assert not query.uns[KEY]["params"]["adapt"]
    assert "adaptations" not in query.uns[KEY]["training"]


def test_a_model_that_is_passed_is_adapted_on_request(model, query):
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    fitted, trainings = model.fitted_, model.trainings_
    plain = reconstruct(query, model=model, copy=True)
    assert all((value == weights[name]).all() for name, value in model.module.state_dict().items())
    adapted = reconstruct(query, model=model, adapt=True, copy=True)
    assert not np.array_equal(plain.obsm[KEY], adapted.obsm[KEY])
    model.module.load_state_dict(weights)
    model.fitted_, model.trainings_ = fitted, trainings


def test_several_samples_give_the_same_placement_and_an_uncertainty(model, query):
    reconstruct(query, model=model, n_samples=3, random_state=5)
    placed = model.sample(query, random_state=5)
    assert query.obsm[KEY].tobytes() == placed.obsm["spatial_reconstructed"].tobytes()
    draws = model.sample(query, n_samples=3, reduce="mean", random_state=5)
    assert query.obs[KEY + "_uncertainty"].tolist() == draws.obs["spatial_reconstructed_uncertainty"].tolist()
    assert (query.obs[KEY + "_uncertainty"] > 0).all()
    assert query.uns[KEY]["params"]["n_samples"] == 3


def test_cells_below_the_smallest_confidence_are_not_placed(model, query, cells):
    reconstruct(query, model=model, min_confidence=0.2)
    placed = model.sample(query, min_confidence=0.2)
    confidence = query.obs[KEY + "_confidence"]
    np.testing.assert_array_equal(confidence, placed.obs["spatial_reconstructed_confidence"])
    np.testing.assert_array_equal(query.obsm[KEY], placed.obsm["spatial_reconstructed"])
    unplaced = np.isnan(query.obsm[KEY]).all(axis=1)
    np.testing.assert_array_equal(unplaced, confidence < 0.2)
    assert query.uns[KEY]["params"]["min_confidence"] == 0.2
    query.obsm["spatial"] = cells[query.obs_names].obsm["spatial"]
    table = evaluate(query)
    assert table["n_skipped"].sum() == unplaced.sum() > 0


def test_a_second_call_replaces_the_results(model, query, cells):
    reconstruct(query, model=model, n_samples=2)
    reconstruct(query, model=model)
    fresh = query.copy()
    fresh, _ = without_result(fresh)
    reconstruct(fresh, model=model)
    assert same(query, fresh)


def test_copy_and_key_added(model, query):
    before = query.copy()
    result = reconstruct(query, model=model, copy=True, key_added="placed", n_samples=2)
    assert same(query, before)
    rest, written = without_result(result, "placed")
    assert same(rest, before)
    assert written == ["placed", "placed", "placed_confidence", "placed_uncertainty"]
    reconstruct(query, model=model, key_added="placed", n_samples=2)
    assert same(query, result)


def test_arguments_of_sample_are_passed_on(model, query):
    reconstruct(query, model=model, refine=False, random_state=2)
    expected = model.sample(query, refine=False, random_state=2)
    assert query.obsm[KEY].tobytes() == expected.obsm["spatial_reconstructed"].tobytes()
    assert query.uns[KEY]["params"]["refine"] is False
    reconstruct(query, model=model, refine=True, random_state=2)
    assert query.obsm[KEY].tobytes() != expected.obsm["spatial_reconstructed"].tobytes()


# -- form 2: a reference ------------------------------------------------------------------------------------------------


def test_with_a_reference(query, reference):
    before, reference_before = query.copy(), reference.copy()
    assert reconstruct(query, reference=reference, **QUICK) is None
    assert same(reference, reference_before)
    rest, written = without_result(query)
    assert same(rest, before)
    assert written == [KEY, KEY, KEY + "_confidence"]
    assert np.isfinite(query.obsm[KEY]).all()


def test_same_arguments_give_the_same_bytes_and_another_seed_others(query, reference):
    def run(**arguments):
        return reconstruct(query, reference, copy=True, **(QUICK | {"dropout": 0.3} | arguments)).obsm[KEY].tobytes()

    first = run(random_state=3)
    np.random.seed(9)
    assert run(random_state=3) == first
    assert run(random_state=4) != first
    assert run(random_state=3, d_model=16) != first


def test_the_trained_model_is_returned_and_places_the_query_again(query, reference):
    result, model = reconstruct(query, reference, adapt=True, copy=True, return_model=True, **QUICK)
    again = query.copy()
    assert reconstruct(again, model=model, return_model=True) is model
    assert again.obsm[KEY].tobytes() == result.obsm[KEY].tobytes()
    assert reconstruct(query, model=model) is None


def test_keys_are_passed_on(query, reference):
    plain = reconstruct(query, reference, copy=True, **QUICK)
    for adata in (query, reference):
        adata.layers["counts"] = adata.X.copy()
        adata.X = adata.X * 0
    reference.obsm["xy"] = reference.obsm.pop("spatial")
    reference.obs["section"] = reference.obs.pop("slice_id")
    reconstruct(query, reference, position_key="xy", slice_key="section", layer="counts", **QUICK)
    assert query.obsm[KEY].tobytes() == plain.obsm[KEY].tobytes()
    parameters = query.uns[KEY]["params"]
    assert (parameters["position_key"], parameters["slice_key"], parameters["layer"]) == ("xy", "section", "counts")


def test_a_view_as_reference(query, cells):
    view = cells[:400]
    expected = reconstruct(query, view.copy(), copy=True, **QUICK)
    reconstruct(query, view, **QUICK)
    assert view.is_view
    assert query.obsm[KEY].tobytes() == expected.obsm[KEY].tobytes()


def test_slices_that_lack_genes_are_refused(query, reference):
    measured = pd.DataFrame({"slice_0": True, "slice_1": np.arange(60) > 3}, index=reference.var_names)
    reference.varm["measured_in"] = measured
    for cells in (reference, reference[:]):
        with pytest.raises(ValueError, match=r'1 slices lack genes.*varm\["measured_in"\]'):
            reconstruct(query, cells, **QUICK)


def test_a_registered_reference_remains_registered(query, cells):
    from alphastomics.model import AlphaSTomics

    AlphaSTomics.setup_anndata(cells)
    reconstruct(query, cells[:400], **QUICK)
    assert AlphaSTomics(cells, **SMALL).schema.slices == ("slice_0", "slice_1", "slice_2")


def test_a_shared_frame(query, reference):
    reconstruct(query, reference, frame="shared", **QUICK)
    reference.obsm["spatial"] += 10_000
    moved = reconstruct(query, reference, frame="shared", copy=True, **QUICK)
    np.testing.assert_allclose(moved.obsm[KEY], query.obsm[KEY] + 10_000, atol=1)


# -- form 1: one object -------------------------------------------------------------------------------------------------


@pytest.fixture
def partly(cells):
    """slice_0 is known, half of slice_1 and all of slice_2 are not."""
    cells.obsm["truth"] = cells.obsm["spatial"].copy()
    unknown = np.r_[200:300, 400:600]
    cells.obsm["spatial"][unknown] = np.nan
    placed = np.zeros(600, dtype=bool)
    placed[unknown] = True
    return cells, placed


@pytest.mark.parametrize("n_samples", [1, 2])
def test_cells_without_a_position_are_placed(partly, n_samples):
    cells, placed = partly
    before = cells.copy()
    reconstruct(cells, n_samples=n_samples, **QUICK)
    rest, written = without_result(cells)
    assert same(rest, before)
    assert written == [KEY, KEY, KEY + "_confidence", KEY + "_placed"] + [KEY + "_uncertainty"] * (n_samples > 1)
    assert cells.obs[KEY + "_placed"].dtype == bool
    assert cells.obs[KEY + "_placed"].tolist() == placed.tolist()
    assert cells.obsm[KEY][~placed].tobytes() == cells.obsm["truth"][~placed].tobytes()
    assert np.isfinite(cells.obsm[KEY]).all()
    if n_samples > 1:
        uncertainty = cells.obs[KEY + "_uncertainty"]
        assert (uncertainty[~placed] == 0).all()
        assert (uncertainty[placed] > 0).all()
    table = evaluate(cells, truth="truth")
    assert table["n_cells"].to_dict() == {"slice_1": 100, "slice_2": 200}
    assert table[["distance_spearman", "aligned_rmsd"]].notna().all(axis=None)


@pytest.mark.filterwarnings("ignore:2 of 400 cells have the same expression:UserWarning")
def test_cells_of_equal_expression_are_marked(partly):
    cells, _ = partly
    rows = np.arange(600)
    rows[[401, 200]] = 400, 300  # two unknown cells of a slice, and an unknown and a known one
    cells.X = cells.X[rows]
    reconstruct(cells, **QUICK)
    assert np.flatnonzero(cells.obs[KEY + "_tied"]).tolist() == [400, 401]


def test_placed_cells_lie_among_the_known_ones(partly):
    cells, placed = partly
    reconstruct(cells, **SMALL, **WELL)
    for axis in range(2):
        assert np.corrcoef(cells.obsm[KEY][200:300, axis], cells.obsm["truth"][200:300, axis])[0, 1] > 0.25
    scores = evaluate(cells, truth="truth")
    assert scores.loc["slice_1", "aligned_rmsd"] < 1.1  # not realigned: shuffled positions give 1.4
    assert scores.loc["slice_2", "distance_spearman"] > 0.1


def test_truth_of_hidden_cells_cannot_leak(partly):
    cells, placed = partly
    first = reconstruct(cells, adapt=True, copy=True, **QUICK)
    cells.obsm["truth"][placed] = np.random.default_rng(0).normal(size=(placed.sum(), 2))
    second = reconstruct(cells, adapt=True, copy=True, **QUICK)
    assert first.obsm[KEY].tobytes() == second.obsm[KEY].tobytes()


def test_slice_without_known_positions_is_placed_as_with_a_reference(partly):
    cells, _ = partly
    reconstruct(cells, **QUICK)
    known = np.isfinite(cells.obsm["spatial"]).all(1)
    query = cells[400:].copy()
    reconstruct(query, cells[known].copy(), **QUICK)
    assert cells.obsm[KEY][400:].tobytes() == query.obsm[KEY].tobytes()


def test_placement_moves_with_the_known_cells_of_the_slice(partly):
    cells, _ = partly
    turn, spread = np.array([[0.0, 1.0], [-1.0, 0.0]]), cells.obsm["truth"][200:400].std()
    reconstruct(cells, **QUICK)
    moved = cells.copy()
    moved.obsm["spatial"][300:400] = cells.obsm["spatial"][300:400] @ turn + 1000
    reconstruct(moved, **QUICK)
    assert np.abs(moved.obsm[KEY][200:300] - (cells.obsm[KEY][200:300] @ turn + 1000)).mean() < 0.1 * spread


def test_a_missing_slice_is_reported(partly):
    cells, _ = partly
    cells.obs["slice_id"] = cells.obs["slice_id"].astype(object)
    cells.obs.iloc[0, cells.obs.columns.get_loc("slice_id")] = np.nan
    with pytest.raises(ValueError, match=r'obs\["slice_id"\] is missing for 1 cells'):
        reconstruct(cells, **QUICK)


def test_one_slice_without_a_name(cells):
    one = cells[:200].copy()
    del one.obs["slice_id"]
    true = one.obsm["spatial"].copy()
    one.obsm["spatial"][:50] = np.nan
    reconstruct(one, **QUICK)
    assert one.obsm[KEY][50:].tobytes() == true[50:].tobytes()
    assert one.obs[KEY + "_placed"].sum() == 50
    assert evaluate(one, truth=KEY)["n_cells"].tolist() == [50]


def test_all_or_no_positions_known_raises(cells, no_training):
    before = cells.copy()
    with pytest.raises(ValueError, match=r'no cell .*obsm\["spatial"\].*reference=.*model='):
        reconstruct(cells)
    cells.obsm["spatial"][:] = np.nan
    with pytest.raises(ValueError, match=r'every cell .*obsm\["spatial"\].*reference=.*model='):
        reconstruct(cells)
    del cells.obsm["spatial"], before.obsm["spatial"]
    with pytest.raises(KeyError, match=r'obsm\["spatial"\].*position_key='):
        reconstruct(cells)
    assert same(cells, before)


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
def test_duplicate_names_are_accepted(partly):
    cells, placed = partly
    cells.obs_names = ["cell"] * cells.n_obs
    reconstruct(cells, n_samples=2, **QUICK)
    assert cells.obs[KEY + "_placed"].tolist() == placed.tolist()
    assert np.isfinite(cells.obsm[KEY]).all()


# -- bookkeeping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["model", "reference", "alone"])
def test_result_survives_a_file(model, query, reference, partly, tmp_path, form):
    arguments = {"n_samples": 2, "random_state": 4}
    if form == "model":
        adata = query
        reconstruct(adata, model=model, **arguments)
    elif form == "reference":
        adata = query
        reconstruct(adata, reference, transform="log1p", plan_kwargs={"lr": np.float64(1e-3)}, **arguments, **QUICK)
    else:
        adata = partly[0]
        reconstruct(adata, **arguments, **QUICK)
    adata.write_h5ad(tmp_path / "result.h5ad")
    read = ad.read_h5ad(tmp_path / "result.h5ad")
    assert read.obsm[KEY].tobytes() == adata.obsm[KEY].tobytes()
    pd.testing.assert_frame_equal(read.obs, adata.obs)
    stored, told = read.uns[KEY], adata.uns[KEY]
    assert stored["versions"] == told["versions"]
    assert stored["versions"].keys() >= {"alphastomics", "torch", "scvi-tools", "anndata"}
    assert dict(stored["params"]) == told["params"]
    assert {name: stored["params"][name] for name in arguments} == arguments
    assert stored["model"]["d_model"] == 32
    assert stored["training"]["n_cells"] == told["training"]["n_cells"]
    if form != "model":
        assert stored["params"]["max_epochs"] == 1
        assert stored["params"]["precision"] == "32-true"
    if form == "alone":
        assert evaluate(read, truth="truth")["n_cells"].to_dict() == {"slice_1": 100, "slice_2": 200}


def test_parameters_repeat_the_call(query, reference):
    reconstruct(query, reference, n_samples=2, random_state=7, **QUICK)
    parameters = query.uns[KEY]["params"]
    again = reconstruct(query, reference, copy=True, key_added="again", **parameters)
    assert again.obsm["again"].tobytes() == query.obsm[KEY].tobytes()


def test_cell_types_are_recorded_for_evaluate(model, cells):
    cells.obs["slice_id"] = cells.obs["slice_id"].astype(str)
    reconstruct(cells, model=model)
    assert cells.uns[KEY]["params"]["cell_type_key"] == "cell_type"
    assert "oracle" in evaluate(cells, baselines=True).index.get_level_values("positions")


# -- errors, all before training -----------------------------------------------------------------------------------------


def raises_unchanged(error, message, query, *args, **kwargs):
    before = query.copy()
    with pytest.raises(error, match=message):
        reconstruct(query, *args, **kwargs)
    assert same(query, before)


def test_reference_and_model_exclude_each_other(model, query, reference, no_training):
    raises_unchanged(ValueError, "reference=.*model=", query, reference=reference, model=model)


def test_arguments_are_sorted_by_the_function_that_takes_them():
    from alphastomics.model import AlphaSTomics

    functions = {"setup": AlphaSTomics.setup_anndata, "init": AlphaSTomics.__init__, "train": AlphaSTomics.train}
    others = {"self", "adata", "registry", "random_state", "kwargs", "trainer_kwargs"}
    for part, function in functions.items():
        names = dict.fromkeys(set(inspect.signature(function).parameters) - others)
        assert sort_arguments(names, caller="test")[part] == names
    trainer = {"limit_val_batches": 1, "early_stopping_patience": 2}
    assert sort_arguments({**trainer, "refine": True}, caller="test", sample={"refine"}) == {
        "setup": {}, "init": {}, "train": trainer, "sample": {"refine": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["max_epoch", "n_head", "self", "adata", "kwargs", "max_seconds", "ema", "mode_", "n_steps", "sampler"],
)
def test_unknown_argument_raises(query, reference, no_training, name):
    raises_unchanged(TypeError, f"'{name}'", query, reference, **{name: 1})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("spatial_key", "position_key"), ("batch_key", "slice_key"), ("n_epochs", "max_epochs"), ("seed", "random_state")],
)
def test_names_of_other_packages_are_answered_with_those_here(query, reference, no_training, name, meant):
    raises_unchanged(TypeError, f"'{name}'; did you mean '{meant}'", query, reference, **{name: 1})


@pytest.mark.parametrize(
    "arguments",
    [{"max_epochs": 5}, {"d_model": 8}, {"transform": "none"}, {"layer": "counts"}],
    ids=["train", "init", "setup", "key"],
)
def test_arguments_that_would_change_a_trained_model_raise(model, query, no_training, arguments):
    (name,) = arguments
    raises_unchanged(TypeError, f"{name}.*model=", query, model=model, **arguments)


def test_keys_equal_to_those_of_the_model_are_accepted(model, query):
    reconstruct(query, model=model, position_key="spatial", slice_key="slice_id")
    assert np.isfinite(query.obsm[KEY]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_samples": 0}, "n_samples"),
        ({"mode": "pos_to_expr"}, "mode='pos_to_expr'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_invalid_arguments_raise(query, reference, no_training, arguments, message):
    raises_unchanged(ValueError, message, query, reference, **arguments)


def test_invalid_query_raises(query, reference, no_training):
    strange = query.copy()
    strange.var_names = [f"ENSG{i}" for i in range(strange.n_vars)]
    raises_unchanged(ValueError, "none of the 60 genes", strange, reference, **QUICK)
    broken = query.copy()
    broken.X.data[3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        reconstruct(broken, reference, **QUICK)
    assert KEY not in broken.obsm
    with pytest.raises(ValueError, match="no cells"):
        reconstruct(query[:0].copy(), reference, **QUICK)


def test_a_confidence_that_a_small_reference_does_not_give_raises(query, reference, no_training):
    raises_unchanged(ValueError, "min_confidence=0.1", query, reference[:40].copy(), min_confidence=0.1, **QUICK)


def test_a_query_without_the_order_that_the_network_reads_raises(query, reference, no_training):
    reference.obs["order"] = np.arange(reference.n_obs)
    ordered = {"sequence_key": "order", "attention": "neighbor", "sparse_pairs": "sequence"}
    raises_unchanged(KeyError, "order", query, reference, **QUICK, **ordered)


def test_missing_genes_give_one_warning(query, reference):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reconstruct(query[:, :50].copy(), reference, copy=True, **QUICK)
    told = [str(warning.message) for warning in caught if "genes are missing" in str(warning.message)]
    assert len(told) == 1
    assert "10 of 60" in told[0]


def test_untrained_model_raises(query, reference):
    from alphastomics.model import AlphaSTomics

    AlphaSTomics.setup_anndata(reference)
    raises_unchanged(RuntimeError, "not trained", query, model=AlphaSTomics(reference, mode="expr_to_pos", **SMALL))
