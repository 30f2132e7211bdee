"""The commands that train: from options to a model, and to the folder of a run. Importing this module imports Lightning."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np

from alphastomics._io._errors import check_folder, os_errors_for
from alphastomics._labels import label_names
from alphastomics._rank import is_first, quiet_unless_first
from alphastomics.cli._output import to_text
from alphastomics.cli._query import read_reference
from alphastomics.config import PLACING_MODES, SetupConfig
from alphastomics.config._sections import SETTINGS
from alphastomics.config._setting import flag
from alphastomics.data import read_dataset
from alphastomics.data.parquet._dataset import DatasetInfo
from alphastomics.model import AlphaSTomics
from alphastomics.train import resolve_strategy
from alphastomics.train.callbacks import MetricsFile
from alphastomics.train.distributed.devices import device_of

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

    from alphastomics.cli._options import FitOptions, SetupOptions
    from alphastomics.cli._run import RunFolder, RunOptions, SourceOptions
    from alphastomics.config import Config

logger = logging.getLogger(__name__)


def check_device(options: FitOptions) -> None:
    """Check that the devices are available and the strategy supports them, with errors that name flags."""
    where = options.devices_and_precision
    try:
        device_of(where["accelerator"], where["devices"])
    except ValueError as error:
        if options.gpus is None:
            raise
        raise ValueError(
            f"--gpus {options.gpus} exceeds the number of available GPUs; omit --gpus to use all of them"
        ) from error
    try:
        resolve_strategy(
            options.strategy,
            num_nodes=options.num_nodes,
            group_size=options.context_parallel_size,
            **where,
        )
    except (ImportError, RuntimeError, ValueError) as error:
        raise type(error)(_flags_for_arguments(str(error))) from error


def _flags_for_arguments(text: str) -> str:
    """Replace ``strategy='ddp'`` by ``--strategy ddp`` and ``num_nodes=`` by ``--num-nodes``."""
    return re.sub(
        rf"\b({'|'.join(SETTINGS)})=(?:'?([\w-]+)'?)?",
        lambda found: f"{flag(found[1])} {found[2] or ''}".rstrip(),
        text,
    )


def fit(reference: AnnData, setup: SetupConfig, options: FitOptions, seed: int) -> AlphaSTomics:
    """Train a model on a reference.

    Raises
    ------
    KeyboardInterrupt
        If training was interrupted.
    RuntimeError
        If training ended before its first step.
    """
    AlphaSTomics.setup_anndata(reference, **vars(setup))
    model = AlphaSTomics(reference, **options.model_arguments(), random_state=seed)
    train(model, options)
    return model


def train(model: AlphaSTomics, options: FitOptions, **arguments: Any) -> None:
    """Train a model, with further arguments of its method.

    Raises
    ------
    KeyboardInterrupt
        If training was interrupted.
    RuntimeError
        If training ended before its first step.
    """
    model.train(**options.training_arguments(model.default_augmentation()), **arguments)
    if model.trainer.interrupted:
        raise KeyboardInterrupt
    if not model.is_trained:
        raise RuntimeError("Training ended before its first step, so there is no model to save")


def run_training(
    config: Config, run: RunOptions, source: SourceOptions, setup: SetupOptions, options: FitOptions
) -> None:
    """Train a model and fill the folder of its run; nothing is written before the first step.

    If several processes run the command (``ddp`` starts one per additional device, torchrun and Slurm one per device), all of
    them read and train; only the first one writes and prints.

    Raises
    ------
    OSError, KeyError, ValueError
        If the data, the folder or an option cannot be used.
    """
    quiet_unless_first()
    check_device(options)
    first = is_first()
    folder, resumed = run.folder(), run.checkpoint(check_free=first)
    if first:
        check_folder(folder.path)
    model = make_model(source, setup, options.model_arguments() | {"random_state": run.seed})
    callbacks = [MakeRunFolder(folder, config, resumed=resumed is not None), MetricsFile(folder.metrics)]
    before = _stamp(folder.config)
    try:
        resume = "last" if run.from_last else resumed
        train(model, options, checkpoint=folder.last, resume=resume, callbacks=callbacks)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        if first and folder.last.is_file():
            logger.warning("The state of the training is in %s; --resume continues it.", folder.last)
        raise
    finally:
        if (
            first and not folder.last.is_file() and _stamp(folder.config) != before
        ):  # written by this run, maybe in a forked process
            folder.discard()
    if not first:
        return
    save(model, folder.model)
    logger.info("The model is in %s.", folder.model)
    if run.test_after_train:
        test(model, source, folder, run.seed)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Inode and time of change of a file; None if there is no file."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def make_model(source: SourceOptions, setup: SetupOptions, arguments: dict[str, Any]) -> AlphaSTomics:
    """A model of the cells of a file or of a dataset."""
    if source.input_data is None:
        model = _model_of_dataset(source, setup, arguments)
    else:
        reference = read_reference(source.input_data)
        AlphaSTomics.setup_anndata(reference, **vars(setup))
        model = AlphaSTomics(reference, **arguments)
    if source.num_genes not in (None, model.schema.n_genes):
        raise ValueError(
            f"{source.data_dir or source.input_data} has {model.schema.n_genes} genes, not {source.num_genes}; correct or "
            "remove num_genes=…"
        )
    return model


def _model_of_dataset(source: SourceOptions, setup: SetupOptions, arguments: dict[str, Any]) -> AlphaSTomics:
    assert source.data_dir is not None  # by SourceOptions.check
    changed = [name for name, value in vars(setup).items() if value != getattr(SetupConfig, name)]
    if changed:
        raise ValueError(f"{changed[0]}=… requires --input-data; a dataset has its own keys")
    n_cells = sum(shard.n_cells for shard in DatasetInfo.read(source.data_dir).shards)
    buffer_size = source.buffer_size if source.streaming else max(1, n_cells)
    return AlphaSTomics.from_parquet(source.data_dir, buffer_size=buffer_size, **arguments)


def save(model: AlphaSTomics, path: Path) -> None:
    """Replace the model at a path; an existing one is kept if saving fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with os_errors_for(path):
            model.save(temporary)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def test(model: AlphaSTomics, source: SourceOptions, folder: RunFolder, seed: int) -> None:
    """Score the trained model on held-out cells; print and write the table, or log why the model is not tested."""
    from alphastomics.cli._scores import score_model, write_scores

    if model.mode not in PLACING_MODES:
        logger.info("The model was not tested: a model with mode=%r does not predict positions.", model.mode)
        return
    cells = held_out(model, source)
    if cells is None:
        return
    table = score_model(model, cells, random_state=seed)
    sys.stdout.write(to_text(table))
    write_scores(folder.scores, table)


