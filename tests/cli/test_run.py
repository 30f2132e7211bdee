"""Runs: their folder, training from a dataset, resuming, scoring afterwards."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

from alphastomics.cli._run import find_model
from alphastomics.config import Config
from alphastomics.data import write_parquet
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from alphastomics.train import TrainingPlan
from files import error_line, write_slices

TINY = ["--d-model", "16", "--n-layers", "1", "--n-heads", "2", "--context-size", "32", "--batch-size", "64"]
SHORT = [*TINY, "--mode", "expr_to_pos", "--epochs", "2", "--accelerator", "cpu"]
RUN = Path("outputs/alphastomics")


def changed(tokens: list[str], **values: object) -> list[str]:
    """Tokens with other values: a flag is given once."""
    tokens = list(tokens)
    for name, value in values.items():
        tokens[tokens.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``raw/`` of three files, ``dataset/`` of them, ``all.h5ad``."""
    folder = tmp_path_factory.mktemp("run")
    tissue = synthetic_tissue(n_cells=90, n_genes=20, random_state=0)
    tissue.write_h5ad(folder / "all.h5ad")
    write_slices(tissue, folder / "raw")
    options = ["--train-ratio", "0.6", "--val-ratio", "0.1"]
    assert (
        main(["preprocess", "--input-dir", str(folder / "raw"), "--output-dir", str(folder / "dataset"), *options]) == 0
    )
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state(path: Path = RUN / "checkpoints/last.ckpt") -> dict:
    return torch.load(path, weights_only=True)


