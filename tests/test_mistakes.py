"""Mistakes of users raise or warn before any training, and the message has the argument or key and a remedy."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
from lightning.pytorch import Callback

from alphastomics import datasets, pl, pp, tl
from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from files import error_line
from small_models import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData

    Change = Callable[[AnnData], Any]

SPATIAL, PREDICTED = "spatial", "spatial_reconstructed"
# Other packages warn about what these mistakes do.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(Variable|Observation) names are not unique",
    "ignore:zero-centering a sparse",
    "ignore:Some cells have zero counts",
)


class Cells(NamedTuple):
    """What a mistake is made with: two slices with positions, one without use of them, and a folder."""

    reference: AnnData
    query: AnnData
    folder: Path

    def place(self, **arguments: Any) -> None:
        tl.reconstruct(self.query, self.reference, **arguments)

    def registered(self) -> AlphaSTomics:
        """A model that is not trained."""
        AlphaSTomics.setup_anndata(self.reference)
        return AlphaSTomics(self.reference, mode="expr_to_pos", **SMALL)

    def placed(self, **obsm: Any) -> AnnData:
        """The query as if it had been placed."""
        self.query.obsm[PREDICTED] = self.query.obsm[SPATIAL] + 1.0
        for key, value in obsm.items():
            self.query.obsm[key] = value
        return self.query

    def file(self, name: str, text: str = "") -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def backed(self) -> AnnData:
        self.reference.write_h5ad(self.folder / "backed.h5ad")
        return ad.read_h5ad(self.folder / "backed.h5ad", backed="r")


class Mistake(NamedTuple):
    """A mistake, the error or warning that it causes, the argument or key in the message, and parts of the remedy."""

    make: Callable[..., Any]
    error: type[Exception]
    argument: str
    remedies: tuple[str, ...]


def mistake(make: Callable[..., Any], error: type[Exception], argument: str, *remedies: str) -> Mistake:
    assert argument
    assert remedies
    return Mistake(make, error, argument, remedies)


def cases(table: dict[str, Mistake]) -> list[Any]:
    return [pytest.param(row, id=name) for name, row in table.items()]


# -- changes of cells ---------------------------------------------------------------------------------------------------


def in_reference(change: Change, **arguments: Any) -> Callable[[Cells], None]:
    def make(c: Cells) -> None:
        change(c.reference)
        c.place(**arguments)

    return make


def in_query(change: Change, **arguments: Any) -> Callable[[Cells], None]:
    def make(c: Cells) -> None:
        change(c.query)
        c.place(**arguments)

    return make


def alone(change: Change) -> Callable[[Cells], None]:
    """Cells with and without positions in one object."""

    def make(c: Cells) -> None:
        change(c.reference)
        tl.reconstruct(c.reference)

    return make


def given(**arguments: Any) -> Callable[[Cells], None]:
    return lambda c: c.place(**arguments)


def normalized(adata: AnnData) -> None:
    sc.pp.normalize_total(adata)


def log_normalized(adata: AnnData) -> None:
    normalized(adata)
    sc.pp.log1p(adata)


def standardized(adata: AnnData) -> None:
    log_normalized(adata)
    sc.pp.scale(adata)


def value(number: float) -> Change:
    """One value is another number."""

    def change(adata: AnnData) -> None:
        x = adata.X.toarray().astype(float)
        x[0, 0] = number
        adata.X = x

    return change


def matrix(function: Callable[[np.ndarray], Any]) -> Change:
    def change(adata: AnnData) -> None:
        adata.X = function(adata.X.toarray())

    return change


def no_matrix(adata: AnnData) -> None:
    adata.raw = adata.copy()
    adata.X = None


def genes(function: Callable[[str], str]) -> Change:
    def change(adata: AnnData) -> None:
        adata.var_names = [function(name) for name in adata.var_names]

    return change


def duplicated_gene(adata: AnnData) -> None:
    adata.var_names = [adata.var_names[1], *adata.var_names[1:]]


def column(key: str, values: Callable[[AnnData], Any]) -> Change:
    def change(adata: AnnData) -> None:
        adata.obs[key] = values(adata)

    return change


def without_column(key: str) -> Change:
    return lambda adata: adata.obs.pop(key)


def position(function: Callable[[np.ndarray], Any]) -> Change:
    def change(adata: AnnData) -> None:
        adata.obsm[SPATIAL] = function(adata.obsm[SPATIAL])

    return change


def no_position(adata: AnnData) -> None:
    del adata.obsm[SPATIAL]


def coordinates_in_obs(adata: AnnData) -> None:
    adata.obs["x"], adata.obs["y"] = adata.obsm.pop(SPATIAL).T


def first(n: int, other: float) -> Callable[[np.ndarray], np.ndarray]:
    """The first positions are another number."""
    return lambda x: np.where(np.arange(len(x))[:, None] < n, other, x)


def table_with_text(adata: AnnData) -> None:
    x, y = adata.obsm[SPATIAL].T
    adata.obsm[SPATIAL] = pd.DataFrame({"x": x, "y": y, "fov": "a"}, index=adata.obs_names)


def fractions(adata: AnnData) -> np.ndarray:
    return np.random.default_rng(0).normal(size=adata.n_obs)


def fields_of_view(adata: AnnData) -> None:
    """Cells of one section on a grid, 25 of them in a field of view."""
    x, y = np.arange(adata.n_obs) % 20, np.arange(adata.n_obs) // 20
    adata.obsm[SPATIAL] = np.stack([x, y], axis=1)
    adata.obs["fov"] = [f"{i}_{j}" for i, j in zip(x // 5, y // 5, strict=True)]


class SpatialData:
    """Stands for that of the package."""


class MuData:
    """Stands for that of the package."""


# -- tables -------------------------------------------------------------------------------------------------------------

setup = AlphaSTomics.setup_anndata

VALUES = {
    "query is log-normalized": mistake(in_query(log_normalized), ValueError, "layer", "give these cells their raw counts"),
    "reference is log-normalized": mistake(in_reference(log_normalized), ValueError, "layer=…", "transform these cells", "fit the reference to its counts"),
    "reference is normalized without logarithm": mistake(in_reference(normalized), ValueError, "layer=…", "transform these cells"),
    "query is 0 and 1": mistake(in_query(matrix(lambda x: (x > 0).astype(float))), ValueError, "layer", "give these cells their raw counts"),
    "reference is 0 and 1": mistake(in_reference(matrix(lambda x: x > 0)), ValueError, "values", "replace these values by X > 0"),
    "query is standardized": mistake(in_query(standardized), ValueError, "X has negative", "pass the layer of raw counts", 'transform="none"'),
    "reference is standardized": mistake(in_reference(standardized), ValueError, "layer=…", "transform these cells"),
    "one negative count in the reference": mistake(in_reference(value(-1)), ValueError, "X", "correct the negative values", 'pass transform="none"'),
    "one negative count in the query": mistake(in_query(value(-1)), ValueError, "gene 'gene_0'", "pass the layer of raw counts"),
    "NaN in X": mistake(in_reference(value(np.nan)), ValueError, "X has NaN", "remove these genes or cells"),
    "NaN in X of the query": mistake(in_query(value(np.nan)), ValueError, "X has NaN", "remove these genes or cells"),
    "infinity in X": mistake(in_query(value(np.inf)), ValueError, "gene 'gene_0'", "replace the values"),
    "integers that float32 does not store": mistake(in_query(matrix(lambda x: x.astype(np.int64) + 2**40)), ValueError, "layer", "give these cells their raw counts"),
    "objects in X": mistake(in_query(matrix(lambda x: x.astype(object))), ValueError, "X holds object", "convert them to integers or floats"),
    "text in X": mistake(in_reference(matrix(lambda x: x.astype(str))), ValueError, "X holds", "convert them to integers or floats"),
    "reference is all zero": mistake(in_reference(matrix(np.zeros_like)), ValueError, "layer=…", "check"),
    "query is all zero": mistake(in_query(matrix(np.zeros_like)), ValueError, "X", "store their expression there"),
    "identical cells in the reference": mistake(in_reference(matrix(lambda x: np.tile(x[:1], (len(x), 1)))), ValueError, "layer=…", "pass other cells"),
    "no X": mistake(in_reference(lambda a: setattr(a, "X", None)), KeyError, "layer=…", "pass"),
    "counts in raw only": mistake(in_query(no_matrix), KeyError, "X is missing", "use adata.raw.to_adata()"),
    "layer is missing": mistake(given(layer="counts"), KeyError, 'layers["counts"]', "pass layer=…"),
    "layer is missing in the query": mistake(in_reference(lambda a: a.layers.update(counts=a.X), layer="counts"), KeyError, 'layers["counts"]', "store it there"),
    "unknown transform": mistake(given(transform="log"), ValueError, "transform='log'", "choose from 'auto', 'log1p', 'none'"),
    "restore counts of counts": mistake(lambda c: pp.restore_counts(c.query), ValueError, "X", "use them as they are"),
    "restore counts of standardized values": mistake(lambda c: (standardized(c.query), pp.restore_counts(c.query)), ValueError, "X", "pass layer=…"),
    "restore counts without logarithm": mistake(lambda c: (normalized(c.query), pp.restore_counts(c.query)), ValueError, "X", "use raw counts"),
    "a number as key of counts": mistake(lambda c: pp.restore_counts(c.query, key_added=3), TypeError, "key_added=3", "pass one key of layers"),
    "restore counts of a missing layer": mistake(lambda c: pp.restore_counts(c.query, layer="log"), KeyError, 'layers["log"]', "pass layer=…"),
}  # fmt: skip

NAMES = {
    "Ensembl identifiers": mistake(in_query(genes(lambda g: g.replace("gene_", "ENSG"))), ValueError, "var_names", "use the gene identifiers of the reference"),
    "versions of identifiers": mistake(in_reference(genes(lambda g: f"{g}.3")), ValueError, "'gene_0.3'", "use the gene identifiers of the reference"),
    "genes in another case": mistake(in_query(genes(str.upper)), ValueError, "var_names", "rename them as in the reference"),
    "a third of the genes": mistake(lambda c: tl.reconstruct(c.query[:, :20].copy(), c.reference), ValueError, "40 of 60 genes", "train on shared genes"),
    "no genes in the query": mistake(lambda c: tl.reconstruct(c.query[:, :0].copy(), c.reference), ValueError, "genes", "pass an AnnData with variables"),
    "no genes in the reference": mistake(lambda c: tl.reconstruct(c.query, c.reference[:, :0].copy()), ValueError, "genes", "pass an AnnData with variables"),
    "duplicated genes": mistake(in_reference(duplicated_gene), ValueError, "'gene_1'", "call adata.var_names_make_unique()"),
    "duplicated genes in the query": mistake(in_query(duplicated_gene), ValueError, "'gene_1'", "merge them"),
    "transposed query": mistake(lambda c: tl.reconstruct(c.query.T.copy(), c.reference), ValueError, "var_names", "use the gene identifiers of the reference"),
    "no cells in the query": mistake(lambda c: tl.reconstruct(c.query[:0].copy(), c.reference), ValueError, "query", "pass some"),
    "no cells in the reference": mistake(lambda c: tl.reconstruct(c.query, c.reference[:0].copy()), ValueError, 'obsm["spatial"]', "pass cells with positions"),
    "other cells in a prediction": mistake(lambda c: tl.expression_scores(c.query, c.reference), KeyError, "missing in prediction", "remove them from adata"),
    "other genes in a prediction": mistake(lambda c: (genes(str.upper)(c.reference), tl.modality_agreement(c.query, c.reference)), ValueError, "GENE_0", "check var_names"),
    "duplicated cells in a prediction": mistake(lambda c: tl.expression_scores(c.query, ad.concat([c.query, c.query])), ValueError, "obs_names of prediction", "call prediction.obs_names_make_unique()"),
}  # fmt: skip

POSITIONS = {
    "reference without positions": mistake(in_reference(no_position), KeyError, 'obsm["spatial"]', "pass position_key=…"),
    "unknown position_key": mistake(given(position_key="X_spatial"), KeyError, 'obsm["X_spatial"]', "pass position_key=…"),
    "coordinates in obs": mistake(in_reference(coordinates_in_obs, position_key="x"), KeyError, 'obsm["x"]', "pass position_key=…"),
    "two names as position_key": mistake(in_reference(coordinates_in_obs, position_key=["x", "y"]), TypeError, "position_key=['x', 'y']", "pass one key of reference.obsm"),
    "words as positions": mistake(in_reference(position(lambda x: np.full(x.shape, "left"))), ValueError, 'obsm["spatial"]', "store floats of shape (n_cells, 2 or 3)"),
    "complex positions": mistake(in_reference(position(lambda x: x.astype(complex))), ValueError, 'obsm["spatial"]', "store floats"),
    "a table with text as positions": mistake(in_reference(table_with_text), ValueError, 'obsm["spatial"]', "store floats"),
    "sparse positions": mistake(in_reference(position(sp.csr_matrix)), ValueError, 'obsm["spatial"]', "store floats"),
    "one coordinate": mistake(in_reference(position(lambda x: x[:, :1])), ValueError, 'obsm["spatial"] has 1 columns', "store floats of shape (n_cells, 2 or 3)"),
    "four coordinates": mistake(in_reference(position(lambda x: np.tile(x, 2))), ValueError, 'obsm["spatial"] has 4 columns', "store floats"),
    "an array of three dimensions": mistake(in_reference(position(lambda x: x[:, :, None])), ValueError, 'obsm["spatial"] has 3 dimensions', "store floats"),
    "some positions are NaN": mistake(in_reference(position(first(3, np.nan))), ValueError, 'obsm["spatial"]', "remove these cells", "place them with tl.reconstruct"),
    "all positions are NaN": mistake(in_reference(position(lambda x: x * np.nan)), ValueError, 'obsm["spatial"]', "remove these cells"),
    "all positions are equal": mistake(in_reference(position(np.ones_like)), ValueError, "position_key", "check"),
    "all positions are unknown": mistake(alone(position(lambda x: x * np.nan)), ValueError, 'obsm["spatial"]', "pass reference=… or model=…"),
    "no position is unknown": mistake(alone(lambda a: None), ValueError, 'obsm["spatial"]', "pass reference=… or model=…"),
    "unknown positions of the reference are 0": mistake(lambda c: (position(first(3, 0.0))(c.reference), setup(c.reference)), UserWarning, "3 cells of slice", "mark unknown positions with NaN"),
    "reference and query exchanged": mistake(lambda c: (no_position(c.query), tl.reconstruct(c.reference, c.query)), KeyError, 'reference.obsm["spatial"]', "exchange reference and query"),
    "unknown positions are 0": mistake(alone(position(first(30, 0.0))), ValueError, "NaN", "which marks the cells to place", "pass"),
    "no positions at all": mistake(alone(no_position), KeyError, 'obsm["spatial"]', "pass position_key=…"),
    "positions of slices in other units": mistake(lambda c: (position(lambda x: x * np.repeat([1000, 1], 100)[:, None])(c.reference), setup(c.reference)), UserWarning, "positions", "check that all positions have the same units"),
    "unknown frame": mistake(given(frame="global"), ValueError, "frame='global'", "choose from 'slice', 'shared'"),
    "outline of two points": mistake(lambda c: tl.fit_outline(c.placed(), [[0, 0], [1, 1]]), ValueError, "outline", "pass at least three finite vertices"),
    "outline whose sides cross": mistake(lambda c: tl.fit_outline(c.placed(), [[0, 0], [1, 1], [1, 0], [0, 1]]), ValueError, "outline", "correct its vertices"),
    "a word as outline": mistake(lambda c: tl.fit_outline(c.placed(), "circle"), ValueError, "outline", "pass vertices"),
    "outline in other units": mistake(lambda c: tl.fit_outline(c.placed(), [[0, 0], [3, 0], [3, 1]]), UserWarning, "outline", "check that both have the same units"),
    "a number as key of an outline": mistake(lambda c: tl.fit_outline(c.placed(), [[0, 0], [1, 0], [1, 1]], key_added=3), TypeError, "key_added=3", "pass one key of obsm"),
    "outline of a body": mistake(lambda c: tl.fit_outline(c.placed(spatial_reconstructed=np.eye(3)[np.arange(100) % 3]), [[0, 0], [1, 0], [1, 1]]), ValueError, PREDICTED, "pass another basis=…"),
    "outline without placement": mistake(lambda c: tl.fit_outline(c.query, [[0, 0], [1, 0], [1, 1]]), KeyError, PREDICTED, "pass basis=…"),
}  # fmt: skip

SLICES = {
    "unknown slice_key": mistake(given(slice_key="section"), KeyError, 'obs["section"]', "pass slice_key=…"),
    "key of obsm as slice_key": mistake(given(slice_key="spatial"), KeyError, 'obs["spatial"]', "pass slice_key=…"),
    "a list as slice_key": mistake(given(slice_key=["slice_id"]), TypeError, "slice_key=['slice_id']", "pass one key of obs"),
    "slice of some cells is missing": mistake(in_reference(column("slice_id", lambda a: a.obs["slice_id"].astype(object).where(np.arange(a.n_obs) > 2))), ValueError, 'obs["slice_id"]', "fill in their slice", "remove them"),
    "a slice for each cell": mistake(in_reference(column("slice_id", lambda a: a.obs_names)), ValueError, "slice_key", "remove the slice", "correct"),
    "fractions as slices": mistake(in_reference(column("z", fractions), slice_key="z"), ValueError, "slice_key", "correct"),
    "fields of view as slices": mistake(lambda c: (fields_of_view(c.reference), setup(c.reference, slice_key="fov")), UserWarning, 'obs["fov"]', "pass slice_key=…"),
    "a slice of five cells": mistake(in_reference(column("slice_id", lambda a: ["a"] * 5 + ["b"] * (a.n_obs - 5))), ValueError, "slice_key", "remove the slice"),
    "unknown cell_type_key": mistake(given(cell_type_key="label"), KeyError, 'obs["label"]', "pass cell_type_key=…"),
    "fractions as cell types": mistake(in_reference(column("score", fractions), cell_type_key="score"), ValueError, 'obs["score"]', "pass cell_type_key=…"),
    "cell types without their key": mistake(given(use_cell_types=True), ValueError, "use_cell_types=True", "name their column in obs with setup_anndata(…, cell_type_key=…)"),
    "text as an order of cells": mistake(given(sequence_key="cell_type"), ValueError, 'obs["cell_type"]', "fill in the values", "leave out sequence_key=…"),
    "hide no positions": mistake(lambda c: pp.hide_positions(c.query), ValueError, "fraction=…", "pass slices=…"),
    "hide 20 for 20 percent": mistake(lambda c: pp.hide_positions(c.query, fraction=20), ValueError, "fraction=20", "must be between 0 and 1"),
    "hide a share that is text": mistake(lambda c: pp.hide_positions(c.query, fraction="20%"), ValueError, "fraction='20%'", "must be between 0 and 1"),
    "hide an unknown slice": mistake(lambda c: pp.hide_positions(c.query, slices="section"), KeyError, "'section'", "pass slices=… or slice_key=…"),
    "hide positions twice": mistake(lambda c: (pp.hide_positions(c.query, fraction=0.2), pp.hide_positions(c.query, fraction=0.2)), ValueError, 'obsm["spatial_truth"]', "restore them"),
}  # fmt: skip

OBJECTS = {
    "a path as query": mistake(lambda c: tl.reconstruct("query.h5ad", c.reference), TypeError, "query='query.h5ad'", "read the file first"),
    "a path as reference": mistake(lambda c: tl.reconstruct(c.query, c.folder / "r.h5ad"), TypeError, "reference=", "read the file first"),
    "a path to score": mistake(lambda c: tl.evaluate("query.h5ad"), TypeError, "adata='query.h5ad'", "read the file first"),
    "a path as reference of a score": mistake(lambda c: tl.evaluate(c.placed(), reference="r.h5ad"), TypeError, "reference='r.h5ad'", "read the file first"),
    "a path to hide positions": mistake(lambda c: pp.hide_positions("query.h5ad", fraction=0.5), TypeError, "adata='query.h5ad'", "read the file first"),
    "a path as query of a comparison": mistake(lambda c: tl.compare(c.reference, "query.h5ad"), TypeError, "query='query.h5ad'", "read the file first"),
    "a path of a provenance": mistake(lambda c: tl.provenance("query.h5ad"), TypeError, "adata='query.h5ad'", "read the file first"),
    "a path of a comparison to plot": mistake(lambda c: pl.comparison("query.h5ad"), TypeError, "adata='query.h5ad'", "read the file first"),
    "a path of a history": mistake(lambda c: pl.history("model"), TypeError, "model_or_history", "pass a trained model"),
    "a table as query": mistake(lambda c: tl.reconstruct(c.query.to_df(), c.reference), TypeError, "query is a DataFrame", "pass an AnnData"),
    "a matrix as reference": mistake(lambda c: tl.reconstruct(c.query, c.reference.X), TypeError, "reference is a csr_matrix", "pass an AnnData"),
    "a table as prediction": mistake(lambda c: tl.expression_scores(c.query, c.query.to_df()), TypeError, "prediction is a DataFrame", "pass an AnnData"),
    "raw as reference": mistake(lambda c: (no_matrix(c.reference), setup(c.reference.raw)), TypeError, "adata is a Raw", "pass adata.raw.to_adata()"),
    "a SpatialData": mistake(lambda c: tl.reconstruct(SpatialData(), c.reference), TypeError, "query is a SpatialData", "convert it with alphastomics.pp.from_spatialdata"),
    "a MuData": mistake(lambda c: setup(MuData()), TypeError, "adata is a MuData", "pass one of its modalities"),
    "a model as reference": mistake(lambda c: tl.reconstruct(c.query, c.registered()), TypeError, "reference is an AlphaSTomics", "pass a trained model as model=…"),
    "reference and model": mistake(lambda c: tl.reconstruct(c.query, c.reference, model=c.registered()), ValueError, "model=…", "pass reference=…", "not both"),
    "a model that is not trained": mistake(lambda c: tl.reconstruct(c.query, model=c.registered()), RuntimeError, "model", "call train() first"),
    "cells that are not registered": mistake(lambda c: AlphaSTomics(c.reference), ValueError, "AnnData", "set up", "AlphaSTomics.setup_anndata first"),
    "labels by a model of a path": mistake(lambda c: tl.transfer_labels(c.query, c.reference, model="m"), TypeError, "model='m'", "load the model first"),
    "query and model swapped": mistake(lambda c: tl.attention_sinks(c.query, c.reference), TypeError, "model", "pass a trained AlphaSTomics as model=…"),
}  # fmt: skip

ARGUMENTS = {
    **{
        f"{other} for {ours}": mistake(lambda c, name=other: setup(c.reference, **{name: "slice_id"}), TypeError, f"'{other}'", f"did you mean '{ours}'")
        for other, ours in (("batch_key", "slice_key"), ("spatial_key", "position_key"), ("library_key", "slice_key"), ("labels_key", "cell_type_key"))
    },
    "n_epochs for max_epochs": mistake(given(n_epochs=3), TypeError, "'n_epochs'", "did you mean 'max_epochs'"),
    "use_gpu for accelerator": mistake(given(use_gpu=True), TypeError, "'use_gpu'", "did you mean 'accelerator'"),
    "lr outside of plan_kwargs": mistake(given(learning_rate=1e-3), TypeError, "'learning_rate'", "pass plan_kwargs={'lr': …}"),
    "misspelled argument": mistake(given(max_epoch=3), TypeError, "'max_epoch'", "did you mean 'max_epochs'"),
    "misspelled argument of the model": mistake(lambda c: (setup(c.reference), AlphaSTomics(c.reference, n_layer=3)), TypeError, "'n_layer'", "did you mean 'n_layers'"),
    "an argument of another function": mistake(lambda c: setup(c.reference, n_epochs=3), TypeError, "'n_epochs'", "leave it out"),
    "no samples": mistake(given(n_samples=0), ValueError, "n_samples=0", "must be a whole number at least 1"),
    "text as number of samples": mistake(given(n_samples="8"), ValueError, "n_samples='8'", "must be a whole number"),
    "half a sample": mistake(given(n_samples=2.5), ValueError, "n_samples=2.5", "must be a whole number"),
    "confidence of 2": mistake(given(min_confidence=2), ValueError, "min_confidence=2", "must lie in [0, 1]"),
    "a word as confidence": mistake(given(min_confidence="high"), ValueError, "min_confidence='high'", "must lie in [0, 1]"),
    "a word for no": mistake(given(refine="no"), ValueError, "refine='no'", "must be True or False"),
    "arguments without effect on each other": mistake(given(refine=True, independent=True), ValueError, "refine=True", "leave one of them out"),
    "no seed": mistake(given(random_state=None), ValueError, "random_state=None", "leave it out"),
    "a fraction as seed": mistake(given(random_state=0.5), ValueError, "random_state=0.5", "must be a whole number"),
    "a negative seed": mistake(given(random_state=-1), ValueError, "random_state=-1", "must be a whole number at least 0"),
    "a negative seed of a model": mistake(lambda c: (setup(c.reference), AlphaSTomics(c.reference, random_state=-1)), ValueError, "random_state=-1", "must be a whole number at least 0"),
    "a word for no adaptation": mistake(given(adapt="no"), ValueError, "adapt='no'", "must be True, False or None"),
    "no key for the result": mistake(given(key_added=None), ValueError, "key_added=None", "leave it out"),
    "a number as key for the result": mistake(given(key_added=3), ValueError, "key_added=3", "must be text"),
    "a number as key of a comparison": mistake(lambda c: tl.compare(c.reference, key_added=3), TypeError, "key_added=3", "pass one key of uns"),
    "unknown mode": mistake(given(mode="place"), ValueError, "mode='place'", "choose from"),
    "mode that places no cells": mistake(given(mode="pos_to_expr"), ValueError, "mode='pos_to_expr'", "train a model with mode='expr_to_pos'"),
    "unknown attention": mistake(given(attention="fulll"), ValueError, "attention='fulll'", "choose from 'full'"),
    "a word as width": mistake(given(d_model="wide"), ValueError, "d_model='wide'", "must be a whole number at least 1"),
    "width that the heads do not divide": mistake(given(d_model=30, n_heads=4), ValueError, "d_model=30", "multiple of n_heads=4"),
    "experts without use_moe": mistake(given(num_experts=8), ValueError, "num_experts=8", "requires use_moe=True", "omit num_experts"),
    "unknown configuration": mistake(lambda c: tl.compare(c.reference, configurations=["gatedd"]), KeyError, "'gatedd'", "choose configurations=… from"),
    "settings that are no Configuration": mistake(lambda c: tl.compare(c.reference, configurations={"wide": {"d_model": 64}}), TypeError, "configurations=…", "use tl.Configuration"),
    "unknown field of a plan": mistake(lambda c: tl.compare(c.reference, configurations={"fast": tl.Configuration(plan={"learning_rate": 1})}), TypeError, "'learning_rate'", "did you mean 'lr'"),
    "one number as seeds": mistake(lambda c: tl.compare(c.reference, seeds=3), TypeError, "seeds=3", "pass seeds=[3]"),
    "a negative seed of a comparison": mistake(lambda c: tl.compare(c.reference, seeds=[0, -1]), ValueError, "seeds=-1", "must be a whole number at least 0"),
    "a negative seed of hidden positions": mistake(lambda c: pp.hide_positions(c.reference, fraction=0.2, random_state=-1), ValueError, "random_state=-1", "must be a whole number at least 0"),
    "time and steps": mistake(lambda c: tl.compare(c.reference, max_time=3, max_steps=3), ValueError, "max_steps=…", "pass max_time=…", "not both"),
    "all slices held out": mistake(lambda c: tl.compare(c.reference, held_out=["slice_0", "slice_1"]), ValueError, "held_out=…", "leave at least one for training"),
    "unknown slice held out": mistake(lambda c: tl.compare(c.reference, held_out="slice_9"), KeyError, "'slice_9'", "choose held_out=… from"),
    "comparison by a query without positions": mistake(lambda c: (no_position(c.query), tl.compare(c.reference, c.query)), KeyError, 'obsm["spatial"]', "store it there"),
    "comparison by a query without slices": mistake(lambda c: (without_column("slice_id")(c.query), tl.compare(c.reference, c.query)), KeyError, 'obs["slice_id"]', "store it there"),
    "comparison by a query without labels": mistake(lambda c: (without_column("cell_type")(c.query), tl.compare(c.reference, c.query, cell_type_key="cell_type")), KeyError, 'obs["cell_type"]', "pass cell_type_key=…"),
}  # fmt: skip

# `train` itself runs, up to the first step.
TRAINING = {
    "a time of 0": mistake(given(max_time=0), ValueError, "max_time", "must be positive"),
    "a time with a unit": mistake(given(max_time="5m"), ValueError, "max_time='5m'", "pass seconds as a number"),
    "a time without end": mistake(given(max_time=np.inf), ValueError, "max_time", "must be positive and finite"),
    "unknown precision": mistake(given(precision="foo"), ValueError, "precision='foo'", "pass 'auto', '32-true'"),
    "one callback": mistake(lambda c: c.registered().train(callbacks=Callback()), TypeError, "callbacks=", "pass callbacks=[…]"),
    "a checkpoint below a file": mistake(lambda c: c.registered().train(checkpoint=c.folder / c.file("notes.txt") / "last.ckpt"), NotADirectoryError, "notes.txt", "choose another folder"),
    "no GPU": mistake(given(accelerator="cuda", devices=[97]), ValueError, "accelerator='cuda'", "omit accelerator=…"),
    "no devices": mistake(given(devices=0), ValueError, "devices=0", "omit devices=…"),
    "unknown strategy": mistake(given(strategy="ddpp"), ValueError, "strategy='ddpp'", "choose from 'auto'"),
    "empty batches": mistake(given(batch_size=0), ValueError, "batch_size=0", "must be a whole number at least 1"),
    "unknown contexts": mistake(given(context_kind="cube"), ValueError, "context_kind='cube'", "choose from 'subset', 'patch'"),
    "all slices for validation": mistake(given(validation_size=1), ValueError, "validation_size=1", "must lie in (0, 1)"),
    "shares for training and for validation": mistake(given(train_size=0.9, validation_size=0.2), ValueError, "train_size=0.9 and validation_size=0.2", "pass one of them"),
    "validation by one slice": mistake(in_reference(column("slice_id", lambda a: "a"), train_size=0.9), ValueError, "train_size=…", "leave out", "two slices"),
    "a word for yes": mistake(given(early_stopping="yes"), ValueError, "early_stopping='yes'", "must be True or False"),
    "a word as augmentation": mistake(given(augmentation="none"), ValueError, "augmentation='none'", "must be Augmentation(…)"),
    "negative learning rate": mistake(given(plan_kwargs={"lr": -1}), ValueError, "lr=-1", "must be finite and greater than 0"),
    "zero epochs": mistake(lambda c: c.registered().train(max_epochs=0), ValueError, "max_epochs=0", "must be a whole number of at least 1"),
    "epochs as a word": mistake(lambda c: c.registered().train(max_epochs="ten"), ValueError, "max_epochs='ten'", "must be a whole number"),
    "misspelled argument of train": mistake(lambda c: c.registered().train(max_epoch=3), TypeError, "'max_epoch'", "did you mean 'max_epochs'?"),
    "device of torch": mistake(given(device="cpu"), TypeError, "'device'", "did you mean 'accelerator'?"),
    "learning rate beside plan_kwargs": mistake(lambda c: c.registered().train(lr=1e-3), TypeError, "'lr'", "pass plan_kwargs={'lr': …}"),
    "unknown field of the plan": mistake(given(plan_kwargs={"learning_rate": 1e-3}), TypeError, "'learning_rate'", "did you mean 'lr'?"),
    "a checkpoint that does not exist": mistake(given(resume="none.ckpt"), FileNotFoundError, "none.ckpt", "pass the path of a checkpoint as resume="),
    "the last checkpoint of nothing": mistake(given(resume="last"), ValueError, "checkpoint=", "pass it"),
}  # fmt: skip

SCORES = {
    "score without placement": mistake(lambda c: tl.evaluate(c.query), KeyError, f'obsm["{PREDICTED}"]', "run alphastomics.tl.reconstruct(adata) first", "pass prediction=…"),
    "a negative seed of scores": mistake(lambda c: tl.evaluate(c.placed(), truth="spatial", random_state=-1), ValueError, "random_state=-1", "must be a whole number at least 0"),
    "score without truth": mistake(lambda c: tl.evaluate((c.placed(), no_position(c.query), c.query)[-1]), KeyError, 'obsm["spatial"]', "pass truth=…"),
    "truth under another key": mistake(lambda c: tl.evaluate(c.placed(), truth="xy"), KeyError, 'obsm["xy"]', "pass truth=…"),
    "truth is NaN": mistake(lambda c: tl.evaluate(c.placed(spatial=np.full((100, 2), np.nan))), ValueError, 'obsm["spatial"]', "pass the key of the true positions as truth=…"),
    "truth is infinite": mistake(lambda c: tl.evaluate(c.placed(spatial=np.full((100, 2), np.inf))), ValueError, 'obsm["spatial"]', "correct the values"),
    "truth is text": mistake(lambda c: tl.evaluate(c.placed(spatial=np.full((100, 2), "left"))), ValueError, 'obsm["spatial"]', "store floats"),
    "prediction is NaN": mistake(lambda c: tl.evaluate(c.placed(spatial_reconstructed=np.full((100, 2), np.nan))), ValueError, f'obsm["{PREDICTED}"]', "place these cells", "remove them"),
    "truth of three dimensions": mistake(lambda c: tl.evaluate(c.placed(spatial=np.ones((100, 3)))), ValueError, 'obsm["spatial"]', "pass keys of positions of equal dimension", "truth=…"),
    "score of no cells": mistake(lambda c: tl.evaluate(c.placed()[:0].copy()), ValueError, f"{PREDICTED}_placed", "pass placed cells"),
    "nothing to score": mistake(lambda c: tl.evaluate(c.query, prediction=None), ValueError, "prediction=…", "pass"),
    "unknown slices": mistake(lambda c: tl.evaluate(c.placed(), library_key="section"), KeyError, 'obs["section"]', "pass library_key=…"),
    "unknown cell types": mistake(lambda c: tl.evaluate(c.placed(), cell_type_key="label"), KeyError, 'obs["label"]', "pass cell_type_key=…"),
    "niches without cell types": mistake(lambda c: tl.evaluate(c.placed(), niches=True), ValueError, "niches=True", "pass cell_type_key=…"),
    "no neighbors": mistake(lambda c: tl.evaluate(c.placed(), n_neighbors=0), ValueError, "n_neighbors=0", "must be a whole number at least 1"),
    "score of at most 0 cells": mistake(lambda c: tl.evaluate(c.placed(), max_cells=0), ValueError, "max_cells=0", "pass another number"),
    "unknown layer of predicted expression": mistake(lambda c: tl.evaluate(c.placed(), expression_layer="p"), KeyError, 'layers["p"]', "expression_layer=…"),
    "fractions as clusters": mistake(lambda c: (column("k", fractions)(c.query), tl.cluster_scores(c.query, "k")), ValueError, 'obs["k"]', "pass cluster_key=…"),
    "Moran's I without positions": mistake(lambda c: (position(lambda x: x * np.nan)(c.query), tl.morans_i(c.query)), ValueError, 'obsm["spatial"]', "pass another spatial_key=…"),
    "agreement of no components": mistake(lambda c: tl.modality_agreement(c.query, c.reference, n_components=0), ValueError, "n_components=0", "pass another number"),
    "agreement with a reference without positions": mistake(lambda c: (position(lambda x: x * np.nan)(c.reference), tl.modality_agreement(c.query, c.reference)), ValueError, 'obsm["spatial"]', "pass another spatial_key=…"),
    "provenance of nothing": mistake(lambda c: tl.provenance(c.query, PREDICTED), KeyError, f'uns["{PREDICTED}"]', "pass another key=…"),
    "a number as key of scores": mistake(lambda c: tl.position_scores(c.placed(), key_added=3), TypeError, "key_added=3", "pass one key of uns"),
    "plot without placement": mistake(lambda c: pl.reconstruction(c.query), KeyError, f'obsm["{PREDICTED}"]', "run alphastomics.tl.reconstruct(adata) first"),
    "plot of an unknown color": mistake(lambda c: pl.reconstruction(c.placed(), color="gene"), KeyError, "color='gene'", "pass one of them"),
    "plot of an unknown slice": mistake(lambda c: pl.reconstruction(c.placed(), slices="section"), KeyError, "'section'", "choose slices=… from"),
    "plot of the history of an untrained model": mistake(lambda c: pl.history(c.registered()), ValueError, "history", "call model.train() first"),
    "plot without comparison": mistake(lambda c: pl.comparison(c.query), KeyError, 'uns["comparison"]', "run alphastomics.tl.compare first", "pass key=…"),
    "plot of a path": mistake(lambda c: pl.reconstruction("placed.h5ad"), TypeError, "adata='placed.h5ad'", "read the file first"),
    "plot without gates": mistake(lambda c: pl.attention_gates(c.query), KeyError, 'uns["attention_gates"]', "run alphastomics.tl.attention_gates first"),
    "plot without maps": mistake(lambda c: pl.attention_maps(c.query), KeyError, 'obsm["attention_maps"]', "run alphastomics.tl.attention_maps first"),
}  # fmt: skip

FILES = {
    "an atlas that does not exist": mistake(lambda c: datasets.seqfish_embryo(c.folder / "none.h5ad"), FileNotFoundError, "path=", "leave path out to download seqfish_embryo"),
    "an atlas without positions": mistake(lambda c: (no_position(c.query), c.query.write_h5ad(c.folder / "q.h5ad"), datasets.seqfish_embryo(c.folder / "q.h5ad")), KeyError, 'obsm["spatial"]', "pass a file of seqfish_embryo with positions"),
    "an atlas in another format": mistake(lambda c: datasets.seqfish_embryo(c.file("a.h5ad", "a,b")), ValueError, "path=", "pass another file", "leave path out to download seqfish_embryo"),
    "a folder without a model": mistake(lambda c: AlphaSTomics.load(c.folder), FileNotFoundError, "config.json", "pass a folder that AlphaSTomics.save has written"),
    "a dataset that does not exist": mistake(lambda c: AlphaSTomics.from_parquet(c.folder), FileNotFoundError, "metadata.json", "make one with alphastomics preprocess"),
    "a folder as results of a comparison": mistake(lambda c: tl.compare(c.reference, results=c.folder), IsADirectoryError, "results=…", "pass the path of a file"),
    "another file as results of a comparison": mistake(lambda c: tl.compare(c.reference, results=c.file("notes.txt", "mine")), ValueError, "notes.txt", "delete it", "pass another results=…"),
}  # fmt: skip

MODEL = {
    "steps for positions": mistake(lambda c, m: m.sample(c.query, n_steps=5), ValueError, "n_steps=5", "omit n_steps"),
    "cells for positions": mistake(lambda c, m: m.sample(c.query, n_cells=5), ValueError, "n_cells=5", "omit n_cells"),
    "expression by a model of positions": mistake(lambda c, m: m.sample(c.query, mode="pos_to_expr"), ValueError, "mode='pos_to_expr'", "train a model with"),
    "unknown mode of sampling": mistake(lambda c, m: m.sample(c.query, mode="positions"), ValueError, "mode='positions'", "choose from"),
    "unknown reduction": mistake(lambda c, m: m.sample(c.query, reduce="median", n_samples=2), ValueError, "reduce='median'", "choose from"),
    "a table to sample": mistake(lambda c, m: m.sample(c.query.to_df()), TypeError, "adata is a DataFrame", "pass an AnnData"),
    "a file on disk to sample": mistake(lambda c, m: m.sample(c.backed()), ValueError, "adata is backed", "read it into memory first with adata.to_memory()"),
    "known positions that are missing": mistake(lambda c, m: (no_position(c.query), m.sample(c.query, inpaint=True)), KeyError, 'obsm["spatial"]', "store it there"),
    "query of three dimensions": mistake(lambda c, m: (position(lambda x: np.c_[x, x[:, :1]])(c.query), m.sample(c.query, inpaint=True)), ValueError, 'obsm["spatial"] has 3 columns', "store floats of shape (n_cells, 2)"),
    "training of a model that is passed": mistake(lambda c, m: tl.reconstruct(c.query, model=m, max_epochs=5), TypeError, "max_epochs", "leave it out", "pass reference=…"),
    "layer of a model that is passed": mistake(lambda c, m: tl.reconstruct(c.query, model=m, layer="counts"), TypeError, "layer", "leave it out"),
    "no genes are shared": mistake(lambda c, m: (genes(str.upper)(c.query), m.sample(c.query)), ValueError, "var_names", "rename them as in the reference"),
    "query is a view": mistake(lambda c, m: tl.reconstruct(c.query[:20], model=m), UserWarning, "query is a view", "pass copy=True or query.copy()"),
    "some genes are missing": mistake(lambda c, m: m.sample(c.query[:, :50].copy()), UserWarning, "10 of 60 genes", "treated as unmeasured"),
    "a tenth of the counts": mistake(lambda c, m: (matrix(lambda x: np.random.default_rng(0).binomial(x.astype(int), 0.1))(c.query), m.sample(c.query)), UserWarning, "library size", "check that the values are raw counts"),
    "cells without counts": mistake(lambda c, m: (matrix(lambda x: x * (np.arange(len(x)) > 4)[:, None])(c.query), m.sample(c.query)), UserWarning, "min_confidence=…", "Remove them"),
    "cells of equal expression": mistake(lambda c, m: (matrix(lambda x: x[np.arange(len(x)) % 90])(c.query), m.sample(c.query)), UserWarning, 'obs["spatial_reconstructed_tied"]', "20 of 100 cells", "Pass more genes of the reference", "instead of 0 and 1"),
    "unknown embedding": mistake(lambda c, m: m.get_latent_representation(c.query, layer="last"), ValueError, "layer='last'", "choose from 'encoder'"),
    "positions in an embedding of expression": mistake(lambda c, m: m.get_latent_representation(c.query, use_positions=True), ValueError, "use_positions=True", "pass use_positions=False"),
    "imputed genes that nobody measures": mistake(lambda c, m: tl.impute(c.query, c.reference, model=m, genes=["nothing"]), KeyError, "genes=…", "remove them"),
    "imputation of nothing": mistake(lambda c, m: tl.impute(c.query, c.reference, model=m), ValueError, "genes=…", "pass"),
    "a gene twice": mistake(lambda c, m: tl.impute(c.query, c.reference, model=m, genes=["gene_1", "gene_1"]), ValueError, "genes=…", "remove the duplicates"),
    "too many genes to validate": mistake(lambda c, m: tl.impute(c.query, c.reference, model=m, genes="gene_1", validate=50), ValueError, "validate=50", "pass at most 30"),
    "more neighbors than cells": mistake(lambda c, m: tl.transfer_labels(c.query, c.reference, model=m, n_neighbors=500), ValueError, "n_neighbors=500", "pass another number"),
    "labels that are missing": mistake(lambda c, m: tl.transfer_labels(c.query, c.reference, model=m, label_key="type"), KeyError, 'obs["type"]', "pass label_key=…"),
    "labels of no cell": mistake(lambda c, m: (column("cell_type", lambda a: None)(c.reference), tl.transfer_labels(c.query, c.reference, model=m)), ValueError, 'obs["cell_type"]', "pass another label_key=…"),
    "fractions as labels": mistake(lambda c, m: (column("cell_type", fractions)(c.reference), tl.transfer_labels(c.query, c.reference, model=m)), ValueError, 'obs["cell_type"]', "pass label_key=…"),
    "a word as confidence of labels": mistake(lambda c, m: tl.transfer_labels(c.query, c.reference, model=m, min_confidence="high"), ValueError, "min_confidence='high'", "must be between 0 and 1"),
    "a path as source of labels": mistake(lambda c, m: tl.transfer_labels(c.query, "r.h5ad", model=m), TypeError, "source='r.h5ad'", "read the file first"),
    "a cell that does not exist": mistake(lambda c, m: tl.attention_maps(m, c.query, ["nobody"]), KeyError, "'nobody'", "pass obs_names or row numbers as cells=…"),
    "a row that does not exist": mistake(lambda c, m: tl.attention_maps(m, c.query, [500]), KeyError, "cells=…", "pass numbers in this range"),
    "a layer that does not exist": mistake(lambda c, m: tl.attention_maps(m, c.query, [0], layer=9), ValueError, "layer=9", "pass 0 to 1"),
    "experts of a model without": mistake(lambda c, m: tl.expert_usage(m, c.query), ValueError, "use_moe=True", "train a model"),
    "a metric that was not logged": mistake(lambda c, m: pl.history(m, keys="loss"), KeyError, "'loss'", "pass keys=…"),
    "rows beyond the end": mistake(lambda c, m: m.sample(c.query, indices=[0, 100]), ValueError, "indices=…", "from 0 to 99"),
    "a negative row": mistake(lambda c, m: m.sample(c.query, indices=[-1]), ValueError, "indices=…", "pass such"),
    "fractions as rows": mistake(lambda c, m: m.sample(c.query, indices=[0.5]), ValueError, "indices=…", "row numbers"),
    "a path as model": mistake(lambda c, m: tl.reconstruct(c.query, model="folder"), TypeError, "model='folder'", "load the model first"),
    "a path as data of a model": mistake(lambda c, m: AlphaSTomics("r.h5ad"), TypeError, "adata='r.h5ad'", "read the file first"),
    "a negative seed of a sample": mistake(lambda c, m: m.sample(c.query, random_state=-1), ValueError, "random_state=-1", "must be a whole number at least 0"),
    "a number as key of a sample": mistake(lambda c, m: m.sample(c.query, key_added=3), ValueError, "key_added=3", "must be text"),
    "a number as key of imputed genes": mistake(lambda c, m: tl.impute(c.query, c.reference, model=m, key_added=3), TypeError, "key_added=3", "pass one key of obsm"),
    "a number as key of labels": mistake(lambda c, m: tl.transfer_labels(c.query, c.reference, model=m, key_added=3), TypeError, "key_added=3", "pass one key of obs"),
    "a number as key of gates": mistake(lambda c, m: tl.attention_gates(m, c.query, key_added=3), TypeError, "key_added=3", "pass one key of uns"),
    "a folder that exists": mistake(lambda c, m: (c.file("mine.txt"), m.save(c.folder)), FileExistsError, "overwrite=True", "pass"),
}  # fmt: skip

# Tokens of the command line, what the error contains, and the status.
COMMANDS = {
    "a query that does not exist": ("reconstruct none.h5ad --reference ref.h5ad", "QUERY", '"none.h5ad" does not exist', 2),
    "a reference that does not exist": ("reconstruct query.h5ad --reference none.h5ad", "--reference", "does not exist", 2),
    "a suffix of another format": ("reconstruct notes.csv --reference ref.h5ad", "notes.csv", "must end in .h5ad or .parquet", 1),
    "another format under a known suffix": ("reconstruct broken.h5ad --reference ref.h5ad", "broken.h5ad", "check that it is complete", 1),
    "an unknown flag": ("reconstruct query.h5ad --reference ref.h5ad --max-tim 3", "--max-tim", "Did you mean --max-time?", 2),
    "an unknown command": ("place query.h5ad", '"place"', "Available commands", 2),
    "a missing flag": ("sample --input-data query.h5ad", "--checkpoint", "requires an argument", 2),
    "a value out of range": ("reconstruct query.h5ad --reference ref.h5ad --min-confidence 2", "--min-confidence", "It must lie in [0, 1]", 2),
    "no epochs": ("train --input-data ref.h5ad --epochs 0", "--epochs", "It must be a whole number at least 1", 2),
    "a negative seed of a run": ("train --input-data ref.h5ad --seed -1", "--seed", "It must be a whole number at least 0", 2),
    "an output in another format": ("reconstruct query.h5ad --reference ref.h5ad --output placed.csv", "placed.csv", "placed.csv must end in .h5ad, which", 1),
    "an unknown choice": ("train --input-data ref.h5ad --mode place", "--mode", "Choose from", 2),
    "a column that does not exist": ("reconstruct query.h5ad --reference ref.h5ad --slice-key section", 'obs["section"]', "pass --slice-key", 1),
    "a model that does not exist": ("reconstruct query.h5ad --checkpoint none", "--checkpoint", "hf://organization/name", 2),
    "no reference": ("reconstruct query.h5ad", "--reference", "pass", 1),
    "an unknown key in a file": ("train --config bad.yaml --input-data ref.h5ad", "training.learning_rat", "did you mean training.learning_rate", 1),
    "a file and a dataset": ("train --input-data ref.h5ad --data-dir .", "--data-dir", "pass one of them", 1),
    "nothing to resume": ("train --input-data ref.h5ad --resume", "last.ckpt", "check --exp-name and --output-dir", 1),
}  # fmt: skip

TABLES = (VALUES, NAMES, POSITIONS, SLICES, OBJECTS, ARGUMENTS, TRAINING, SCORES, FILES, MODEL, COMMANDS)


# -- tests --------------------------------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("training was started")


@pytest.fixture
def cells(small: AnnData, reference: AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cells:
    monkeypatch.chdir(tmp_path)
    return Cells(reference=small, query=reference[600:700].copy(), folder=tmp_path)


@pytest.fixture(scope="module")
def model(model_of: Callable[[str], AlphaSTomics]) -> AlphaSTomics:
    """A model that places cells."""
    return model_of("expr_to_pos")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is trained."""
    monkeypatch.setattr(AlphaSTomics, "train", fail)


