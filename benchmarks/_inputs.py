"""Random damage to, and crafted versions of, the five kinds of files that the package reads."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from alphastomics.cli._tensors import read_tensors
from alphastomics.config import Config
from alphastomics.data import create_dataloaders, read_dataset, read_parquet
from alphastomics.data._h5ad import read_h5ad
from alphastomics.data.parquet._files import footer_checksum
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess, stage1
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from benchmarks._mutations import ODD_VALUES, as_json, mutate_bytes, mutate_document, mutate_values

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2}
BRIEF = {"max_epochs": 1, "context_size": 32, "batch_size": 64, "accelerator": "cpu", "precision": "32-true"}


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def make_tissue() -> AnnData:
    """Two small slices."""
    return synthetic_tissue(n_slices=2, n_cells=40, n_genes=12, random_state=0)


def trap(folder: Path, rng: np.random.Generator) -> bytes:
    """A pickle, plain or in a torch archive, that creates a file."""
    attack: Any = Trap(folder / "executed")
    values = [attack, {"expression": torch.ones(3, 12), "positions": attack}, {"state_dict": attack}][
        int(rng.integers(3))
    ]
    if rng.random() < 0.5:
        return pickle.dumps(values, protocol=int(rng.integers(6)))
    target = BytesIO()
    torch.save(values, target, _use_new_zipfile_serialization=bool(rng.random() < 0.7))
    return target.getvalue()


class ModelFolders:
    """Saved models: ``config.json`` and ``model.safetensors``."""

    def __init__(self, folder: Path) -> None:
        self.base, self.cells = folder / "model", make_tissue()
        tissue = self.cells.copy()
        AlphaSTomics.setup_anndata(tissue, slice_key="slice_id")
        model = AlphaSTomics(tissue, mode="any", **SMALL)
        model.train(**BRIEF, enable_progress_bar=False, checkpoint=folder / "last.ckpt")
        model.save(self.base)
        self.config = json.loads((self.base / "config.json").read_text())

    def make(self, folder: Path, rng: np.random.Generator) -> None:
        shutil.copytree(self.base, folder, dirs_exist_ok=True)
        if rng.random() < 0.3:
            (folder / "with_data").touch()
        kind, weights = rng.random(), folder / "model.safetensors"
        if kind < 0.6:
            self._mutate_config(folder / "config.json", rng)
        elif kind < 0.9:
            weights.write_bytes(mutate_safetensors(weights.read_bytes(), rng))
        else:
            name = ("config.json", "model.safetensors", "model.pt", "pytorch_model.bin")[int(rng.integers(4))]
            (folder / name).write_bytes(trap(folder, rng))
            if rng.random() < 0.5:
                (folder / "config.json").unlink()

    def _mutate_config(self, path: Path, rng: np.random.Generator) -> None:
        """Change the configuration anywhere, or in one of its sections."""
        part = ("init", "frame", "history", "registry", None, None)[int(rng.integers(6))]
        if part is None:
            path.write_bytes(mutate_document(self.config, as_json, rng))
        else:
            path.write_text(as_json(self.config | {part: mutate_values(self.config[part], rng)}))

    def read(self, folder: Path) -> None:
        attached = self.cells.copy() if (folder / "with_data").exists() else False
        model = AlphaSTomics.load(folder, adata=attached, accelerator="cpu")
        if model.is_trained:
            model.sample(self.cells[:20].copy(), mode="expr_to_pos")


def mutate_safetensors(data: bytes, rng: np.random.Generator) -> bytes:
    """A safetensors file with its bytes, those of its header, or the values of its header changed."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    kind = rng.random()
    if kind < 0.3:
        return mutate_bytes(data, rng)
    if kind < 0.5:
        return mutate_bytes(data[: 8 + size], rng) + rest
    if kind < 0.55:
        return int(2 ** rng.uniform(0, 63)).to_bytes(8, "little") + header + rest
    changed = mutate_document(json.loads(header), as_json, rng)
    return len(changed).to_bytes(8, "little") + changed + rest


class Configurations:
    """``config.yaml`` of a training."""

    def __init__(self, folder: Path) -> None:
        text = StringIO()
        with redirect_stdout(text):
            main(["train", "--input-data", __file__, "--batch-size", "64", "--print-config"])
        self.values = yaml.safe_load(text.getvalue())
        del self.values["model"]["n_layers"]
        self.values["TransformerLayer_setting"] = {"num_layers": 4}

    def make(self, folder: Path, rng: np.random.Generator) -> None:
        path = folder / "config.yaml"
        if rng.random() < 0.05:
            path.write_bytes(trap(folder, rng))
        else:
            path.write_bytes(mutate_document(self.values, yaml.safe_dump, rng))

    def read(self, folder: Path) -> None:
        config = Config.read(folder / "config.yaml")
        Config.from_dict(config.to_dict())
        config.options()
        main(["train", "--config", str(folder / "config.yaml"), "--print-config"])


