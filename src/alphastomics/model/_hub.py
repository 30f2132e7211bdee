"""The card of a model: what the Hub and people read of it.

Models on the Hugging Face Hub: the files of a model folder, and a card that says what is in them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from alphastomics._provenance import versions
from alphastomics.data.hub._card import TAGS
from alphastomics.data.hub._repository import (
    CARD,
    Kind,
    check_places,
    check_token,
    explained,
    files_of,
    is_same,
    open_repository,
    require,
)
from alphastomics.model import _files
from alphastomics.nn import count_parameters

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from alphastomics.model._model import AlphaSTomics

LIBRARY = "alphastomics"
MODES = {
    "expr_to_pos": "places cells by their expression",
    "pos_to_expr": "writes expression into places",
    "joint": "draws whole slices",
    "any": "places cells by their expression, writes expression into places, and draws whole slices",
}


def model_card(model: AlphaSTomics, repo_id: str, license: str | None = None) -> str:
    """Text of ``README.md``.

    Parameters
    ----------
    model
        The model.
    repo_id
        Where it goes.
    license
        As the Hub writes it, for example ``"cc-by-4.0"``; none is named when None.
    """
    named = {} if license is None else {"license": license}
    header = {**named, "library_name": LIBRARY, "tags": [*TAGS, "diffusion"]}
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    name = repo_id.rpartition("/")[2]
    parts = [
        f"# {name}",
        f"A diffusion transformer over expression and positions of cells. It {MODES[model.mode]}.",
        _loading(model, repo_id),
        "## What it was trained on",
        _table(_tissue(model)),
        "`config.json` lists the genes. " + _held(model),
        "## How it was made",
        _table(_making(model)),
    ]
    return f"---\n{text}---\n\n" + "\n\n".join(parts) + "\n"


def _loading(model: AlphaSTomics, repo_id: str) -> str:
    modes = ("expr_to_pos", "pos_to_expr") if model.mode == "any" else (model.mode,)
    reads = "n_cells=2000" if model.mode == "joint" else "cells"
    return f"""With [AlphaSTomics](https://alphastomics.readthedocs.io/) (`pip install "alphastomics[hub]"`):

```python
import alphastomics as asx

model = asx.model.AlphaSTomics.from_pretrained("{repo_id}")
sampled = model.sample({reads}, mode="{modes[0]}")
```"""


def _tissue(model: AlphaSTomics) -> dict[str, Any]:
    schema = model.schema
    values = "counts" if schema.transform == "log1p" else "values as they are"
    return {
        "cells": f"{model.summary_stats.n_cells:,}",
        "slices": f"{len(schema.slices):,}",
        "genes": f"{schema.n_genes:,}",
        "dimensions": schema.n_dims,
        "expression": f"{values}, in `{'X' if schema.layer is None else f'layers[{schema.layer!r}]'}`",
        "positions": f"in `obsm[{schema.position_key!r}]`, frame `{schema.frame}`",
    }


def _held(model: AlphaSTomics) -> str:
    if model.exemplars_ is None:
        return "No expression of a cell of the reference is in this model."
    return (
        f"The model holds expression of {len(model.exemplars_.expression):,} cells of its reference, with which it completes "
        "others."
    )


def _making(model: AlphaSTomics) -> dict[str, Any]:
    init = model.init_params_["non_kwargs"]
    told = {name: init[name] for name in ("mode", "attention", "d_model", "n_layers", "n_heads", "random_state")}
    epochs = max((len(table) for table in (model.history_ or {}).values()), default=0)
    return {**told, "parameters": f"{count_parameters(model.module).total:,}", "epochs": epochs, **versions()}


def _table(values: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in values.items())])


logger = logging.getLogger(__name__)

TYPE: Kind = "model"
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(name_or_path: str | Path, *, revision: str | None, token: str | None) -> Path:
    """The folder of a model: one that is here, or else that of a download.

    Raises
    ------
    FileNotFoundError
        If it is neither here nor on the Hub.
    OSError, ValueError
        If the Hub cannot be reached, or what it has is no model.
    """
    path = Path(name_or_path)
    if path.exists():
        return path
    if not NAME.fullmatch(str(name_or_path)):
        raise FileNotFoundError(
            f"{name_or_path} is not there, and no name of a repository; name a folder, or organization/name on the Hub"
        )
    try:
        return download(str(name_or_path), revision=revision, token=token)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no folder {name_or_path} here, and {error}") from error


def download(repo_id: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """The files of a model, and no others, in the cache of huggingface_hub.

    What is in the cache is taken from there, also where the Hub cannot be reached.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    OSError, ValueError
        If the Hub cannot be reached, has no such repository, or no model in it.
    """
    require("huggingface_hub")
    from huggingface_hub import snapshot_download

    files = [_files.WEIGHTS, _files.CONFIG, CARD]
    with explained(repo_id, "read"):
        folder = Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=files))
    for name in (_files.CONFIG, _files.WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{repo_id} on the Hub holds no model of AlphaSTomics: {name} is missing")
    return folder


def push(
    model: AlphaSTomics,
    repo_id: str,
    *,
    private: bool,
    license: str | None,
    overwrite: bool,
    token: str | None,
    commit_message: str,
) -> str:
    """Send a model; see :meth:`AlphaSTomics.push_to_hub`."""
    check_token(token)
    if not model.is_trained:
        raise ValueError("This model is not trained, and nothing to share; train it first")
    with TemporaryDirectory() as name:
        files = _make(model, Path(name), repo_id, license)
        api, url = open_repository(repo_id, TYPE, private=private, token=token)
        missing = _missing(files, repo_id, files_of(api, repo_id, TYPE), overwrite=overwrite)
        if missing:
            with explained(repo_id):
                api.create_commit(repo_id, missing, commit_message=commit_message, repo_type=TYPE)
    return url


def _make(model: AlphaSTomics, folder: Path, repo_id: str, license: str | None) -> list[CommitOperationAdd]:
    """What is sent, after a look for what is no one's business."""
    from huggingface_hub import CommitOperationAdd

    _files.write_model(folder, _files.model_tensors(model), _files.model_config(model), overwrite=False)
    check_places(_files.CONFIG, (folder / _files.CONFIG).read_text(encoding="utf-8"), Path.cwd())
    card = CommitOperationAdd(CARD, model_card(model, repo_id, license).encode())
    return [CommitOperationAdd(name, str(folder / name)) for name in (_files.WEIGHTS, _files.CONFIG)] + [card]


def _missing(
    files: list[CommitOperationAdd], repo_id: str, there: dict[str, object], *, overwrite: bool
) -> list[CommitOperationAdd]:
    """The files that the repository does not hold as they are here."""
    missing = [file for file in files if not is_same(file, there.get(file.path_in_repo))]
    others = [file.path_in_repo for file in missing if file.path_in_repo in there and file.path_in_repo != CARD]
    if others and not overwrite:
        raise ValueError(
            f"{repo_id} holds another model ({others[0]} differs); name another repository, or pass overwrite=True to "
            "replace it"
        )
    if CARD in there and not overwrite and any(file.path_in_repo == CARD for file in missing):
        logger.info("The card of %s stays as it is; overwrite=True replaces it.", repo_id)
        missing = [file for file in missing if file.path_in_repo != CARD]
    return missing
