"""Cell types as an input: what is read, what is hidden in training, and what they add."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from alphastomics import tl
from alphastomics.data import AnnDataSource
from alphastomics.data._slices import encode_labels
from alphastomics.data.parquet._source import ParquetSource
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.metrics import distance_spearman
from alphastomics.model import AlphaSTomics
from alphastomics.train.draws import ALL_HIDDEN, TRAINING, VALIDATION
from files import write_slices

SETUP = {"slice_key": "slice_id", "cell_type_key": "cell_type"}


@pytest.fixture
def uninformative(reference):
    """Tissue whose expression is noise; the cell type is the quadrant of the slice."""
    rng = np.random.default_rng(0)
    reference.X = sp.csr_matrix(rng.poisson(2.0, reference.shape).astype(np.float32))
    position = pd.DataFrame(reference.obsm["spatial"], index=reference.obs_names)
    centered = position - position.groupby(reference.obs["slice_id"].to_numpy()).transform("median")
    turned = np.floor(np.arctan2(centered[1], centered[0]) / (np.pi / 2)).astype(int)
    reference.obs["cell_type"] = pd.Categorical([f"quadrant {q}" for q in turned])
    return reference


def one_slice(adata):
    return adata[adata.obs["slice_id"] == "slice_1"].copy()


@pytest.fixture
def typed(small, make_model, train_briefly):
    return train_briefly(make_model(small, setup=SETUP, use_cell_types=True), max_epochs=3)


@pytest.mark.slow
def test_cell_types_place_cells_whose_expression_is_noise(uninformative, make_model, train_briefly):
    others = uninformative[uninformative.obs["slice_id"] != "slice_1"]
    model = make_model(others, setup=SETUP | {"frame": "shared"}, use_cell_types=True)
    train_briefly(model, max_epochs=60, plan_kwargs={"lr": 6e-3, "warmup_steps": 5})
    query = one_slice(uninformative)
    bare = query.copy()
    del bare.obs["cell_type"]
    true = query.obsm["spatial"]
    with_types, without = (
        distance_spearman(true, model.sample(each).obsm["spatial_reconstructed"]) for each in (query, bare)
    )
    assert with_types > 0.5
    assert without < 0.3


def test_cell_types_are_not_an_input_by_default(small, make_model, train_briefly, positions_of):
    model = train_briefly(make_model(small, setup=SETUP))
    assert not hasattr(model.module, "cell_type_in")
    bare = small.copy()
    del bare.obs["cell_type"]
    assert positions_of(model.sample(bare)) == positions_of(model.sample(small))


def test_labels_and_genes_are_transferred_by_expression_alone(typed, small):
    """Otherwise labels of the query would be those that are returned."""
    bare, shuffled = small.copy(), small.copy()
    del bare.obs["cell_type"]
    shuffled.obs["cell_type"] = np.random.default_rng(0).permutation(small.obs["cell_type"])
    for query in (bare, shuffled):
        tl.transfer_labels(query, small, model=typed, label_key="cell_type", key_added="found")
    assert (bare.obs["found"].astype(str) == shuffled.obs["found"].astype(str)).all()
    np.testing.assert_array_equal(
        *(tl.impute(q, small, model=typed, genes=["gene_0"], copy=True).obsm["imputed"] for q in (bare, shuffled))
    )


def test_labels_that_are_numbers_are_the_same_as_integers_and_floats(small, make_model):
    numbered = small.copy()
    numbered.obs["cell_type"] = small.obs["cell_type"].cat.codes.to_numpy(dtype=int)
    model, fractional = make_model(numbered, setup=SETUP, use_cell_types=True), numbered.copy()
    fractional.obs["cell_type"] = numbered.obs["cell_type"].astype(float).mask(np.arange(small.n_obs) == 0)
    rows = np.arange(small.n_obs)
    expected, found = (AnnDataSource(a, model.schema, positions=False).cell_type(rows) for a in (numbered, fractional))
    assert found[0] == 0
    np.testing.assert_array_equal(found[1:], expected[1:])


@pytest.mark.filterwarnings("ignore:.*cells have the same expression:UserWarning")
def test_cells_of_equal_expression_and_type_are_tied(typed, small):
    one = small[small.obs["slice_id"] == "slice_0"].copy()
    one.X = one.X[np.r_[0, 0, 0, 3:100]]
    one.obs.loc[one.obs_names[:3], "cell_type"] = one.obs["cell_type"].cat.categories[[0, 1, 1]]
    assert np.flatnonzero(typed.sample(one).obs["spatial_reconstructed_tied"]).tolist() == [1, 2]


def test_missing_and_unknown_types_are_the_same(typed, small, positions_of):
    bare, other = small.copy(), small.copy()
    del bare.obs["cell_type"]
    other.obs["cell_type"] = "a type that the reference lacks"
    expected = positions_of(typed.sample(bare))
    assert positions_of(typed.sample(other)) == expected
    assert positions_of(typed.sample(small)) != expected


def test_a_saved_model_uses_them(typed, small, weights_of, positions_of, tmp_path):
    typed.save(tmp_path / "model")
    loaded = AlphaSTomics.load(tmp_path / "model", adata=False)
    assert weights_of(loaded) == weights_of(typed)
    assert positions_of(loaded.sample(small)) == positions_of(typed.sample(small))


def test_they_are_used_where_expression_is_clean(small, make_model):
    module = make_model(small, setup=SETUP, use_cell_types=True).module.eval()
    x, position = torch.randn(1, 7, module.config.n_genes), torch.zeros(1, 7, 2)
    zero, one = torch.zeros(1), torch.ones(1)
    types = torch.arange(7)[None] % (module.config.n_cell_types + 1)

    def predicted(t_expr, cell_type):
        with torch.no_grad():
            return module(x, position, t_expr, one, cell_type=cell_type).position

    assert not torch.equal(predicted(zero, types), predicted(zero, None))
    assert torch.equal(predicted(zero, torch.zeros_like(types)), predicted(zero, None))
    assert torch.equal(predicted(one / 2, types), predicted(one / 2, None))


def test_a_random_share_is_hidden_in_training_alone(typed):
    objective = typed.trainer.lightning_module.objective
    loader = iter(typed.trainer.datamodule.train_dataloader())
    raw = next(loader)
    batch = getattr(raw, "batch", raw)
    batch, known = batch._replace(draws=None), []
    for number in range(200):
        key = batch.key.clone()
        key[:, 2] = number
        hidden = objective.draw(batch._replace(key=key), TRAINING).hidden_type
        known.append(1 - float(hidden[0, batch.mask[0]].float().mean()))
    known = np.array(known)
    assert abs((known == 0).mean() - ALL_HIDDEN) < 0.15
    partly = known[known > 0]
    assert partly.min() < 0.3
    assert partly.max() > 0.7
    assert not bool(objective.draw(batch, VALIDATION).hidden_type.any())


def test_a_reference_without_types_is_refused(small, make_model):
    with pytest.raises(ValueError, match="cell_type_key"):
        make_model(small, setup={"slice_key": "slice_id"}, use_cell_types=True)


def test_labels_are_numbered_as_in_the_schema(small, make_model):
    names = ("a", "b")
    labels = pd.Series(["b", None, "a", "c", np.nan], dtype=object)
    assert encode_labels(labels, names).tolist() == [2, 0, 1, 0, 0]
    assert encode_labels(pd.Series([3, 1], dtype=object), ("1", "3")).tolist() == [2, 1]
    schema = make_model(small, setup=SETUP).schema
    source = AnnDataSource(small, schema, positions=True)
    found = source.cell_type(np.array([5, 0]))
    assert [schema.cell_types[number - 1] for number in found] == small.obs["cell_type"].iloc[[5, 0]].astype(
        str
    ).tolist()


def test_a_dataset_on_disk_has_them(small, tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "dataset"
    raw.mkdir()
    write_slices(small, raw)
    options = Stage1Options(cell_type_key="cell_type")
    preprocess(raw, out, options, Stage2Options(train_ratio=1.0, val_ratio=0.0))
    source = ParquetSource(out)
    found = source.cell_type(np.arange(source.n_cells))
    counts = pd.Series([source.schema.cell_types[number - 1] for number in found]).value_counts()
    expected = small.obs["cell_type"].astype(str).value_counts()
    assert counts.to_dict() == expected.to_dict()
    model = AlphaSTomics.from_parquet(out, use_cell_types=True, d_model=16, n_layers=1, n_heads=2)
    assert model.module.config.n_cell_types == len(source.schema.cell_types)
