"""Invalid input, in Python and on the command line: a short error with the name of the file and a remedy, and no partial output."""

from __future__ import annotations

import os
import re

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp

from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess, stage1, stage2
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from files import files_in, write_slices


@pytest.fixture(scope="module")
def _tissue():
    return synthetic_tissue(n_slices=2, n_cells=60, n_genes=20, random_state=0)


@pytest.fixture
def raw(_tissue, tmp_path):
    """A folder with a file for each of two slices, and one of another program."""
    folder = write_slices(_tissue, tmp_path / "raw")
    (folder / "notes.txt").write_text("mine")
    return folder


def error_line(capsys):
    """The only line on stderr besides progress."""
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    (line,) = [line for line in lines if line.strip() and not line.startswith(("Reading slices", "Writing files"))]
    assert line.startswith("alphastomics: ")
    return line


def rewrite(change):
    """Change one of the files as an AnnData."""

    def changed(folder):
        adata = ad.read_h5ad(folder / "slice_1.h5ad")
        other = change(adata)
        (adata if other is None else other).write_h5ad(folder / "slice_1.h5ad")

    changed.__name__ = change.__name__
    return changed


def reopen(change):
    """Change one of the files as HDF5."""

    def changed(folder):
        with h5py.File(folder / "slice_1.h5ad", "r+") as file:
            change(file)

    changed.__name__ = change.__name__
    return changed


def cut_at(share):
    def cut(folder):
        path = folder / "slice_1.h5ad"
        os.truncate(path, int(path.stat().st_size * share))

    cut.__name__ = f"cut_at_{share}"
    return cut


def replace(file, name, values, **options):
    attributes = dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, data=values, **options).attrs.update(attributes)


def damaged_values(folder):
    """The file opens, its names are there, and its values are not."""
    path = folder / "slice_1.h5ad"
    with h5py.File(path, "r+") as file:
        replace(
            file,
            "X/data",
            np.random.default_rng(0).poisson(3, len(file["X/data"])) + 1.0,
            compression="gzip",
            chunks=(64,),
        )
        chunk = file["X/data"].id.get_chunk_info(3)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(data)


def no_file(folder):
    for path in folder.glob("*.h5ad"):
        path.unlink()


def no_hdf5(folder):
    (folder / "slice_1.h5ad").write_text("cell,x,y\n")


def a_folder(folder):
    (folder / "other.h5ad").mkdir()


@reopen
def no_h5ad(file):
    del file["obs"]


@reopen
def fewer_positions(file):
    replace(file, "obsm/spatial", file["obsm/spatial"][:-5])


@reopen
def other_expression(file):
    del file["X"]
    file["X"] = np.ones((60, 19), dtype=np.float32)


@reopen
def genes_out_of_range(file):
    indices = file["X/indices"][:]
    indices[10] = 10_000
    replace(file, "X/indices", indices)


@reopen
def fewer_values(file):
    replace(file, "X/data", file["X/data"][:-10])


@rewrite
def other_axes(adata):
    adata.obsm["spatial"] = np.column_stack([adata.obsm["spatial"], np.zeros(adata.n_obs)])


@rewrite
def no_positions(adata):
    adata.obsm["X_umap"] = adata.obsm.pop("spatial")


@rewrite
def positions_missing(adata):
    adata.obsm["spatial"][7] = np.nan


@rewrite
def positions_of_text(adata):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ad.AnnData, "_check_dimensions", lambda *_: None, raising=False)
        adata.obsm["spatial"] = np.array([["left", "right"]] * adata.n_obs)


@rewrite
def no_cells(adata):
    return adata[:0].copy()


@rewrite
def no_genes(adata):
    return adata[:, :0].copy()


@rewrite
def genes_twice(adata):
    adata.var_names = ["gene_0", *adata.var_names[:-1]]


@rewrite
def values_missing(adata):
    adata.X = sp.csr_matrix(adata.X, dtype=np.float32)
    adata.X.data[9] = np.nan


