"""Cells of a dataset on disk are those of an AnnData: the same values, places and contexts, whatever is held in memory."""

from __future__ import annotations

import errno
import json
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from alphastomics.data import AnnDataSource, Augmentation, ContextDataset, collate
from alphastomics.data._order import WindowSampler
from alphastomics.data.parquet._source import ParquetSource
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue


@pytest.fixture(scope="module")
def tissue():
    return synthetic_tissue(n_slices=4, n_cells=(90, 70, 40, 110), n_genes=20, random_state=0)


@pytest.fixture(scope="module")
def folder(tissue, tmp_path_factory):
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    tissue.write_h5ad(raw / "all.h5ad")
    preprocess(raw, out, Stage1Options(), Stage2Options(train_ratio=1.0, val_ratio=0.0, max_shard_size=60))
    return out


def order_of(source, tissue):
    """Rows of the AnnData in the order of the source."""
    names = []
    for path in source._paths:
        names += pq.read_table(path, columns=["cell_id"]).column(0).to_pylist()
    return tissue.obs_names.get_indexer(names)


@pytest.mark.parametrize("buffer_size", [1, 100, 10_000])
def test_values_and_positions_match_the_anndata(folder, tissue, buffer_size):
    source = ParquetSource(folder, buffer_size=buffer_size)
    memory = AnnDataSource(tissue, source.schema, positions=True)
    rows = order_of(source, tissue)
    assert sorted(rows) == list(range(tissue.n_obs))
    chosen = np.random.default_rng(0).permutation(source.n_cells)[:150]
    np.testing.assert_array_equal(source.expression(chosen), memory.expression(rows[chosen]))
    np.testing.assert_array_equal(source.library_size(chosen), memory.library_size(rows[chosen]))
    assert [cells.name for cells in source.slices] == [cells.name for cells in memory.slices]
    for cells in source.slices:
        np.testing.assert_array_equal(cells.position, tissue.obsm["spatial"][rows[cells.rows]])
    assert source.has_counts
    assert source.measured.all()
    observed = sum(source.groups[i].n_cells for i in source._cache)
    assert observed <= max(buffer_size, max(group.n_cells for group in source.groups))


def test_counts_are_thinned(folder):
    source = ParquetSource(folder)
    rows = np.arange(200)
    thinned = source.values(rows, thinning=0.5, rng=np.random.default_rng(0))[0]
    again = source.values(rows, thinning=0.5, rng=np.random.default_rng(0))[0]
    np.testing.assert_array_equal(thinned, again)
    assert np.abs(thinned - source.values(rows)[0]).max() > 0
    with pytest.raises(ValueError, match="rng"):
        source.values(rows, thinning=0.5)


def test_a_source_can_be_sent_to_another_process(folder):
    source = ParquetSource(folder)
    source.expression(np.arange(10))
    other = pickle.loads(pickle.dumps(source))
    assert not other._cache
    np.testing.assert_array_equal(other.expression(np.arange(10)), source.expression(np.arange(10)))


@pytest.fixture(scope="module")
def dense_folder(tissue, tmp_path_factory):
    """A dataset of values that are not counts, most of them not 0."""
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dense")
    values = tissue.copy()
    values.X = np.log1p(tissue.X.toarray() + 0.5).astype(np.float32)
    values.write_h5ad(raw / "all.h5ad")
    preprocess(raw, out, Stage1Options(log_normalize=False), Stage2Options(train_ratio=1.0, val_ratio=0.0))
    return out


def rewritten(folder, to, **options):
    """The same dataset with files that were not written by this package."""
    import shutil

    shutil.copytree(folder, to)
    for path in (to / "data").iterdir():
        file = pq.ParquetFile(path)
        with pq.ParquetWriter(path.with_suffix(".new"), file.schema_arrow, **options) as writer:
            for i in range(file.num_row_groups):
                table = file.read_row_group(i)
                writer.write_table(table, row_group_size=table.num_rows)
        path.with_suffix(".new").replace(path)
    described = json.loads((to / "metadata.json").read_text())
    for shard in described["shards"]:
        shard["footer"] = ""  # nothing is known of the ends of these files
    (to / "metadata.json").write_text(json.dumps(described))
    return to


def read_twice(source, rows):
    """Expression as it is decoded and as it is read again."""
    decoded = source.expression(rows)
    np.testing.assert_array_equal(source.expression(rows), decoded)
    return decoded


@pytest.mark.parametrize("name", ["folder", "dense_folder"])
@pytest.mark.parametrize("options", [{}, {"compression": "none", "data_page_size": 256, "use_dictionary": False}])
def test_files_stored_in_another_way_are_read_by_pyarrow_alone(request, name, options, tmp_path):
    written = request.getfixturevalue(name)
    source, other = ParquetSource(written), ParquetSource(rewritten(written, tmp_path / "other", **options))
    rows = np.random.default_rng(0).permutation(source.n_cells)[:200]
    np.testing.assert_array_equal(read_twice(other, rows), read_twice(source, rows))
    assert source._mapped
    assert not source._cache
    assert other._cache
    assert not other._mapped


