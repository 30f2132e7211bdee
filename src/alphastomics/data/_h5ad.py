"""``.h5ad`` files that anyone may have written: what leads out of the file, or fits no memory, is refused before it is read.

HDF5 follows links to other files, takes the values of a dataset from any file of the computer if it is told to, and gives
values that nobody has stored, as many as are asked for. Of a damaged file it may never come back, or take the process with it.
A child process therefore goes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import scipy.sparse as sp

from alphastomics._io._errors import describe_error
from alphastomics._io._untrusted import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anndata import AnnData

TRIAL = Path(__file__).with_name("_hdf5_trial.py")
LONGEST = 600.0  # seconds of waiting for a file, of a slow disk too
STUCK: dict[str, Any] = {"refused": "HDF5 does not get through it"}
_found: dict[tuple[str, int, int], dict[str, Any]] = {}  # what was said of files, until they change


def read_h5ad(path: Path) -> AnnData:
    """Read a file into memory.

    Raises
    ------
    ValueError
        If it is no ``.h5ad`` file, or one that cannot be read.
    """
    with _whole(path):
        check_contents(path)
        adata = ad.read_h5ad(path)
        for matrix in (adata.X, *adata.layers.values()):
            if sp.issparse(matrix):
                matrix.check_format(full_check=True)  # compiled code later takes every index as it is
        return adata


def read_uns(path: Path) -> dict[str, Any]:
    """Read ``uns`` of a file, and nothing else of it; the refusals are those of :func:`read_h5ad`."""
    with _whole(path):
        check_contents(path, lambda name: name.startswith("/uns/"))
        with h5py.File(path) as file:
            return dict(ad.io.read_elem(file["uns"])) if "uns" in file else {}


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Name the file in what is raised when it is not what it says that it is."""
    try:
        yield
    except Exception as error:  # a damaged file can break the reader in any way
        raise ValueError(
            f"{path} cannot be read as .h5ad: {describe_error(error)}; see that it is whole and readable, or name another"
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
    try_files([path])
    found = _found[_version(path)]
    if "refused" in found:
        raise ValueError(found["refused"])
    check_memory(sum(size for name, size in found["sizes"].items() if is_held(name)))


def try_files(paths: Sequence[Path]) -> None:
    """Try files together, which takes less time than one after the other when they are opened.

    Raises
    ------
    OSError
        If one is not there.
    """
    left = {version: str(path.absolute()) for path in paths if (version := _version(path)) not in _found}
    while left:
        answers = _ask(list(left.values()))
        for version, answer in zip(list(left), [*answers, STUCK], strict=False):  # the first without an answer is why
            _found[version] = answer
            del left[version]


def _ask(paths: list[str]) -> list[dict[str, Any]]:
    """What the trial says of files, as far as it gets."""
    command, text = [sys.executable, "-P", str(TRIAL)], json.dumps(paths).encode()
    try:
        said = subprocess.run(command, input=text, capture_output=True, timeout=LONGEST * len(paths)).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    return [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]


def _version(path: Path) -> tuple[str, int, int]:
    """A file as it is now."""
    about = path.stat()
    return str(path.absolute()), about.st_size, about.st_mtime_ns
