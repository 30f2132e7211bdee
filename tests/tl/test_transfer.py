"""Transfer of labels and of genes between datasets: ``tl.transfer_labels`` and ``tl.impute``."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from scipy.stats import pearsonr
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from alphastomics.datasets import synthetic_tissue
from alphastomics.tl import impute, transfer_labels
from small_models import BRIEF, SMALL

GENES = 50  # of the model; the tissue has 60


@pytest.fixture(scope="module")
def _tissue():
    return synthetic_tissue(n_slices=3, n_cells=200, n_genes=60, random_state=0)


@pytest.fixture
def reference(_tissue):
    """Two slices of a tissue, all genes."""
    return _tissue[:400].copy()


@pytest.fixture
def query(_tissue):
    """Dissociated cells of the third slice without labels, and without ten genes of the reference."""
    query = _tissue[400:, :GENES].copy()
    del query.obsm["spatial"], query.obs["slice_id"], query.obs["cell_type"]
    return query


@pytest.fixture(scope="module")
def model(_tissue):
    from alphastomics.model import AlphaSTomics

    adata = _tissue[:400, :GENES].copy()
    AlphaSTomics.setup_anndata(adata)
    model = AlphaSTomics(adata, mode="expr_to_pos", **SMALL)
    model.train(**BRIEF, max_epochs=2)
    return model


def embeddings(model, *datasets):
    return [model.get_latent_representation(each, layer="encoder") for each in datasets]


def log1p(x, size):
    x = np.asarray(x.todense() if sp.issparse(x) else x, dtype=float)
    return np.log1p(x / x.sum(1, keepdims=True) * size)


def median_size(adata):
    return np.median(np.asarray(adata.X.sum(1)).ravel())


def test_labels_are_those_of_the_nearest_neighbors(model, query, reference):
    known, wanted = embeddings(model, reference, query)
    classifier = KNeighborsClassifier(15).fit(known, reference.obs["cell_type"].astype(str))
    share = classifier.predict_proba(wanted)

    transfer_labels(query, reference, model=model)

    np.testing.assert_allclose(query.obs["cell_type_transferred_confidence"], share.max(1))
    assert (query.obs["cell_type_transferred"].astype(str) == classifier.classes_[share.argmax(1)]).all()
    assert query.uns["cell_type_transferred"]["function"] == "transfer_labels"


def test_labels_of_dissociated_cells_are_transferred_to_the_tissue(model, query, reference):
    dissociated, tissue = reference[:200, :GENES].copy(), reference[200:].copy()
    true = tissue.obs.pop("cell_type").astype(str)
    del dissociated.obsm["spatial"]
    transfer_labels(tissue, dissociated, model=model, key_added="found")
    agreement = (tissue.obs["found"].astype(str) == true).mean()
    assert agreement > 1.5 * true.value_counts(normalize=True).max()


def test_labels_below_the_smallest_confidence_are_missing(model, query, reference):
    result = transfer_labels(query, reference, model=model, min_confidence=0.8, copy=True)
    confidence = result.obs["cell_type_transferred_confidence"]
    assert 0 < (confidence < 0.8).sum() < len(confidence)
    assert (result.obs["cell_type_transferred"].isna() == (confidence < 0.8)).all()
    assert not query.obs.columns.str.contains("transferred").any()


def test_categories_are_those_of_the_source(model, query, reference):
    labels = reference.obs["cell_type"].cat.add_categories("absent")
    reference.obs["cell_type"] = labels.cat.reorder_categories(["absent", *reference.obs["cell_type"].cat.categories])
    transfer_labels(query, reference, model=model)
    found = query.obs["cell_type_transferred"]
    assert found.dtype == reference.obs["cell_type"].dtype
    assert not found.isin(["absent"]).any()


def test_cells_without_a_label_do_not_vote(model, query, reference):
    reference.obs["cell_type"] = reference.obs["cell_type"].astype(object)  # in both, so that the categories are equal
    whole = reference.copy()
    labeled = np.flatnonzero(np.arange(400) % 2)
    whole.obs.loc[whole.obs_names[::2], "cell_type"] = None
    both = [transfer_labels(query, s, model=model, copy=True) for s in (whole, reference[labeled].copy())]
    pd.testing.assert_frame_equal(both[0].obs, both[1].obs)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (KeyError, {"label_key": "type"}, "label_key"),
        (ValueError, {"n_neighbors": 401}, "between 1 and 400"),
        (ValueError, {"n_neighbors": 0}, "between 1 and 400"),
        (ValueError, {"min_confidence": 1.5}, "between 0 and 1"),
        (ValueError, {"label_key": "empty"}, "no cell of source has a label"),
    ],
)
def test_errors_of_labels(model, query, reference, error, arguments, message):
    reference.obs["empty"] = pd.Categorical([None] * 400, categories=["a"])
    with pytest.raises(error, match=message):
        transfer_labels(query, reference, model=model, **arguments)


def test_genes_are_the_mean_of_the_nearest_neighbors(model, query, reference):
    known, wanted = embeddings(model, reference, query)
    size = median_size(reference)
    values = np.expm1(log1p(reference.X, size))[:, GENES:]
    expected = KNeighborsRegressor(50).fit(known, values).predict(wanted)

    impute(query, reference, model=model)

    table = query.obsm["imputed"]
    assert list(table.columns) == list(reference.var_names[GENES:])
    assert list(table.index) == list(query.obs_names)
    np.testing.assert_allclose(table, expected, rtol=1e-4, atol=1e-5)
    assert query.uns["imputed"]["function"] == "impute"
    assert "imputed_validation" not in query.uns


def test_chosen_genes_and_values_that_are_not_counts(model, query, reference):
    reference.layers["scaled"] = np.asarray(reference.X.todense(), dtype=float) - 0.5
    genes = list(reference.var_names[[55, 2]])
    query.layers["scaled"] = np.zeros(query.shape)
    impute(query, reference, model=model, genes=genes, layer="scaled", n_neighbors=1, key_added="genes")
    known, wanted = embeddings(model, reference, query)
    nearest = ((wanted[:, None] - known) ** 2).sum(-1).argmin(1)
    np.testing.assert_allclose(query.obsm["genes"], reference[nearest, genes].layers["scaled"], rtol=1e-6)


def test_held_out_genes_are_predicted_without_being_read(model, query, reference):
    result = impute(query, reference, model=model, validate=8, copy=True)
    table = result.uns["imputed_validation"]
    assert len(table) == 8
    rest = [each[:, ~each.var_names.isin(table.index)].copy() for each in (reference, query)]
    with pytest.warns(UserWarning, match="8 of 50 genes are missing"):
        known, wanted = embeddings(model, *rest)
    values = log1p(reference.X, median_size(reference))[:, reference.var_names.get_indexer(table.index)]
    predicted = KNeighborsRegressor(50).fit(known, values).predict(wanted)
    true = log1p(query.X, median_size(query))[:, query.var_names.get_indexer(table.index)]
    expected = [pearsonr(*pair).statistic for pair in zip(true.T, predicted.T, strict=True)]
    np.testing.assert_allclose(table["pearson"], expected, rtol=1e-4, atol=1e-6)
    again = impute(result, reference, model=model, copy=True)
    assert "imputed_validation" not in again.uns


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (KeyError, {"genes": ["nothing"]}, "source does not measure 1 of the 1 genes: nothing"),
        (ValueError, {"genes": []}, "is empty"),
        (ValueError, {"n_neighbors": 401}, "between 1 and 400"),
        (ValueError, {"validate": GENES // 2 + 1}, f"pass at most {GENES // 2}"),
        (ValueError, {"validate": -1}, "validate=-1"),
        (KeyError, {"layer": "counts"}, "counts"),
    ],
)
def test_errors_of_genes(model, query, reference, error, arguments, message):
    with pytest.raises(error, match=message):
        impute(query, reference, model=model, **arguments)


def test_unmeasured_genes_are_left_out(model, query, reference):
    """A gene that is NaN in all cells of a layer does not change the library size, and is not predicted."""
    kept = reference[:, 1:].copy()
    for cells in (query, reference):
        x = cells.X.toarray()
        x[:, 0] = np.nan
        cells.layers["counts"] = x
    result = impute(query, reference, model=model, layer="counts", validate=8, copy=True)
    known, wanted = embeddings(model, reference, query)
    scaled = np.expm1(log1p(kept.X, median_size(kept)))[:, GENES - 1 :]
    expected = KNeighborsRegressor(50).fit(known, scaled).predict(wanted)
    np.testing.assert_allclose(result.obsm["imputed"], expected, rtol=1e-4, atol=1e-6)
    assert "gene_0" not in result.uns["imputed_validation"].index
    with pytest.raises(KeyError, match="does not measure 1 of the 1 genes"):
        impute(query, reference, model=model, layer="counts", genes=[reference.var_names[0]])


def test_genes_that_are_not_measured_are_predicted_and_not_compared(model, query, reference):
    """A gene that is NaN in all cells is not read, and counts as one that the cells lack."""
    filled, part = query[:, 1:].copy(), reference.copy()
    for cells, gene in ((query, 0), (reference, GENES + 1)):
        cells.X = cells.X.toarray()
        cells.X[:, gene] = np.nan
    with pytest.warns(UserWarning, match="1 of 50 genes are missing"):
        impute(query, reference, model=model)
    with pytest.warns(UserWarning, match="1 of 50 genes are missing"):
        known, wanted = embeddings(model, part, filled)
    names = part.var_names[[0, *range(GENES, 60)]].delete(2)
    assert list(query.obsm["imputed"]) == list(names)
    kept = part[:, part.var_names != part.var_names[GENES + 1]]
    scaled = np.expm1(log1p(kept.X, median_size(kept)))[:, kept.var_names.get_indexer(names)]
    expected = KNeighborsRegressor(50).fit(known, scaled).predict(wanted)
    np.testing.assert_allclose(query.obsm["imputed"], expected, rtol=1e-4, atol=1e-5)
    reference.X[:, GENES + 1] = np.inf  # no gene of the model
    with pytest.warns(UserWarning, match="1 of 50 genes are missing"):
        transfer_labels(query, reference, model=model)


def test_nothing_to_impute(model, query, reference):
    with pytest.raises(ValueError, match="adata lacks no gene of source"):
        impute(query, reference[:, :GENES].copy(), model=model)


def test_positions_are_never_read(model, query, reference):
    poisoned = query.copy()
    poisoned.obsm["spatial"] = np.full((len(query), 2), 1e30)
    for tool in (transfer_labels, impute):
        a, b = (tool(cells, reference, model=model, copy=True) for cells in (query, poisoned))
        pd.testing.assert_frame_equal(a.obs, b.obs)
        if "imputed" in a.obsm:
            pd.testing.assert_frame_equal(a.obsm["imputed"], b.obsm["imputed"])


def test_results_survive_a_file(model, query, reference, tmp_path):
    transfer_labels(query, reference, model=model)
    impute(query, reference, model=model, validate=3)
    query.write_h5ad(tmp_path / "query.h5ad")
    read = ad.read_h5ad(tmp_path / "query.h5ad")
    pd.testing.assert_frame_equal(read.obsm["imputed"], query.obsm["imputed"])
    pd.testing.assert_frame_equal(read.uns["imputed_validation"], query.uns["imputed_validation"])
    assert (read.obs["cell_type_transferred"] == query.obs["cell_type_transferred"]).all()