def test_empty_cells_are_not_mistaken_for_other_bytes(tissue, tmp_path):
    """With the first cells empty, decoded values cannot show that a column has one page."""
    empty = tissue.copy()
    empty.X = empty.X.toarray()
    empty.X[np.arange(empty.n_obs) % 20 != 19] = 0
    (tmp_path / "raw").mkdir()
    empty.write_h5ad(tmp_path / "raw" / "all.h5ad")
    preprocess(tmp_path / "raw", tmp_path / "out", Stage1Options(), Stage2Options(train_ratio=1.0, val_ratio=0.0))
    other = rewritten(tmp_path / "out", tmp_path / "other", compression="none", data_page_size=64, use_dictionary=False)
    for folder in (tmp_path / "out", other):
        source = ParquetSource(folder)
        memory = AnnDataSource(empty, source.schema, positions=True)
        found = source.values(np.arange(source.n_cells))[0]
        np.testing.assert_array_equal(found, memory.values(order_of(source, empty))[0])


@pytest.mark.parametrize("name", ["folder", "dense_folder"])
def test_files_of_preprocess_are_mapped(request, name):
    source = ParquetSource(request.getfixturevalue(name))
    read_twice(source, np.arange(source.n_cells))
    assert set(source._mapped) == set(range(len(source.groups)))


def test_several_threads_read_at_once(folder):
    source = ParquetSource(folder, buffer_size=1)
    expected = {cells.name: source.expression(cells.rows) for cells in source.slices}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(source.expression, [cells.rows for cells in source.slices] * 20))
    for cells, values in zip(source.slices * 20, found, strict=True):
        np.testing.assert_array_equal(values, expected[cells.name])


# One process reads in every way; several, which are slow to start, in one of them.
READERS = [(kind, size, ranks, 0) for kind in ("subset", "patch") for size in (70, 10_000) for ranks in (1, 2)]
READERS += [("subset", 70, ranks, n_workers) for ranks, n_workers in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3))]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of a machine with few processors
@pytest.mark.parametrize(("kind", "buffer_size", "world_size", "n_workers"), READERS)
def test_every_cell_comes_once_an_epoch(folder, kind, buffer_size, world_size, n_workers):
    seen, batches = Counter(), []
    for rank in range(world_size):
        source = ParquetSource(folder, buffer_size=buffer_size)
        dataset = ContextDataset(source, context_size=32, kind=kind, seed=0, augmentation=Augmentation(composition=5.0))
        streams = world_size * max(1, n_workers)
        dataset.set_streams(streams, 2)
        dataset.set_epoch(3)
        sampler = WindowSampler(len(dataset), 2, rank=rank, world_size=world_size, n_workers=max(1, n_workers))
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=n_workers)
        batches.append(0)
        for batch in loader:
            batches[-1] += 1
            rows = batch.rows[:, :1] if kind == "patch" else batch.rows
            seen.update(rows[rows >= 0].tolist())
    assert sorted(seen) == list(range(source.n_cells))
    assert set(seen.values()) == {1}
    assert len(set(batches)) == 1


def test_a_context_costs_few_reads(folder, monkeypatch):
    source = ParquetSource(folder, buffer_size=150)
    reads = []
    load = ParquetSource._load
    monkeypatch.setattr(ParquetSource, "_load", lambda self, group: (reads.append(group), load(self, group))[1])
    dataset = ContextDataset(source, context_size=32, seed=0)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for i in range(len(dataset)):
            dataset[i]
    assert len(reads) <= 1.2 * 3 * len(source.groups)  # forgetting what was used least lately is nearly the best


def test_each_file_is_open_once(folder):
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("the system does not list open files")
    source = ParquetSource(folder)
    before = len(list(descriptors.iterdir()))
    source.values(np.arange(source.n_cells))
    assert len(list(descriptors.iterdir())) - before <= len(list((folder / "data").iterdir()))


def test_too_many_open_files_are_an_error_with_the_remedy(folder, monkeypatch):
    source = ParquetSource(folder)

    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("alphastomics.data.parquet._source.mmap.mmap", fail)
    with pytest.raises(OSError, match=r"Too many open files.*ulimit -n.*--max-shard-size"):
        source.values(np.arange(1))


# -- what is not whole ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def first_file(folder):
    return min((folder / "data").iterdir())


def test_a_folder_without_a_dataset_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metadata\.json.*alphastomics preprocess"):
        ParquetSource(tmp_path)


def read_all(folder):
    source = ParquetSource(folder)
    return [source.expression(cells.rows) for cells in source.slices]


@pytest.mark.parametrize("column", ["slice_id", "library_size", "position", "expression"])
def test_a_flipped_byte_is_found_by_the_checksum_of_its_page(copy, column):
    read_all(copy)
    path = first_file(copy)
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    (chunk,) = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=path.name):
        read_all(copy)


def test_splits_without_cells_are_an_error(folder):
    with pytest.raises(ValueError, match="cells for test"):
        ParquetSource(folder, ("test",))
