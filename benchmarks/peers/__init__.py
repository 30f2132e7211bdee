"""Published methods that place cells, each from PyPI and in an environment of its own.

A peer is a script with a function ``place(data, seed)``, which runs inside the environment (``_inside.py``) and returns positions
for one or more methods. It is given dense expression of the genes that reference and query share, and positions of all reference
slices in the frame of the largest (:func:`benchmarks.baselines._features.common_frame`). At most ``max_reference`` random
reference cells are used.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._process import ONE_THREAD
from benchmarks._runner import store
from benchmarks.baselines._features import common_frame, expression_features, is_counts, principal_components
from benchmarks.peers._environment import PINNED, PeerError, environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from benchmarks._data import Fold
    from benchmarks._report import Results

FOLDER = Path(__file__).parent
GIBIBYTES = 8


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A published method.

    Attributes
    ----------
    requirements
        Packages of its environment, as for pip.
    methods
        Names of the positions that its script returns.
    n_dims
        Numbers of dimensions that it can place.
    max_reference
        Largest number of reference cells.
    script
        File with ``place(data, seed)``.
    """

    requirements: Sequence[str]
    methods: Sequence[str]
    script: Path
    n_dims: Sequence[int] = (2, 3)
    max_reference: int = 3000

    @property
    def parameters(self) -> dict[str, Any]:
        """What it was run with; part of every saved entry."""
        return {"requirements": list(self.requirements), "max_reference": self.max_reference}


PEERS = {
    "tangram": Peer(
        requirements=("tangram-sc==1.0.4", "torch==2.13.0", *PINNED),
        methods=("tangram", "tangram_mean"),
        script=FOLDER / "tangram.py",
    ),
    "novosparc": Peer(
        requirements=("novosparc==0.4.4", "POT==0.9.3", *PINNED), methods=("novosparc",), script=FOLDER / "novosparc.py"
    ),
    "celery": Peer(
        requirements=("CeLEryPy==1.2.1", "torch==2.13.0", *PINNED),
        methods=("celery",),
        script=FOLDER / "celery.py",
        n_dims=(2,),
        max_reference=20_000,
    ),
}
METHODS = tuple(method for peer in PEERS.values() for method in peer.methods)


def run_peer(results: Results, fold: Fold, name: str, seed: int, folder: Path, minutes: float) -> None:
    """Run a peer on a fold, unless it is finished or cannot place so many dimensions; a failure is printed.

    Parameters
    ----------
    results
        Finished runs, to which those of the peer are added.
    fold
        Reference, query and truth.
    name
        Key of :data:`PEERS`.
    seed
        Seed of the peer and of its sample of the reference.
    folder
        Folder of the environments.
    minutes
        Limit of time.
    """
    peer = PEERS[name]
    done = [results.find(peer.parameters, method=m, fold=fold.name, seed=seed) is not None for m in peer.methods]
    if all(done) or fold.truth.shape[1] not in peer.n_dims:
        return
    try:
        python = environment(folder / name, peer.requirements)
        start = time.perf_counter()
        placed = place(peer, python, fold.reference, fold.query, seed=seed, minutes=minutes)
    except PeerError as error:
        print(f"{fold.name}, seed {seed}, {name}: {error}", flush=True)
        return
    seconds = round(time.perf_counter() - start, 2)
    for method in peer.methods:
        store(results, fold, method, seed, peer.parameters, fold.in_source_order(placed[method]), seconds)


def place(
    peer: Peer, python: Path, reference: AnnData, query: AnnData, *, seed: int, minutes: float
) -> dict[str, NDArray[np.float64]]:
    """Positions of the query, ``(n_query, n_dims)``, for every method of a peer.

    Raises
    ------
    PeerError
        If its script fails, exceeds the limit of time or memory, or returns something else.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "input.npz", Path(temporary) / "output.npz"
        np.savez(source, **arrays(reference, query, max_reference=peer.max_reference, seed=seed))
        command = [python, "-P", "-W", "ignore", FOLDER / "_inside.py", peer.script, source, target, seed, GIBIBYTES]
        try:
            done = subprocess.run(
                list(map(str, command)),
                cwd=temporary,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": ""},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60 * minutes,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PeerError(f"not finished after {minutes:g} minutes; pass a larger --peer-minutes") from None
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise PeerError(f"{peer.script.name} failed: {reason[0]}")
        with np.load(target) as file:
            placed = {name: np.asarray(file[name], dtype=np.float64) for name in file.files}
    shape = (query.n_obs, reference.obsm["spatial"].shape[1])
    for method in peer.methods:
        if method not in placed or placed[method].shape != shape or not np.isfinite(placed[method]).all():
            raise PeerError(f"{peer.script.name} returned no finite positions of shape {shape} for {method}")
    return placed


def arrays(reference: AnnData, query: AnnData, *, max_reference: int, seed: int) -> dict[str, Any]:
    """Input of a script: ``reference`` and ``query``, cells x genes, ``positions`` of the reference, and ``is_counts``."""
    genes = reference.var_names[reference.var_names.isin(query.var_names)]
    ref, _ = principal_components(*expression_features(reference, query, scale=False))
    kept = np.sort(np.random.default_rng(seed).permutation(reference.n_obs)[:max_reference])
    return {
        "reference": _dense(reference[kept, genes]),
        "positions": common_frame(reference, ref)[kept],
        "query": _dense(query[:, genes]),
        "is_counts": is_counts(reference.X),
    }


def _dense(adata: AnnData) -> NDArray[np.float32]:
    return adata.to_df().to_numpy(dtype=np.float32)
