"""Rank of this process in a training of several processes, available before torch is imported."""

from __future__ import annotations

import logging
import os


def is_first() -> bool:
    """Whether the rank is 0 by the environment variables of Lightning, torchrun, Slurm or LSF."""
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    rank = next((number for number in ranks if number is not None), "0")
    return int(rank) == int(os.environ.get("NODE_RANK", "0")) == 0


def local_rank() -> int:
    """Number of this process among those of its machine, by the environment variables of Lightning, torchrun or Slurm."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def quiet_unless_first() -> None:
    """Log only errors in processes other than the first."""
    if not is_first():
        logging.getLogger("alphastomics").setLevel(logging.ERROR)
