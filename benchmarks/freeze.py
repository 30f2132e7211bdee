"""SHA-256 hashes of all results of a model, for every row of an array that covers the options.

``python -m benchmarks.freeze --output before.json`` records hashes, and ``python -m benchmarks.freeze --compare before.json``
prints each difference and exits with status 1 if there is one. A refactoring must not change a hash. Hashes depend on the
processor and on library versions, so compare on one machine and do not commit them.

For each row: weights after 20 optimizer steps with one process and with two; samples of each mode of the model;
latents; tensors and JSON of the saved model; and ``alphastomics train --print-config`` with the options of the row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anndata import AnnData

    from alphastomics.model import AlphaSTomics

ROOT = Path(__file__).parents[1]
SIZES = {"d_model": 16, "n_layers": 3, "n_heads": 2}
TRAINING = {
    "max_epochs": 20,
    "batch_size": 80,
    "context_size": 40,
    "precision": "32-true",
    "accelerator": "cpu",
    "enable_progress_bar": False,
}
MODES = ("expr_to_pos", "pos_to_expr", "joint")
VOLATILE = ("_scvi_uuid", "finished", "seconds", "versions", "system", "machine", "cells_per_second", "memory_gib")


def covering_array() -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of options, and which of their names are options of the network."""
    path = ROOT / "tests" / "model" / "test_combinations.py"
    spec = importlib.util.spec_from_file_location("covering_array", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.ROWS, list(module.NETWORK)


def digest(*arrays: Any) -> str:
    """Hash of type, shape and bytes of arrays, dense or sparse, in order."""
    found = sha256()
    for array in arrays:
        values = np.ascontiguousarray(array.toarray() if hasattr(array, "toarray") else array)
        found.update(f"{values.dtype.str}{values.shape}".encode())
        found.update(values.tobytes())
    return found.hexdigest()


def digest_tensors(tensors: Mapping[str, Any]) -> str:
    """Hash of tensors with their names."""
    return sha256("".join(f"{name}:{digest(tensors[name])}\n" for name in sorted(tensors)).encode()).hexdigest()


def without_volatile(value: Any) -> Any:
    """A value of JSON without times and versions."""
    if isinstance(value, dict):
        return {name: without_volatile(entry) for name, entry in value.items() if name not in VOLATILE}
    return [without_volatile(entry) for entry in value] if isinstance(value, list) else value


@cache
def tissue(n_dims: int) -> AnnData:
    """Two slices of 40 cells, ordered."""
    from alphastomics.datasets import synthetic_tissue

    adata = synthetic_tissue(n_slices=2, n_cells=40, n_genes=12, n_dims=n_dims, random_state=0)
    adata.obs["order"] = np.random.default_rng(0).permutation(adata.n_obs)
    return adata


def train(row: dict[str, Any], network: list[str], **training: Any) -> AlphaSTomics:
    """Train a small model of a row."""
    from alphastomics.model import AlphaSTomics

    reference = tissue(row["n_dims"]).copy()
    AlphaSTomics.setup_anndata(reference, frame=row["frame"], sequence_key="order" if row["ordered"] else None)
    options = {name: row[name] for name in network} | {name: row[name] for name in ("mode", "enable_masking")}
    model = AlphaSTomics(reference, random_state=0, **(SIZES | options))
    model.train(**(TRAINING | training))
    return model


def samples(model: AlphaSTomics, cells: AnnData) -> Iterator[tuple[str, str]]:
    """Hashes of samples of each mode that the model has, and of draws that are reduced."""
    for mode in MODES if model.mode == "any" else (model.mode,):
        arguments: dict[str, Any] = {"mode": mode, "random_state": 1}
        if mode != "expr_to_pos":
            arguments["n_steps"] = 3
        if mode == "joint":
            result = model.sample(n_cells=30, **arguments)
            yield mode, digest(result.obsm["spatial"], result.X)
            continue
        for name, more in {mode: {}, f"{mode}_mean": {"n_samples": 2, "reduce": "mean"}}.items():
            result = model.sample(cells.copy(), **arguments, **more)
            positions = result.obsm["spatial_reconstructed" if mode == "expr_to_pos" else "spatial"]
            arrays = [positions, result.X, *(result.layers[key] for key in sorted(result.layers))]
            yield name, digest(*arrays)
        known = cells.copy()
        known.obsm["spatial"] = np.where(np.arange(known.n_obs)[:, None] % 3 > 0, known.obsm["spatial"], np.nan)
        if mode == "expr_to_pos":
            yield (
                f"{mode}_inpaint",
                digest(model.sample(known, inpaint=True, **arguments).obsm["spatial_reconstructed"]),
            )


def saved(model: AlphaSTomics) -> Iterator[tuple[str, str]]:
    """Hashes of the files of a model."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save(folder, overwrite=True)
        for path in sorted(Path(folder).iterdir()):
            if path.suffix == ".json":
                text = json.dumps(without_volatile(json.loads(path.read_text())), sort_keys=True)
                yield f"saved {path.name}", sha256(text.encode()).hexdigest()
            else:
                yield f"saved {path.name}", digest_tensors(load_file(path))


def print_config(row: dict[str, Any], network: list[str]) -> str:
    """Hash of the configuration that the options of a row make."""
    from contextlib import redirect_stdout
    from io import StringIO

    from alphastomics.main import main

    options = {name: row[name] for name in (*network, "mode", "frame")}
    flags = ["train", "--print-config", "--data-dir", "dataset"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.extend((f"--{flag}", str(value)))
    with redirect_stdout(StringIO()) as printed:
        main(flags)
    return sha256(printed.getvalue().encode()).hexdigest()


def one_process(row: dict[str, Any], network: list[str]) -> dict[str, str]:
    """All hashes of a row that one process gives."""
    model = train(row, network)
    found = {"weights": digest_tensors(model.module.state_dict())}
    found |= dict(samples(model, tissue(row["n_dims"])))
    if model.mode in ("any", "expr_to_pos"):
        found["latent"] = digest(model.get_latent_representation(layer="all"))
    found |= dict(saved(model))
    found["print_config"] = print_config(row, network)
    return found


def two_processes(row: dict[str, Any], network: list[str]) -> dict[str, str]:
    """Weights of a row that two processes train."""
    model = train(row, network, devices=2, strategy="ddp_fork", max_epochs=40)
    return {"weights of two processes": digest_tensors(model.module.state_dict())}


def run(row: dict[str, Any], network: list[str]) -> dict[str, str]:
    """Train a row in one process and in two, each time in a new interpreter."""
    found: dict[str, str] = {}
    for which in ("one", "two"):
        command = [sys.executable, "-m", "benchmarks.freeze", f"--{which}", json.dumps([row, network])]
        alone = os.environ | {"OMP_NUM_THREADS": "1"}  # sums over threads depend on their number
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone, timeout=600, check=False)
        if done.returncode:
            found[f"error of {which}"] = done.stderr.strip().splitlines()[-1]
        else:
            found |= json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the hashes")
    parser.add_argument("--compare", type=Path, help="JSON file with the hashes of another state of the code")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows; default: all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--two", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for which, function in (("one", one_process), ("two", two_processes)):
        if getattr(arguments, which) is not None:
            print(json.dumps(function(*json.loads(getattr(arguments, which)))), flush=True)
            return 0
    expected: dict[str, Any] = {}
    if arguments.compare:  # the rows of that state: options that came later take their defaults
        expected = json.loads(arguments.compare.read_text())
        rows, network = expected["rows"], expected["network"]
    else:
        rows, network = covering_array()
    found: dict[str, dict[str, str]] = {}
    different = 0
    for number in arguments.rows or range(len(rows)):
        hashes = found[str(number)] = run(rows[number], network)
        before = expected["hashes"].get(str(number), {}) if arguments.compare else {}
        for name in sorted(before.keys() | hashes.keys()) if before else ():
            if before.get(name) != hashes.get(name):
                different += 1
                print(f"row {number}: {name} was {before.get(name)}, is {hashes.get(name)}", flush=True)
        print(f"row {number}: {len(hashes)} hashes", flush=True)
        if arguments.output:
            record = {"rows": rows, "network": network, "hashes": found}
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.compare:
        print(f"{different} differences")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