class TensorFiles:
    """``.pt`` files of cells, and ``.ckpt`` files of trainings."""

    def __init__(self, folder: Path) -> None:
        self.genes = make_tissue().var_names.tolist()
        self.checkpoint = (folder / "last.ckpt").read_bytes()
        target = BytesIO()
        cells = {"expression": torch.rand(2, 9, 12), "positions": torch.rand(2, 9, 2), "slice_id": torch.arange(2)}
        torch.save(cells | {"mask": torch.ones(2, 9, dtype=torch.bool)}, target)
        self.cells = target.getvalue()

    def make(self, folder: Path, rng: np.random.Generator) -> None:
        name, data = ("x.pt", self.cells) if rng.random() < 0.6 else ("x.ckpt", self.checkpoint)
        kind = rng.random()
        if kind < 0.1:
            data = trap(folder, rng)
        elif kind < 0.5:
            data = mutate_bytes(data, rng)
        else:
            data = mutate_archive(data, rng)
        (folder / name).write_bytes(data)

    def read(self, folder: Path) -> None:
        if (folder / "x.pt").exists():
            read_tensors(folder / "x.pt", self.genes)
        else:
            AlphaSTomics.load(folder / "x.ckpt", adata=False, accelerator="cpu")


def mutate_archive(data: bytes, rng: np.random.Generator) -> bytes:
    """A valid archive with one entry, mostly the pickle, changed, removed or compressed."""
    target = BytesIO()
    compression = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        names = old.namelist()
        chosen = next(n for n in names if n.endswith("data.pkl")) if rng.random() < 0.8 else str(rng.choice(names))
        for name in names:
            content = old.read(name)
            if name == chosen and rng.random() < 0.05:
                continue
            if name == chosen:
                content = mutate_bytes(content, rng)
            new.writestr(name, content, compression)
    return target.getvalue()


class ParquetDatasets:
    """Datasets: ``metadata.json`` and Parquet files."""

    def __init__(self, folder: Path) -> None:
        self.bases = []
        for name, add in (("sparse", 0), ("dense", 1)):
            tissue = make_tissue()
            tissue.X = np.where(tissue.X.toarray() > 2, tissue.X.toarray(), 0) if not add else tissue.X.toarray() + 1
            raw, out = folder / f"raw_{name}", folder / name
            raw.mkdir()
            tissue.write_h5ad(raw / "all.h5ad")
            options = Stage2Options(train_ratio=0.6, val_ratio=0.2, max_shard_size=30)
            preprocess(raw, out, Stage1Options(cell_type_key="cell_type"), options)
            shutil.rmtree(out / "_intermediate_slices")
            self.bases.append(out)

    def make(self, folder: Path, rng: np.random.Generator) -> None:
        shutil.copytree(self.bases[int(rng.integers(2))], folder, dirs_exist_ok=True)
        metadata = folder / "metadata.json"
        values = json.loads(metadata.read_text())
        kind = rng.random()
        if kind < 0.35:
            values["schema"] = mutate_values(values["schema"], rng) if rng.random() < 0.4 else values["schema"]
            metadata.write_bytes(mutate_document(values, as_json, rng))
            return
        path = folder / "data" / str(rng.choice([shard["file"] for shard in values["shards"]]))
        if kind < 0.65:
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        elif kind < 0.7:
            path.write_bytes(trap(folder, rng))
        else:
            mutate_table(path, rng)
        if rng.random() < 0.8:  # an attacker can change the checksum as well
            for shard in values["shards"]:
                if shard["file"] == path.name:
                    shard["footer"] = _checksum(path)
            metadata.write_text(json.dumps(values))

    def read(self, folder: Path) -> None:
        read_all(folder)


def _checksum(path: Path) -> str:
    try:
        return footer_checksum(path)
    except ValueError:
        return ""


def read_all(folder: Path) -> None:
    """Read a dataset in every way; the first error is the result, and all must be clear."""
    ways = [
        *(lambda path=path: read_parquet(path) for path in sorted((folder / "data").glob("*.parquet"))),
        *(lambda split=split: read_dataset(folder, split) for split in ("train", "validation", "test")),
        lambda: [list(loader) for loader in create_dataloaders(folder, 32, context_size=16) if loader is not None],
    ]
    errors = []
    for way in ways:
        try:
            way()
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors:  # raise the least clear one
        raise max(
            errors,
            key=lambda error: (type(error) is not ValueError, "\n" in str(error), str(folder) not in str(error)),
        )


def mutate_table(path: Path, rng: np.random.Generator) -> None:
    """A valid Parquet file with a column removed, renamed, of another type, or with missing values."""
    file = pq.ParquetFile(path)
    tables = [file.read_row_group(number) for number in range(file.num_row_groups)]
    name = str(rng.choice(tables[0].column_names))
    kind = rng.choice(["drop", "rename", "type", "null", "note", "values", "empty", "repeat", "lists"])
    changed = [_change_table(table, name, str(kind), rng) for table in tables]
    schema = changed[0].schema
    if kind == "note":
        note = json.loads(schema.metadata[b"alphastomics"])
        schema = schema.with_metadata({b"alphastomics": mutate_document(note, as_json, rng)})
    with pq.ParquetWriter(path, schema, compression=str(rng.choice(["none", "zstd", "snappy"]))) as writer:
        for table in changed:
            writer.write_table(table.cast(schema) if kind == "note" else table)


