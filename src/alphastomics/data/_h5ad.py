"""Reading ``.h5ad`` files of unknown origin, after a check for links to other files and of the size.

HDF5 follows links to other files, reads the values of a dataset from any file of the computer, and fills in values that are
declared in a header but not stored. Each of these raises an error before values are read.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import scipy.sparse as sp

from alphastomics._io._errors import describe_error
from alphastomics._io._untrusted import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from anndata import AnnData

OBJECT_BYTES = 64  # smallest size of an object in memory
UNCHECKED_BYTES = 2**26  # size up to which the compression of a dataset is not checked
MAX_RATIO = 2000  # of bytes in memory to bytes in the file; gzip reaches 1000


def read_h5ad(path: Path) -> AnnData:
    """Read a file into memory; the message of a ValueError names the file."""
    with reading_h5ad(path):
        check_h5ad(path)
        adata = ad.read_h5ad(path)
        for matrix in (adata.X, *adata.layers.values()):
            if sp.issparse(matrix):
                matrix.check_format(full_check=True)  # compiled code does not check indices
        return adata


def read_uns(path: Path) -> dict[str, Any]:
    """Read ``uns`` of a file and nothing else; see :func:`read_h5ad`."""
    with reading_h5ad(path):
        check_h5ad(path, lambda name: name.startswith("/uns/"))
        with h5py.File(path) as file:
            return dict(ad.io.read_elem(file["uns"])) if "uns" in file else {}


@contextmanager
def reading_h5ad(path: Path, remedy: str = "choose another file") -> Iterator[None]:
    """Turn errors of h5py and anndata into a ValueError that names the file and the remedy."""
    try:
        yield
    except Exception as error:  # a damaged file can raise anything
        if isinstance(error, (KeyError, ValueError)) and str(path) in str(error):  # names the file already
            raise
        raise ValueError(
            f"{path} cannot be read as .h5ad ({describe_error(error)}); check that it is complete and readable, or {remedy}"
        ) from error


def check_h5ad(path: Path, is_read: Callable[[str], bool] = lambda name: True) -> None:
    """Raise a ValueError for a file that refers to other files, or that exceeds the memory of this machine.

    ``is_read`` is whether a dataset of this name (``"/obs/cell_type"``) is read at once; the size of others is not
    limited. The message does not name the file.
    """
    with h5py.File(path, "r") as file:
        check_memory(sum(_size(dataset) for dataset in _datasets(file) if is_read(dataset.name)))


def _datasets(file: h5py.File) -> Iterator[h5py.Dataset]:
    """Every dataset of a file, once; raises ValueError if values are in another file."""
    waiting, seen = [file["/"]], set()
    while waiting:
        group = waiting.pop()
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise ValueError(f"{group.name.rstrip('/')}/{name} is a link to another file")
            if isinstance(link, h5py.SoftLink):  # the target is found under its own name
                continue
            entry = group[name]
            address = h5py.h5o.get_info(entry.id).addr
            if address in seen:
                continue
            seen.add(address)
            if isinstance(entry, h5py.Group):
                waiting.append(entry)
            elif isinstance(entry, h5py.Dataset):
                if entry.external or entry.is_virtual:
                    raise ValueError(f"{entry.name} stores its values in another file")
                yield entry


def _size(dataset: h5py.Dataset) -> int:
    """Bytes of a dataset in memory; raises ValueError if nearly all of them would be fill values."""
    size = (dataset.size or 0) * (OBJECT_BYTES if dataset.dtype.hasobject else dataset.dtype.itemsize)
    if size > UNCHECKED_BYTES and size > MAX_RATIO * dataset.id.get_storage_size():
        raise ValueError(f"{dataset.name} declares {size / 2**30:,.1f} GiB but stores hardly any values")
    return int(size)
