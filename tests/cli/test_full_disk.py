"""A full disk, and files without permission: a short error with file and remedy, and no partial output."""

from __future__ import annotations

import errno
import os
import pkgutil
import re
import resource
import shutil
import subprocess
import sys

import anndata as ad
import h5py
import numpy as np
import pytest
import torch

from alphastomics.cli._output import print_error, write_h5ad
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.train.checkpoint import LastCheckpoint
from files import error_line, files_in

TINY = ["--d-model", "16", "--n-layers", "1", "--n-heads", "2", "--context-size", "32", "--batch-size", "64"]
TRAIN = ["train", *TINY, "--mode", "expr_to_pos", "--epochs", "1", "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """``cells.h5ad``, ``cells.pt``, ``raw/``, ``dataset/`` and the run ``outputs/alphastomics``."""
    folder = tmp_path_factory.mktemp("disk")
    tissue = synthetic_tissue(n_slices=2, n_cells=90, n_genes=20, random_state=0)
    tissue.write_h5ad(folder / "cells.h5ad")
    torch.save({"expression": torch.tensor(tissue.X.toarray())}, folder / "cells.pt")
    (folder / "raw").mkdir()
    shutil.copy(folder / "cells.h5ad", folder / "raw" / "cells.h5ad")
    (folder / "genes.txt").write_text("gene_0\ngene_1\n")
    (folder / "config.yaml").write_text("model:\n  d_model: 16\n")
    data, cells = str(folder / "dataset"), str(folder / "cells.h5ad")
    assert main(["preprocess", "--input-dir", str(folder / "raw"), "--output-dir", data]) == 0
    assert main([*TRAIN, "--input-data", cells, "--output-dir", str(folder / "outputs")]) == 0
    return folder


@pytest.fixture
def folder(place, monkeypatch):
    """The same, as the current one, which is left as it was found."""
    monkeypatch.chdir(place)
    before = files_in(place)
    yield place
    assert files_in(place) == before


MODEL = ["--checkpoint", "outputs/alphastomics/checkpoints/model", "--input-data", "cells.h5ad", "--accelerator", "cpu"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["sample"], "x.h5ad"),
        (["sample"], "x.parquet"),
        (["extract"], "x.h5ad"),
        (["extract"], "x.npz"),
        (["extract"], "x.parquet"),
        (["test"], "x.json"),
    ],
)
def test_a_result_larger_than_the_disk(folder, tmp_path, capsys, command, name, files_of_at_most):
    path = tmp_path / name
    path.write_text("old")
    with files_of_at_most(100):
        assert main([*command, *MODEL, "--output", str(path)]) == 1
    assert re.search(rf"{path} .*File too large", error_line(capsys))
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_process_does_not_crash_at_its_end(folder, tmp_path):
    command = [sys.executable, "-m", "alphastomics", "extract", *MODEL, "--output", str(tmp_path / "x.h5ad")]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    done = subprocess.run(command, preexec_fn=limit, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert done.returncode == 1
    lines = [
        line for line in done.stderr.splitlines() if line.strip() and not line.startswith(("Embedding", "Values of"))
    ]
    assert len(lines) == 1
    assert lines[0].startswith("alphastomics: ")


def entries_of(path):
    """Everything in an HDF5 file, by name."""
    entries = {}
    with h5py.File(path) as file:

        def note(name, entry):
            values = repr(np.asarray(entry[()]).tolist()) if isinstance(entry, h5py.Dataset) else None
            entries[name] = values, {key: np.asarray(value).tolist() for key, value in entry.attrs.items()}

        note("/", file)
        file.visititems(note)
    return entries


def test_files_made_in_memory_equal_those_of_anndata(tmp_path):
    tissue = synthetic_tissue(n_slices=2, n_cells=30, n_genes=5, random_state=0)
    tissue.raw = tissue.copy()
    tissue.layers["dense"] = tissue.X.toarray()
    tissue.uns["a"] = {"b": np.arange(3), "c": "text"}
    tissue.obs["name"] = [f"cell of {i % 2}" for i in range(tissue.n_obs)]
    for adata in (tissue, ad.AnnData(obs=tissue.obs, obsm={"z": np.ones((60, 2))})):
        write_h5ad(tmp_path / "ours.h5ad", adata.copy())
        adata.copy().write_h5ad(tmp_path / "theirs.h5ad")
        assert entries_of(tmp_path / "ours.h5ad") == entries_of(tmp_path / "theirs.h5ad")


@pytest.mark.parametrize(("n_bytes", "name"), [(10, "e/config.yaml"), (5_000, "e/checkpoints/last.ckpt")])
def test_a_run_without_room_for_its_first_checkpoint_leaves_its_name_free(
    folder, tmp_path, capsys, n_bytes, name, files_of_at_most
):
    command = [*TRAIN, "--input-data", "cells.h5ad", "--output-dir", str(tmp_path), "--exp-name", "e"]
    with files_of_at_most(n_bytes):
        assert main(command) == 1
    assert re.search(rf"{tmp_path}/{name} .*File too large", error_line(capsys))
    assert list(tmp_path.iterdir()) == []
    assert main(command) == 0


def test_a_run_without_room_for_its_next_checkpoint_keeps_the_first(folder, tmp_path, capsys, monkeypatch):
    save = LastCheckpoint._save

    def once(self, trainer):
        if self.path.is_file():
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
        save(self, trainer)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(LastCheckpoint, "_save", once)
    command = [*TRAIN, "--input-data", "cells.h5ad", "--output-dir", str(tmp_path), "--exp-name", "e"]
    command += ["--checkpoint-every", "1"]
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(rf"{tmp_path}/e/checkpoints/last\.ckpt .*File too large", error_line(capsys))
    assert torch.load(tmp_path / "e/checkpoints/last.ckpt", weights_only=True)["global_step"] >= 1
    monkeypatch.setattr(LastCheckpoint, "_save", save)
    assert main(["train", "--resume", "--output-dir", str(tmp_path), "--exp-name", "e"]) == 0


# -- errors of the system ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "space"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "writable"),
        (errno.ENOTDIR, "path"),
        (errno.ENOENT, "path"),
    ],
)
def test_system_errors_get_a_remedy(number, remedy, capsys):
    print_error(OSError(number, os.strerror(number), "a/b.json"))
    assert re.search(rf"^alphastomics: a/b\.json.*{os.strerror(number)}.*{remedy}", error_line(capsys))
    print_error(OSError(number, os.strerror(number)))
    assert re.search(rf"^alphastomics: {os.strerror(number)}.*{remedy}", error_line(capsys))
    print_error(OSError("a sentence"))
    assert error_line(capsys) == "alphastomics: a sentence"
    print_error(RuntimeError("give checkpoint=… and resume='last'"))
    assert error_line(capsys) == "alphastomics: give --checkpoint … and --resume last"


# -- files without permission ------------------------------------------------------------------------------------------


@pytest.fixture
def forbid():
    """Take permissions away, until the test is over; as root, which they do not bind, there is nothing to test."""
    before = {}

    def forbid(path, mode=0):
        before[path] = path.stat().st_mode
        path.chmod(mode)
        if os.access(path, os.R_OK if mode == 0 else os.W_OK):
            pytest.skip("permissions do not bind this user")

    yield forbid
    for path, mode in before.items():
        path.chmod(mode)


@pytest.mark.parametrize(
    "tokens",
    [
        ["extract", *MODEL, "--output", "OUT/x.npz"],
        ["sample", *MODEL, "--output", "OUT/x.h5ad"],
        ["test", *MODEL, "--output", "OUT/x.json"],
        [*TRAIN, "--input-data", "cells.h5ad", "--output-dir", "OUT"],
        ["demo", "--output-dir", "OUT/demo"],
        ["compare", "--input-data", "cells.h5ad", "--output-dir", "OUT/comparison"],
    ],
)
def test_unwritable_outputs_are_errors_before_the_work(folder, tmp_path, capsys, forbid, monkeypatch, tokens):
    for name in ("load", "setup_anndata"):
        monkeypatch.setattr(f"alphastomics.model.AlphaSTomics.{name}", lambda *args, **kwargs: pytest.fail("too late"))
    forbid(tmp_path, 0o500)
    assert main([token.replace("OUT", str(tmp_path)) for token in tokens]) == 1
    assert re.search(rf"{tmp_path}.*(Permission denied|read-only)", error_line(capsys))


DATA = ["--data-dir", "dataset"]


@pytest.mark.parametrize(
    ("path", "tokens", "message"),
    [
        (
            "genes.txt",
            ["stage1", "--input-dir", "raw", "--output-dir", "o", "--gene-list-file", "genes.txt"],
            "genes.txt",
        ),
        ("raw", ["preprocess", "--input-dir", "raw", "--output-dir", "o"], "raw"),
        ("raw", ["stage1", "--input-dir", "raw", "--output-dir", "o"], "raw"),
        ("dataset/metadata.json", [*TRAIN, *DATA, "--exp-name", "x"], "metadata.json"),
        ("dataset/data/test.parquet", [*TRAIN, *DATA, "--exp-name", "x"], "test.parquet"),
        ("config.yaml", [*TRAIN, "--input-data", "cells.h5ad", "--config", "config.yaml"], "config.yaml"),
        ("cells.h5ad", ["extract", *MODEL, "--output", "x.npz"], "cells.h5ad"),
        ("cells.pt", ["extract", *MODEL[:3], "cells.pt", "--output", "x.npz"], "cells.pt"),
        ("outputs/alphastomics/checkpoints/last.ckpt", [*TRAIN, "--resume"], "last.ckpt"),
        ("outputs/alphastomics/checkpoints/model/config.json", ["extract", *MODEL, "--output", "x.npz"], "config.json"),
        (
            "outputs/alphastomics/checkpoints/model/model.safetensors",
            ["extract", *MODEL, "--output", "x.npz"],
            "model.safetensors",
        ),
    ],
)
def test_unreadable_files_are_not_reported_as_damaged(place, capsys, forbid, monkeypatch, path, tokens, message):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    forbid(place / path)
    assert main(tokens) == 1
    line = error_line(capsys)
    assert re.search(message, line)
    assert re.search(
        r"; check (its|the) permissions|; see to the permissions|; check that it is complete and readable", line
    )
    assert not re.search("damaged|truncated|make the dataset again|no .h5ad file", line)
    (place / path).chmod(0o700)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("x.parquet", "alphastomics.data.parquet._files.open_parquet"),
        ("x.parquet", "alphastomics.data.parquet._files.footer_checksum"),
        ("x.json", "alphastomics.data.parquet._files.read_json"),
        ("x.ckpt", "alphastomics.model._checkpoint.read_checkpoint"),
        ("x.pt", "alphastomics.cli._tensors._load"),
    ],
)
def test_readers_report_unreadable_files(tmp_path, monkeypatch, name, read):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name))

    (tmp_path / name).write_text("x")
    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr("torch.load", fail)
    monkeypatch.setattr("pathlib.Path.open", fail)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", fail)
    with pytest.raises(PermissionError, match=rf"{name} .*Permission denied"):
        pkgutil.resolve_name(read)(tmp_path / name)


def test_a_folder_inside_a_file_is_an_error(folder, capsys):
    for tokens in (
        [*TRAIN, "--input-data", "cells.h5ad", "--output-dir", "cells.h5ad"],
        ["extract", *MODEL, "--output", "cells.h5ad/x.npz"],
        ["demo", "--output-dir", "cells.h5ad"],
    ):
        assert main(tokens) == 1
        assert re.search(r"cells\.h5ad\S* .*(is a file|File exists)", error_line(capsys))
