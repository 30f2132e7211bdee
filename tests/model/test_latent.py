"""Embeddings of cells: shapes, and what they must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("use_positions", [False, True])
def test_many_cells_are_embedded_in_contexts(everything, reference, monkeypatch, use_positions):
    sizes = []
    trunk = everything.module.trunk

    def watch(h, *args, **kwargs):
        sizes.append(h.shape[1])
        return trunk(h, *args, **kwargs)

    whole = everything.get_latent_representation(reference, use_positions=use_positions)
    monkeypatch.setattr(everything.module, "trunk", watch)
    part = everything.get_latent_representation(reference, use_positions=use_positions, batch_size=100)
    assert max(sizes) <= 100
    assert np.corrcoef(whole.ravel(), part.ravel())[0, 1] > 0.9


def test_unknown_layer_raises(trained, reference):
    with pytest.raises(ValueError, match="layer='last'"):
        trained.get_latent_representation(reference, layer="last")


# -- with positions --------------------------------------------------------------------------------------------------


@pytest.fixture
def embed(everything):
    """Embedding with positions."""

    def call(adata, **kwargs):
        return everything.get_latent_representation(adata, **({"layer": "all", "use_positions": True} | kwargs))

    return call


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1]


def test_positions_are_used_on_request(embed, reference):
    placed = embed(reference)
    assert placed.shape == (900, 64)
    assert np.isfinite(placed).all()
    without = embed(reference, use_positions=False)
    shuffled = reference.copy()
    shuffled.obsm["spatial"] = np.random.default_rng(0).permuted(reference.obsm["spatial"], axis=0)
    elsewhere = embed(shuffled)
    for half in (slice(32), slice(32, None)):
        assert correlation(placed[:, half], without[:, half]) < 0.99
        assert correlation(placed[:, half], elsewhere[:, half]) < 0.99


@pytest.mark.parametrize("batch_size", [None, 128])
def test_permuted_rows_permute_the_embedding_with_positions(embed, reference, batch_size):
    alike = np.r_[np.zeros(40, dtype=int), 40:900]
    reference.X = reference.X[alike]  # cells that differ only in their positions
    order = np.random.default_rng(0).permutation(900)
    expected = embed(reference, batch_size=batch_size)
    assert embed(reference[order].copy(), batch_size=batch_size).tobytes() == expected[order].tobytes()


def test_a_moved_turned_and_mirrored_slice_is_the_same_slice(embed, reference):
    expected = embed(reference)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 2)))[0] @ np.diag([1, -1])
    reference.obsm["spatial"] = reference.obsm["spatial"] @ rotation + [1000, -50]
    np.testing.assert_allclose(embed(reference), expected, rtol=0, atol=2e-3)
    reference.obsm["spatial"] = reference.obsm["spatial"] * [1, 1.5]
    assert np.abs(embed(reference) - expected).max() > 0.1


def test_a_registered_slice_keeps_its_frame(reference, make_model, train_briefly):
    model = train_briefly(make_model(reference, mode="any", setup={"slice_key": "slice_id", "frame": "shared"}))
    expected = model.get_latent_representation(use_positions=True)
    moved = model.adata.copy()
    moved.obsm["spatial"] = moved.obsm["spatial"] + moved.obsm["spatial"].std()
    assert np.abs(model.get_latent_representation(moved, use_positions=True) - expected).max() > 0.01


@pytest.mark.parametrize("use_positions", [False, True])
def test_one_context_equals_the_forward_pass_of_the_network(everything, reference, use_positions):
    from alphastomics.data import AnnDataSource, local_density
    from alphastomics.sampling._canonical import canonical_positions

    cells = reference[reference.obs["slice_id"] == "slice_1"].copy()
    source, rows = AnnDataSource(cells, everything.schema, positions=True), np.arange(300)
    x = canonical_positions(everything._make_sampler(), source, rows, cells.obsm["spatial"], max_context=300)
    tensors = (source.expression(rows), x, local_density(cells.obsm["spatial"]))
    expression, position, crowded = (torch.from_numpy(array)[None] for array in tensors)
    with torch.no_grad():
        t_pos = torch.full((1,), float(not use_positions))
        output = everything.module(expression, position, torch.zeros(1), t_pos, local_density=crowded)
    result = everything.get_latent_representation(cells, use_positions=use_positions)
    np.testing.assert_allclose(result, output.latent[0].numpy(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("n_cells", [1, 2])
def test_few_cells_with_positions(embed, reference, n_cells):
    assert np.isfinite(embed(reference[:n_cells].copy())).all()


def test_cells_without_a_position_raise(embed, reference):
    reference.obsm["spatial"][[3, 7], 0] = np.nan
    with pytest.raises(ValueError, match=r"'slice_0'.* 2 .*use_positions=False"):
        embed(reference)
    assert np.isfinite(embed(reference, use_positions=False)).all()
    del reference.obsm["spatial"]
    with pytest.raises(KeyError, match="spatial"):
        embed(reference)


def test_a_model_trained_without_positions_raises_for_positions(trained, reference):
    with pytest.raises(ValueError, match="use_positions=True.*mode='expr_to_pos'"):
        trained.get_latent_representation(reference, use_positions=True)
