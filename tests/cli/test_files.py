"""Files: early errors, no partial output, scores unchanged."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from alphastomics._io._atomic import replacing, write_json
from alphastomics._io._json import to_plain
from alphastomics.cli._output import number, prepare_file, to_text


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as temporary, temporary.open("w") as file:
        file.writelines(["ne", None])
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        assert temporary.suffix == ".txt"
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_of_a_file_is_made(tmp_path):
    prepare_file(tmp_path / "a" / "b" / "c.json")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(IsADirectoryError, match="/a "):
        prepare_file(tmp_path / "a")


def test_undefined_scores_are_null(tmp_path):
    scores = {"a": {"n": 3, "x": np.float64(0.1), "y": float("nan"), "z": -np.inf}}
    write_json(tmp_path / "s.json", to_plain(scores))
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": {"n": 3, "x": 0.1, "y": None, "z": None}}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1500.0, "1500"),
        (123456.0, "123456"),
        (0.123456, "0.1235"),
        (0.0, "0"),
        (float("nan"), "nan"),
        (98765.4, "9.877e+04"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_a_wide_table_is_folded(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table = pd.DataFrame({"score": np.arange(10) / 7}, index=[f"slice_{i}" for i in range(10)])
    text = to_text(table)
    assert max(map(len, text.splitlines())) <= 40
    assert all(f"slice_{i}" in text and number(i / 7) in text for i in range(10))
