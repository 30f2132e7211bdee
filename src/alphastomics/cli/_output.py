"""Output of commands: messages, errors in one line, and files that are written atomically."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from alphastomics._io._atomic import follow_link, replacing
from alphastomics._io._errors import os_errors_for, permission_error
from alphastomics._messages import PACKAGE, hide_others

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData

# Errors that a user can fix; others are bugs and keep their traceback.
# An ImportError names an optional package and how to install it.
USER_ERRORS = (KeyError, ValueError, OSError, NotImplementedError, RuntimeError, ImportError)
SPACE, ACCESS, NAME = "free some space there", "check the permissions there", "check the path"
REMEDIES = {
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EFBIG: SPACE,
    errno.EACCES: ACCESS,
    errno.EPERM: ACCESS,
    errno.EROFS: "pass a folder that is writable",
    errno.ENOTDIR: NAME,
    errno.EISDIR: NAME,
    errno.ENOENT: NAME,
    errno.EEXIST: NAME,
    errno.ENAMETOOLONG: NAME,
    errno.EIO: "check the disk",
}


@contextmanager
def messages() -> Iterator[None]:
    """Show messages of this package on stderr, and hide those of others."""
    package, handler = logging.getLogger(PACKAGE), logging.StreamHandler(sys.stderr)
    level = package.level
    package.setLevel(logging.INFO)
    package.addHandler(handler)
    try:
        with hide_others():
            yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)


def print_error(error: Exception) -> None:
    """Print an error on one line, with flags for arguments: ``slice_key=…`` becomes ``--slice-key …``."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, OSError) and error.errno in REMEDIES:  # a message of the operating system
        text = f"{error.strerror}; {REMEDIES[error.errno]}, and repeat the command"
        text = text if error.filename is None else f"{error.filename}: {text}"
    text = re.sub(r"\b([a-z][a-z_]*)=…", lambda found: f"--{found[1].replace('_', '-')} …", " ".join(text.split()))
    text = text.replace("resume='last'", "--resume last").replace("--model …", "--checkpoint …")
    sys.stderr.write(f"alphastomics: {text or type(error).__name__}\n")


def prepare_file(path: Path) -> None:
    """Make the folder of a file, and check before a long computation that the file can be written."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass a file")
    prepare_folder(follow_link(path).parent)


def check_readable(folder: Path) -> None:
    """Raise ``PermissionError`` for a folder that cannot be listed, which would otherwise look empty."""
    try:
        next(folder.iterdir(), None)
    except PermissionError as error:
        raise permission_error(folder, error) from error


def prepare_folder(path: Path) -> None:
    """Make a folder, and check before a long computation that it can be written to."""
    with os_errors_for(path):
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass


def write_h5ad(path: Path, adata: AnnData) -> None:
    """Write an ``.h5ad`` file from memory, because HDF5 ends the process when a disk is full."""
    import anndata as ad
    import h5py

    adata.strings_to_categoricals()
    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        with ad.settings.override(allow_write_nullable_strings=True):  # as files of anndata 0.13 have them
            ad.io.write_elem(file, "/", adata)
        if adata.raw is None:  # null, which AnnData.write_h5ad leaves out
            file.pop("raw", None)
        file.flush()
        image = file.id.get_file_image()
    with replacing(path) as temporary:
        temporary.write_bytes(image)


def write_figure(path: Path, axes: Any) -> None:
    """Write the figure of the axes that a function of ``pl`` returns, and close it."""
    from matplotlib import pyplot as plt

    figure = axes.flat[0].figure
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, bbox_inches="tight")
    plt.close(figure)


def to_text(table: pd.DataFrame) -> str:
    """Scores as text, one column per row of the table, wrapped at the width of the terminal."""
    width = shutil.get_terminal_size((120, 24)).columns
    return table.T.map(number).to_string(line_width=width) + "\n"


def number(value: float) -> str:
    """A score as printed: four digits, or a whole number."""
    return f"{value:.0f}" if value == round(value, 0) else f"{value:.4g}"
