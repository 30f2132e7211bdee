r"""Devices, precision, usable memory, random generators and deterministic algorithms.

.. math:: \operatorname{round}(x) = x\,(1 + \delta), \qquad |\delta| \le u, \qquad
    |(\hat x_i - \hat x_j) - (x_i - x_j)| \le u\,(|x_i| + |x_j|)

u is 2^-8 in bfloat16: a position two model units from the center has an error of 1/128 unit, more than the distance of near
cells. Coordinates, distances, Gram matrices and losses are therefore computed outside of autocast (Higham 2002, section 2).

Random generators and the choice of algorithms are global to the process; a training restores them.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from alphastomics.config import TrainerConfig
from alphastomics.nn._torch_compat import has_amx
from alphastomics.train._lightning_compat import parse_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


AUTOCAST = {
    "32": None,
    "32-true": None,
    "bf16": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16": torch.float16,
    "16-mixed": torch.float16,
}
"""Precision -> type of matrix products, None for that of the weights, which is 32 bits."""
MARGIN = 0.05  # share of a GPU's free memory reserved for fragmentation and the driver
SHARE = 0.8  # usable share of the total memory with several processes
MEMINFO = Path("/proc/meminfo")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # workspaces with which cuBLAS is deterministic


def device_of(
    accelerator: str = TrainerConfig.accelerator, devices: int | list[int] | str = TrainerConfig.devices
) -> torch.device:
    """The device that :class:`lightning.pytorch.Trainer` would use in this process, the first one unless it is one of several.

    Raises
    ------
    ValueError
        If there is no such device, or its number or name is invalid.
    """
    return _parsed(accelerator, devices)[0]


def count_devices(
    accelerator: str = TrainerConfig.accelerator, devices: int | list[int] | str = TrainerConfig.devices
) -> int:
    """Number of devices on this machine that the trainer would use; raises the errors of :func:`device_of`."""
    return _parsed(accelerator, devices)[1]


def _parsed(accelerator: str, devices: int | list[int] | str) -> tuple[torch.device, int]:
    try:
        return parse_devices(accelerator, devices)
    except (MisconfigurationException, TypeError, ValueError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".!")
        values = {"accelerator": accelerator, "devices": devices}
        values = {name: value for name, value in values.items() if value != "auto"}
        described = " and ".join(f"{name}={value!r}" for name, value in values.items())
        flags = " and ".join(f"{name}=…" for name in values)
        raise ValueError(
            f"there is no device for {described} ({reason}); omit {flags} to use the available devices"
        ) from error


def resolve_precision(precision: str | int, device: torch.device) -> str | int:
    """Resolve ``"auto"`` to bfloat16 if the device has matrix products of it, else to 32 bits; others are unchanged.

    Raises
    ------
    ValueError
        If the precision is unknown, or the weights would not be in 32 bits, in which placements are computed.
    """
    if precision != "auto":
        if str(precision) not in AUTOCAST:
            raise ValueError(
                f"precision={precision!r} is unknown, or its weights are not in 32 bits; pass 'auto', '32-true', 'bf16-mixed' or "
                "'16-mixed'"
            )
        return precision
    if device.type == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    # Without AMX a CPU multiplies no faster in 16 bits than in 32, and conversions cost time.
    return "bf16-mixed" if has_amx() else "32-true"


def usable_memory(device: torch.device | str, limit: int | None = None, *, n_processes: int = 1) -> int:
    """Bytes that training may use on a device.

    On a GPU: the free memory and PyTorch's unused cache, less 5 %. Elsewhere: the available memory, or the total memory if the
    system does not report it. Several processes get a share of the total memory, because free memory changes and they must
    use the same number.

    Parameters
    ----------
    device
        The device.
    limit
        Number of bytes to return instead.
    n_processes
        Number of processes of a training, each with its own device; outside of GPUs they share the memory.

    Raises
    ------
    ValueError
        If the limit is not positive, or the system does not report its memory.
    """
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit={limit} bytes of memory must be positive")
        return limit
    device = torch.device(device)
    if n_processes > 1:
        if device.type == "cuda":
            return int(SHARE * torch.cuda.get_device_properties(device).total_memory)
        return int(SHARE * _all_memory() / n_processes)
    if device.type != "cuda":
        return _system_memory()
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((1 - MARGIN) * (free + cached))


def _system_memory() -> int:
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024  # from KiB
    return _all_memory()


def _all_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise ValueError("the system does not report its memory; pass limit=") from None


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed PyTorch's generator within the context, and restore all generators after it.

    Generators of GPUs are restored only if CUDA is initialized: reading them would initialize it, and prevent forks.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(int(seed))
        yield


@contextmanager
def preserve_algorithm_settings() -> Iterator[None]:
    """Restore the choice of algorithms and the cuBLAS workspaces, which a trainer sets for the whole process."""
    enabled, warn_only = before = _algorithms()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE)
    try:
        yield
    finally:
        if _algorithms() != before:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = workspace


def _algorithms() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def check_cublas_workspace(deterministic: bool | str | None, device: torch.device) -> None:
    """Warn if cuBLAS cannot be made deterministic any more: it reads its workspaces when CUDA is initialized."""
    is_set = os.environ.get(WORKSPACE) in REPEATABLE
    if deterministic and not is_set and device.type == "cuda" and torch.cuda.is_initialized():
        logger.warning(
            "CUDA was initialized before this training with deterministic=True, so that cuBLAS may not be deterministic; "
            "set %s=%s before Python starts.", WORKSPACE, REPEATABLE[0],
        )  # fmt: skip
