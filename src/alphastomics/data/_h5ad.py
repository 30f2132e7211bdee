"""``.h5ad`` files that anyone may have written: what leads out of the file, or fits no memory, is refused before it is read.

HDF5 follows links to other files, and takes the values of a dataset from any file of the computer if it is told to. It also
gives values that nobody has stored, as many as are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata as ad
import h5py

from alphastomics._disk import check_memory, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from anndata import AnnData

POINTER = 64  # bytes in memory, at least, of a value that is an object


def read_h5ad(path: Path) -> AnnData:
    """Read a file into memory.

    Raises
    ------
    ValueError
        If it is no ``.h5ad`` file, or one that cannot be read.
    """
    try:
        with h5py.File(path, "r") as file:
            check_contents(file)
        return ad.read_h5ad(path)
    except Exception as error:  # a damaged file can break the reader in any way
        raise ValueError(
            f"{path} cannot be read as .h5ad: {reason(error)}; see that it is whole and readable, or name another"
        ) from error


def check_contents(file: h5py.File, is_held: Callable[[str], bool] = lambda name: True) -> None:
    """Refuse a file that reads others, or of which more would be held at once than fits into memory.

    Parameters
    ----------
    file
        The file, open.
    is_held
        Whether a dataset of this name (``"/obs/cell_type"``) is read as a whole.

    Raises
    ------
    ValueError
        If it is so; the message does not name the file.
    """
    n_bytes = 0
    for stored in _datasets(file):
        if stored.external or stored.is_virtual:
            raise ValueError(f"{stored.name} takes its values from another file")
        if is_held(stored.name):
            n_bytes += (stored.size or 0) * (POINTER if stored.dtype.hasobject else stored.dtype.itemsize)
    check_memory(n_bytes)


def _datasets(file: h5py.File) -> Iterator[h5py.Dataset]:
    """Every dataset once, whatever leads to it."""
    waiting, seen = [file["/"]], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise ValueError(f"{group.name.rstrip('/')}/{name} is a link to another file")
            if isinstance(link, h5py.SoftLink):  # to what has a place in the file, which is looked at there
                continue
            entry = group[name]
            address = h5py.h5o.get_info(entry.id).addr
            if address in seen:
                continue
            seen.add(address)
            if isinstance(entry, h5py.Group):
                waiting.append(entry)
            elif isinstance(entry, h5py.Dataset):
                yield entry
