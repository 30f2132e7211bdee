"""Kinds of expression values, their log, and the comparison of a query with the reference."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.sparse as sp

from alphastomics.data import AnnDataSource, TissueSchema, fit_schema
from alphastomics.data._checks import summarize_values
from alphastomics.data._values import MIN_NONZERO, Evidence
from alphastomics.tl._expression import needs_log1p

if TYPE_CHECKING:
    from collections.abc import Callable

    import anndata as ad

    Make = Callable[..., ad.AnnData]

CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "counts": lambda x: x,
    "binary": lambda x: (x > 0).astype(float),
    "log-normalized": np.log1p,
    "fractional": lambda x: np.log1p(x) + 0.5,
    "intensities": lambda x: 1000.5 * x,
    "signed": lambda x: np.log1p(x) - 1,
}


def changed(adata: ad.AnnData, kind: str) -> ad.AnnData:
    adata = adata.copy()
    adata.X = sp.csr_matrix(CHANGES[kind](adata.X.toarray()))
    return adata


@pytest.mark.parametrize("storage", [sp.csr_matrix, np.asarray])
@pytest.mark.parametrize("kind", CHANGES)
def test_every_kind_is_recognized(make_adata: Make, storage: Callable, kind: str) -> None:
    values = storage(CHANGES[kind](make_adata().X.toarray()))
    assert summarize_values(values).kind == kind
    assert needs_log1p(values, "auto") == (kind == "counts")


def test_integers_without_small_counts_are_intensities() -> None:
    counts = np.random.default_rng(0).poisson(3, (20, 5))
    assert summarize_values(counts).kind == "counts"
    assert summarize_values(counts * 100).kind == "intensities"


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_integers_that_float32_does_not_store_are_no_counts(dtype: type) -> None:
    evidence = Evidence()
    evidence.add(np.array([0, 1, 2**24], dtype=dtype))
    assert (evidence.kind, evidence.integer) == ("counts", True)
    evidence.add(np.array([2**24 + 2], dtype=dtype))
    assert (evidence.kind, evidence.integer) == ("intensities", False)


def test_nan_is_ignored_by_scores() -> None:
    values = np.array([[np.nan, 3.0], [1.0, 0.0]])
    assert needs_log1p(values, "auto")
    assert not needs_log1p(np.minimum(values, 1), "auto")


@pytest.mark.parametrize("kind", CHANGES)
def test_the_kind_and_the_transform_are_logged(make_adata: Make, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    adata = changed(make_adata(), kind)
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        schema = fit_schema(adata)
        AnnDataSource(adata[:50], schema, positions=False).log_kind()
    transform = "log1p" if kind == "counts" else "none"
    assert schema.transform == transform
    assert schema.value_kind == kind
    for cells in ("the reference", "50 cells"):
        (line,) = [message for message in caplog.messages if message.startswith(f"Values of {cells} are {kind}")]
        assert line.endswith(f"transform: {transform}.")
    assert ("pass layer=" in caplog.text) == (kind == "log-normalized")


@pytest.mark.parametrize("reference", CHANGES)
@pytest.mark.parametrize("query", CHANGES)
def test_a_query_of_another_kind_is_refused(make_adata: Make, reference: str, query: str) -> None:
    schema = fit_schema(changed(make_adata(n_genes=30), reference))
    cells = changed(make_adata(n_genes=30, random_state=1), query)
    if query == "signed" and reference == "counts":
        with pytest.raises(ValueError, match="negative values.*raw counts"):
            AnnDataSource(cells, schema, positions=False)
    elif query == reference or {query, reference} == {"fractional", "log-normalized"}:
        AnnDataSource(cells, schema, positions=False)
    else:
        with pytest.raises(ValueError, match=f"cells are {query}.* reference are {reference}.*; .*"):
            AnnDataSource(cells, schema, positions=False)


def test_few_values_and_unknown_references_are_accepted(make_adata: Make) -> None:
    adata = make_adata(n_genes=30)
    cells, values = changed(adata, "binary"), fit_schema(adata).to_dict()
    few = cells[:5]
    assert few.X.nnz < MIN_NONZERO
    AnnDataSource(few, fit_schema(adata), positions=False)
    del values["value_kind"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnnDataSource(cells, TissueSchema.from_dict(values), positions=False)


def test_a_schema_with_an_unknown_kind_is_refused(make_adata: Make) -> None:
    values = fit_schema(make_adata()).to_dict()
    with pytest.raises(ValueError, match="value_kind"):
        TissueSchema.from_dict(values | {"value_kind": "colors"})


def test_a_negative_value_among_counts_is_refused(make_adata: Make) -> None:
    adata = make_adata()
    adata.X = adata.X.toarray()
    adata.X[3, 2] = -1
    assert fit_schema(adata, transform="none").value_kind == "signed"
    with pytest.raises(ValueError, match='negative and all are integers.*transform="none"'):
        fit_schema(adata)
