from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import scipy.sparse as sp

from alphastomics.data import fit_schema
from alphastomics.data._checks import check_genes, resolve_transform, summarize_values

if TYPE_CHECKING:
    from collections.abc import Callable

    import anndata as ad

    Make = Callable[..., ad.AnnData]


@pytest.mark.parametrize("storage", [sp.csr_matrix, sp.csc_matrix, np.asarray])
@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN"), (np.inf, "NaN"), (-1.0, "negative")])
def test_invalid_values_raise_with_gene_and_cell(
    make_adata: Make, storage: Callable, value: float, message: str
) -> None:
    adata = make_adata()
    dense = adata.X.toarray()
    dense[7, 5] = value
    adata.X = storage(dense)
    with pytest.raises(ValueError, match=f"{message}.*gene 'g5' in cell '{adata.obs_names[7]}'"):
        fit_schema(adata, transform="log1p")
    if value == -1:
        assert fit_schema(adata, transform="none").transform == "none"


@pytest.mark.parametrize("argument", ["position_key", "slice_key", "cell_type_key", "sequence_key", "layer"])
def test_given_keys_must_exist(make_adata: Make, argument: str) -> None:
    with pytest.raises(KeyError, match=f"nowhere.*{argument}="):
        fit_schema(make_adata(), **{argument: "nowhere"})


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
def test_duplicate_cells_are_accepted(make_adata: Make) -> None:
    adata = make_adata()
    adata.obs_names = ["c"] * adata.n_obs
    first = np.flatnonzero(adata.obs["slice_id"] == "s0")
    adata.obsm["spatial"][first[:20]] = adata.obsm["spatial"][first[20]]
    assert fit_schema(adata).n_genes == 12


@pytest.mark.parametrize("storage", [sp.csr_matrix, np.asarray, np.asfortranarray])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0, 3], [1, 2]], "log1p"),
        ([[0.0, 3.0], [1.0, 2.0]], "log1p"),
        ([[0.0, 3.5], [1.0, 2.0]], "none"),
        ([[0.0, -3.5], [1.0, 2.0]], "none"),
        ([[0, 0], [0, 0]], "log1p"),
        ([[True, False], [True, True]], "none"),
        ([[0.0, 1.0], [1.0, 0.0]], "none"),
        ([[0, 250], [4000, 12]], "none"),
    ],
)
def test_auto_is_log1p_for_counts_only(storage: Callable, values: list, expected: str) -> None:
    assert resolve_transform("auto", summarize_values(storage(np.array(values)))) == expected


def test_every_block_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphastomics.data._matrix._BLOCK_VALUES", 6)
    values = np.ones((9, 4))
    values[8, 2] = 0.5
    assert not summarize_values(values).integer
    assert not summarize_values(sp.csr_matrix(values)).integer
    values[8, 2] = -2
    assert summarize_values(values).negative == (8, 2)
    assert summarize_values(sp.csr_matrix(values)).negative == (8, 2)


def test_genes_are_strings() -> None:
    assert check_genes([1, "b"]) == ("1", "b")
    with pytest.raises(ValueError, match="no genes"):
        check_genes([])


def test_columns_and_layers_that_may_hold_sections_and_counts_are_named(make_adata: Make, caplog) -> None:
    adata = make_adata()
    del adata.obs["slice_id"]
    adata.obs["sample"] = np.where(np.arange(adata.n_obs) % 2, "a", "b")
    adata.layers["counts"], adata.layers["lognorm_counts"] = adata.X.copy(), np.log1p(adata.X.toarray())
    with caplog.at_level("WARNING"):
        fit_schema(adata)
    assert [record.getMessage() for record in caplog.records] == [
        'If the values of obs["sample"] are sections, pass slice_key="sample".'
    ]
    caplog.clear()
    with caplog.at_level("WARNING"):
        fit_schema(adata, layer="lognorm_counts", slice_key="sample")
    assert 'pass layer="counts" if it holds the counts' in caplog.text