def _change_table(table: pa.Table, name: str, kind: str, rng: np.random.Generator) -> pa.Table:
    place, column = table.column_names.index(name), table.column(name)
    if kind == "drop":
        return table.drop_columns([name])
    if kind == "rename":
        return table.rename_columns([f"{each}_" if each == name else each for each in table.column_names])
    if kind == "empty":
        return table.slice(0, 0)
    if kind == "repeat":
        return pa.concat_tables([table, table.slice(0, 3)])
    if kind in ("note", "values") and not pa.types.is_primitive(column.type):
        return table
    n = len(table)
    new = {
        "type": lambda: pa.array([str(i) for i in range(n)]) if place % 2 else pa.array(np.arange(n)),
        "null": lambda: pa.array([None] * n, column.type),
        "note": lambda: column,
        "values": lambda: pa.array(rng.choice([np.nan, np.inf, -1.0, 1e30], n)),
        "lists": lambda: pa.array([list(range(int(k))) for k in rng.integers(0, 9, n)], pa.list_(pa.int32())),
    }[kind]()
    field = pa.field(name, new.type)
    return table.set_column(place, field, new)


class AnnDataFiles:
    """``.h5ad`` files."""

    def __init__(self, folder: Path) -> None:
        tissue = make_tissue()
        self.bases = []
        for name, compression in (("plain", None), ("gzip", "gzip")):
            path = folder / f"{name}.h5ad"
            tissue.write_h5ad(path, compression=compression)
            self.bases.append(path.read_bytes())
        tissue.X = tissue.X.toarray()
        tissue.write_h5ad(folder / "dense.h5ad")
        self.bases.append((folder / "dense.h5ad").read_bytes())

    def make(self, folder: Path, rng: np.random.Generator) -> None:
        data, path = self.bases[int(rng.integers(len(self.bases)))], folder / "x.h5ad"
        path.write_bytes(data)
        if rng.random() < 0.03:
            path.write_bytes(trap(folder, rng))
        elif rng.random() < 0.6:
            path.write_bytes(mutate_bytes(data, rng))
        else:
            mutate_hdf5(path, rng)

    def read(self, folder: Path) -> None:
        failure = None
        try:
            stage1(folder, folder / "out", Stage1Options(cell_type_key="cell_type"))
        except (ValueError, KeyError) as error:
            if str(folder) not in str(error) or "\n" in str(error):
                raise
            failure = error
        cells = read_h5ad(folder / "x.h5ad")
        AlphaSTomics.setup_anndata(cells)
        if failure is not None:
            raise failure


def mutate_hdf5(path: Path, rng: np.random.Generator) -> None:
    """A valid HDF5 file with an object removed, of another type, huge, or moved."""
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name = str(rng.choice(names))
        kind = rng.choice(
            ["delete", "replace", "replace", "attribute", "attribute", "external", "soft", "huge", "storage"]
        )
        if kind == "attribute":
            attributes = file[name].attrs
            for key in list(attributes)[:2]:
                value = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
                attributes[key] = (
                    value
                    if isinstance(value, (bool, int, float, str)) and "\x00" not in str(value) and _fits(value)
                    else [1, 2]
                )
            return
        attributes = dict(file[name].attrs)
        del file[name]
        if kind == "external":
            file[name] = h5py.ExternalLink(str(path.parent / "other.h5"), "/x")
        elif kind == "soft":
            file[name] = h5py.SoftLink(str(rng.choice(["/obs", "/nowhere", "/", f"/{name}"])))
        elif kind == "storage":
            (path.parent / "secret").write_bytes(os.urandom(800))
            file.create_dataset(name, (100,), "f8", external=[(str(path.parent / "secret"), 0, 800)])
        elif kind == "huge":
            file.create_dataset(name, (10 ** int(rng.integers(8, 16)),), "f8", chunks=(1024,))
        elif kind == "replace":
            values = [
                np.zeros((3, 3)),
                np.arange(80),
                "text",
                np.array([b"a", b"b"]),
                np.float64("nan"),
                np.full(80, np.inf),
            ]
            file[name] = values[int(rng.integers(len(values)))]
        if name in file and not isinstance(file.get(name, getlink=True), (h5py.SoftLink, h5py.ExternalLink)):
            file[name].attrs.update(attributes)


def _fits(value: Any) -> bool:
    """Whether HDF5 can store a value."""
    return (not isinstance(value, str) or value.isprintable()) and (not isinstance(value, int) or abs(value) < 2**63)
