"""Checks of files of unknown origin, before they are read into memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def check_inside(folder: Path, path: Path) -> None:
    """Raise a ValueError if a file is a link to a file outside of its folder.

    Links from ``snapshots/<version>`` to ``blobs``, of which the cache of huggingface_hub consists, are accepted.
    """
    root, target = folder.resolve(), path.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(each) for each in roots):
        raise ValueError(f"{path} is a link to a file outside of its folder; replace it by a copy of the file")


def check_memory(n_bytes: int) -> None:
    """Raise a ValueError, whose message does not name the file, if ``n_bytes`` exceed the memory of this machine."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on this system
        return
    if n_bytes > memory:
        raise ValueError(
            f"it declares {n_bytes / 2**30:,.0f} GiB of data, more than the {memory / 2**30:,.0f} GiB of memory of this machine"
        )
