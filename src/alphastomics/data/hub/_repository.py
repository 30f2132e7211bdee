"""A repository of the Hub that is written to: made if it is not there, and compared with what is here."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphastomics.data.hub._errors import LOGIN, explained, require

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from huggingface_hub import CommitOperationAdd, HfApi

CARD = "README.md"
Kind = Literal["dataset", "model"]


def open_repository(
    repo_id: str, kind: Kind, *, private: bool, token: str | None = None, endpoint: str | None = None
) -> tuple[HfApi, str]:
    """Make a repository if it is not there; give what speaks with the Hub, and the address.

    Raises
    ------
    OSError
        If the Hub cannot be reached, or refuses.
    ValueError
        If it is there and public, and not to be.
    """
    from huggingface_hub import HfApi

    with explained(repo_id):
        api = HfApi(endpoint=endpoint, token=token)
        url = str(api.create_repo(repo_id, repo_type=kind, private=private or None, exist_ok=True))
        public = not api.repo_info(repo_id, repo_type=kind).private
    if private and public:
        raise ValueError(f"{repo_id} is there and public; make it private in its settings, or name another one")
    return api, url


def check_token(token: str | None = None) -> None:
    """Complain about a token that nobody gave, before anything is done.

    Raises
    ------
    ImportError
        If huggingface_hub is not installed.
    PermissionError
        If there is none.
    """
    require("huggingface_hub")
    from huggingface_hub import get_token

    if token is None and get_token() is None:
        raise PermissionError(f"there is no token for the Hub; {LOGIN.format(doing='write')}")


def check_places(name: str | PathLike[str], text: str, *folders: Path) -> None:
    """Refuse a text that names the home of the user, or one of the folders.

    Raises
    ------
    ValueError
        If it does.
    """
    for place in {str(Path.home()), *map(str, folders)}:
        if len(place) > 1 and re.search(rf"{re.escape(place)}\b", text):
            raise ValueError(f"{name} names the folder {place} of this computer, which is no one's business; remove it")


def files_of(api: HfApi, repo_id: str, kind: Kind) -> dict[str, Any]:
    """What a repository holds, by path.

    Raises
    ------
    OSError
        If the Hub cannot be reached, or refuses.
    """
    with explained(repo_id):
        return {entry.path: entry for entry in api.list_repo_tree(repo_id, repo_type=kind, recursive=True)}


def is_same(file: CommitOperationAdd, entry: Any) -> bool:
    """Whether a file is in the repository as it is here."""
    if entry is None:
        return False
    if lfs := getattr(entry, "lfs", None):
        return bool(lfs.sha256 == file.upload_info.sha256.hex())
    if file.upload_info.size != getattr(entry, "size", None):
        return False
    with file.as_file() as opened:
        return bool(entry.blob_id == _git_hash(opened))


def _git_hash(opened: Iterable[bytes]) -> str:
    """Name that git gives to contents; only of files so small that the Hub keeps them in git."""
    content = b"".join(opened)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
