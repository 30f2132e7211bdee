from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy.spatial.distance import cdist, pdist
from torch.utils.data import DataLoader

from alphastomics.data import AnnDataSource, Augmentation, Context, ContextDataset, collate, fit_schema
from alphastomics.sampling._cells import unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    import anndata as ad

    Make = Callable[..., ad.AnnData]


def source_of(adata: ad.AnnData, *, positions: bool = True, **kwargs: object) -> AnnDataSource:
    return AnnDataSource(adata, fit_schema(adata, **kwargs), positions=positions)


def assert_same(left: Context, right: Context) -> None:
    for name, first, second in zip(Context._fields, left, right, strict=True):
        np.testing.assert_array_equal(first, second, err_msg=name)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    context_size=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1000),
    composition=st.sampled_from([0.0, 5.0]),
)
def test_subsets_partition_every_slice(
    make_adata: Make, context_size: int, seed: int, epoch: int, composition: float
) -> None:
    adata = make_adata()
    source = source_of(adata)
    augmentation = Augmentation(gene_dropout=0.0, composition=composition)
    dataset = ContextDataset(source, context_size=context_size, seed=seed, augmentation=augmentation)
    dataset.set_epoch(epoch)
    contexts = [dataset[i] for i in range(len(dataset))]
    np.testing.assert_array_equal(np.sort(np.concatenate([c.rows for c in contexts])), np.arange(adata.n_obs))
    names = adata.obs["slice_id"].to_numpy()
    for c in contexts:
        assert set(names[c.rows]) == {source.slices[c.slice_index].name}
        np.testing.assert_array_equal(c.key, [seed, epoch, c.key[2]])
    for index in range(2):
        sizes = [len(c.rows) for c in contexts if c.slice_index == index]
        assert max(sizes) <= context_size
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-len(source.slices[index].rows) // context_size)


def test_slices_are_shuffled_and_epochs_differ(make_adata: Make) -> None:
    dataset = ContextDataset(source_of(make_adata()), context_size=10, seed=0)
    first = [dataset[i] for i in range(len(dataset))]
    order = [c.slice_index for c in first]
    assert order != sorted(order)
    dataset.set_epoch(1)
    assert any(not np.array_equal(a.rows, dataset[i].rows) for i, a in enumerate(first))
    dataset.set_epoch(0)
    assert_same(dataset[3], first[3])


def test_composition_gathers_cells_that_lie_together(make_adata: Make) -> None:
    def scatter(composition: float, shift: float = 0.0) -> tuple[float, list[np.ndarray]]:
        adata = make_adata(n_cells=(300,))
        adata.obsm["spatial"] += shift
        augmentation = Augmentation(gene_dropout=0.0, rotate=False, composition=composition)
        dataset = ContextDataset(source_of(adata), context_size=30, seed=0, augmentation=augmentation)
        rows = [dataset[i].rows for i in range(len(dataset))]
        spread = np.mean([adata.obsm["spatial"][r].var(axis=0).mean() for r in rows])
        return float(spread / adata.obsm["spatial"].var(axis=0).mean()), rows

    fair, weak, strong = (scatter(strength)[0] for strength in (0.0, 2.0, 20.0))
    assert 0.9 < fair < 1.1
    assert strong < weak < fair
    assert strong < 0.9
    for one, other in zip(scatter(5.0)[1], scatter(5.0, shift=1000.0)[1], strict=True):
        np.testing.assert_array_equal(one, other)  # where the origin lies means nothing


def test_values_of_a_context(make_adata: Make) -> None:
    adata = make_adata()
    source = source_of(adata)
    context = ContextDataset(source, context_size=20, seed=0)[0]
    position = adata.obsm["spatial"][context.rows]
    expected = (position - position.mean(0)) / source.schema.scale
    np.testing.assert_allclose(context.position, expected, atol=1e-6)
    np.testing.assert_array_equal(context.expression, source.expression(context.rows))
    assert context.expression.dtype == context.position.dtype == np.float32
    assert context.rows.dtype == context.key.dtype == np.int64
    assert context.dropout == 0
    shared = source_of(adata, frame="shared")
    turned = ContextDataset(shared, context_size=20, seed=0, augmentation=Augmentation())[0]
    np.testing.assert_array_equal(turned.position, shared.schema.encode_position(adata.obsm["spatial"][turned.rows]))


@pytest.mark.parametrize("kind", ["subset", "patch"])
def test_draws_depend_on_the_key_alone(make_adata: Make, kind: str) -> None:
    source = source_of(make_adata())
    kwargs = {"context_size": 16, "kind": kind, "seed": 7, "augmentation": Augmentation(thinning=0.5)}
    dataset = ContextDataset(source, **kwargs)
    dataset.set_epoch(2)
    forward = [dataset[i] for i in range(len(dataset))]
    torch.manual_seed(1)
    np.random.seed(1)
    copy = pickle.loads(pickle.dumps(dataset))
    for i in reversed(range(len(copy))):
        assert_same(copy[i], forward[i])
    fresh = ContextDataset(source, **kwargs)
    fresh.set_epoch(2)
    assert_same(fresh[5], forward[5])
    other = ContextDataset(source, **(kwargs | {"seed": 8}))
    other.set_epoch(2)
    assert not np.array_equal(other[5].position, forward[5].position)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(context_size=st.integers(1, 50), lattice=st.booleans())
