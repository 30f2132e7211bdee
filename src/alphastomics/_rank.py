"""Of several processes that run one training, the first tells how it goes and writes; known before torch is imported."""

from __future__ import annotations

import logging
import os


def is_first() -> bool:
    """Whether this is the first of the processes that run one training, by what Lightning, torchrun, Slurm or LSF tell it."""
    said = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    rank = next((number for number in said if number is not None), "0")
    return int(rank) == int(os.environ.get("NODE_RANK", "0")) == 0


def quiet_unless_first() -> None:
    """Let the other processes tell nothing but errors."""
    if not is_first():
        logging.getLogger("alphastomics").setLevel(logging.ERROR)
