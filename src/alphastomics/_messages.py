"""Messages of the package on stderr, and messages of other packages that do not concern its users."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "alphastomics"
OTHERS = ("lightning.pytorch.utilities.rank_zero", "scvi.data")


class DefaultHandler(logging.StreamHandler):
    """Writes messages as ``scvi.settings.verbosity`` allows, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message to the present ``sys.stderr``."""
        scvi = sys.modules.get("scvi")
        verbosity = logging.INFO if scvi is None else scvi.settings.verbosity
        configured = logging.getLogger().handlers or logging.getLogger(PACKAGE).handlers[1:]
        if not configured and record.levelno >= verbosity:
            self.setStream(sys.stderr)
            super().emit(record)


def show_messages() -> None:
    """Show messages from the level INFO on, as scvi-tools does."""
    package = logging.getLogger(PACKAGE)
    if not package.handlers:
        package.addHandler(DefaultHandler())
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)


@contextmanager
def hide_others() -> Iterator[None]:
    """Hide messages of other packages below WARNING, unless their level was set to show more."""
    hidden = [logger for logger in map(logging.getLogger, OTHERS) if logger.level == logging.NOTSET]
    for logger in hidden:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger in hidden:
            logger.setLevel(logging.NOTSET)
