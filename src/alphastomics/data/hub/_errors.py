"""What went wrong between here and the Hub, in one line, with what to do."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGIN = "run hf auth login, or set HF_TOKEN to a token of https://huggingface.co/settings/tokens that may {doing}"
LATER = {"write": "the same command, later, goes on where this one stopped", "read": "try again later"}
MAX_CHARACTERS = 300

Doing = Literal["read", "write"]


def require(package: str) -> None:
    """Complain about a package of the extra ``hub`` that is not installed.

    Raises
    ------
    ImportError
        If it is not.
    """
    try:
        __import__(package)
    except ImportError as error:
        raise ImportError(
            f'the Hub needs {package}, which is not installed: pip install "alphastomics[hub]"'
        ) from error


@contextmanager
def explained(repo_id: str, doing: Doing = "write") -> Iterator[None]:
    """Turn errors of huggingface_hub into one line each.

    Parameters
    ----------
    repo_id
        The repository.
    doing
        What is done with it.

    Raises
    ------
    PermissionError
        If the token is missing, or may not do this.
    ValueError
        If the Hub refuses the name or what is sent.
    FileNotFoundError
        If there is no such repository, revision or file.
    OSError
        If the Hub cannot be reached, or fails.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        RevisionNotFoundError,
    )

    network = cast("type[Exception]", HfHubHTTPError.__bases__[0])  # of requests or httpx, as the version is
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no name of a repository; write organization/name") from error
    except LocalTokenNotFoundError as error:
        raise PermissionError(f"there is no token for the Hub; {LOGIN.format(doing=doing)}") from error
    except (network, OSError, RuntimeError, ValueError) as error:
        # Uploads in threads wrap what happened in them.
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        for each in chain:
            if isinstance(each, RevisionNotFoundError):
                raise FileNotFoundError(
                    f"the Hub has no such revision of {repo_id} ({_said(each)}); name a branch, a tag or a commit"
                ) from error
            if isinstance(each, HfHubHTTPError) and each.response is not None:
                raise _of_status(repo_id, doing, each.response.status_code, _said(each)) from error
            if isinstance(each, OSError) and each.filename is not None:  # a file of ours
                raise type(each)(each.errno, each.strerror, each.filename) from error
        if isinstance(error, ValueError):
            raise ValueError(f"the Hub refuses {repo_id}: {_one_line(str(error))}") from error
        what = " ".join(str(each) for each in chain[: 1 + isinstance(error, RuntimeError)])
        raise ConnectionError(f"the Hub cannot be reached ({_one_line(what)}); {LATER[doing]}") from error


def _of_status(repo_id: str, doing: Doing, status: int, said: str) -> OSError:
    """The error that a status of HTTP means."""
    answer = f"{status}: {said}" if said else str(status)
    login = LOGIN.format(doing=doing)
    if status in (402, 413, 507) or (status == 403 and re.search(r"storage|quota|limit", said, re.IGNORECASE)):
        return OSError(f"the Hub has no room for {repo_id} ({answer}); free some there, or ask for more")
    if status == 401:
        return PermissionError(f"the Hub does not accept the token for {repo_id} ({answer}); {login}")
    if status == 403:
        return PermissionError(f"the token may not {doing} {repo_id} ({answer}); {login}")
    if status == 404:
        return FileNotFoundError(
            f"the Hub knows no such file of {repo_id}, or hides it from this token ({answer}); check the name, and that the "
            f"token may {doing} it"
        )
    if status == 429 or status >= 500:
        return ConnectionError(f"the Hub cannot serve {repo_id} now ({answer}); {LATER[doing]}")
    return OSError(f"the Hub refuses {repo_id} ({answer})")


def _said(error: BaseException) -> str:
    return _one_line(str(getattr(error, "server_message", None) or ""))


def _one_line(text: str) -> str:
    """Text in one line, not too long, in which no token is left."""
    text = re.sub(r"\bhf_\w+|(?<=Bearer )\S+", "…", " ".join(text.split()))
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)  # addresses of uploads are signed
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