BAD = [
    (no_file, r"raw.*\.h5ad"),
    (no_hdf5, r"slice_1\.h5ad"),
    (a_folder, r"other\.h5ad"),
    (no_h5ad, r"slice_1\.h5ad.*obs.*var"),
    *((cut_at(share), r"slice_1\.h5ad") for share in (0, 0.01, 0.3, 0.6, 0.99)),
    (damaged_values, r"slice_1\.h5ad"),
    (genes_out_of_range, r"slice_1\.h5ad"),
    (fewer_values, r"slice_1\.h5ad"),
    (fewer_positions, r'slice_1\.h5ad.*obsm\["spatial"\].*\(55, 2\).*\(60, 2\).*position.key'),
    (other_expression, r"slice_1\.h5ad.*\(60, 19\).*60 cells.*20 genes"),
    (other_axes, r'obsm\["spatial"\].* 2 .*slice_0\.h5ad.* 3 .*slice_1\.h5ad'),
    (no_positions, r'slice_1\.h5ad.*obsm\["spatial"\].*X_umap.*position.key'),
    (positions_missing, r'slice_1\.h5ad.*obsm\["spatial"\].* 1 cells.* 7\b'),
    (positions_of_text, r"slice_1\.h5ad.*could not convert"),
    (no_cells, r"slice_1\.h5ad.*cells"),
    (no_genes, r"slice_1\.h5ad.*genes"),
    (genes_twice, r"slice_1\.h5ad.* 1 gene.*'gene_0'"),
    (values_missing, r"slice_1\.h5ad.*NaN.*gene .* cell "),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[change.__name__ for change, _ in BAD])
def test_invalid_files_are_errors(raw, tmp_path, capsys, change, message):
    change(raw)
    before, out = files_in(raw), tmp_path / "out"
    out.mkdir()
    (out / "mine.tmp").write_text("of somebody else")
    with pytest.raises((ValueError, KeyError, OSError), match=message):
        preprocess(raw, out, Stage1Options(), Stage2Options())
    capsys.readouterr()
    assert main(["preprocess", "--input-dir", str(raw), "--output-dir", str(out)]) == 1
    assert re.search(message, error_line(capsys))
    assert files_in(raw) == before
    left = {path.name for path in out.rglob("*") if path.is_file()}
    assert left <= {"mine.tmp", "stage1.json", "00000.arrow", "00000.json"}  # slices that are whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gene_0\ngene_1\nGENE_2\n", r"raw.*'GENE_2'"),
        ("gene_0\ngene_1\ngene_0\n", "genes .*'gene_0'"),
        ("\n \n", "genes .*empty"),
        (b"\xff\xfe\x00\x80", r"genes\.txt.*--gene-list-file"),
    ],
)
def test_invalid_gene_lists_are_errors(raw, tmp_path, capsys, text, message):
    path = tmp_path / "genes.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tokens = ["preprocess", "--input-dir", str(raw), "--output-dir", str(tmp_path / "out")]
    assert main([*tokens, "--gene-list-file", str(path)]) == 1
    assert re.search(message, error_line(capsys))
    assert not (tmp_path / "out").exists()


