"""Access to repositories of the Hub, and translation of the errors of huggingface_hub."""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    from huggingface_hub import CommitOperationAdd, HfApi

CARD = "README.md"
LOGIN = "run hf auth login, or set HF_TOKEN to a token of https://huggingface.co/settings/tokens with permission to {access}"
RETRY = {"write": "repeat the command later; it resumes the upload", "read": "try again later"}
MAX_CHARACTERS = 300

Kind = Literal["dataset", "model"]
Access = Literal["read", "write"]


def require(package: str) -> None:
    """Raise an ImportError if a package of the extra ``hub`` is not installed."""
    try:
        __import__(package)
    except ImportError as error:
        raise ImportError(f'{package} is not installed; run pip install "alphastomics[hub]"') from error


@contextmanager
def hub_errors(repo_id: str, access: Access = "write") -> Iterator[None]:
    """Turn errors of huggingface_hub into one line with a remedy.

    Raises ``PermissionError`` for a missing or insufficient token, ``ValueError`` for a name or content that the Hub
    rejects, ``FileNotFoundError`` for a missing repository, revision or file, and ``OSError`` for a failure of the Hub.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        RevisionNotFoundError,
    )

    network = cast("type[Exception]", HfHubHTTPError.__bases__[0])  # of requests or httpx, depending on the version
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not the name of a repository; use organization/name") from error
    except LocalTokenNotFoundError as error:
        raise PermissionError(f"no token for the Hub is set; {LOGIN.format(access=access)}") from error
    except (network, OSError, RuntimeError, ValueError) as error:
        chain: list[BaseException] = [error]  # uploads in threads wrap their errors
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        for each in chain:
            if isinstance(each, RevisionNotFoundError):
                raise FileNotFoundError(
                    f"the Hub has no such revision of {repo_id} ({_message(each)}); use a branch, a tag or a commit"
                ) from error
            if isinstance(each, HfHubHTTPError) and each.response is not None:
                raise _of_status(repo_id, access, each.response.status_code, _message(each)) from error
            if isinstance(each, OSError) and each.filename is not None:  # a local file
                raise type(each)(each.errno, each.strerror, each.filename) from error
        if isinstance(error, ValueError):
            raise ValueError(f"the Hub rejects {repo_id}: {_one_line(str(error))}") from error
        what = " ".join(str(each) for each in chain[: 1 + isinstance(error, RuntimeError)])
        raise ConnectionError(f"the Hub cannot be reached ({_one_line(what)}); {RETRY[access]}") from error


def _of_status(repo_id: str, access: Access, status: int, message: str) -> OSError:
    """The error for an HTTP status."""
    answer = f"{status}: {message}" if message else str(status)
    login = LOGIN.format(access=access)
    if status in (402, 413, 507) or (status == 403 and re.search(r"storage|quota|limit", message, re.IGNORECASE)):
        return OSError(f"the Hub has no space for {repo_id} ({answer}); free space, or request more")
    if status == 401:
        return PermissionError(f"the Hub does not accept the token for {repo_id} ({answer}); {login}")
    if status == 403:
        return PermissionError(f"the token has no permission to {access} {repo_id} ({answer}); {login}")
    if status == 404:
        return FileNotFoundError(
            f"{repo_id} or the file does not exist on the Hub, or the token has no access ({answer}); check the name, and that "
            f"the token has permission to {access}"
        )
    if status == 429 or status >= 500:
        return ConnectionError(f"the Hub is not available for {repo_id} ({answer}); {RETRY[access]}")
    return OSError(f"the Hub rejects {repo_id} ({answer})")


def _message(error: BaseException) -> str:
    return _one_line(str(getattr(error, "server_message", None) or ""))


def _one_line(text: str) -> str:
    """Text in one line of limited length, without tokens."""
    text = re.sub(r"\bhf_\w+|(?<=Bearer )\S+", "…", " ".join(text.split()))
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)  # addresses of uploads are signed
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


def open_repository(
    repo_id: str, kind: Kind, *, private: bool, token: str | None = None, endpoint: str | None = None
) -> tuple[HfApi, str]:
    """Create a repository unless it exists; return a client and the address.

    Raises ``ValueError`` if ``private`` and the repository exists and is public.
    """
    from huggingface_hub import HfApi

    with hub_errors(repo_id):
        api = HfApi(endpoint=endpoint, token=token)
        url = str(api.create_repo(repo_id, repo_type=kind, private=private or None, exist_ok=True))
        public = not api.repo_info(repo_id, repo_type=kind).private
    if private and public:
        raise ValueError(f"{repo_id} exists and is public; make it private in its settings, or use another name")
    return api, url


def check_token(token: str | None = None) -> None:
    """Raise a PermissionError if there is no token, an ImportError without huggingface_hub."""
    require("huggingface_hub")
    from huggingface_hub import get_token

    if token is None and get_token() is None:
        raise PermissionError(f"no token for the Hub is set; {LOGIN.format(access='write')}")


def check_no_local_paths(name: str | PathLike[str], text: str, *folders: Path) -> None:
    """Raise a ValueError if a text contains the path of the home directory or of one of the folders."""
    for folder in {str(Path.home()), *map(str, folders)}:
        if len(folder) > 1 and re.search(rf"{re.escape(folder)}\b", text):
            raise ValueError(
                f"{name} contains the path of a folder of this computer, {folder}, which must not be published; remove it"
            )


def files_of(api: HfApi, repo_id: str, kind: Kind) -> dict[str, Any]:
    """Files of a repository, by path."""
    with hub_errors(repo_id):
        return {entry.path: entry for entry in api.list_repo_tree(repo_id, repo_type=kind, recursive=True)}


def is_same(file: CommitOperationAdd, entry: Any) -> bool:
    """Whether the repository holds this file with the same content."""
    if entry is None:
        return False
    if lfs := getattr(entry, "lfs", None):
        return bool(lfs.sha256 == file.upload_info.sha256.hex())
    if file.upload_info.size != getattr(entry, "size", None):
        return False
    with file.as_file() as opened:
        return bool(entry.blob_id == _git_hash(opened))


def _git_hash(opened: Iterable[bytes]) -> str:
    """Git object name of a small file, which the Hub stores in git."""
    content = b"".join(opened)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