def test_patches_are_the_nearest_cells(make_adata: Make, context_size: int, lattice: bool) -> None:
    adata = make_adata((30, 25))
    if lattice:
        # Whole numbers: many ties, and several cells in one place.
        adata.obsm["spatial"] = np.round(adata.obsm["spatial"] / 2)
    source = source_of(adata)
    dataset = ContextDataset(source, context_size=context_size, kind="patch", seed=0)
    contexts = [dataset[i] for i in range(len(dataset))]
    np.testing.assert_array_equal(np.sort([c.rows[0] for c in contexts]), np.arange(adata.n_obs))
    for c in contexts:
        rows, position = source.slices[c.slice_index].rows, source.slices[c.slice_index].position
        center = np.searchsorted(rows, c.rows[0])
        squared = cdist(position[[center]], position, "sqeuclidean")[0]
        squared[center] = -1
        np.testing.assert_array_equal(c.rows, rows[np.lexsort((rows, squared))[:context_size]])


def test_gene_dropout_takes_columns_and_keeps_the_variance(make_adata: Make) -> None:
    adata = make_adata(n_genes=40)
    source = source_of(adata)
    dataset = ContextDataset(source, context_size=8, seed=0, augmentation=Augmentation(rotate=False))
    shares = []
    for i in range(len(dataset)):
        c = dataset[i]
        clean = source.expression(c.rows)
        assert (c.expression[:, ~c.measured] == 0).all()
        assert c.dropout == pytest.approx(1 - c.measured.mean())
        np.testing.assert_allclose(
            c.expression[:, c.measured], clean[:, c.measured] / np.sqrt(c.measured.mean()), rtol=1e-6
        )
        shares.append(c.dropout)
    assert max(shares) < 0.5
    assert len(set(shares)) > 3
    assert source.measured.all()


def test_unmeasured_genes_stay_unmeasured(make_adata: Make) -> None:
    adata = make_adata()
    with pytest.warns(UserWarning, match="3 of 12"):
        source = AnnDataSource(adata[:, 3:], fit_schema(adata), positions=True)
    dataset = ContextDataset(source, context_size=20, seed=0, augmentation=Augmentation(gene_dropout=0.9))
    for i in range(len(dataset)):
        assert not dataset[i].measured[:3].any()
        assert dataset[i].measured.any()


@pytest.mark.parametrize("augmentation", [None, Augmentation(gene_dropout=0.5)])
def test_expression_with_unmeasured_genes_has_the_factor_of_placements(make_adata: Make, augmentation: Any) -> None:
    adata = make_adata()
    with pytest.warns(UserWarning, match="3 of 12"):
        source = AnnDataSource(adata[:, 3:], fit_schema(adata), positions=True)
    c = ContextDataset(source, context_size=20, seed=0, augmentation=augmentation)[0]
    assert c.dropout == pytest.approx(1 - c.measured.mean())
    placed = source.expression(c.rows) * unchanged(source)[0]
    expected = placed * c.measured * np.sqrt(source.measured.mean() / c.measured.mean())
    np.testing.assert_allclose(c.expression, expected, rtol=1e-5)


def test_rotation_is_orthogonal_and_uniform(make_adata: Make) -> None:
    for n_dims in (2, 3):
        adata = make_adata(n_dims=n_dims)
        source = source_of(adata)
        augmentation = Augmentation(gene_dropout=0.0)
        dataset = ContextDataset(source, context_size=8, seed=0, augmentation=augmentation)
        plain = ContextDataset(source, context_size=8, seed=0)
        rotations = []
        for epoch in range(20):
            dataset.set_epoch(epoch)
            plain.set_epoch(epoch)
            for i in range(len(dataset)):
                before, after = plain[i].position, dataset[i].position
                np.testing.assert_allclose(pdist(after), pdist(before), atol=1e-5)
                rotations.append(np.linalg.lstsq(before, after, rcond=None)[0])
        np.testing.assert_allclose(np.mean(rotations, axis=0), 0, atol=0.15)
        determinants = np.linalg.det(rotations)
        assert 0.4 < np.mean(determinants > 0) < 0.6
        np.testing.assert_allclose(np.abs(determinants), 1, atol=1e-3)


def test_thinning_lowers_depth_only(make_adata: Make) -> None:
    source = source_of(make_adata())
    augmentation = Augmentation(gene_dropout=0.0, thinning=0.9, rotate=False)
    thinned = ContextDataset(source, context_size=20, seed=0, augmentation=augmentation)[0]
    plain = ContextDataset(source, context_size=20, seed=0)[0]
    np.testing.assert_array_equal(thinned.rows, plain.rows)
    np.testing.assert_array_equal(thinned.position, plain.position)
    assert not np.array_equal(thinned.expression, plain.expression)


