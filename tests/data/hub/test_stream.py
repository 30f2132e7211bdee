"""Contexts of a stream: cells as they are in the dataset, each once an epoch, whoever reads them."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import datasets
from alphastomics.data import AnnDataSource, Augmentation
from alphastomics.data.hub import StreamedContexts, create_dataloaders, read_info
from alphastomics.data.parquet._dataset import DatasetInfo
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue

N_CELLS = (90, 70, 40, 110)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def tissue(request):
    found = synthetic_tissue(n_slices=4, n_cells=N_CELLS, n_genes=20, random_state=0)
    if request.param == "sparse":
        rng = np.random.default_rng(0)
        found.X = (found.X.toarray() if hasattr(found.X, "toarray") else found.X) * (rng.random(found.shape) < 0.1)
        found.X[:, 0] += 1  # no cell without counts
    return found


@pytest.fixture(scope="module")
def folder(tissue, tmp_path_factory):
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    for name, rows in tissue.obs.groupby("slice_id", observed=True).indices.items():
        part = tissue[rows].copy()
        # The second slice lacks two genes.
        (part[:, 2:].copy() if name == "slice_1" else part).write_h5ad(raw / f"{name}.h5ad")
    options = Stage2Options(train_ratio=0.9, val_ratio=0.1, max_shard_size=60)
    preprocess(raw, out, Stage1Options(genes=tuple(tissue.var_names)), options)
    return out


def load(folder, split="train", order=1):
    names = [shard.file for shard in DatasetInfo.read(folder).shards if shard.split == split]
    files = [str(folder / "data" / name) for name in names][::order]
    return datasets.load_dataset("parquet", data_files={split: files}, split=split, streaming=True)


def stream(folder, **options):
    return StreamedContexts(
        load(folder), read_info(folder), "train", **{"context_size": 16, "buffer_size": 80} | options
    )


def split_table(folder, split="train"):
    names = [shard.file for shard in DatasetInfo.read(folder).shards if shard.split == split]
    return [row for name in names for row in pq.read_table(folder / "data" / name).to_pylist()]


def rows_of(batches, kind="subset"):
    seen = Counter()
    for batch in batches:
        rows = batch.rows[:, :1] if kind == "patch" else batch.rows
        seen.update(rows[rows >= 0].tolist())
    return seen


def test_the_columns_are_what_the_name_says(folder, tissue, request):
    columns = pq.read_schema(folder / "data" / "train-00000.parquet").names
    kind = request.node.callspec.params["tissue"]
    assert ("expression" in columns) == (kind == "dense")
    assert ("indices" in columns) == (kind == "sparse")


def test_values_and_places_are_those_of_the_anndata(folder, tissue):
    contexts = stream(folder)
    cells = split_table(folder)
    names = sorted(set(tissue.obs["slice_id"]))
    schema = contexts.info.schema
    for name in names:
        part = tissue[tissue.obs["slice_id"] == name]
        lacking = contexts.info.unmeasured.get(name, ())
        assert (name == "slice_1") == bool(lacking)
        part = part[:, [gene for gene in part.var_names if gene not in lacking]].copy()
        if lacking:
            with pytest.warns(UserWarning, match="unmeasured"):
                memory = AnnDataSource(part, schema, positions=True)
        else:
            memory = AnnDataSource(part, schema, positions=True)
        seen = 0
        for context in contexts:
            if not len(context.rows) or names[context.slice_index] != name:
                continue
            numbers = part.obs_names.get_indexer([cells[row]["cell_id"] for row in context.rows])
            assert (numbers >= 0).all()  # no context mixes slices
            np.testing.assert_allclose(context.expression, memory.expression(numbers), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(context.present, memory.measured)
            places = part.obsm["spatial"][numbers]
            np.testing.assert_allclose(context.position, schema.encode_position(places - places.mean(0)), atol=1e-5)
            seen += len(numbers)
        assert seen == sum(cell["slice_id"] == name for cell in cells)


READERS = [("subset", size, ranks, 0) for size in (20, 80, 10_000) for ranks in (1, 2, 3)]
READERS += [("patch", 80, ranks, 0) for ranks in (1, 2)]
READERS += [("subset", 80, 1, 1), ("subset", 80, 2, 2), ("subset", 10_000, 1, 3)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of a machine with few processors
@pytest.mark.parametrize(("kind", "buffer_size", "world_size", "num_workers"), READERS)
def test_every_cell_comes_once_an_epoch(folder, kind, buffer_size, world_size, num_workers):
    seen, lengths = Counter(), []
    for rank in range(world_size):
        contexts = stream(folder, kind=kind, buffer_size=buffer_size, augmentation=Augmentation(composition=5.0))
        contexts.set_epoch(3)
        loader = contexts.loader(batch_size=32, num_workers=num_workers, rank=rank, world_size=world_size)
        batches = list(loader)
        lengths.append(len(batches))
        assert len(loader) == len(batches)
        seen += rows_of(batches, kind)
    assert sorted(seen) == list(range(len(split_table(folder))))
    assert set(seen.values()) == {1}
    assert len(set(lengths)) == 1


def key(context):
    return tuple(context.rows), context.expression.tobytes(), context.position.tobytes(), tuple(context.key)


def test_contexts_depend_on_seed_and_epoch_alone(folder):
    options = {"augmentation": Augmentation(thinning=0.5, gene_noise=0.1, composition=2.0), "targets": True}

    def draw(epoch=0, world_size=1, **others):
        found = []
        for rank in range(world_size):
            contexts = stream(folder, **options | others)
            contexts.set_epoch(epoch)
            contexts.set_streams(2, rank=rank, world_size=world_size)
            found += [key(context) for context in contexts if len(context.rows)]
        return found

    first = draw()
    assert len(set(first)) == len(first)
    assert len({each[-1] for each in first}) == len(first)  # noise is drawn from these keys
    assert draw() == first
    assert sorted(draw(world_size=3)) == sorted(first)
    for other in (draw(epoch=1), draw(seed=1)):
        assert not set(other) & set(first)


def test_rotations_of_portions_differ(folder):
    """The first contexts of two portions draw from generators of their own."""
    contexts = [context for context in stream(folder, augmentation=Augmentation(gene_dropout=0.9)) if len(context.rows)]
    assert len({context.dropout for context in contexts}) > len(contexts) / 2


def test_an_interrupted_epoch_goes_on(folder):
    whole = list(stream(folder).loader(batch_size=32))
    rest = list(stream(folder).loader(batch_size=32, start=3))
    assert len(rest) == len(whole) - 3
    for one, other in zip(whole[3:], rest, strict=True):
        torch.testing.assert_close(one.expression, other.expression, rtol=0, atol=0)
        torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_an_interrupted_epoch_of_workers_goes_on(folder):
    whole = [batch.rows for batch in stream(folder).loader(batch_size=32, num_workers=2)]
    rest = [batch.rows for batch in stream(folder).loader(batch_size=32, num_workers=2, start=3)]
    assert [rows.tolist() for rows in rest] == [rows.tolist() for rows in whole[3:]]


def test_no_more_is_held_than_the_buffer(folder, monkeypatch):
    from alphastomics.data.hub import _stream

    observed, most = set(), []

    class Watched(_stream.ContextDataset):
        def __init__(self, source, **options):
            super().__init__(source, **options)
            observed.add(source.slices[0].rows[0])
            sizes[source.slices[0].rows[0]] = source.n_cells
            most.append(sum(sizes[each] for each in observed))

        def __del__(self):
            observed.discard(self.source.slices[0].rows[0])

    sizes = {}
    monkeypatch.setattr(_stream, "ContextDataset", Watched)
    assert len(rows_of(stream(folder, buffer_size=80).loader())) == len(split_table(folder))
    assert 0 < max(most) <= 80 + 60
    assert len(most) == len(sizes)  # every portion is read once


def test_consecutive_contexts_come_from_different_slices(folder):
    contexts = stream(folder, buffer_size=10_000, context_size=8)
    same, expected = 0.0, 0.0
    for epoch in range(20):
        contexts.set_epoch(epoch)
        slices = [context.slice_index for context in contexts if len(context.rows)]
        share = np.bincount(slices) / len(slices)
        same += np.mean(np.diff(slices) == 0)
        expected += (share**2).sum()
    assert same / expected == pytest.approx(1.0, abs=0.2)


def test_it_can_be_sent_to_another_process(folder):
    contexts = pickle.loads(pickle.dumps(stream(folder)))
    assert [key(context) for context in contexts] == [key(context) for context in stream(folder)]


def test_loaders_of_a_folder(folder):
    train, validation, test = create_dataloaders(folder, 64, context_size=16, augmentation=Augmentation(), seed=1)
    assert test is None
    assert len(rows_of(train)) == len(split_table(folder))
    assert len(rows_of(validation)) == len(split_table(folder, "validation"))
    assert train.dataset._options["augmentation"] is not None
    assert validation.dataset._options["augmentation"] is None
    batch = next(iter(train))
    assert batch.expression.shape[0] == 4
    assert batch.expression.shape[2] == 20


# -- what cannot be read --------------------------------------------------------------------------------------------------


def test_other_cells_than_announced_are_refused(folder):
    cells = load(folder)
    info = read_info(folder)
    with pytest.raises(ValueError, match=r"train-0000\d\.parquet has other cells than metadata.json says"):
        list(StreamedContexts(cells.filter(lambda cell: cell["position"][0] > 0), info))
    with pytest.raises(ValueError, match="has other cells than metadata.json says"):
        list(StreamedContexts(load(folder, order=-1), info))
    with pytest.raises(ValueError, match="cells streams 1 files and the split 'train' has 7"):
        StreamedContexts(load(folder, "validation"), info)
    with pytest.raises(ValueError, match=r"streaming=True"):
        StreamedContexts(datasets.Dataset.from_dict({"a": [0]}), info)
    with pytest.raises(ValueError, match="the dataset has no cells for test"):
        StreamedContexts(cells, info, "test")


def test_a_damaged_file_of_a_folder_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "data" / "train-00001.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-00001\.parquet is not a complete Parquet file"):
        create_dataloaders(tmp_path / "copy")


def test_arguments_out_of_range_are_refused(folder):
    for options in ({"context_size": 0}, {"buffer_size": 0}, {"seed": -1}, {"kind": "other"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            stream(folder, **options)
    contexts = stream(folder)
    contexts.set_streams(1, num_workers=2)
    with pytest.raises(ValueError, match="another number of workers"):
        next(iter(contexts))


def test_without_the_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "alphastomics\[hub\]"'):
        create_dataloaders(folder)
