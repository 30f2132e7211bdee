"""From options to a trained model, and to the folder of a run.

What the folder of a run gets when training begins; imports Lightning.
"""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from alphastomics._io._errors import os_errors_for
from alphastomics._rank import is_first, quiet_unless_first
from alphastomics.cli._files import check_folder
from alphastomics.cli._options import SetupOptions, check_masks

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

    from alphastomics.cli._options import ModelOptions, PlanOptions, TrainingOptions
    from alphastomics.cli._run import RunFolder, RunOptions, SourceOptions
    from alphastomics.config import Config
    from alphastomics.model import AlphaSTomics

logger = logging.getLogger(__name__)


def fit(
    reference: AnnData,
    setup: SetupOptions,
    model: ModelOptions,
    training: TrainingOptions,
    plan: PlanOptions,
    seed: int,
) -> AlphaSTomics:
    """Train a model on a reference.

    Raises
    ------
    KeyboardInterrupt
        If training was interrupted.
    RuntimeError
        If training ended before its first step.
    """
    check_masks(model, training)
    from alphastomics.model import AlphaSTomics

    AlphaSTomics.setup_anndata(reference, **asdict(setup))
    fitted = AlphaSTomics(reference, **model.arguments(), random_state=seed)
    train(fitted, training, plan)
    return fitted


def train(model: AlphaSTomics, training: TrainingOptions, plan: PlanOptions, **arguments: Any) -> None:
    """Train a model, with further arguments of its method.

    Raises
    ------
    KeyboardInterrupt
        If training was interrupted.
    RuntimeError
        If training ended before its first step.
    """
    model.train(**training.arguments(model), plan_kwargs=plan.arguments(), **arguments)
    if model.trainer.interrupted:
        raise KeyboardInterrupt
    if not model.is_trained:
        raise RuntimeError("Training ended before its first step; there is no model to keep")


def run_training(
    config: Config,
    source: SourceOptions,
    run: RunOptions,
    setup: SetupOptions,
    model: ModelOptions,
    training: TrainingOptions,
    plan: PlanOptions,
    seed: int,
) -> None:
    """Train a model and fill the folder of its run; nothing is written before the first step.

    Where several processes run the command (``ddp`` starts it once more for every further device, torchrun and Slurm for
    each), all of them read and train, and the first writes and tells.

    Raises
    ------
    OSError, KeyError, ValueError
        If the data, the folder or an option cannot be used.
    """
    quiet_unless_first()
    training.check_device()
    check_masks(model, training)
    from alphastomics.train.callbacks import MetricsFile

    leads = is_first()
    folder, resumed = run.folder(), run.checkpoint(claim=leads)
    if leads:
        check_folder(folder.path)
    fresh = make_model(source, setup, model.arguments() | {"random_state": seed})
    callbacks = [StartOfRun(folder, config, resumed=resumed is not None), MetricsFile(folder.metrics)]
    before = _stamp(folder.config)
    try:
        begun_at = "last" if run.from_last else resumed
        train(fresh, training, plan, checkpoint=folder.last, resume=begun_at, callbacks=callbacks)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        if leads and folder.last.is_file():
            logger.warning("The training is in %s; --resume continues it.", folder.last)
        raise
    finally:
        if leads and not folder.last.is_file() and _stamp(folder.config) != before:  # it has begun, maybe in a fork
            folder.discard()
    if not leads:
        return
    save(fresh, folder.model)
    logger.info("The model is in %s.", folder.model)
    if run.test_after_train:
        test(fresh, source, folder, seed)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew; None where there is none."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def make_model(source: SourceOptions, setup: SetupOptions, arguments: dict[str, Any]) -> AlphaSTomics:
    """A model of the cells of a file or of a dataset.

    Raises
    ------
    OSError, KeyError, ValueError
        If these cannot be used.
    """
    from alphastomics.cli._cells import read_reference
    from alphastomics.model import AlphaSTomics

    if source.input_data is None:
        model = _model_of_dataset(source, setup, arguments)
    else:
        reference = read_reference(source.input_data)
        AlphaSTomics.setup_anndata(reference, **asdict(setup))
        model = AlphaSTomics(reference, **arguments)
    if source.num_genes not in (None, model.schema.n_genes):
        raise ValueError(
            f"{source.data_dir or source.input_data} has {model.schema.n_genes} genes, not {source.num_genes}; "
            "correct num_genes=… or leave it out"
        )
    return model


def _model_of_dataset(source: SourceOptions, setup: SetupOptions, arguments: dict[str, Any]) -> AlphaSTomics:
    from alphastomics.data.parquet._dataset import DatasetInfo
    from alphastomics.data.parquet._source import BUFFER
    from alphastomics.model import AlphaSTomics

    assert source.data_dir is not None  # SourceOptions.check has seen to it
    changed = [name for name, value in asdict(SetupOptions()).items() if getattr(setup, name) != value]
    if changed:
        raise ValueError(f"{changed[0]}=… is for --input-data; a dataset was told so when it was made")
    n_cells = sum(shard.n_cells for shard in DatasetInfo.read(source.data_dir).shards)
    buffer_size = source.buffer_size or BUFFER if source.streaming else max(1, n_cells)
    return AlphaSTomics.from_parquet(source.data_dir, buffer_size=buffer_size, **arguments)


def save(model: AlphaSTomics, path: Path) -> None:
    """Save a model whole, in the place of one that is there."""
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
    """Score the trained model on cells that it has not seen; print and write the table, or say why there is none."""
    from alphastomics.cli._files import to_text
    from alphastomics.cli._query import score_model, write_scores

    if model.mode not in ("any", "expr_to_pos"):
        logger.info(
            "Nothing was tested: scores are of cells that are placed, and mode=%r does not place any.", model.mode
        )
        return
    cells = unseen(model, source)
    if cells is None:
        return
    table = score_model(model, cells, n_samples=1, n_steps=None, seed=seed)
    sys.stdout.write(to_text(table))
    write_scores(folder.scores, table)


def unseen(model: AlphaSTomics, source: SourceOptions) -> AnnData | None:
    """Cells that were not trained on; None, which the log explains, if there are none."""
    if source.data_dir is not None:
        from alphastomics.cli._cells import read_dataset
        from alphastomics.data.parquet._dataset import DatasetInfo

        splits = {shard.split for shard in DatasetInfo.read(source.data_dir).shards if shard.n_cells}
        split = next((split for split in ("test", "validation") if split in splits), None)
        if split is None:
            logger.info("Nothing was tested: %s has neither a test nor a validation set.", source.data_dir)
            return None
        return read_dataset(source.data_dir, split)
    held_out = model.trainer.datamodule.validation_set
    if held_out is None:
        logger.info("Nothing was tested: no slice was held out; --validation-size does that.")
        return None
    names = [held_out.source.slices[i].name for i in held_out._slices]
    return model.adata[model.adata.obs[model.schema.slice_key].astype(str).isin(names)].copy()


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
                with os_errors_for(self.folder.path):
                    self.folder.make(resumed=self.resumed)
                    self.config.write(self.folder.config)
            except OSError:
                if not self.folder.last.is_file():
                    self.folder.discard()
                raise