def test_chosen_slices(make_adata: Make) -> None:
    source = source_of(make_adata())
    dataset = ContextDataset(source, context_size=20, seed=0, slices=["s1"])
    rows = np.concatenate([dataset[i].rows for i in range(len(dataset))])
    np.testing.assert_array_equal(np.sort(rows), source.slices[1].rows)
    assert {dataset[i].slice_index for i in range(len(dataset))} == {1}
    with pytest.raises(ValueError, match="'s9'.*'s0', 's1'"):
        ContextDataset(source, context_size=20, seed=0, slices=["s1", "s9"])
    with pytest.raises(ValueError, match="slice"):
        ContextDataset(source, context_size=20, seed=0, slices=[])


def test_without_positions(make_adata: Make) -> None:
    adata = make_adata()
    source = source_of(adata, positions=False)
    context = ContextDataset(source, context_size=20, seed=0)[0]
    assert context.position.shape == (len(context.rows), 2)
    assert np.isnan(context.position).all()
    with pytest.raises(ValueError, match='kind="patch"'):
        ContextDataset(source, context_size=20, kind="patch", seed=0)
    schema = fit_schema(adata)
    adata.obsm["spatial"][np.flatnonzero(adata.obs["slice_id"] == "s1")[:2]] = np.nan
    partly = AnnDataSource(adata, schema, positions=True)
    with pytest.raises(ValueError, match="'s1'.* 2 cells"):
        ContextDataset(partly, context_size=20, seed=0)
    assert len(ContextDataset(partly, context_size=20, seed=0, slices=["s0"])) == 3


def test_bad_arguments(make_adata: Make) -> None:
    source = source_of(make_adata())
    for kwargs in ({"context_size": 0, "seed": 0}, {"context_size": 5, "seed": -1}):
        with pytest.raises(ValueError, match="context_size|seed"):
            ContextDataset(source, **kwargs)
    with pytest.raises(ValueError, match="kind='graph'"):
        ContextDataset(source, context_size=5, seed=0, kind="graph")
    for kwargs in ({"gene_dropout": 1.0}, {"thinning": -0.1}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            Augmentation(**kwargs)
    plain = source_of(make_adata(), transform="none")
    with pytest.raises(ValueError, match="counts"):
        ContextDataset(plain, context_size=5, seed=0, augmentation=Augmentation(thinning=0.1))
    dataset = ContextDataset(source, context_size=50, seed=0)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_collate_pads(make_adata: Make) -> None:
    source = source_of(make_adata((33, 20)))
    dataset = ContextDataset(source, context_size=32, seed=0, augmentation=Augmentation())
    contexts = [dataset[i] for i in range(len(dataset))]
    batch = collate(contexts)
    sizes = [len(c.rows) for c in contexts]
    assert len(set(sizes)) > 1
    assert batch.expression.shape == (3, max(sizes), 12)
    assert batch.position.shape == (3, max(sizes), 2)
    assert batch.mask.sum(1).tolist() == sizes
    assert batch.expression.dtype == batch.position.dtype == batch.dropout.dtype == torch.float32
    assert batch.mask.dtype == batch.measured.dtype == torch.bool
    for i, c in enumerate(contexts):
        n = sizes[i]
        np.testing.assert_array_equal(batch.expression[i, :n], c.expression)
        np.testing.assert_array_equal(batch.position[i, :n], c.position)
        np.testing.assert_array_equal(batch.rows[i, :n], c.rows)
        assert batch.mask[i, :n].all()
        assert not batch.mask[i, n:].any()
        assert (batch.expression[i, n:] == 0).all()
        assert (batch.position[i, n:] == 0).all()
        assert (batch.rows[i, n:] == -1).all()
        np.testing.assert_array_equal(batch.measured[i], c.measured)
        np.testing.assert_array_equal(batch.key[i], c.key)
        assert batch.slice_index[i] == c.slice_index
        assert batch.dropout[i] == np.float32(c.dropout)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of a machine with few processors
@pytest.mark.slow
def test_kept_workers_serve_every_cell_once_and_see_the_epoch(make_adata: Make) -> None:
    adata = make_adata()
    dataset = ContextDataset(source_of(adata), context_size=16, seed=3, augmentation=Augmentation())
    loader = DataLoader(
        dataset,
        batch_size=2,
        collate_fn=collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for epoch in range(2):
        dataset.set_epoch(epoch)
        batches = list(loader)
        rows = torch.cat([batch.rows[batch.mask] for batch in batches])
        np.testing.assert_array_equal(rows.sort().values, np.arange(adata.n_obs))
        expected = collate([dataset[0], dataset[1]])
        for left, right in zip(batches[0][:-1], expected[:-1], strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
