"""The shift of genes between techniques: simulated gains are found in another composition, and nothing is found where there are none."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

from alphastomics.data import AnnDataSource, fit_schema
from alphastomics.sampling._confidence import fit_confidence_cells
from alphastomics.sampling._gene_shift import gene_shift

N_GENES = 30
KINDS = np.exp(np.random.default_rng(7).normal(0, 1.2, (5, N_GENES)))


def cells(n: int, seed: int, share: tuple[float, ...] = (0.2,) * 5, gain: np.ndarray | float = 1.0) -> ad.AnnData:
    """Counts of five kinds of cells with their shares."""
    rng = np.random.default_rng(seed)
    rate = KINDS[rng.choice(5, n, p=share)] * rng.lognormal(0, 0.2, (n, 1))
    adata = ad.AnnData(rng.poisson(60 * rate / KINDS.mean() / N_GENES * 10 * gain).astype(np.float32))
    adata.var_names = [f"gene_{g}" for g in range(N_GENES)]
    adata.obsm["spatial"] = rng.random((n, 2))
    adata.obs["slice_id"] = "one"
    return adata


@pytest.fixture(scope="module")
def reference():
    adata = cells(2500, 0)
    schema = fit_schema(adata)
    return schema, fit_confidence_cells(AnnDataSource(adata, schema, positions=True))


def source(query: ad.AnnData, schema) -> AnnDataSource:
    return AnnDataSource(query, schema, positions=False)


def difference(query: ad.AnnData, schema) -> np.ndarray:
    """Difference of the mean expression from the reference, network units."""
    return source(query, schema).expression(np.arange(query.n_obs)).mean(0)


def test_gains_of_another_technique_are_found_in_another_composition(reference):
    schema, stored = reference
    gain = np.exp(np.random.default_rng(3).normal(0, 0.3, N_GENES))
    share = (0.6, 0.1, 0.1, 0.1, 0.1)
    plain, changed = cells(800, 1, share), cells(800, 1, share, gain)
    true = difference(changed, schema) - difference(plain, schema)
    found = gene_shift(stored, source(changed, schema), np.arange(800))
    assert np.corrcoef(found, true)[0, 1] > 0.9
    error, of_means = (np.linalg.norm(x - true) for x in (found, difference(changed, schema)))
    assert error < 0.5 * min(of_means, np.linalg.norm(true))


@pytest.mark.parametrize("share", [(0.2,) * 5, (0.6, 0.1, 0.1, 0.1, 0.1)])
def test_cells_of_the_same_technique_have_no_shift(reference, share):
    schema, stored = reference
    query = cells(800, 2, share)
    assert np.abs(gene_shift(stored, source(query, schema), np.arange(800))).max() < 0.1


@pytest.mark.filterwarnings("ignore:10 of 30 genes are missing")
def test_genes_that_are_not_measured_and_a_query_without_genes_of_the_reference(reference):
    schema, stored = reference
    part = cells(300, 3)[:, :20].copy()
    found = gene_shift(stored, source(part, schema), np.arange(300))
    assert not found[20:].any()
    assert found[:20].all()
    few = type(stored)(searched=stored.searched[:, 25:], held_out=stored.held_out[:, 25:], genes=stored.genes[25:])
    assert not gene_shift(few, source(part, schema), np.arange(300)).any()


def test_values_that_are_not_counts():
    adata = cells(900, 4)
    adata.X = np.sqrt(adata.X)
    schema = fit_schema(adata)
    assert schema.transform == "none"
    stored = fit_confidence_cells(AnnDataSource(adata, schema, positions=True))
    query = cells(400, 5)
    query.X = np.sqrt(query.X) + np.linspace(0, 0.5, N_GENES, dtype=np.float32)
    found = gene_shift(stored, source(query, schema), np.arange(400))
    expected = np.linspace(0, 0.5, N_GENES) / np.asarray(schema.gene_scale)
    assert np.abs(found - expected).max() < 0.15
