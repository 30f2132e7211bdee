"""Models on the Hugging Face Hub: the files of a model folder, and a model card."""

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
    check_no_local_paths,
    check_token,
    files_of,
    hub_errors,
    is_same,
    open_repository,
    require,
)
from alphastomics.model._files import CONFIG, WEIGHTS, write_model

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from alphastomics.model._state import ModelState

logger = logging.getLogger(__name__)

LIBRARY = "alphastomics"
TYPE: Kind = "model"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
MODES = {
    "expr_to_pos": "predicts positions of cells from their expression",
    "pos_to_expr": "predicts expression at positions",
    "joint": "samples whole slices",
    "any": "predicts positions from expression and expression at positions, and samples whole slices",
}


def model_card(state: ModelState, repo_id: str, license: str | None = None) -> str:
    """Text of the model card, ``README.md``; ``license`` is an identifier of the Hub, for example ``"cc-by-4.0"``."""
    named = {} if license is None else {"license": license}
    header = {**named, "library_name": LIBRARY, "tags": [*TAGS, "diffusion"]}
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    name = repo_id.rpartition("/")[2]
    parts = [
        f"# {name}",
        f"A diffusion transformer over expression and positions of cells. It {MODES[state.init['mode']]}.",
        _loading(state.init["mode"], repo_id),
        "## Training data",
        _table(_tissue(state)),
        "`config.json` lists the genes. " + _reference_cells(state),
        "## Model parameters and training",
        _table(_making(state)),
    ]
    return f"---\n{text}---\n\n" + "\n\n".join(parts) + "\n"


def _loading(mode: str, repo_id: str) -> str:
    modes = ("expr_to_pos", "pos_to_expr") if mode == "any" else (mode,)
    reads = "n_cells=2000" if mode == "joint" else "cells"
    return f"""With [AlphaSTomics](https://alphastomics.readthedocs.io/) (`pip install "alphastomics[hub]"`):

```python
import alphastomics as asx

model = asx.model.AlphaSTomics.from_pretrained("{repo_id}")
sampled = model.sample({reads}, mode="{modes[0]}")
```"""


def _tissue(state: ModelState) -> dict[str, Any]:
    schema = state.schema
    values = "counts" if schema.transform == "log1p" else "untransformed values"
    return {
        "cells": f"{state.n_cells:,}",
        "slices": f"{len(schema.slices):,}",
        "genes": f"{schema.n_genes:,}",
        "dimensions": schema.n_dims,
        "expression": f"{values}, in `{'X' if schema.layer is None else f'layers[{schema.layer!r}]'}`",
        "positions": f"in `obsm[{schema.position_key!r}]`, frame `{schema.frame}`",
    }


def _reference_cells(state: ModelState) -> str:
    cells, compared = state.fitted.reference_cells, state.fitted.confidence_cells
    parts = []
    if cells is not None:
        parts.append(
            f"The model contains the expression of {len(cells.expression):,} cells of the reference and their positions. They are "
            "used to place dissociated cells, to complete partly observed cells and to sample new slices."
        )
    if compared is not None:
        parts.append(
            f"The model contains the expression of {len(compared.searched) + len(compared.held_out):,} cells of the reference "
            "without their positions, with which the cells that are placed are compared."
        )
    return " ".join(parts) or "The model contains no expression of single cells of the reference."


def _making(state: ModelState) -> dict[str, Any]:
    named = {name: state.init[name] for name in ("mode", "attention", "d_model", "n_layers", "n_heads", "random_state")}
    epochs = max((len(table) for table in state.config["history"].values()), default=0)
    return {**named, "parameters": f"{state.n_parameters:,}", "epochs": epochs, **versions()}


def _table(values: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in values.items())])


def find_folder(name_or_path: str | Path, *, revision: str | None, token: str | None) -> Path:
    """The folder of a model: a local folder if it exists, else a download.

    Raises ``FileNotFoundError`` if there is no such folder or repository, and the errors of :func:`download`.
    """
    path = Path(name_or_path)
    if path.exists():
        return path
    if not NAME.fullmatch(str(name_or_path)):
        raise FileNotFoundError(f"{name_or_path} is neither a folder nor the name of a repository (organization/name)")
    try:
        return download(str(name_or_path), revision=revision, token=token)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no folder {name_or_path}, and {error}") from error


def download(repo_id: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Download the files of a model to the cache of huggingface_hub; cached files are used if the Hub cannot be reached.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    OSError, ValueError
        If the Hub cannot be reached, the repository does not exist, or it contains no model.
    """
    require("huggingface_hub")
    from huggingface_hub import snapshot_download

    files = [WEIGHTS, CONFIG, CARD]
    with hub_errors(repo_id, "read"):
        folder = Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=files))
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{repo_id} on the Hub contains no model of AlphaSTomics: {name} is missing")
    return folder


def push(
    state: ModelState,
    repo_id: str,
    *,
    private: bool,
    license: str | None,
    overwrite: bool,
    token: str | None,
    commit_message: str,
) -> str:
    """Upload a model, see :meth:`AlphaSTomics.push_to_hub`."""
    check_token(token)
    if not state.config["is_trained"]:
        raise ValueError("The model is not trained; call train() before push_to_hub()")
    with TemporaryDirectory() as name:
        files = _make(state, Path(name), repo_id, license)
        api, url = open_repository(repo_id, TYPE, private=private, token=token)
        missing = _missing(files, repo_id, files_of(api, repo_id, TYPE), overwrite=overwrite)
        if missing:
            with hub_errors(repo_id):
                api.create_commit(repo_id, missing, commit_message=commit_message, repo_type=TYPE)
    return url


def _make(state: ModelState, folder: Path, repo_id: str, license: str | None) -> list[CommitOperationAdd]:
    """The files to upload, after a check that they contain no paths of this machine."""
    from huggingface_hub import CommitOperationAdd

    write_model(folder, state, overwrite=False)
    check_no_local_paths(CONFIG, (folder / CONFIG).read_text(encoding="utf-8"), Path.cwd())
    card = CommitOperationAdd(CARD, model_card(state, repo_id, license).encode())
    return [CommitOperationAdd(name, str(folder / name)) for name in (WEIGHTS, CONFIG)] + [card]


def _missing(
    files: list[CommitOperationAdd], repo_id: str, existing: dict[str, object], *, overwrite: bool
) -> list[CommitOperationAdd]:
    """The files that the repository lacks or has in another version."""
    missing = [file for file in files if not is_same(file, existing.get(file.path_in_repo))]
    changed = [file.path_in_repo for file in missing if file.path_in_repo in existing and file.path_in_repo != CARD]
    if changed and not overwrite:
        raise ValueError(
            f"{repo_id} contains another model ({changed[0]} differs); choose another repository, or pass overwrite=True to "
            "replace it"
        )
    if CARD in existing and not overwrite and any(file.path_in_repo == CARD for file in missing):
        logger.info("The card of %s is kept; overwrite=True replaces it.", repo_id)
        missing = [file for file in missing if file.path_in_repo != CARD]
    return missing
