"""Invalid input raises before training, with its name, and is not modified."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from alphastomics.data import AnnDataSource
from alphastomics.model import AlphaSTomics
from alphastomics.tl import compare, evaluate, reconstruct


def _set(adata, **columns):
    for key, value in columns.items():
        adata.obs[key] = value


def _position(adata, position):
    adata.obsm["spatial"] = position


def _value(adata, value):
    adata.X = adata.X.copy()
    adata.X.data[0] = value


def _few(adata):
    names = np.array(["slice_0"] * 9 + ["slice_1"] * (adata.n_obs - 9))
    adata.obs["slice_id"] = names


def _nan_position(adata):
    adata.obsm["spatial"][3] = np.nan


BAD = {
    "no positions": (lambda a: a.obsm.pop("spatial"), {}, KeyError, r'obsm\["spatial"\].*position_key='),
    "other position key": (None, {"position_key": "X_tissue"}, KeyError, r'obsm\["X_tissue"\].*found: '),
    "no slice key": (None, {"slice_key": "section"}, KeyError, r'obs\["section"\].*slice_key='),
    "no cell type key": (None, {"cell_type_key": "label"}, KeyError, r'obs\["label"\].*cell_type_key='),
    "no sequence key": (None, {"sequence_key": "order"}, KeyError, r'obs\["order"\].*sequence_key='),
    "no layer": (None, {"layer": "counts"}, KeyError, r'layers\["counts"\].*layer='),
    "no matrix": (lambda a: delattr(a, "X"), {}, KeyError, "X .*layer="),
    "slice without a name": (lambda a: _set(a, slice_id=a.obs["slice_id"].where(a.obs.index != a.obs.index[0])), {}, ValueError, "slice_id.* 1 cells"),
    "NaN value": (lambda a: _value(a, np.nan), {}, ValueError, "X .*NaN.*gene '"),
    "infinite value": (lambda a: _value(a, np.inf), {}, ValueError, "X .*NaN.*gene '"),
    "negative value": (lambda a: _value(a, -2), {"transform": "log1p"}, ValueError, "X .*negative.*gene '"),
    "all zero": (lambda a: setattr(a, "X", sp.csr_matrix(a.shape, dtype=np.float32)), {}, ValueError, "zero.*layer"),
    "few cells": (_few, {}, ValueError, "'slice_0'.* 9 cells.* 10"),
    "one place": (lambda a: _position(a, np.ones((a.n_obs, 2))), {}, ValueError, "'slice_0'.*position"),
    "NaN position": (_nan_position, {}, ValueError, r'obsm\["spatial"\] has NaN .*in 1 cells'),
    "infinite position": (lambda a: _position(a, np.full((a.n_obs, 2), np.inf)), {}, ValueError, r'obsm\["spatial"\].*infinite'),
    "a cube of positions": (lambda a: _position(a, a.obsm["spatial"][:, :, None]), {}, ValueError, "3 dimensions"),
    "positions of text": (lambda a: _position(a, a.obsm["spatial"].astype(str).astype(object) + "x"), {}, ValueError, r'obsm\["spatial"\].*numeric'),
    "one coordinate": (lambda a: _position(a, a.obsm["spatial"][:, :1]), {}, ValueError, "1 columns"),
    "four coordinates": (lambda a: _position(a, np.tile(a.obsm["spatial"], 2)), {}, ValueError, "4 columns"),
    "duplicate genes": (lambda a: setattr(a, "var_names", ["g", "g", *map(str, range(a.n_vars - 2))]), {}, ValueError, "1 gene names.*'g'"),
    "no genes": (None, {}, ValueError, "no genes"),
    "name of squidpy": (None, {"library_key": "slice_id"}, TypeError, "'library_key'; did you mean 'slice_key'"),
    "another name of squidpy": (None, {"spatial_key": "spatial"}, TypeError, "'spatial_key'; did you mean 'position_key'"),
    "name of scvi-tools": (None, {"labels_key": "cell_type"}, TypeError, "'labels_key'; did you mean 'cell_type_key'"),
    "negative count": (lambda a: _value(a, -2), {}, ValueError, "some values are negative and all are integers"),
    "unknown frame": (None, {"frame": "global"}, ValueError, "frame='global'.*'slice', 'shared'"),
    "unknown transform": (None, {"transform": "sqrt"}, ValueError, "transform='sqrt'"),
}  # fmt: skip


@pytest.fixture(params=BAD)
def bad(request, reference):
    """A tissue that cannot be used: (tissue, arguments, error, message)."""
    change, arguments, error, message = BAD[request.param]
    if request.param == "no genes":
        reference = reference[:, :0].copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Variable names are not unique")
        if change is not None:
            change(reference)
    return reference, arguments, error, message


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_invalid_setup_raises_and_changes_nothing(bad, assert_same, no_training):
    adata, arguments, error, message = bad
    before = adata.copy()
    with pytest.raises(error, match=message):
        AlphaSTomics.setup_anndata(adata, **arguments)
    assert_same(adata, before)


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_reconstruct_with_an_invalid_reference_raises_and_changes_nothing(bad, assert_same, no_training, tissue):
    adata, arguments, error, message = bad
    query = tissue
    before, query_before = adata.copy(), query.copy()
    with pytest.raises(error, match=message):
        reconstruct(query, reference=adata, **arguments)
    assert_same(adata, before)
    assert_same(query, query_before)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_not_read(kind, tissue, no_training):
    path, message = kind("tissue.h5ad"), r"'tissue.h5ad' is a path; .*anndata.read_h5ad\('tissue.h5ad'\)"
    for argument, call in {
        "adata": lambda: AlphaSTomics.setup_anndata(path),
        "query": lambda: reconstruct(path, tissue),
        "reference": lambda: reconstruct(tissue, path),
    }.items():
        with pytest.raises(TypeError, match=f"{argument}={message}"):
            call()
    for call in (lambda: evaluate(path), lambda: compare(path)):
        with pytest.raises(TypeError, match=message):
            call()


def test_another_object_is_no_tissue(tissue):
    with pytest.raises(TypeError, match="adata is a DataFrame, not an AnnData; pass an AnnData"):
        AlphaSTomics.setup_anndata(tissue.obs)
    spatial = type("SpatialData", (), {})()
    with pytest.raises(TypeError, match=r"query is a SpatialData.*pp\.from_spatialdata"):
        reconstruct(spatial, tissue)


@pytest.mark.parametrize("change", [str.upper, str.title])
def test_genes_in_another_case_are_named(reference, make_model, change):
    schema = make_model(reference).schema
    query = reference.copy()
    query.var_names = [change(name) for name in query.var_names]
    with pytest.raises(ValueError, match=f"{schema.n_genes} of them are present in another case"):
        AnnDataSource(query, schema, positions=False)
    names = np.array(reference.var_names)
    query.var_names = [*names[:-3], *(change(name) for name in names[-3:])]
    with pytest.warns(UserWarning, match=r"3 of .* genes are missing.* 3 of them are present in another case"):
        AnnDataSource(query, schema, positions=False)


def test_backed_reference_raises(reference, tmp_path):
    import anndata as ad

    reference.write_h5ad(tmp_path / "tissue.h5ad")
    backed = ad.read_h5ad(tmp_path / "tissue.h5ad", backed="r")
    with pytest.raises(ValueError, match=r"backed.*to_memory"):
        AlphaSTomics.setup_anndata(backed)
    backed.file.close()


def test_a_model_without_registered_data_raises(reference):
    with pytest.raises(ValueError, match="set up"):
        AlphaSTomics(reference)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 30, "n_heads": 4}, "d_model=30.*n_heads=4"),
        ({"gate_type": "wide"}, "gate_type='wide'"),
        ({"schedule": "linear"}, "schedule='linear'"),
        ({"prediction_type": "score"}, "prediction_type='score'"),
        ({"nu": 0.0}, "nu"),
    ],
)
def test_invalid_architecture_raises(reference, make_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(reference, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"context_size": 0}, ValueError, "context_size=0"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"context_kind": "cube"}, ValueError, "'cube'"),
        ({"validation_size": 1.5}, ValueError, "validation_size=1.5"),
        ({"plan_kwargs": {"learning_rate": 1}}, TypeError, "learning_rate"),
        ({"unheard_of": 1}, TypeError, "unheard_of"),
    ],
)
def test_invalid_arguments_of_train_raise(reference, make_model, train_briefly, arguments, error, message):
    model = make_model(reference)
    with pytest.raises(error, match=message):
        train_briefly(model, **arguments)
    assert not model.is_trained_


# -- odd, and accepted --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
@pytest.mark.parametrize("kind", ["subset", "patch"])
def test_duplicate_names_and_positions_are_accepted(reference, make_model, train_briefly, kind, tmp_path):
    adata = reference[np.r_[0:60, 300:360]].copy()
    adata.obs_names = ["cell"] * adata.n_obs
    adata.obsm["spatial"][:20] = adata.obsm["spatial"][0]
    model = train_briefly(make_model(adata), context_size=30, context_kind=kind, limit_train_batches=3)
    for arguments in ({}, {"n_samples": 2}, {"n_samples": 2, "reduce": "mean"}, {"inpaint": True}):
        result = model.sample(adata, **arguments)
        assert np.isfinite(result.obsm["spatial_reconstructed"]).all()
    model.save(tmp_path / "m", save_anndata=True)
    assert AlphaSTomics.load(tmp_path / "m").adata.n_obs == 120


def test_values_that_are_no_counts_are_taken_as_they_are(reference, make_model, train_briefly):
    reference.X = sp.csr_matrix(np.random.default_rng(0).normal(size=reference.shape).astype(np.float32))
    model = train_briefly(make_model(reference[:300].copy()))
    assert model.schema.transform == "none"
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()


@pytest.mark.filterwarnings("ignore:Trying to modify attribute")
def test_a_view_is_registered_as_a_copy_of_its_own(reference, assert_same):
    before = reference.copy()
    view = reference[:300]
    AlphaSTomics.setup_anndata(view)
    assert not view.is_view
    model = AlphaSTomics(view, d_model=16, n_layers=1, n_heads=1)
    assert model.adata.n_obs == 300
    assert_same(reference, before)


def test_a_layer_is_read_instead_of_x(reference, make_model, train_briefly, positions_of):
    plain = train_briefly(make_model(reference[:300].copy()))
    layered = reference[:300].copy()
    layered.layers["counts"] = layered.X.copy()
    layered.X = None
    model = train_briefly(make_model(layered, setup={"layer": "counts"}))
    assert positions_of(model.sample()) == positions_of(plain.sample())


def test_slice_key_none_takes_slice_id_or_one_slice(reference, make_model):
    assert make_model(reference).schema.slices == ("slice_0", "slice_1", "slice_2")
    assert make_model(reference).schema.slice_key == "slice_id"
    del reference.obs["slice_id"]
    assert len(make_model(reference).schema.slices) == 1
    assert make_model(reference).schema.slice_key is None
