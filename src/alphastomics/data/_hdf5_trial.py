"""Whether HDF5 gets through files: run as a script, in a process that may hang or crash in the place of the one that asks.

Everything that leads to data is read, and of the data what is made of text, in a global heap, and the ends of the rest. What is
read elsewhere later has been reached here once.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import h5py

SECONDS = 5  # of a processor, for a group or a dataset, of which a large one may have millions of chunks
POINTER = 64  # bytes in memory, at least, of a value that is an object
FEW = 1024  # values at either end of a dataset
TEXTS = 2**18  # pieces of text that are read of all datasets together
SMALL = 2**26  # bytes that nobody minds
RATIO = 2000  # bytes in memory for one in the file: gzip makes a thousand of one at most


def examine(path: str) -> dict[str, int]:
    """Bytes in memory of every dataset.

    Raises
    ------
    ValueError
        If something leads out of the file, or holds next to nothing of what it says that it holds.
    Exception
        Whatever HDF5 says of a file that is damaged.
    """
    sizes: dict[str, int] = {}
    with h5py.File(path, "r") as file:
        waiting, seen, left = [file["/"]], set(), TEXTS
        while waiting:
            limit()
            group = waiting.pop()
            dict(group.attrs)
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
                limit()
                if isinstance(entry, h5py.Group):
                    waiting.append(entry)
                elif isinstance(entry, h5py.Dataset):
                    sizes[entry.name] = _size(entry)
                    left -= _touch(entry, left)
    return sizes


def _size(stored: h5py.Dataset) -> int:
    """Bytes in memory of a dataset that is what it says."""
    dict(stored.attrs)
    if stored.external or stored.is_virtual:
        raise ValueError(f"{stored.name} takes its values from another file")
    size = (stored.size or 0) * (POINTER if stored.dtype.hasobject else stored.dtype.itemsize)
    if size > SMALL and size > RATIO * stored.id.get_storage_size():
        raise ValueError(f"{stored.name} says that it holds {size / 2**30:,.1f} GiB, and next to nothing is stored")
    return size


def _touch(stored: h5py.Dataset, most: int) -> int:
    """Read the ends of a dataset, or all of it where it is text; give how many pieces of text were read."""
    if stored.chunks is not None and hasattr(stored.id, "chunk_iter"):
        stored.id.chunk_iter(lambda chunk: None)
    if stored.shape is None or not stored.size:
        return 0
    if not stored.shape:
        stored[()]
        return 1
    if stored.dtype.hasobject and stored.size <= most:
        stored[...]
        return int(stored.size)
    few = max(1, FEW * len(stored) // stored.size)
    stored[:few], stored[-few:]
    return 2 * FEW if stored.dtype.hasobject else 0


def limit() -> None:
    """Give the process so many seconds from now on, or twice that: limits are whole seconds."""
    with suppress(ImportError, ValueError, OSError):  # a system without limits, or a stricter one
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + SECONDS, resource.RLIM_INFINITY)
        )


def main() -> None:
    """Read paths as JSON, and write for each what was found as a line of JSON: sizes, or why the file is refused."""
    for path in json.load(sys.stdin):
        limit()
        try:
            found: dict[str, object] = {"sizes": examine(path)}
        except Exception as error:  # noqa: BLE001  a damaged file can break the reader in any way, and all is said
            found = {"refused": str(error) or type(error).__name__}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
