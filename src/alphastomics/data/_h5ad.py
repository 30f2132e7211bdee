"""``.h5ad`` files that anyone may have written: what leads out of the file, or fits no memory, is refused before it is read.

HDF5 follows links to other files, takes the values of a dataset from any file of the computer if it is told to, and gives
values that nobody has stored, as many as are asked for. Of a damaged file it may never come back, or take the process with it.
A child process therefore goes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import scipy.sparse as sp

from alphastomics._disk import check_memory, reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData

TRIAL = Path(__file__).with_name("_hdf5_trial.py")
LONGEST = 600.0  # seconds of waiting, of a slow disk too


def read_h5ad(path: Path) -> AnnData:
    """Read a file into memory.

    Raises
    ------
    ValueError
        If it is no ``.h5ad`` file, or one that cannot be read.
    """
    try:
        check_contents(path)
        adata = ad.read_h5ad(path)
        for matrix in (adata.X, *adata.layers.values()):
            if sp.issparse(matrix):
                matrix.check_format(full_check=True)  # compiled code later takes every index as it is
        return adata
    except Exception as error:  # a damaged file can break the reader in any way
        raise ValueError(
            f"{path} cannot be read as .h5ad: {reason(error)}; see that it is whole and readable, or name another"
        ) from error


def check_contents(path: Path, is_held: Callable[[str], bool] = lambda name: True) -> None:
    """Refuse a file that reads others, that HDF5 does not get through, or of which more would be held than fits into memory.

    Parameters
    ----------
    path
        The file.
    is_held
        Whether a dataset of this name (``"/obs/cell_type"``) is read as a whole.

    Raises
    ------
    OSError
        If it is not there.
    ValueError
        If it is so; the message does not name the file.
    """
    about = path.stat()
    found = _examine(path.absolute(), about.st_size, about.st_mtime_ns)
    if "refused" in found:
        raise ValueError(found["refused"])
    check_memory(sum(size for name, size in found["sizes"].items() if is_held(name)))


@lru_cache(maxsize=1024)
def _examine(path: Path, size: int, modified: int) -> dict[str, Any]:
    """What the trial says of a file; of one that has not changed since, what it said then."""
    command = [sys.executable, "-P", str(TRIAL), str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST)
        found: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {"refused": "HDF5 does not get through it"}
    return found
