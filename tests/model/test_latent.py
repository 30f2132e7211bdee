"""Embeddings of cells: shapes, and what they must not depend on."""

from __future__ import annotations

import numpy as np
import pytest

LAYERS = ("encoder", "transformer", "all")


def test_shapes(trained, reference):
    encoder, transformer, both = (trained.get_latent_representation(reference, layer=layer) for layer in LAYERS)
    assert encoder.shape == transformer.shape == (900, 32)
    assert np.array_equal(both, np.concatenate([encoder, transformer], axis=1))
    assert np.isfinite(both).all()
    assert (both.std(axis=0) > 0).all()
    assert np.array_equal(trained.get_latent_representation(), transformer)


@pytest.mark.parametrize("batch_size", [None, 128])
def test_permuted_rows_permute_the_embedding(trained, reference, batch_size):
    order = np.random.default_rng(0).permutation(900)
    expected = trained.get_latent_representation(reference, layer="all", batch_size=batch_size)
    result = trained.get_latent_representation(reference[order].copy(), layer="all", batch_size=batch_size)
    assert result.tobytes() == expected[order].tobytes()


def test_positions_are_never_read(trained, reference):
    expected = trained.get_latent_representation(reference)
    reference.obsm["spatial"][:] = np.nan
    assert trained.get_latent_representation(reference).tobytes() == expected.tobytes()
    del reference.obsm["spatial"]
    assert trained.get_latent_representation(reference).tobytes() == expected.tobytes()


def test_transformer_sees_the_slice_and_the_encoder_the_cell(trained, reference):
    half = np.arange(0, 900, 2)
    for layer, same in (("encoder", True), ("transformer", False)):
        whole = trained.get_latent_representation(reference, layer=layer)[half]
        part = trained.get_latent_representation(reference, indices=half, layer=layer)
        assert np.allclose(whole, part, rtol=0, atol=1e-4) == same
        assert np.corrcoef(whole.ravel(), part.ravel())[0, 1] > 0.95


def test_many_cells_are_embedded_in_contexts(trained, reference, monkeypatch):
    sizes = []
    trunk = trained.module.trunk

    def watch(h, *args):
        sizes.append(h.shape[1])
        return trunk(h, *args)

    whole = trained.get_latent_representation(reference)
    monkeypatch.setattr(trained.module, "trunk", watch)
    part = trained.get_latent_representation(reference, batch_size=100)
    assert max(sizes) <= 100
    assert np.corrcoef(whole.ravel(), part.ravel())[0, 1] > 0.9


def test_unknown_layer_is_refused(trained, reference):
    with pytest.raises(ValueError, match="layer='last' is unknown"):
        trained.get_latent_representation(reference, layer="last")
