"""From a dataset on disk to a repository of the Hub.

Nothing leaves but the files that ``metadata.json`` lists, itself and a card. Files are committed a few at a time, these two
last: a repository without ``metadata.json`` holds an upload that is not finished. What is there already, with the same
checksum, is not sent again, which is how an interrupted upload goes on.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq
from tqdm.auto import tqdm

from alphastomics._io._untrusted import check_inside
from alphastomics.data.hub._card import dataset_card
from alphastomics.data.hub._errors import explained, require
from alphastomics.data.hub._repository import CARD, Kind, check_places, check_token, files_of, is_same, open_repository
from alphastomics.data.parquet._dataset import FOLDER, METADATA, SPLITS, DatasetInfo

if TYPE_CHECKING:
    from collections.abc import Container
    from os import PathLike

    from huggingface_hub import CommitOperationAdd, HfApi

    from alphastomics.data.parquet._dataset import Shard

logger = logging.getLogger(__name__)

TYPE: Kind = "dataset"
AT_ONCE = 50  # files of a commit; the Hub advises against more than 100
OURS = re.compile(rf"{FOLDER}/({'|'.join(SPLITS)})(-\d{{5}})?\.parquet")


class Uploaded(NamedTuple):
    """What an upload did.

    Attributes
    ----------
    url
        Where the dataset is.
    files
        Files that were sent; none if all were there.
    """

    url: str
    files: tuple[str, ...]


def upload(
    data_dir: str | PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    license: str | None = None,
    overwrite: bool = False,
    endpoint: str | None = None,
) -> Uploaded:
    """Upload a dataset to the Hugging Face Hub, or finish an upload that was interrupted.

    The token is that of ``hf auth login`` or of the environment variable ``HF_TOKEN``. The repository is made if it is not
    there. Nothing is written on disk.

    Parameters
    ----------
    data_dir
        Folder that ``alphastomics preprocess`` wrote.
    repo_id
        ``"organization/name"``.
    private
        Whether only its organization sees it; as the organization has it by default if not.
    license
        License for the card, as the Hub writes it, for example ``"cc-by-4.0"``.
    overwrite
        Whether to replace another dataset, and a card, that the repository holds.
    endpoint
        Address of the Hub; that of ``HF_ENDPOINT`` when None.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    FileNotFoundError, ValueError
        If the dataset is not whole, the repository holds another one or is public against `private`, or there is no such
        organization.
    OSError
        If the token is missing or does not suffice (:class:`PermissionError`), or the Hub cannot be reached or fails.
    """
    require("huggingface_hub")
    folder, info = Path(data_dir), DatasetInfo.read(data_dir, check=False)
    check_token()
    files = _shards(folder, info)
    files += [_metadata(folder), _card(folder, info, repo_id, license)]
    api, url = open_repository(repo_id, TYPE, private=private, endpoint=endpoint)
    return Uploaded(url, _send(api, repo_id, files, overwrite=overwrite))


def _shards(folder: Path, info: DatasetInfo) -> list[CommitOperationAdd]:
    """The files that the dataset lists, after a look at each."""
    return [
        _checked(folder / FOLDER / shard.file, shard)
        for shard in tqdm(info.shards, desc="Checking", unit="file", disable=None)
    ]


def _checked(path: Path, shard: Shard) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make the dataset again")
    check_inside(path.parents[1], path)
    addition = CommitOperationAdd(f"{FOLDER}/{shard.file}", str(path))
    if addition.upload_info.sha256.hex() != shard.sha256:
        raise ValueError(f"{path} is damaged: its checksum is not that of {METADATA}; make the dataset again")
    return addition


def _metadata(folder: Path) -> CommitOperationAdd:
    """``metadata.json`` as it is, if it names no place of this computer."""
    from huggingface_hub import CommitOperationAdd

    path = folder / METADATA
    text = path.read_text(encoding="utf-8")
    check_places(path, text, folder.absolute(), folder.resolve())
    return CommitOperationAdd(METADATA, text.encode())


def _card(folder: Path, info: DatasetInfo, repo_id: str, license: str | None) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    columns = pq.read_schema(folder / FOLDER / info.shards[0].file).names
    return CommitOperationAdd(CARD, dataset_card(info, repo_id, columns, license).encode())


def _send(api: HfApi, repo_id: str, files: list[CommitOperationAdd], *, overwrite: bool) -> tuple[str, ...]:
    """Send what is not there; give the names of what was sent."""
    there = files_of(api, repo_id, TYPE)
    missing = {file.path_in_repo: file for file in files if not is_same(file, there.get(file.path_in_repo))}
    listed = {file.path_in_repo for file in files}
    superfluous = [path for path in there if OURS.fullmatch(path) and path not in listed]
    if (others := [path for path in missing if path in there and path != CARD] + superfluous) and not overwrite:
        raise ValueError(
            f"{repo_id} holds another dataset ({others[0]} differs); name another repository, or pass overwrite (--overwrite) "
            "to replace it"
        )
    if CARD in there and CARD in missing and not overwrite:
        logger.info("The card of %s stays as it is; overwrite replaces it.", repo_id)
        del missing[CARD]
    commits = _commits(missing, superfluous, next(file for file in files if file.path_in_repo == METADATA), there)
    n_operations = sum(map(len, commits))
    with explained(repo_id), tqdm(total=n_operations, desc="Sending", unit="file", disable=None) as bar:
        for number, operations in enumerate(commits, 1):
            message = f"Upload dataset with alphastomics ({number} of {len(commits)})"
            api.create_commit(repo_id, operations, commit_message=message, repo_type=TYPE)
            bar.update(len(operations))
    return tuple(missing)


def _commits(
    missing: dict[str, CommitOperationAdd], superfluous: list[str], metadata: CommitOperationAdd, there: Container[str]
) -> list[list[Any]]:
    """Divide what is to be done: a few files at a time, ``metadata.json`` and the card at the end."""
    from huggingface_hub import CommitOperationDelete

    shards = [file for path, file in missing.items() if path.startswith(FOLDER)]
    last = {path: file for path, file in missing.items() if not path.startswith(FOLDER)}
    commits: list[list[Any]] = [shards[i : i + AT_ONCE] for i in range(0, len(shards), AT_ONCE)] or [[]]
    if len(commits) > 1 and METADATA in there:
        # Between these commits the repository holds neither the old dataset nor the new one.
        commits[0].append(CommitOperationDelete(METADATA))
        last[METADATA] = metadata
    commits[-1] += [*last.values(), *(CommitOperationDelete(path) for path in superfluous)]
    return [operations for operations in commits if operations]
