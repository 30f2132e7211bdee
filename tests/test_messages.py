"""Messages of the package in a program, and those of other packages."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from alphastomics._messages import OTHERS, hide_others

LOG = "; logging.getLogger('alphastomics.train').info('placed')"


@pytest.mark.parametrize(
    ("program", "n_shown"),
    [
        ("import logging, alphastomics", 1),
        ("import logging, alphastomics; logging.basicConfig()", 1),
        ("import logging; logging.basicConfig(); import alphastomics", 1),
        ("import logging, alphastomics; logging.getLogger('alphastomics').setLevel('WARNING')", 0),
        ("import logging, alphastomics, types, sys; sys.modules['scvi'] = types.SimpleNamespace(settings=types.SimpleNamespace(verbosity=30))", 0),
    ],
)  # fmt: skip
def test_messages_are_shown_once(program, n_shown):
    found = subprocess.run(
        [sys.executable, "-c", program + LOG], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stderr.count("placed") == n_shown
    assert found.stdout == ""


def test_messages_of_others_are_hidden_for_a_while(caplog):
    other = logging.getLogger(OTHERS[0])
    with hide_others():
        other.info("advertisement")
        other.warning("problem")
    other.info("later")
    assert "advertisement" not in caplog.text
    assert "problem" in caplog.text
    assert other.level == logging.NOTSET


def test_a_level_that_was_set_is_kept(caplog):
    other = logging.getLogger(OTHERS[1])
    other.setLevel(logging.DEBUG)
    try:
        with hide_others():
            assert other.level == logging.DEBUG
        assert other.level == logging.DEBUG
    finally:
        other.setLevel(logging.NOTSET)
