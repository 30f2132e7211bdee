"""Damaged and crafted files: a share of what ``python -m benchmarks.fuzz`` reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_fuzzed_files_run_no_code_do_not_hang_and_give_clear_errors(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fuzz", "--share", "0.02"]
    # On a busy machine files may take long; a hang never ends.
    command += ["--limit", "60", "--output", str(tmp_path / "f.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "f.json").read_text())["kinds"]
    for kind, outcomes in found.items():
        assert outcomes["bad"] == [], kind
        assert min(outcomes["refused"], outcomes["accepted"]) > 0, f"{kind}: nothing is refused, or everything"
        assert outcomes["largest_mebibytes"] < 1024
        assert outcomes["hang"] + outcomes["crash"] <= (2 if kind == ".h5ad" else 0)
    assert [outcomes["files"] for outcomes in found.values()] == [50, 50, 50, 50, 10]
