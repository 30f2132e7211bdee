"""Private names of Lightning and scvi-tools: why each is used, and which public name could replace it.

Because of them pyproject.toml bounds the minor version of Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from scvi.model._utils import parse_device_args

from alphastomics._rank import local_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch.strategies import Strategy

# Starts processes by fork or spawn and returns their results. Replace when Lightning exports its launchers.
MultiProcessingLauncher = _MultiProcessingLauncher


def parse_devices(accelerator: str, devices: int | list[int] | str) -> tuple[torch.device, int]:
    """Device of this process and number of devices of the arguments ``accelerator`` and ``devices``.

    Replace when Lightning resolves devices without constructing a ``Trainer``, which logs and chooses a strategy.
    """
    kind, chosen, device = parse_device_args(accelerator=accelerator, devices=devices, return_device="torch")
    parallel = _AcceleratorConnector(accelerator=kind, devices=chosen)._parallel_devices
    if device.type == "cuda" and local_rank() < len(parallel):
        device = torch.device(parallel[local_rank()])
    return device, len(parallel)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script once more for each further device, without Lightning's process observer.

    The observer kills this process without a message if another one fails. Replace when it can be disabled.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes and call ``function``."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self.start_processes()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def start_processes(self) -> None:
        """Start the script for each further device; the processes are in ``procs``."""
        self._call_children_scripts()


def replace_script_launcher(strategy: Strategy, launcher_class: type[ScriptLauncher]) -> None:
    """Replace the launcher of a strategy that starts scripts; a strategy takes no launcher as argument."""
    launcher = strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        strategy._launcher = launcher_class(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)


class MultiProcessingDDPStrategy(DDPStrategy):
    """DDP in forked or spawned processes, started by ``launcher_class``; a strategy takes no launcher as argument."""

    launcher_class: type[_MultiProcessingLauncher] = _MultiProcessingLauncher

    def __init__(self, *, start_method: str) -> None:
        super().__init__(start_method=start_method)  # type: ignore[arg-type]
        self.start_method = start_method

    def _configure_launcher(self) -> None:
        self._launcher = self.launcher_class(self, start_method=self.start_method)  # type: ignore[arg-type]