def test_invalid_gene_lists_raise_in_python(raw, tmp_path):
    with pytest.raises(ValueError, match="genes .*'gene_0'"):
        Stage1Options(genes=("gene_0", "gene_0"))
    with pytest.raises(ValueError, match="'one', 'two'"):
        stage1(raw, tmp_path / "out", Stage1Options(genes=("gene_0", "one", "two")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ratios", [(0.8, 0.3), (-0.1, 0.1), (1.2, 0.0), (0.5, -0.2), (0.0, 0.5), ("nan", 0.1)])
def test_invalid_ratios_are_errors(raw, tmp_path, capsys, ratios):
    train, validation = map(str, ratios)
    tokens = ["preprocess", "--input-dir", str(raw), "--output-dir", str(tmp_path / "out")]
    assert main([*tokens, f"--train-ratio={train}", f"--val-ratio={validation}"]) in (1, 2)
    assert re.search("(train|val).ratio", error_line(capsys))
    with pytest.raises(ValueError, match="_ratio="):
        Stage2Options(train_ratio=float(train), val_ratio=float(validation))
    assert not (tmp_path / "out").exists()


def test_names_of_cells_may_repeat(raw, tmp_path):
    """They are text that goes along; what counts is that every cell is there."""
    rewrite(lambda adata: setattr(adata, "obs_names", ["cell"] * adata.n_obs))(raw)
    with pytest.warns(UserWarning, match="not unique"):
        ad.read_h5ad(raw / "slice_1.h5ad")
    preprocess(raw, tmp_path / "out", Stage1Options(), Stage2Options())
    from alphastomics.data.parquet._dataset import DatasetInfo

    assert sum(shard.n_cells for shard in DatasetInfo.read(tmp_path / "out").shards) == 120


# -- folders that cannot be written to --------------------------------------------------------------------------------


def a_file(folder):
    folder.write_text("mine")
    return folder


def below_a_file(folder):
    folder.write_text("mine")
    return folder / "out"


def read_only(folder):
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("permissions do not bind this user")
    return folder / "out"


@pytest.mark.parametrize("place", [a_file, below_a_file, read_only])
def test_an_invalid_folder_is_an_error(raw, tmp_path, capsys, place):
    out = place(tmp_path / "there")
    message = rf"the folder {out}\S* cannot be created \(.*and repeat the command"
    assert main(["preprocess", "--input-dir", str(raw), "--output-dir", str(out)]) == 1
    assert re.search(message, error_line(capsys))
    with pytest.raises(OSError, match=message):
        stage1(raw, out, Stage1Options())
    stage1(raw, tmp_path / "slices", Stage1Options())
    with pytest.raises(OSError, match=message):
        stage2([tmp_path / "slices"], out, Stage2Options())
    assert (tmp_path / "there").is_dir() or (tmp_path / "there").read_text() == "mine"


def test_an_unreadable_file_is_an_error(raw, tmp_path, capsys):
    path = raw / "slice_1.h5ad"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("permissions do not bind this user")
    assert main(["stage1", "--input-dir", str(raw), "--output-dir", str(tmp_path / "out")]) == 1
    assert re.search(r"slice_1\.h5ad.*denied", error_line(capsys))


def test_existing_folders_named_data_are_kept(raw, tmp_path, capsys):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "mine.csv").write_text("mine")
    assert main(["preprocess", "--input-dir", str(raw), "--output-dir", str(out)]) == 1
    assert re.search(r"out/data/\S+", error_line(capsys))
    assert (out / "data" / "mine.csv").read_text() == "mine"
    assert not (out / "metadata.json").exists()


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_full_disk_is_an_error_and_finished_files_are_kept(raw, tmp_path, capsys, stage, files_of_at_most):
    straight, out = tmp_path / "straight", tmp_path / "out"
    tokens = ["preprocess", "--input-dir", str(raw), "--output-dir"]
    assert main([*tokens, str(straight)]) == 0
    slices = out / "_intermediate_slices"
    if stage == "stage2":
        stage1(raw, slices, Stage1Options())
    name = {"stage1": "_intermediate_slices/00000.arrow", "stage2": "data/train.parquet"}[stage]
    limit = (straight / name).stat().st_size * 2 // 3
    before = files_in(out) if out.exists() else {}
    capsys.readouterr()
    with files_of_at_most(limit):
        assert main([*tokens, str(out)]) == 1
    message = r"0000\d.arrow|train.parquet"
    assert re.search(rf"({message}) .*File too large", error_line(capsys))
    left = files_in(out)
    assert before.items() <= left.items()
    assert not (out / "metadata.json").exists()
    assert not [path for path in left if path.endswith((".tmp", ".parquet"))]
    assert main([*tokens, str(out)]) == 0
    assert files_in(out) == files_in(straight)
