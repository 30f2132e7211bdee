"""Checks of files of unknown origin before anything of them is read into memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def check_inside(folder: Path, path: Path) -> None:
    """Raise an error if a file of a folder is a link to a place outside of it.

    The cache of huggingface_hub consists of links from ``snapshots/<version>`` to ``blobs``, which are accepted.

    Raises
    ------
    ValueError
        If the link leads outside.
    """
    root, there = folder.resolve(), path.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(there.is_relative_to(each) for each in roots):
        raise ValueError(f"{path} is a link that leads out of its folder; copy the file itself there")


def check_memory(n_bytes: int) -> None:
    """Raise an error if an object of this size exceeds the memory of this machine.

    Raises
    ------
    ValueError
        If it does; the message does not name the file.
    """
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on this system
        return
    if n_bytes > memory:
        raise ValueError(
            f"it claims to hold {n_bytes / 2**30:,.0f} GiB, more than the {memory / 2**30:,.0f} GiB of this machine"
        )
