"""The fewer cells a reference has, the more it is protected from being learned by heart."""

from __future__ import annotations

import numpy as np
import pytest

from alphastomics.data import fit_schema
from alphastomics.model import AlphaSTomics
from alphastomics.train.defaults import advised_attention, default_augmentation, default_dropout


@pytest.fixture
def counts(tissue):
    return fit_schema(tissue, transform="log1p")


@pytest.fixture
def plain_values(tissue):
    return fit_schema(tissue, transform="none")


def strengths(schema, n_cells: int) -> list[float]:
    augmentation = default_augmentation(schema, n_cells)
    names = ("gene_dropout", "thinning", "gene_noise")
    return [*(getattr(augmentation, name) for name in names), default_dropout(schema, n_cells)]


def test_fewer_cells_are_regularized_more(counts):
    few, many = (np.delete(strengths(counts, n_cells), 1) for n_cells in (4_999, 5_000))
    assert (few > many).all()


def test_counts_are_thinned_whatever_their_number(counts):
    assert strengths(counts, 100)[1] == strengths(counts, 1_000_000)[1] == 0.9


def test_values_that_are_not_counts_need_little(counts, plain_values):
    assert strengths(plain_values, 1_000)[1:] == [0, 0, 0]
    assert strengths(plain_values, 1_000)[0] < strengths(counts, 1_000_000)[0]


def test_binary_values_are_regularized_as_counts(tissue, counts):
    binary = tissue.copy()
    binary.X = (binary.X > 0).astype("float32")
    schema = fit_schema(binary)
    assert schema.transform == "none"
    assert strengths(schema, 1_000) == strengths(counts, 1_000)
    AlphaSTomics.setup_anndata(binary)
    model = AlphaSTomics(binary, mode="expr_to_pos", d_model=16, n_layers=1, n_heads=2)
    model.train(max_steps=2, max_epochs=-1, enable_progress_bar=False)  # thins the values
    assert model.sample(binary[:50], mode="expr_to_pos").obsm["spatial_reconstructed"].shape == (50, 2)


def test_defaults_depend_on_the_reference_unless_given(tissue, counts):
    AlphaSTomics.setup_anndata(tissue)
    model = AlphaSTomics(tissue, d_model=16, n_layers=1, n_heads=2)
    assert model.module.config.dropout == default_dropout(counts, tissue.n_obs)
    assert model.default_augmentation() == default_augmentation(counts, tissue.n_obs)
    assert AlphaSTomics(tissue, d_model=16, n_layers=1, n_heads=2, dropout=0.0).module.config.dropout == 0


def test_attention_is_full_while_it_is_quick_and_fits() -> None:
    assert advised_attention(16_384) == {"attention": "full"}
    assert advised_attention(16_385) == {"attention": "neighbor", "pair_features": "factorized"}
    assert advised_attention(500, lambda arguments: arguments["attention"] != "full")["attention"] == "neighbor"
    assert advised_attention(500, lambda arguments: arguments == {"attention": "neighbor"}) == {"attention": "neighbor"}
    assert advised_attention(500, lambda _: False) == {"attention": "linear"}