def held_out(model: AlphaSTomics, source: SourceOptions) -> AnnData | None:
    """Cells that were not trained on; None, with a log message, if there are none."""
    if source.data_dir is not None:
        splits = {shard.split for shard in DatasetInfo.read(source.data_dir).shards if shard.n_cells}
        split = next((split for split in ("test", "validation") if split in splits), None)
        if split is None:
            logger.info("The model was not tested: %s has neither a test nor a validation set.", source.data_dir)
            return None
        return read_dataset(source.data_dir, split)
    validation = model.trainer.datamodule.validation_set
    if validation is None:
        logger.info("The model was not tested: no slice was held out; pass --validation-size to hold out slices.")
        return None
    names = [validation.source.slices[i].name for i in validation._slices]
    return model.adata[np.isin(label_names(model.adata.obs[model.schema.slice_key]), names)].copy()


class MakeRunFolder(pl.Callback):
    """Makes the folder of a run and writes its configuration, in the first process and before the first step."""

    def __init__(self, folder: RunFolder, config: Config, *, resumed: bool) -> None:
        self.folder, self.config, self.resumed = folder, config, resumed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the folder; all processes have read its earlier contents by now."""
        if trainer.is_global_zero:
            try:
                with os_errors_for(self.folder.path):
                    self.folder.make(resumed=self.resumed)
                    self.config.write(self.folder.config)
            except OSError:
                if not self.folder.last.is_file():
                    self.folder.discard()
                raise
