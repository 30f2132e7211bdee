"""Virtual environments of the peers, made once by venv and pip."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# The peers were written for these releases; newer ones of SciPy, scikit-learn and AnnData break calls that they make.
PINNED = (
    *("numpy==1.26.4", "scipy==1.13.1", "pandas==2.2.3", "scanpy==1.9.8", "anndata==0.10.9", "scikit-learn==1.5.2"),
    "matplotlib==3.8.4",
)
INSTALLED = "installed.json"
PEER_DIR = Path(__file__).parents[1] / "environments"


class PeerError(RuntimeError):
    """A peer that cannot be installed or run."""


def environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Python of the environment in ``folder``, which is made again if its requirements have changed.

    Raises
    ------
    PeerError
        If pip fails.
    """
    python, record = folder / "bin" / "python", folder / INSTALLED
    if record.is_file() and json.loads(record.read_text()) == list(requirements):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder.name}: installing {', '.join(requirements)} in {folder}", flush=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", *requirements])
    record.write_text(json.dumps(list(requirements)))
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{' '.join(command[:4])} failed: {done.stderr.strip()[-500:]}")
