"""Upload and download of datasets.

The files that ``metadata.json`` lists are uploaded, a few per commit, then ``metadata.json`` and a card: a repository
without ``metadata.json`` is an incomplete upload. Files that the repository has with the same checksum are skipped, so
that a repeated call resumes an interrupted upload. Downloads go to the cache of huggingface_hub, where they are read as
datasets on disk.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq
from tqdm.auto import tqdm

from alphastomics._io._untrusted import check_inside
from alphastomics.config import UploadConfig
from alphastomics.data.hub._card import dataset_card
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
from alphastomics.data.parquet._dataset import FOLDER, METADATA, SPLITS, DatasetInfo

if TYPE_CHECKING:
    from collections.abc import Container
    from os import PathLike

    from huggingface_hub import CommitOperationAdd, HfApi

    from alphastomics.data.parquet._dataset import Shard

logger = logging.getLogger(__name__)

TYPE: Kind = "dataset"
FILES_PER_COMMIT = 50  # the Hub advises against more than 100
SHARD_NAME = re.compile(rf"{FOLDER}/({'|'.join(SPLITS)})(-\d{{5}})?\.parquet")


class Uploaded(NamedTuple):
    """The result of an upload.

    Attributes
    ----------
    url
        Address of the dataset on the Hub.
    files
        Names of the files that were uploaded.
    """

    url: str
    files: tuple[str, ...]


def upload(
    data_dir: str | PathLike[str],
    repo_id: str,
    *,
    private: bool = UploadConfig.private,
    license: str | None = None,
    overwrite: bool = UploadConfig.overwrite,
    endpoint: str | None = None,
) -> Uploaded:
    """Upload a dataset to the Hugging Face Hub, or resume an interrupted upload.

    The token is that of ``hf auth login`` or of the environment variable ``HF_TOKEN``. The repository is created unless it
    exists. Nothing is written on disk.

    Parameters
    ----------
    data_dir
        Folder written by ``alphastomics preprocess``.
    repo_id
        ``"organization/name"``.
    private
        Whether the repository is created private; when False, the default of the organization applies.
    license
        License in the card, an identifier of the Hub, for example ``"cc-by-4.0"``.
    overwrite
        Whether another dataset and an edited card in the repository are replaced.
    endpoint
        Address of the Hub; that of ``HF_ENDPOINT`` when None.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    FileNotFoundError, ValueError
        If the dataset is incomplete, the repository holds another one or is public although `private` is True, or the
        organization does not exist.
    OSError
        If the token is missing or insufficient (:class:`PermissionError`), or the Hub cannot be reached or fails.
    """
    require("huggingface_hub")
    folder, info = Path(data_dir), DatasetInfo.read(data_dir, check=False)
    check_token()
    files = _shards(folder, info)
    files += [_metadata(folder), _card(folder, info, repo_id, license)]
    api, url = open_repository(repo_id, TYPE, private=private, endpoint=endpoint)
    return Uploaded(url, _send(api, repo_id, files, overwrite=overwrite))


def download(repo_id: str, *, revision: str | None = None, endpoint: str | None = None) -> Path:
    """Download a dataset from the Hugging Face Hub, unless it is in the local cache.

    Parameters
    ----------
    repo_id
        ``"organization/name"``.
    revision
        Branch, tag or commit; ``main`` when None.
    endpoint
        Address of the Hub; that of ``HF_ENDPOINT`` when None.

    Returns
    -------
    The folder of the dataset in the cache of huggingface_hub, for :func:`alphastomics.data.create_dataloaders`,
    :func:`alphastomics.data.read_dataset` and :meth:`alphastomics.model.AlphaSTomics.from_parquet`.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    FileNotFoundError
        If the repository or the revision does not exist, or holds no complete dataset.
    ValueError
        If the files are damaged, or of another format version.
    OSError
        If the token is insufficient (:class:`PermissionError`), or the Hub cannot be reached or fails.
    """
    require("huggingface_hub")
    from huggingface_hub import snapshot_download

    patterns = [METADATA, f"{FOLDER}/*.parquet"]
    with hub_errors(repo_id, "read"):
        folder = snapshot_download(
            repo_id, repo_type=TYPE, revision=revision, endpoint=endpoint, allow_patterns=patterns
        )
    if not (Path(folder) / METADATA).is_file():
        raise FileNotFoundError(
            f"{repo_id} on the Hub is not a dataset of AlphaSTomics, or an incomplete upload: {METADATA} is missing"
        )
    DatasetInfo.read(folder)
    return Path(folder)


def _shards(folder: Path, info: DatasetInfo) -> list[CommitOperationAdd]:
    """Files that the dataset lists, with verified checksums."""
    return [
        _checked(folder / FOLDER / shard.file, shard)
        for shard in tqdm(info.shards, desc="Checking", unit="file", disable=None)
    ]


def _addition(name: str, content: str | bytes) -> CommitOperationAdd:
    """A file to upload, from its path or content."""
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(name, content)


def _checked(path: Path, shard: Shard) -> CommitOperationAdd:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make the dataset again")
    check_inside(path.parents[1], path)
    addition = _addition(f"{FOLDER}/{shard.file}", str(path))
    if addition.upload_info.sha256.hex() != shard.sha256:
        raise ValueError(f"{path} is damaged: its checksum differs from that in {METADATA}; make the dataset again")
    return addition


def _metadata(folder: Path) -> CommitOperationAdd:
    """``metadata.json`` unchanged; a ValueError if it contains the path of a folder of this computer."""
    path = folder / METADATA
    text = path.read_text(encoding="utf-8")
    check_no_local_paths(path, text, folder.absolute(), folder.resolve())
    return _addition(METADATA, text.encode())


def _card(folder: Path, info: DatasetInfo, repo_id: str, license: str | None) -> CommitOperationAdd:
    columns = pq.read_schema(folder / FOLDER / info.shards[0].file).names
    return _addition(CARD, dataset_card(info, repo_id, columns, license).encode())


def _send(api: HfApi, repo_id: str, files: list[CommitOperationAdd], *, overwrite: bool) -> tuple[str, ...]:
    """Upload what the repository lacks; return the names of these files."""
    stored = files_of(api, repo_id, TYPE)
    missing = {file.path_in_repo: file for file in files if not is_same(file, stored.get(file.path_in_repo))}
    listed = {file.path_in_repo for file in files}
    superfluous = [path for path in stored if SHARD_NAME.fullmatch(path) and path not in listed]
    if (others := [path for path in missing if path in stored and path != CARD] + superfluous) and not overwrite:
        raise ValueError(
            f"{repo_id} holds another dataset ({others[0]} differs); use another repository, or replace it with "
            "overwrite=True (--overwrite)"
        )
    if CARD in stored and CARD in missing and not overwrite:
        logger.info("The card of %s is kept; pass overwrite=True (--overwrite) to replace it.", repo_id)
        del missing[CARD]
    commits = _commits(missing, superfluous, next(file for file in files if file.path_in_repo == METADATA), stored)
    n_operations = sum(map(len, commits))
    with hub_errors(repo_id), tqdm(total=n_operations, desc="Sending", unit="file", disable=None) as bar:
        for number, operations in enumerate(commits, 1):
            message = f"Upload dataset with alphastomics ({number} of {len(commits)})"
            api.create_commit(repo_id, operations, commit_message=message, repo_type=TYPE)
            bar.update(len(operations))
    return tuple(missing)


def _commits(
    missing: dict[str, CommitOperationAdd], superfluous: list[str], metadata: CommitOperationAdd, stored: Container[str]
) -> list[list[Any]]:
    """Divide the operations into commits: a few files each, ``metadata.json`` and the card in the last."""
    from huggingface_hub import CommitOperationDelete

    shards = [file for path, file in missing.items() if path.startswith(FOLDER)]
    last = {path: file for path, file in missing.items() if not path.startswith(FOLDER)}
    starts = range(0, max(1, len(shards)), FILES_PER_COMMIT)
    commits: list[list[Any]] = [shards[start : start + FILES_PER_COMMIT] for start in starts]
    if len(commits) > 1 and METADATA in stored:
        # Between these commits the repository holds neither the old dataset nor the new one.
        commits[0].append(CommitOperationDelete(METADATA))
        last[METADATA] = metadata
    commits[-1] += [*last.values(), *(CommitOperationDelete(path) for path in superfluous)]
    return [operations for operations in commits if operations]
