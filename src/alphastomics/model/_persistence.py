"""Mixin of the model class: saving and loading, in folders and on the Hugging Face Hub."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import anndata as ad
import pandas as pd

from alphastomics._io._errors import format_value
from alphastomics._io._untrusted import check_inside
from alphastomics.config import TrainerConfig
from alphastomics.data._h5ad import read_h5ad
from alphastomics.model import _checkpoint, _files, _hub
from alphastomics.model._base import ModelBase
from alphastomics.model._state import reading_model, trainings_of
from alphastomics.train.distributed.devices import device_of
from alphastomics.train.distributed.processes import write_on_rank_zero

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics.model._state import ModelState

PREFIX = "prefix is not supported: a model has a folder of its own"


class PersistenceMixin(ModelBase):
    """Saves and loads a model."""

    def save(
        self,
        dir_path: str | Path,
        prefix: str | None = None,
        overwrite: bool = False,
        save_anndata: bool = False,
        **anndata_write_kwargs: Any,
    ) -> None:
        """Save the model to a folder, as safetensors and JSON.

        In a script with several processes, rank 0 writes and the others wait.

        A model contains the positions and the expression of up to 8,192 cells of its reference, and one that predicts positions
        also the expression of up to 5,120 cells without their positions. Share it only as the license of these data permits.

        Parameters
        ----------
        dir_path
            Folder, which gets ``model.safetensors`` and ``config.json``.
        prefix
            Not supported, because each model has its own folder.
        overwrite
            Whether to replace an existing model.
        save_anndata
            Whether to save the reference in the same folder, as ``adata.h5ad``.
        **anndata_write_kwargs
            Passed to :meth:`anndata.AnnData.write_h5ad`.

        Raises
        ------
        FileExistsError
            If the folder is not empty and ``overwrite`` is false.
        OSError
            If the folder cannot be written.
        ValueError
            If ``prefix`` is given, or ``save_anndata=True`` and the model has no data.

        Examples
        --------
        >>> model.save("tissue_model", save_anndata=True)
        """
        if prefix:
            raise ValueError(PREFIX)
        if save_anndata and self.adata is None:
            raise ValueError("save_anndata=True requires a model with data")
        folder = Path(dir_path)

        def write() -> None:
            _files.write_model(folder, self._state(), overwrite=overwrite)
            (folder / _files.DATA).unlink(missing_ok=True)  # of the model that was replaced
            if save_anndata:
                with ad.settings.override(allow_write_nullable_strings=True):  # as files of anndata 0.13 have them
                    self.adata.write_h5ad(folder / _files.DATA, **anndata_write_kwargs)

        write_on_rank_zero(folder.absolute(), write)

    @classmethod
    def load(
        cls,
        dir_path: str | Path,
        adata: AnnData | Literal[False] | None = None,
        accelerator: str = TrainerConfig.accelerator,
        device: int | str = "auto",
        prefix: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model written by :meth:`save`, with or without its data.

        Parameters
        ----------
        dir_path
            Folder, or the ``.ckpt`` file of a training that has ended, see :meth:`train`.
        adata
            Data to attach. None: the data saved with the model, if any. False: none.
        accelerator, device
            Device of the network.
        prefix
            Not supported, because each model has its own folder.
        **kwargs
            Not used.

        Returns
        -------
        The model.

        Raises
        ------
        FileNotFoundError, ValueError
            If the folder or file does not contain a complete model of this package.

        Examples
        --------
        >>> model.save("tissue_model")
        >>> model = asx.model.AlphaSTomics.load("tissue_model", adata=False)
        """
        if prefix:
            raise ValueError(PREFIX)
        path = Path(dir_path)
        target = device_of(accelerator, device)
        model = cls._from_state(path, (_checkpoint if path.suffix == ".ckpt" else _files).read_model(path), adata)
        model.to_device(target)
        return model

    @classmethod
    def _from_state(cls, path: Path, state: ModelState, adata: AnnData | Literal[False] | None) -> Self:
        """Rebuild a model from its state, read from ``path``."""
        config = state.config
        if config.get("class") != cls.__name__:
            raise ValueError(
                f"{path} contains a model of class {format_value(config.get('class'))}, not {cls.__name__}"
            )
        if adata is None and (path / _files.DATA).is_file():
            check_inside(path, path / _files.DATA)
            adata = read_h5ad(path / _files.DATA)
        with reading_model(path):
            registry, setup = config["registry"], dict(config["registry"]["setup_args"])
            if others := setup.keys() - signature(cls.setup_anndata).parameters.keys():
                raise ValueError(f"setup_anndata has no argument {format_value(min(others))}")
        data = None if adata is False else adata
        if data is not None:  # outside of reading_model: errors of the data are not errors of the model
            cls.setup_anndata(data, **setup, source_registry=registry)
        with reading_model(path):
            model = cls(data, registry if data is None else None, **config["init"])
            model.module.load_state_dict(state.weights)
            model.fitted_ = state.fitted
            model.trainings_ = trainings_of(config)
            model.history_ = {name: _history(name, values) for name, values in config["history"].items()}
            model.is_trained_ = bool(config["is_trained"])
        model.module.eval()
        return model

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        adata: AnnData | Literal[False] | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
        accelerator: str = TrainerConfig.accelerator,
        device: int | str = "auto",
    ) -> Self:
        """Load a model from a folder or from the Hugging Face Hub.

        The files cannot run code; see :doc:`/files`.

        Parameters
        ----------
        name_or_path
            Folder written by :meth:`save`, which takes precedence, or ``"organization/name"`` on the Hub, from which only the
            files of a model are downloaded.
        adata
            Data to attach. None: the data saved with the model in a folder, if any. False: none.
        revision
            Branch, tag or commit on the Hub; ``main`` when None.
        token
            Token for the Hub; that of ``hf auth login`` or of the environment variable ``HF_TOKEN`` when None.
        accelerator, device
            Device of the network.

        Returns
        -------
        The model.

        Raises
        ------
        ImportError
            If huggingface_hub is not installed (the extra ``hub``) and there is no such folder.
        FileNotFoundError
            If there is no such folder, repository or revision.
        OSError
            If the Hub cannot be reached.
        ValueError
            If the folder or repository does not contain a complete model of this package.

        Examples
        --------
        >>> model = asx.model.AlphaSTomics.from_pretrained("organization/name")
        """
        folder = _hub.find_folder(name_or_path, revision=revision, token=token)
        return cls.load(folder, adata, accelerator, device)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        license: str | None = None,
        overwrite: bool = False,
        token: str | None = None,
        commit_message: str = "Upload model with alphastomics",
    ) -> str:
        """Upload the model to the Hugging Face Hub, with a model card.

        Uploads the files that :meth:`save` writes, without the reference. Share it only as the license of the
        data permits: it contains cells of the reference, see :meth:`save`.

        Parameters
        ----------
        repo_id
            ``"organization/name"``; created if it does not exist.
        private
            Whether a new repository is private; if not, the default of the organization applies.
        license
            License in the card, as an identifier of the Hub, for example ``"cc-by-4.0"``.
        overwrite
            Whether to replace another model and its card in the repository.
        token
            Token for the Hub; that of ``hf auth login`` or of the environment variable ``HF_TOKEN`` when None.
        commit_message
            Message in the history of the repository.

        Returns
        -------
        The address of the model.

        Raises
        ------
        ImportError
            If huggingface_hub is not installed (the extra ``hub``).
        OSError
            If the token is missing or has no permission (:class:`PermissionError`), or the Hub cannot be reached.
        ValueError
            If the model is not trained; if the repository contains another model and ``overwrite`` is false; or if it is
            public and ``private`` is true.

        Examples
        --------
        >>> model.push_to_hub("organization/name", private=True, license="cc-by-4.0")
        """
        return _hub.push(
            self._state(),
            repo_id,
            private=private,
            license=license,
            overwrite=overwrite,
            token=token,
            commit_message=commit_message,
        )


def _history(name: str, values: dict[str, float]) -> pd.DataFrame:
    """The table of one logged value by epoch."""
    column = pd.Series({int(epoch): value for epoch, value in values.items()}, dtype=float)
    return pd.DataFrame({name: column}).rename_axis("epoch")
