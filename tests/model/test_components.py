"""Principal components from which embeddings of expression start."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.decomposition import PCA

from alphastomics.data import AnnDataSource
from alphastomics.model import AlphaSTomics
from alphastomics.model._components import principal_components


def test_components_match_the_reference(reference, make_model):
    model = make_model(reference)
    source = AnnDataSource(model.adata, model.schema, positions=False)
    found = principal_components(source, 3)
    assert found.shape == (model.schema.n_genes, 3)
    np.testing.assert_allclose(found.T @ found, np.eye(3), atol=1e-5)
    expected = PCA(3, svd_solver="full").fit(source.expression(np.arange(source.n_cells)).astype(np.float64))
    np.testing.assert_allclose(np.abs((found * expected.components_.T).sum(0)), 1.0, atol=1e-3)
    few = principal_components(source, 10**6)
    assert few.shape[1] == min(source.n_cells, model.schema.n_genes)


def test_components_are_computed_once(small, make_model, train_briefly, tmp_path):
    model = make_model(small)
    assert not model.module.components.any()
    train_briefly(model)
    kept = model.module.components.clone()
    assert kept.any()
    train_briefly(model)
    assert torch.equal(model.module.components, kept)
    model.save(tmp_path / "model")
    assert torch.equal(AlphaSTomics.load(tmp_path / "model", adata=False).module.components, kept)
