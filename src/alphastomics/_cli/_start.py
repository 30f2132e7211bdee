"""What the folder of a run gets when training begins; imports Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

from alphastomics._disk import naming

if TYPE_CHECKING:
    from alphastomics._cli._run import RunFolder
    from alphastomics.config import Config


class StartOfRun(pl.Callback):
    """Makes the folder of a run and writes its configuration, in the first of all processes and before the first step.

    Parameters
    ----------
    folder
        The folder.
    config
        Everything that was decided.
    resumed
        Whether what an earlier training left there is continued.
    """

    def __init__(self, folder: RunFolder, config: Config, *, resumed: bool) -> None:
        self.folder, self.config, self.resumed = folder, config, resumed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make it; all processes have read by now what it held."""
        if trainer.is_global_zero:
            try:
                with naming(self.folder.path):
                    self.folder.make(resumed=self.resumed)
                    self.config.write(self.folder.config)
            except OSError:
                if not self.folder.last.is_file():
                    self.folder.discard()
                raise
