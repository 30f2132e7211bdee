"""What a user reads while a command runs, and after it failed."""

from __future__ import annotations

import errno
import logging
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a user can cause and mend; anything else is a bug and keeps its traceback.
# An ImportError names an optional package and how to install it.
USER_ERRORS = (KeyError, ValueError, OSError, NotImplementedError, RuntimeError, ImportError)
ROOM, MAY, NAME = "make room there", "see to the permissions there", "check the name"
REMEDIES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: ROOM,
    errno.EACCES: MAY,
    errno.EPERM: MAY,
    errno.EROFS: "name a folder that can be written to",
    errno.ENOTDIR: NAME,
    errno.EISDIR: NAME,
    errno.ENOENT: NAME,
    errno.EEXIST: NAME,
    errno.ENAMETOOLONG: NAME,
    errno.EIO: "see that the disk is whole",
}
# Loggers of others that say nothing which a user of the command line could use.
CHATTER = ("lightning.pytorch.utilities.rank_zero", "scvi.data")


@contextmanager
def messages() -> Iterator[None]:
    """Show what the package says on stderr, and not what others say."""
    ours, handler = logging.getLogger("alphastomics"), logging.StreamHandler(sys.stderr)
    levels = {logging.getLogger(name): logging.WARNING for name in CHATTER} | {ours: logging.INFO}
    before = {logger: logger.level for logger in levels}
    for logger, level in levels.items():
        logger.setLevel(level)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)


def print_error(error: Exception) -> None:
    """Print an error as one line, its remedy in the words of the command line: ``slice_key=…`` is ``--slice-key …``."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, OSError) and error.errno in REMEDIES:  # what the system says, not yet a sentence of ours
        text = f"{error.strerror}; {REMEDIES[error.errno]}, and repeat the command"
        text = text if error.filename is None else f"{error.filename}: {text}"
    text = re.sub(r"\b([a-z][a-z_]*)=…", lambda found: f"--{found[1].replace('_', '-')} …", " ".join(text.split()))
    text = text.replace("resume='last'", "--resume last")
    sys.stderr.write(f"alphastomics: {text or type(error).__name__}\n")
