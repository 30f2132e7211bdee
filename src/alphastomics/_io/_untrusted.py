"""Checks of files of unknown origin, before they are read into memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def check_inside(folder: Path, path: Path) -> None:
    """Raise a ValueError if a file is a link that leads out of its folder.

    Links from ``snapshots/<version>`` to ``blobs``, of which the cache of huggingface_hub consists, are accepted.
    """
    root, there = folder.resolve(), path.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(there.is_relative_to(each) for each in roots):
        raise ValueError(f"{path} is a link that leads out of its folder; copy the file itself there")


def check_memory(n_bytes: int) -> None:
    """Raise a ValueError, whose message does not name the file, if ``n_bytes`` exceed the memory of this machine."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on this system
        return
    if n_bytes > memory:
        raise ValueError(
            f"it claims to hold {n_bytes / 2**30:,.0f} GiB, more than the {memory / 2**30:,.0f} GiB of this machine"
        )