def test_a_dataset_is_trained_on_and_its_test_set_scored(folder, here, capsys):
    tokens = ["train", "--data-dir", str(folder / "dataset"), "--num_genes", "20", "--exp_name", "mine", *SHORT]
    assert main([*tokens, "--streaming", "--buffer_size", "40", "--output_dir", "runs", "--test_after_train"]) == 0
    run = here / "runs/mine"
    model = AlphaSTomics.load(run / "checkpoints/model", adata=False, accelerator="cpu")
    assert model.is_trained
    assert model.summary_stats.n_cells == 162
    assert pd.read_csv(run / "logs/metrics.csv", index_col="epoch")["train_loss"].notna().all()
    scores = json.loads((run / "logs/scores.json").read_text())
    assert sorted(scores) == ["slice_0", "slice_1", "slice_2"]
    assert sum(values["prediction"]["n_cells"] for values in scores.values()) == 81
    printed = capsys.readouterr().out
    assert all(f"{values['prediction']['aligned_rmsd']:.4g}" in printed for values in scores.values())
    # The configuration has all options and is used again.
    config = Config.read(run / "config.yaml")
    assert config.data.processed_data_dir == folder / "dataset"
    assert (config.data.loading.streaming, config.data.loading.buffer_size, config.run.exp_name) == (True, 40, "mine")
    assert main(["train", "--config", str(run / "config.yaml"), "--exp-name", "again"]) == 0
    weights = [here / f"runs/{name}/checkpoints/model/model.safetensors" for name in ("mine", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("tokens", "observed"), [([], 270), (["--streaming"], 2**20), (["--streaming", "--buffer-size", "70"], 70)]
)
def test_buffer_size_reaches_the_dataset(folder, here, tokens, observed, monkeypatch):
    seen = []
    original = AlphaSTomics.from_parquet.__func__

    def spy(cls, *args, **kwargs):
        model = original(cls, *args, **kwargs)
        seen.append(model._dataset.buffer_size)
        raise ValueError("enough")

    monkeypatch.setattr(AlphaSTomics, "from_parquet", classmethod(spy))
    assert main(["train", "--data-dir", str(folder / "dataset"), *SHORT, *tokens]) == 1
    assert seen == [observed]


def test_held_out_slices_are_scored_or_their_absence_is_logged(folder, here, capsys):
    tokens = ["train", "--input-data", str(folder / "all.h5ad"), *SHORT, "--test-after-train"]
    assert main([*tokens, "--validation-size", "0.3", "--exp-name", "with"]) == 0
    assert sorted(json.loads(Path("outputs/with/logs/scores.json").read_text())) == ["slice_2"]
    capsys.readouterr()
    assert main([*tokens, "--exp-name", "without"]) == 0
    assert "--validation-size" in capsys.readouterr().err
    assert main([*changed(tokens, mode="pos_to_expr"), "--exp-name", "other", "--validation-size", "0.3"]) == 0
    assert "mode='pos_to_expr'" in capsys.readouterr().err
    assert sorted(path.name for path in Path("outputs").glob("*/logs/scores.json")) == ["scores.json"]


def test_a_run_is_found_by_its_folder_its_model_and_its_checkpoint(folder, here):
    assert main(["train", "--input-data", str(folder / "all.h5ad"), *SHORT]) == 0
    assert find_model(RUN) == RUN / "checkpoints/model"
    assert find_model(Path("elsewhere")) == Path("elsewhere")
    placed = []
    for checkpoint in (RUN, RUN / "checkpoints/model", RUN / "checkpoints/last.ckpt"):
        tokens = ["sample", "--checkpoint", str(checkpoint), "--input-data", str(folder / "all.h5ad")]
        assert main([*tokens, "--output", "out.h5ad", "--accelerator", "cpu"]) == 0
        placed.append(ad.read_h5ad("out.h5ad").obsm["spatial"])
    np.testing.assert_array_equal(placed[0], placed[1])
    np.testing.assert_array_equal(placed[0], placed[2])


def test_a_finished_run_is_resumed_with_more_epochs(folder, here):
    tokens = ["train", "--input-data", str(folder / "all.h5ad"), *SHORT, "--dropout", "0.1", "--seed", "5"]
    assert main(tokens) == 0
    before = state()
    assert main(["train", "--resume", "--epochs", "3"]) == 0
    after = state()
    assert (before["epoch"], after["epoch"]) == (2, 3)
    assert after["global_step"] == before["global_step"] * 3 // 2
    assert pd.read_csv(RUN / "logs/metrics.csv", index_col="epoch").index.tolist() == [0, 1, 2]
    config = Config.read(RUN / "config.yaml")
    assert (config.training.max_epochs, config.model.dropout, config.seed.global_seed) == (3, 0.1, 5)
    # From its checkpoint into another run; the first is left as it is.
    kept = (RUN / "checkpoints/last.ckpt").read_bytes()
    more = ["--exp-name", "branch", "--resume-from", str(RUN / "checkpoints/last.ckpt")]
    assert main([*changed(tokens, epochs=4), *more]) == 0
    assert state(Path("outputs/branch/checkpoints/last.ckpt"))["epoch"] == 4
    assert (RUN / "checkpoints/last.ckpt").read_bytes() == kept


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        ({}, [], "alphastomics .*--exp-name"),
        ({"epochs": 1}, ["--resume"], "--max-epochs|max_epochs=1"),
        ({"d_model": 32}, ["--resume"], "d_model=16.*d_model=32"),
        ({}, ["--resume", "--overwrite"], "--resume.*--overwrite"),
        ({}, ["--resume", "a", "b"], r"--resume.*\.ckpt"),
        ({}, ["--resume", "none.ckpt"], r"none\.ckpt"),
        ({}, ["--resume", "--exp-name", "new"], r"last\.ckpt"),
        ({}, ["--resume", "evil.ckpt", "--exp-name", "new"], r"evil\.ckpt"),
        ({}, ["--resume", "text.ckpt", "--exp-name", "new"], "text.ckpt"),
        ({}, ["--resume", "other.ckpt", "--exp-name", "new"], r"other\.ckpt"),
        ({}, ["--resume", "half.ckpt", "--exp-name", "new"], r"half\.ckpt.*truncated"),
        ({}, ["--resume", "other.ckpt"], "alphastomics .*empty"),
        ({}, ["--overwrite", "--num-genes", "7"], r"all\.h5ad.* 20 genes.* 7.*--num-genes"),
        ({}, ["--overwrite", "--data-dir", "DATASET"], "--data-dir.*--input-data"),
        ({}, ["--overwrite", "--streaming"], "--streaming.*--data-dir"),
        ({}, ["--overwrite", "--max-time", "soon"], "max_time='soon'"),
        ({}, ["--exp-name", ".."], "--exp-name"),
        ({}, ["--fp16", "--precision", "32-true"], "--fp16.*--precision"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_a_short_error_and_change_nothing(trained_run, folder, changes, tokens, message, capsys):
    before = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    tokens = [str(folder / "dataset") if token == "DATASET" else token for token in tokens]
    command = ["train", "--input-data", str(folder / "all.h5ad"), *changed(SHORT, **changes), *tokens]
    assert main(command) == 1
    assert re.search(message, error_line(capsys))
    assert {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()} == before
    assert not (trained_run / "ran").exists()


@pytest.fixture(scope="module")
def _trained_run(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    assert (
        main(["train", "--input-data", str(folder / "all.h5ad"), *SHORT, "--output-dir", str(place / "outputs")]) == 0
    )
    (place / "evil.ckpt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    (place / "text.ckpt").write_text("no")
    torch.save({"state_dict": {}}, place / "other.ckpt")
    whole = (place / RUN / "checkpoints/last.ckpt").read_bytes()
    (place / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    return place


def test_a_parquet_file_is_trained_on_as_the_same_cells_elsewhere(folder, here, capsys):
    write_parquet(ad.read_h5ad(folder / "all.h5ad"), here / "all.parquet")
    for source in (folder / "all.h5ad", here / "all.parquet"):
        tokens = ["--input-data", str(source), "--slice-key", "slice_id", "--cell-type-key", "cell_type"]
        assert main(["train", *tokens, *SHORT, "--exp-name", source.suffix[1:]]) == 0
    weights = [here / f"outputs/{name}/checkpoints/model/model.safetensors" for name in ("h5ad", "parquet")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    (here / "all.parquet").write_bytes((here / "all.parquet").read_bytes()[:-9])
    assert main(["train", "--input-data", "all.parquet", *SHORT, "--exp-name", "cut"]) == 1
    assert "all.parquet" in error_line(capsys)
    assert not (here / "outputs/cut").exists()


@pytest.fixture
def trained_run(_trained_run, monkeypatch):
    monkeypatch.chdir(_trained_run)
    return _trained_run


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--streaming", "--layer", "counts"], "--layer.*--input-data"),
        (["--buffer-size", "9"], "--buffer-size.*--streaming"),
        (["--num-genes", "7"], "dataset .*20 genes.* 7"),
    ],
)
def test_flags_without_effect_on_a_dataset_are_errors(folder, here, tokens, message, capsys):
    assert main(["train", "--data-dir", str(folder / "dataset"), *SHORT, *tokens]) == 1
    assert re.search(message, error_line(capsys))
    assert list(here.iterdir()) == []


def test_a_checkpoint_with_code_is_an_error(trained_run, folder, capsys):
    for name in ("evil", "text", "other", "half"):
        tokens = [
            "sample",
            "--checkpoint",
            f"{name}.ckpt",
            "--input-data",
            str(folder / "all.h5ad"),
            "--output",
            "o.h5ad",
        ]
        assert main(tokens) == 1
        assert f"{name}.ckpt" in error_line(capsys)
    assert not Path("ran").exists()
    assert not Path("o.h5ad").exists()


def test_other_flags_reach_the_trainer(folder, here, monkeypatch):
    seen = {}

    def train(self, **arguments):
        seen.update(arguments)
        raise ValueError("enough")

    monkeypatch.setattr(AlphaSTomics, "train", train)
    command = ["train", "--input-data", str(folder / "all.h5ad"), *TINY]
    assert main(command) == 1
    assert seen.keys().isdisjoint(
        ["strategy", "accumulate_grad_batches", "num_nodes", "context_parallel_size", "deterministic"]
    )
    flags = ["--accumulate-grad-batches", "3", "--gradient-clip-val", "0.5", "--deterministic", "--fp16"]
    spread = ["--strategy", "ddp_fork", "--devices", "2", "--context-parallel-size", "2"]
    assert main([*command, *flags, *spread]) == 1
    expected = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "deterministic": True, "precision": "16-mixed"}
    expected |= {"strategy": "ddp_fork", "devices": 2, "context_parallel_size": 2}
    assert {name: seen[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--resume", "--exp-name", "nonex"], r"outputs/nonex\S*last\.ckpt.*--exp-name"),
        (["--resume", "outputs/alphastomics"], r"outputs/alphastomics .*\.ckpt.*--resume"),
    ],
)
def test_resume_errors_come_before_data_errors(trained_run, tokens, message, capsys):
    assert main(["train", *tokens]) == 1
    assert re.search(message, error_line(capsys))


@pytest.mark.slow
def test_an_interrupted_run_logs_it_and_resumes(folder, here):
    """Before there is a checkpoint as good as after: what an interrupt leaves is one."""
    tokens = ["train", "--input-data", str(folder / "all.h5ad"), *changed(SHORT, epochs=100_000)]
    process = subprocess.Popen([sys.executable, "-m", "alphastomics", *tokens], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while not (RUN / "config.yaml").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert "Traceback" not in output
    assert re.search(r"last\.ckpt.*--resume", output)
    before = state()
    assert before["global_step"] >= 1
    assert main(["train", "--resume", "--epochs", str(before["epoch"] + 2)]) == 0
    assert state()["epoch"] == before["epoch"] + 2


def test_an_interrupt_waits_for_the_step_and_leaves_its_state(folder, here, monkeypatch):
    step = []
    original = TrainingPlan.training_step

    def interrupted(self, *args, **kwargs):
        step.append(self.trainer.global_step)
        if len(step) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TrainingPlan, "training_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", "--input-data", str(folder / "all.h5ad"), *changed(SHORT, epochs=5)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert len(step) == 3
    assert state()["global_step"] == 3


def test_one_command_is_repeated_until_the_run_has_finished(folder, here, monkeypatch, capsys):
    """Killed before its first checkpoint, then terminated, then resumed; a finished run is not repeated."""
    tokens = ["train", "--input-data", str(folder / "all.h5ad"), *SHORT, "--resume", "last"]
    original = TrainingPlan.training_step

    def terminated(self, *args, **kwargs):
        if self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    for name in ("checkpoints", "logs"):
        (RUN / name).mkdir(parents=True)
    (RUN / "config.yaml").write_text("model: {d_model: 16}")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingPlan, "training_step", terminated)
        with pytest.raises(SystemExit) as ended:
            main(tokens)
    assert ended.value.code == 143
    output = capsys.readouterr().err
    assert "outputs/alphastomics/checkpoints/last.ckpt" in output
    assert re.search(r"last\.ckpt.*--resume", output)
    assert state()["global_step"] == 4
    weights = []
    for _ in range(2):
        assert main(tokens) == 0
        weights.append((RUN / "checkpoints/model/model.safetensors").read_bytes())
    assert "step 4" in capsys.readouterr().err
    assert weights[0] == weights[1]
    assert main([*tokens[: tokens.index("--resume")], "--exp-name", "undisturbed"]) == 0
    assert weights[0] == Path("outputs/undisturbed/checkpoints/model/model.safetensors").read_bytes()
    assert pd.read_csv(RUN / "logs/metrics.csv", index_col="epoch").index.tolist() == [0, 1]
    (RUN / "checkpoints/last.ckpt").unlink()
    assert main(tokens) == 1
    assert "--exp-name" in error_line(capsys)


@pytest.mark.slow
def test_a_killed_run_resumes(folder, here, capsys):
    """Before the first checkpoint there is nothing to resume; after it everything is."""
    tokens = ["train", "--data-dir", str(folder / "dataset"), *changed(SHORT, epochs=100_000)]
    process = subprocess.Popen([sys.executable, "-m", "alphastomics", *tokens], stderr=subprocess.DEVNULL)
    last, end = RUN / "checkpoints/last.ckpt", time.monotonic() + 600
    while not last.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert sorted(path.name for path in last.parent.iterdir() if not path.name.startswith(".")) == ["last.ckpt"]
    before = state()
    assert (
        main(["extract", "--checkpoint", str(RUN), "--input-data", str(folder / "all.h5ad"), "--output", "z.npz"]) == 1
    )
    assert "--resume" in error_line(capsys)
    assert main(["train", "--resume", "--epochs", str(before["epoch"] + 2)]) == 0
    after = state()
    assert after["epoch"] == before["epoch"] + 2
    assert after["global_step"] == after["epoch"] * 3
    ema = after["callbacks"]["MovingAverage"]
    assert ema["n_updates"] == after["global_step"]
    assert pd.read_csv(RUN / "logs/metrics.csv", index_col="epoch").index.tolist() == list(range(after["epoch"]))
