"""Stored outputs of the tutorials."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
REAL = [path for path in NOTEBOOKS if "ALPHASTOMICS_DATA" in path.read_text()]
LARGEST = 1_000_000  # bytes


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code" and cell["source"]]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_tutorials_on_real_tissues_are_stored_as_executed(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "display_data" in kinds
    assert "error" not in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_small_and_have_neither_messages_nor_paths(path):
    assert path.stat().st_size < LARGEST
    for output in (output for cell in code_cells(path) for output in cell["outputs"]):
        assert output.get("name") != "stderr"
        texts = [value for kind, value in output.get("data", {}).items() if not kind.startswith("image")]
        text = "".join(map("".join, [*texts, output.get("text", "")]))
        assert not re.search(r"(?<![\w.<])/(home|root|tmp|work|Users|usr|opt)/|Warning", text)


@pytest.mark.slow
def test_tutorials_on_real_tissues_are_skipped_without_them(tmp_path):
    folder = tmp_path / "repository" / "tutorials"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tutorials" / "conftest.py", folder)
    shutil.copy(REAL[0], folder)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbmake", "-rs", str(folder)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"ALPHASTOMICS_DATA": "absent"}
    )
    assert done.returncode == 0
    assert "1 skipped" in done.stdout
    assert "ALPHASTOMICS_DATA" in done.stdout