def check(row: Mistake, *objects: Any) -> None:
    """Make a mistake, and look for the argument and the remedy in the message."""
    if issubclass(row.error, Warning):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row.make(*objects)
        messages = [str(each.message) for each in caught if issubclass(each.category, row.error)]
        assert any(row.argument in text and all(part in text for part in row.remedies) for text in messages), messages
        return
    with pytest.raises(row.error) as caught:
        row.make(*objects)
    message = str(caught.value.args[0])
    assert row.argument in message
    for part in row.remedies:
        assert part in message


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("row", cases(VALUES | NAMES | POSITIONS | SLICES | OBJECTS | ARGUMENTS | SCORES | FILES))
def test_a_mistake_is_found_without_training(row: Mistake, cells: Cells) -> None:
    check(row, cells)


@pytest.mark.parametrize("row", cases(TRAINING))
def test_a_mistake_in_an_argument_of_training_is_found_before_the_first_step(
    row: Mistake, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alphastomics.train import ContextRunner, session

    monkeypatch.setattr(ContextRunner, "__call__", fail)
    monkeypatch.setattr(session, "cross_fit", fail)
    check(row, cells)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("row", cases(MODEL))
def test_a_mistake_with_a_trained_model_is_found(row: Mistake, cells: Cells, model: AlphaSTomics) -> None:
    check(row, cells, model)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("command", "argument", "remedy", "status"), [pytest.param(*row, id=name) for name, row in COMMANDS.items()]
)
def test_a_mistake_on_the_command_line_is_found(
    command: str, argument: str, remedy: str, status: int, cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.reference.write_h5ad("ref.h5ad")
    cells.query.write_h5ad("query.h5ad")
    for name, text in {"notes.csv": "a,b", "broken.h5ad": "a,b", "bad.yaml": "training:\n  learning_rat: 3\n"}.items():
        cells.file(name, text)
    assert main(command.split()) == status
    message = error_line(capsys)
    assert argument in message
    assert remedy in message


def test_names_of_mistakes_are_unique() -> None:
    assert len({name for table in TABLES for name in table}) == sum(map(len, TABLES)) >= 62
