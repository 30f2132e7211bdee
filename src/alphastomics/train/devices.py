"""The device that a user asks for, or what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from scvi.model._utils import parse_device_args

if TYPE_CHECKING:
    import torch


def device_of(accelerator: str = "auto", devices: int | list[int] | str = "auto") -> torch.device:
    """The first device of those that :class:`lightning.pytorch.Trainer` would use.

    Raises
    ------
    ValueError
        If there is no such device here, or its number or name makes no sense.
    """
    return _parsed(accelerator, devices)[0]


def count_devices(accelerator: str = "auto", devices: int | list[int] | str = "auto") -> int:
    """Number of devices on this machine that the trainer would use; the refusals are those of :func:`device_of`."""
    return _parsed(accelerator, devices)[1]


def _parsed(accelerator: str, devices: int | list[int] | str) -> tuple[torch.device, int]:
    try:
        kind, chosen, device = parse_device_args(accelerator=accelerator, devices=devices, return_device="torch")
        number = len(_AcceleratorConnector(accelerator=kind, devices=chosen)._parallel_devices)
    except (MisconfigurationException, TypeError, ValueError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".!")
        asked = {"accelerator": accelerator, "devices": devices}
        asked = {name: value for name, value in asked.items() if value != "auto"}
        named = " and ".join(f"{name}={value!r}" for name, value in asked.items())
        flags = " and ".join(f"{name}=…" for name in asked)
        raise ValueError(
            f"there is no device for {named} ({reason}); leave {flags} out to use what is there"
        ) from error
    return device, number
