"""New processes and their memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[1]
STATUS = Path("/proc/self/status")
# Environment variables for new processes.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "NUMBA", "OPENBLAS")}
# The allocator returns freed memory to the system at once, so that peaks are comparable.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def peak_bytes() -> int:
    """Largest resident memory of this process so far.

    On Linux ``ru_maxrss`` starts at the resident memory of the process that started this one, so the high-water mark of
    the process's own memory is read where the kernel offers it.
    """
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def in_fresh_process(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ``python -m module arguments`` from the repository root and read the JSON of its last line of output.

    ``environment`` is added to the variables of this process.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
