"""Distributed strategies by name, and checks that they can run on this device and from this process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib.util import find_spec
from typing import get_args

import torch
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from alphastomics.config import Strategy as Name, TrainerConfig
from alphastomics.train.distributed.devices import count_devices, device_of
from alphastomics.train.distributed.launch import LaunchedDDPStrategy
from alphastomics.train.distributed.processes import check_group_size

FORKED = ("ddp_fork", "ddp_notebook")
STRATEGIES: tuple[str, ...] = get_args(Name)


def resolve_strategy(
    strategy: str | Strategy = TrainerConfig.strategy,
    *,
    accelerator: str = TrainerConfig.accelerator,
    devices: int | list[int] | str = TrainerConfig.devices,
    num_nodes: int = 1,
    precision: str | int = "32",
    group_size: int = 1,
) -> str | Strategy:
    """The strategy for Lightning's trainer.

    Parameters
    ----------
    strategy
        One of ``STRATEGIES``, or a strategy object of Lightning, which is returned unchanged. ``"auto"``: one process for
        one device, else ``"ddp"``, or ``"ddp_notebook"`` in notebooks.
    accelerator, devices, num_nodes, precision
        As in :class:`lightning.pytorch.Trainer`.
    group_size
        Number of processes that share a context.

    Returns
    -------
    A name or an object, for the argument ``strategy`` of :class:`lightning.pytorch.Trainer`.

    Raises
    ------
    ImportError
        If the strategy needs a package that is not installed.
    RuntimeError
        If the strategy cannot start processes from this one; the message names another strategy.
    ValueError
        If the name is unknown, or the strategy does not support the device, the precision or shared contexts.
    """
    if group_size != 1:
        check_group_size(group_size, num_nodes * count_devices(accelerator, devices))
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"strategy={strategy!r} is unknown; choose from {known}, or pass a strategy of Lightning")
    if strategy == "auto":
        if num_nodes == 1 and count_devices(accelerator, devices) == 1:
            return "auto"
        strategy = "ddp" if _can_start_again() else "ddp_notebook"
    kind = device_of(accelerator, devices).type
    _check_device(strategy, kind, str(precision))
    if group_size > 1 and strategy.startswith("deepspeed"):
        raise ValueError(f"strategy={strategy!r} does not support context_parallel_size > 1; use strategy='ddp'")
    _check_start(strategy, kind)
    if strategy == "fsdp2":
        # The weights are sharded over all processes; a checkpoint is one file, as with the other strategies.
        n_processes = num_nodes * count_devices(accelerator, devices)
        return ModelParallelStrategy(
            data_parallel_size=n_processes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if strategy in (*FORKED, "ddp_spawn"):
        return LaunchedDDPStrategy(start_method="spawn" if strategy == "ddp_spawn" else "fork")
    return DDPStrategy() if strategy == "ddp" else strategy


def is_forked(strategy: str | Strategy) -> bool:
    """Whether the processes of a strategy are forks of this one."""
    return isinstance(strategy, LaunchedDDPStrategy) and strategy.start_method == "fork"


def _check_device(strategy: str, kind: str, precision: str) -> None:
    if kind == "mps":
        raise ValueError(f"strategy={strategy!r} requires several devices, and MPS is a single one; omit strategy")
    if strategy == "fsdp":
        why = "does not support clipping by the gradient norm" if kind == "cuda" else "requires GPUs"
        raise ValueError(f"strategy='fsdp' {why}; use strategy='fsdp2'")
    if strategy.startswith("deepspeed_stage_3"):
        raise ValueError(
            f"strategy={strategy!r} does not support the moving average of the weights; use strategy='fsdp2'"
        )
    if strategy.startswith("deepspeed"):
        if kind != "cuda":
            raise ValueError(f"strategy={strategy!r} requires GPUs; use strategy='fsdp2' or 'ddp'")
        if find_spec("deepspeed") is None:
            raise ImportError(
                f"strategy={strategy!r} requires the package deepspeed; pip install deepspeed, or use strategy='fsdp2'"
            )
    if strategy == "fsdp2" and precision in ("16", "16-mixed"):
        raise ValueError(f"strategy='fsdp2' does not support precision={precision!r}; use precision='bf16-mixed'")


def _check_start(strategy: str, kind: str) -> None:
    """Raise ``RuntimeError`` if the strategy cannot start processes from this one."""
    if strategy in FORKED:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise RuntimeError(
                f"strategy={strategy!r} forks processes, which {sys.platform} does not support; use strategy='ddp_spawn'"
            )
        if kind == "cuda" and torch.cuda.is_initialized():
            raise RuntimeError(
                f"strategy={strategy!r} forks this process, in which CUDA is already initialized; restart the kernel and "
                "train before other code uses a GPU"
            )
    elif strategy == "ddp_spawn":
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                "strategy='ddp_spawn' imports the script in every process; put the training under "
                "if __name__ == '__main__':, or use strategy='ddp'"
            )
        if _is_interactive():
            raise RuntimeError("strategy='ddp_spawn' does not work in a notebook; use strategy='ddp_notebook'")
    elif not _can_start_again():
        raise RuntimeError(
            f"strategy={strategy!r} runs the script once for each device, and this is not a script; run one, or use "
            "strategy='ddp_notebook'"
        )


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _can_start_again() -> bool:
    """Whether a cluster manager starts the processes, or there is a script that can be started once for each."""
    managers = (SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    if "LOCAL_RANK" in os.environ or any(manager.detect() for manager in managers):
        return True
    main = sys.modules["__main__"]
    return not _is_interactive() and (main.__spec__ is not None or os.path.isfile(sys.argv[0]))
