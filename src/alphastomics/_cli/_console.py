"""What a user reads while a command runs, and after it failed."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a user can cause and mend; anything else is a bug and keeps its traceback.
USER_ERRORS = (KeyError, ValueError, OSError, ImportError, NotImplementedError, RuntimeError)
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


def complain(error: Exception) -> None:
    """Print an error as one line, its remedy in the words of the command line: ``slice_key=…`` is ``--slice-key …``."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = re.sub(r"\b([a-z][a-z_]*)=…", lambda found: f"--{found[1].replace('_', '-')} …", " ".join(text.split()))
    sys.stderr.write(f"alphastomics: {text or type(error).__name__}\n")
