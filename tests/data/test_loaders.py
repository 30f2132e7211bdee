"""Loaders hand out every context once, in one order however it is cut, and go on where they were left."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from alphastomics.config import PlanConfig
from alphastomics.data import AnnDataSource, Augmentation, ContextDataset, collate, create_dataloaders, fit_schema
from alphastomics.data._batch import collate_raw
from alphastomics.data._loaders import ContextLoader
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue
from alphastomics.train.draws import DrawContexts


@pytest.fixture(scope="module")
def tissue():
    return synthetic_tissue(n_slices=3, n_cells=(90, 70, 40), n_genes=20, random_state=0)


@pytest.fixture(scope="module")
def folder(tissue, tmp_path_factory):
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    tissue.write_h5ad(raw / "all.h5ad")
    preprocess(raw, out, Stage1Options(), Stage2Options(train_ratio=0.6, val_ratio=0.2, max_shard_size=60))
    return out


def contexts_of(tissue, **kwargs):
    source = AnnDataSource(tissue, fit_schema(tissue), positions=True)
    augmentation = Augmentation(gene_dropout=0.5, thinning=0.5, gene_noise=0.2)
    return ContextDataset(source, context_size=16, seed=0, augmentation=augmentation, targets=True, **kwargs)


def keys(batches):
    return [tuple(getattr(each, "batch", each).key.ravel().tolist()) for each in batches]


def assert_same(one, other):
    for x, y in zip([*one.batch[:-1], *one[1:]], [*other.batch[:-1], *other[1:]], strict=True):
        assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


def test_batches_loaded_ahead_are_the_same(tissue):
    dataset = contexts_of(tissue)
    loader = ContextLoader(dataset, 3)
    plain = list(ContextLoader(dataset, 3, prefetch=False))
    found = list(loader)
    assert len(found) == len(loader) == len(plain)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other)


def test_local_density_is_computed_where_positions_are_an_input(tissue):
    dataset, draw = contexts_of(tissue), DrawContexts(mode="any", config=PlanConfig(), cell_types=False)
    n_given = 0
    for whole, drawn in zip(ContextLoader(dataset, 3), ContextLoader(dataset, 3, draw=draw), strict=True):
        given = drawn.batch.draws.t_pos < 1
        assert torch.equal(drawn.batch.local_density[given], whole.batch.local_density[given])
        assert not bool(drawn.batch.local_density[~given].any())
        n_given += int(given.sum())
    assert 0 < n_given < len(dataset)


@pytest.mark.parametrize("transform", ["log1p", "none"])
@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("thinning", [0.5, 0.0])
def test_batches_in_network_units_are_the_contexts(tissue, transform, targets, thinning):
    cells = tissue[:, :15].copy()
    schema = fit_schema(tissue, transform=transform)
    with pytest.warns(UserWarning, match="5 of 20 genes"):
        source = AnnDataSource(cells, schema, positions=True)
    changes = Augmentation(gene_dropout=0.5, thinning=thinning * (transform == "log1p"), gene_noise=0.2)
    dataset = ContextDataset(source, context_size=33, seed=0, augmentation=changes, targets=targets)
    loader = ContextLoader(dataset, 4)
    for numbers, raw in zip(loader._order, loader, strict=True):
        expected, found = collate([dataset[i] for i in numbers]), loader.encode(raw)
        for name, one, other in zip(expected._fields[:-1], found, expected, strict=False):
            if name in ("expression", "target"):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert bool((one[~found.mask] == 0).all())
            else:
                assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
        assert bool((found.expression[..., 15:] == 0).all())
        assert bool((found.target[..., 15:] == 0).all())


def test_targets_of_a_batch_with_and_without_thinning(tissue):
    dataset = contexts_of(tissue)
    thinned, whole = dataset.raw(0), dataset.raw(1)
    assert thinned.target_factor is not None
    context = whole.context._replace(expression=whole.context.target)
    whole = whole._replace(context=context, factor=whole.target_factor, target_factor=None)
    expected = dataset[1].target
    batch = ContextLoader(dataset, 2).encode(collate_raw([thinned, whole], None))
    np.testing.assert_allclose(batch.target[1, : len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_epochs_differ_and_come_again(tissue):
    loader = ContextLoader(contexts_of(tissue), 3)
    first = list(loader)
    loader.set_epoch(1)
    second = list(loader)
    assert set(keys(first)).isdisjoint(keys(second))
    loader.set_epoch(0)
    for one, other in zip(first, loader, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("n_done", [0, 1, 4])
def test_an_epoch_continues_from_its_state(folder, n_done):
    def loader():
        return create_dataloaders(folder, 32, context_size=16, buffer_size=40, seed=3)[0]

    whole, left = loader(), loader()
    whole.set_epoch(2)
    left.set_epoch(2)
    iterator = iter(left)
    for _ in range(n_done):
        next(iterator)
    state = left.state_dict()
    assert state == {"epoch": 2, "batch": n_done}
    other = loader()
    other.load_state_dict(state)
    assert other.state_dict() == state
    rest = list(other)
    assert keys(rest) == keys(whole)[n_done:]
    assert other.state_dict() == {"epoch": 2, "batch": len(whole)}
    other.set_epoch(3)
    assert len(list(other)) == len(whole)  # the next epoch is a whole one


def test_a_finished_epoch_is_not_repeated(tissue):
    loader = ContextLoader(contexts_of(tissue), 3)
    list(loader)
    other = ContextLoader(contexts_of(tissue), 3)
    other.load_state_dict(loader.state_dict())
    loader.set_epoch(1)
    assert keys(other) == keys(loader)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of a machine with few processors
def test_worker_processes_add_no_empty_batches_and_change_no_global_generator(folder):
    alone, several = (create_dataloaders(folder, 32, context_size=16, num_workers=n)[0] for n in (0, 3))
    before = torch.get_rng_state()
    assert keys(several) == keys(alone)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_abandoned_pass_leaves_no_thread(tissue):
    loader = ContextLoader(contexts_of(tissue), 1)
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("contexts")]


def test_errors_in_a_thread_are_raised(tissue, monkeypatch):
    dataset = contexts_of(tissue)
    loader = ContextLoader(dataset, 2)
    monkeypatch.setattr(AnnDataSource, "values", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_in_memory_take_equally_many_steps_and_every_cell_once(tissue, world_size):
    loaders = [ContextLoader(contexts_of(tissue), 2, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(loader) for loader in loaders]
    assert len({len(each) for each in batches}) == 1
    rows = torch.cat([raw.batch.rows[raw.batch.mask] for each in batches for raw in each])
    assert sorted(rows.tolist()) == list(range(tissue.n_obs))


def test_ranks_of_a_dataset(folder):
    seen = []
    for rank in range(2):
        loader = create_dataloaders(folder, 32, context_size=16, rank=rank, world_size=2)[0]
        seen += [row for batch in loader for row in batch.rows[batch.mask].tolist()]
    assert sorted(seen) == list(range(loader.dataset.source.n_cells))


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """Twelve slices of 48 cells."""
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    synthetic_tissue(n_slices=12, n_cells=48, n_genes=5, random_state=0).write_h5ad(raw / "all.h5ad")
    preprocess(raw, out, Stage1Options(), Stage2Options(train_ratio=1.0, val_ratio=0.0))
    return out


def slices_in_order(folder, **kwargs):
    train, *_ = create_dataloaders(folder, 8, context_size=8, raw=True, **kwargs)
    return [int(each.batch.slice_index) for each in train]


def test_slices_of_a_dataset_are_in_random_order(sections):
    n, n_here = 12 * 6, 6
    same = sum(int((np.diff(slices_in_order(sections, seed=seed)) == 0).sum()) for seed in range(20))
    steps = 20 * (n - 1)
    assert binomtest(same, steps, (n_here - 1) / (n - 1)).pvalue > 0.01


def test_a_small_buffer_keeps_slices_together(sections):
    """The price of a window: with one slice at a time, contexts change their slice as seldom as can be."""
    assert (np.diff(slices_in_order(sections, buffer_size=48)) != 0).sum() == 11


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of a machine with few processors
@pytest.mark.parametrize("n_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_without_shuffling_contexts_are_the_same_in_every_epoch_and_hold_every_cell_once(
    sections, n_workers, world_size
):
    seen, order = [], []
    for rank in range(world_size):
        train, *_ = create_dataloaders(
            sections, 20, context_size=10, shuffle=False, num_workers=n_workers, rank=rank, world_size=world_size
        )
        epochs = []
        for epoch in (0, 3):
            train.set_epoch(epoch)
            epochs.append([batch.rows[batch.mask] for batch in train])
            if not epoch:
                order += [batch.slice_index[batch.mask.any(1)].tolist() for batch in train]
        assert all(torch.equal(one, other) for one, other in zip(*epochs, strict=True))
        seen += torch.cat(epochs[0]).tolist()
    assert sorted(seen) == list(range(12 * 48))
    if world_size == 1 and not n_workers:
        assert sum(order, []) == sorted(sum(order, []))


def test_batches_have_at_most_batch_size_cells(sections):
    train, *_ = create_dataloaders(sections, 16, context_size=512)
    assert {tuple(batch.mask.shape) for batch in train} == {(1, 16)}
