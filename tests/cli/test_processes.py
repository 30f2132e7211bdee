"""``alphastomics train`` in several processes: one run, written and logged by the first process; errors are short."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from lightning.fabric.utilities.rank_zero import _get_rank
from safetensors.numpy import load_file

from alphastomics._rank import is_first, quiet_unless_first
from alphastomics.config import Config
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from alphastomics.train.distributed import strategies

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 240  # seconds
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "NODE_RANK", "GROUP_RANK")
TINY = "--d-model 16 --n-layers 1 --n-heads 2 --context-size 30 --batch-size 60 --mode expr_to_pos --epochs 3".split()
PROCESSOR = ["--accelerator", "cpu", "--precision", "32-true"]


@pytest.fixture
def alone(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    synthetic_tissue(n_slices=2, n_cells=90, n_genes=20, random_state=0).write_h5ad(path)
    return path


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_RANK": "1"},
        {"RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"},
        {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"},
        {"SLURM_PROCID": "0"},
        {"SLURM_PROCID": "3"},
        {"LOCAL_RANK": "0", "SLURM_PROCID": "3"},
        {"JSM_NAMESPACE_RANK": "1"},
    ],
)
def test_the_first_process_matches_lightning(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first() is ((_get_rank() or 0) == 0)


@pytest.mark.usefixtures("alone")
def test_of_several_machines_without_a_manager_the_first_has_it(monkeypatch):
    """Lightning starts the processes of each machine by its number, and has no rank before its trainer."""
    monkeypatch.setenv("NODE_RANK", "1")
    assert not is_first()
    monkeypatch.setenv("NODE_RANK", "0")
    assert is_first()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_first()


@pytest.mark.usefixtures("alone")
def test_only_the_first_process_logs(monkeypatch):
    logger = logging.getLogger("alphastomics")
    monkeypatch.setattr(logger, "level", logging.INFO)
    quiet_unless_first()
    assert logger.level == logging.INFO
    monkeypatch.setenv("RANK", "1")
    quiet_unless_first()
    assert logger.level == logging.ERROR


@pytest.mark.parametrize(
    ("tokens", "code", "message"),
    [
        (["--strategy", "dpp"], 2, '"dpp".*--strategy.*"auto", "ddp"'),
        (["--strategy", "fsdp"], 1, "--strategy fsdp .*--strategy fsdp2"),
        (["--strategy", "deepspeed_stage_3"], 1, "average.*--strategy fsdp2"),
        (["--strategy", "fsdp2", "--fp16"], 1, "--strategy fsdp2.*--precision 16-mixed.*--precision bf16-mixed"),
        (["--context-parallel-size", "3"], 1, "--context-parallel-size 3.* 2 processes.*--devices"),
        (["--strategy", "ddp"], 1, "--strategy ddp .*script"),
    ],
)
def test_invalid_process_arguments_give_a_short_error_before_the_work(
    cells, tmp_path, tokens, code, message, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(strategies, "_can_start_again", lambda: False)
    command = ["train", "--input-data", str(cells), *TINY, "--accelerator", "cpu", "--devices", "2", *tokens]
    assert main(command) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alphastomics: ")
    assert re.search(message, line)
    assert list(tmp_path.iterdir()) == []


def run(place: Path, *command: str) -> list[str]:
    """Output of a command without its progress bar."""
    place.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in RANKS} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stderr.splitlines() if "it/s" not in line]


@pytest.mark.slow
def test_several_processes_train_one_run(cells, tmp_path):
    """By the command itself and by torchrun: the same weights as of one process with twice as many batches in a step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "alphastomics", "train", "--input-data", str(cells), *TINY, *PROCESSOR]
    two = ["--strategy", "ddp", "--devices", "2"]
    output = {
        "one": run(tmp_path / "one", sys.executable, *command, "--accumulate-grad-batches", "2"),
        "ddp": run(tmp_path / "ddp", sys.executable, *command, *two),
        "torchrun": run(tmp_path / "torchrun", *torchrun, *command, *two),
        "fork": run(tmp_path / "fork", sys.executable, *command, "--strategy", "ddp_fork", "--devices", "2"),
    }
    expected = load_file(tmp_path / "one/outputs/alphastomics/checkpoints/model/model.safetensors")
    for name, lines in output.items():
        folder = tmp_path / name / "outputs/alphastomics"
        assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
            "config.json", "config.yaml", "last.ckpt", "metrics.csv", "model.safetensors",
        ]  # fmt: skip
        model = AlphaSTomics.load(folder / "checkpoints/model", adata=False, accelerator="cpu")
        assert model.is_trained
        assert sum(" 180 cells," in line for line in lines) == 1
        assert lines[-1] == "The model is in outputs/alphastomics/checkpoints/model."
        found = load_file(folder / "checkpoints/model/model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, atol=1e-5)
    assert Config.read(tmp_path / "ddp/outputs/alphastomics/config.yaml").training.strategy == "ddp"


@pytest.mark.slow
def test_a_run_of_several_processes_that_never_began_leaves_its_name_free(cells, tmp_path):
    """Its first step fails in the fork, which has written the configuration; this process removes it."""
    code = (
        "import sys; from alphastomics.train import TrainingPlan; from alphastomics.main import main\n"
        "def broken(*_): raise ValueError('broken')\n"
        "TrainingPlan.training_step = broken; sys.exit(main(sys.argv[1:]))"
    )
    command = ["train", "--input-data", str(cells), *TINY, *PROCESSOR, "--strategy", "ddp_fork", "--devices", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 1
    assert "ValueError: broken" in done.stderr
    assert not (tmp_path / "outputs/alphastomics").exists()
