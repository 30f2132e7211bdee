"""A model of a dataset on disk: that of the same cells in memory."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from lightning.pytorch.callbacks import Callback

from alphastomics.data import read_dataset
from alphastomics.data.parquet._columns import read_expression
from alphastomics.data.parquet._source import ParquetSource
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics
from files import write_slices

TINY = {"d_model": 16, "n_layers": 1, "n_heads": 2, "random_state": 0}
SHORT = {"max_steps": 3, "context_size": 40, "batch_size": 80, "accelerator": "cpu"}
SHORT |= {"enable_progress_bar": False, "precision": "32-true"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of three slices, of eight contexts: no batch is padded."""
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    tissue = synthetic_tissue(n_slices=3, n_cells=(90, 70, 90), n_genes=25, random_state=0)
    write_slices(tissue, raw)
    preprocess(raw, out, Stage1Options(), Stage2Options(train_ratio=1.0, val_ratio=0.0))
    return out


def in_memory(folder):
    """The cells of a dataset, in its order."""
    source = ParquetSource(folder)
    tables = [pq.read_table(folder / "data" / shard.file) for shard in source.info.shards if shard.split == "train"]
    counts = np.concatenate(
        [sp.csr_matrix(read_expression(table, source.schema.n_genes)).toarray() for table in tables]
    )
    position, names = np.empty((source.n_cells, 2)), np.empty(source.n_cells, dtype=object)
    for cells in source.slices:
        position[cells.rows], names[cells.rows] = cells.position, cells.name
    obs = pd.DataFrame({"slice_id": pd.Categorical(names)}, index=[f"cell_{i}" for i in range(source.n_cells)])
    adata = ad.AnnData(
        sp.csr_matrix(counts.astype(np.float32)), obs=obs, var=pd.DataFrame(index=list(source.schema.genes))
    )
    adata.obsm["spatial"] = position
    return adata


def weights(model):
    return torch.cat([parameter.detach().ravel() for parameter in model.module.parameters()])


def test_a_model_of_a_dataset_matches_a_model_of_its_cells(folder):
    streamed = AlphaSTomics.from_parquet(folder, **TINY)
    adata = in_memory(folder)
    AlphaSTomics.setup_anndata(adata, position_key="spatial", slice_key="slice_id")
    observed = AlphaSTomics(adata, **TINY)
    start = weights(observed).clone()
    torch.testing.assert_close(weights(streamed), start, rtol=1e-5, atol=1e-6)
    for model in (streamed, observed):
        model.train(**SHORT)
    learned = weights(observed) - start
    assert learned.norm() > 0
    assert (weights(streamed) - weights(observed)).norm() < 1e-2 * learned.norm()
    placed = [model.sample(adata[:70].copy(), mode="expr_to_pos") for model in (streamed, observed)]
    np.testing.assert_allclose(
        placed[0].obsm["spatial_reconstructed"], placed[1].obsm["spatial_reconstructed"], rtol=1e-2, atol=1
    )


def test_sections_in_planes_are_placed_as_in_2d(folder, tmp_path):
    tissue = synthetic_tissue(n_slices=3, n_cells=(90, 70, 90), n_genes=25, random_state=0)
    preprocess(
        write_slices(tissue, tmp_path / "raw"),
        tmp_path / "out",
        Stage1Options(z_spacing=4.0),
        Stage2Options(train_ratio=1.0, val_ratio=0.0),
    )
    query, placed = tissue[:40].copy(), []
    for data_dir in (folder, tmp_path / "out"):
        model = AlphaSTomics.from_parquet(data_dir, **TINY)
        model.train(**SHORT)
        model.save(tmp_path / data_dir.name / "model")
        loaded = AlphaSTomics.load(tmp_path / data_dir.name / "model", query.copy())
        placed.append(model.sample(query).obsm["spatial_reconstructed"])
        assert loaded.sample().obsm["spatial_reconstructed"].tobytes() == placed[-1].tobytes()
    np.testing.assert_array_equal(placed[1], np.c_[placed[0], np.zeros(40)])
    cells = read_dataset(tmp_path / "out", "train")
    np.testing.assert_array_equal(cells.obsm["spatial"][:, 2], 4.0 * cells.obs["slice_id"].cat.codes)
    again = model.sample(cells, mode="pos_to_expr", n_steps=1)
    assert again.obsm["spatial"].tobytes() == cells.obsm["spatial"].tobytes()


def test_a_part_at_a_time(folder, tmp_path):
    model = AlphaSTomics.from_parquet(folder, buffer_size=100, **TINY)
    model.train(**SHORT)
    model.save(tmp_path / "model")
    loaded = AlphaSTomics.load(tmp_path / "model", adata=False)
    query = in_memory(folder)[:50].copy()
    expected = model.sample(query, mode="pos_to_expr", n_steps=2)
    np.testing.assert_array_equal(loaded.sample(query, mode="pos_to_expr", n_steps=2).X.toarray(), expected.X.toarray())


def test_no_dataset_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="metadata.json"):
        AlphaSTomics.from_parquet(tmp_path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_contexts_of_a_dataset_grow_and_every_cell_comes_once(folder, num_workers):
    class Watch(Callback):
        def on_train_batch_start(self, trainer, plan, batch, batch_idx):
            seen.setdefault(trainer.current_epoch, []).extend(batch.rows[batch.mask].tolist())
            lengths.append(int(batch.mask.sum(1).max()))

    seen, lengths = {}, []
    arguments = SHORT | {"max_steps": -1, "max_epochs": 4, "num_workers": num_workers, "callbacks": [Watch()]}
    growth = {"context_growth": "geometric", "shortest_context": 10, "growth_steps": 9}
    AlphaSTomics.from_parquet(folder, **TINY).train(**arguments, **growth)
    assert all(sorted(cells) == list(range(250)) for cells in seen.values())
    assert len(seen) == 4
    assert (lengths[0], max(lengths)) == (10, 35)  # a slice of 70 cells in two parts
