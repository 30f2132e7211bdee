"""How training is spread over processes: errors, and that all strategies give the same weights.

The slow tests run ``strategy_program.py``, once for each strategy.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from alphastomics.train import STRATEGIES, resolve_strategy
from alphastomics.train.distributed import strategies
from alphastomics.train.distributed.launch import LaunchedDDPStrategy, run_in_subprocess
from alphastomics.train.distributed.processes import write_on_rank_zero
from alphastomics.train.distributed.sharding import fill_gradients, touch_all_params

if TYPE_CHECKING:
    from collections.abc import Callable

ATTENTION: dict[str, dict[str, Any]] = {
    "moe": {"use_moe": True, "moe_top_k": 1, "dropout": 0.1},
    "full": {},
    "linear": {"attention": "linear"},
    "geometric": {"attention": "geometric", "pair_features": "factorized"},
    "neighbor": {"attention": "neighbor", "n_neighbors": 4, "residual": "hyper"},
    "axial": {"attention": "axial", "layer_sharing": "universal"},
}


@pytest.fixture
def script(monkeypatch):
    """As in a script that was started from a shell, whatever runs these tests."""
    monkeypatch.setattr(strategies, "_can_start_again", lambda: True)


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def on(monkeypatch) -> Callable[[str], None]:
    """Let all devices seem to be of a kind."""

    def be(kind: str) -> None:
        monkeypatch.setattr(strategies, "device_of", lambda *_: torch.device(kind))

    return be


# -- names -------------------------------------------------------------------------------------------------------------


def test_one_device_needs_no_strategy():
    assert resolve_strategy("auto", accelerator="cpu") == "auto"


@pytest.mark.usefixtures("script")
def test_several_devices_of_a_script_use_ddp():
    assert type(resolve_strategy("auto", accelerator="cpu", devices=2)) is DDPStrategy
    assert type(resolve_strategy("auto", accelerator="cpu", num_nodes=2)) is DDPStrategy


@pytest.mark.usefixtures("notebook")
def test_several_devices_of_a_notebook_use_fork():
    strategy = resolve_strategy("auto", accelerator="cpu", devices=2)
    assert isinstance(strategy, LaunchedDDPStrategy)
    assert strategy.start_method == "fork"
    assert strategies.is_forked(strategy)
    assert not strategies.is_forked("auto")


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("name", ["ddp", "ddp_find_unused_parameters_true", "ddp_spawn", "ddp_fork", "fsdp2"])
def test_known_names_have_a_strategy_on_cpus(name):
    assert resolve_strategy(name, accelerator="cpu", devices=2) is not None


def test_an_object_of_lightning_is_taken_as_it_is():
    strategy = SingleDeviceStrategy("cpu")
    assert resolve_strategy(strategy) is strategy


def test_an_unknown_name_raises_with_the_known_ones():
    with pytest.raises(ValueError, match="strategy='dpp'.*'auto', 'ddp'") as error:
        resolve_strategy("dpp")
    assert all(repr(name) in str(error.value) for name in STRATEGIES)


# -- errors: a short message with an alternative -----------------------------------------------------------------------


def error_message(kind: type[Exception], name: str, **arguments: Any) -> str:
    with pytest.raises(kind) as error:
        resolve_strategy(name, accelerator="cpu", devices=2, **arguments)
    message = str(error.value)
    assert repr(name) in message
    assert "\n" not in message
    return message


@pytest.mark.usefixtures("script")
def test_strategies_for_gpus_raise_without_gpus():
    assert "strategy='fsdp2'" in error_message(ValueError, "fsdp")
    assert "GPU" in error_message(ValueError, "deepspeed_stage_2_offload")


@pytest.mark.usefixtures("script")
def test_strategies_on_gpus_raise_without_their_packages(on, monkeypatch):
    on("cuda")
    assert "norm" in error_message(ValueError, "fsdp")
    assert "average" in error_message(ValueError, "deepspeed_stage_3")
    monkeypatch.setattr(strategies, "find_spec", lambda _: None)
    assert "pip install deepspeed" in error_message(ImportError, "deepspeed_stage_1")
    monkeypatch.setattr(strategies, "find_spec", lambda _: object())
    assert resolve_strategy("deepspeed_stage_1", accelerator="cpu", devices=2) == "deepspeed_stage_1"


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_mps_is_one_device(on, name):
    on("mps")
    assert "MPS" in error_message(ValueError, name)


@pytest.mark.usefixtures("script")
def test_fsdp2_scales_no_losses():
    assert "'bf16-mixed'" in error_message(ValueError, "fsdp2", precision="16-mixed")


def test_a_gpu_that_was_used_cannot_be_forked(on, monkeypatch):
    on("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "CUDA" in error_message(RuntimeError, "ddp_notebook")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert strategies.is_forked(resolve_strategy("ddp_notebook", accelerator="cpu", devices=2))


def test_without_fork_processes_are_spawned(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert "strategy='ddp_spawn'" in error_message(RuntimeError, "ddp_fork")


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "ddp_spawn"])
def test_notebooks_can_only_fork(name):
    assert "strategy='ddp_notebook'" in error_message(RuntimeError, name)


def test_code_without_a_file_cannot_be_started_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert "script" in error_message(RuntimeError, "ddp")
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun has started it
    assert type(resolve_strategy("ddp", accelerator="cpu", devices=2)) is DDPStrategy


def test_a_script_without_a_main_guard_raises(monkeypatch):
    """In the child, which runs the script again to find what it is to do."""
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(_inheriting=True))
    assert "if __name__ == '__main__':" in error_message(RuntimeError, "ddp_spawn")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_unused_parameters_get_a_gradient():
    x, used, idle = torch.tensor(2.0, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(2, 2)
    idle.requires_grad_()
    frozen = torch.ones(2)
    y = touch_all_params(x * used.sum(), [used, idle, frozen])
    y.backward()
    assert y.item() == 6
    assert used.grad.tolist() == [2, 2, 2]
    assert idle.grad.tolist() == [[0, 0], [0, 0]]
    assert x.grad == 3


def test_a_single_process_fills_in_the_same_gradients_after_the_backward_pass():
    used, idle, frozen = torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True), torch.ones(2)
    (2 * used.sum()).backward()
    fill_gradients([used, idle, frozen])
    assert used.grad.tolist() == [2, 2, 2]
    assert idle.grad.tolist() == [[0, 0], [0, 0]]
    assert frozen.grad is None


def test_a_function_in_another_process_returns_or_raises():
    here = os.getpid()
    assert run_in_subprocess(lambda: (os.getpid() != here, 1 + 1)) == (True, 2)
    with pytest.raises(KeyError, match="gene"):
        run_in_subprocess(lambda: {}["gene"])
    with pytest.raises(RuntimeError, match="died"):
        run_in_subprocess(lambda: os._exit(3))


def test_a_single_process_writes_directly(tmp_path):
    write_on_rank_zero(tmp_path / "model", (tmp_path / "model").mkdir)
    assert (tmp_path / "model").is_dir()


# -- all ways learn the same -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(run_strategy, tmp_path_factory) -> Any:
    """One process that accumulates what two would have."""
    models = ATTENTION | {"trials": ATTENTION["moe"]}
    (told,) = run_strategy(tmp_path_factory.mktemp("alone") / "auto", "auto", devices=1, accumulation=2, models=models)
    return told


def assert_same_trials(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["validation"], expected["validation"], rtol=1e-4)  # in 16 bits
    for name in ("grown", "resume_state"):
        assert found[name] == pytest.approx(expected[name], rel=1e-7)
    assert re.search("nan at step 2.*slice_", found["error"])
    for name in ("kept", "resumed"):
        assert found[name][:-1] == expected[name][:-1]
        assert found[name][-1] == pytest.approx(expected[name][-1], rel=1e-7)
    assert found["kept"][:2] == [True, 2]
    assert found["resumed"][0] == 8


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn", "fsdp2"])
def test_two_processes_match_one(run_strategy, alone, tmp_path, strategy):
    """Losses of every step, in which the last of an epoch has padding; weights; the conditional mean; and placements from a file."""
    # How processes start makes no difference to attention; shards are compared on experts, pair features and shared blocks.
    kinds = {"ddp": tuple(ATTENTION), "fsdp2": ("moe", "geometric", "axial")}.get(strategy, ("moe",))
    models = {name: ATTENTION[name] for name in kinds}
    if strategy in ("ddp_fork", "fsdp2"):
        models["trials"] = ATTENTION["moe"]
    ranks = run_strategy(tmp_path / strategy, strategy, models=models)
    assert len(ranks) == (2 if strategy in ("ddp", "fsdp2") else 1)
    for rank in ranks:
        assert rank.keys() == models.keys()
        if "trials" in rank:
            assert_same_trials(rank.pop("trials"), alone["trials"])
        for name, found in rank.items():
            expected = alone[name]
            assert len(found["losses"]) == found["n_steps"] == expected["n_steps"] == 6
            np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5, rtol=1e-6, err_msg=name)
            assert found["history"].keys() == expected["history"].keys()
            for key in ("train_loss", "train_balance"):
                np.testing.assert_allclose(found["history"].get(key, 0), expected["history"].get(key, 0), rtol=1e-5)
            np.testing.assert_allclose(found["weights"], expected["weights"], atol=5e-4, err_msg=name)
            # Refinement and removal of overlaps amplify rounding of the mean, at most 2e-7 of the scale, to per cents of the
            # scale: placements are compared below, between processes with the same weights.
            scale = np.std(expected["mean"])
            np.testing.assert_allclose(found["mean"], expected["mean"], atol=1e-6 * scale, rtol=0, err_msg=name)
            assert found["same"]
            assert found["plain"] == ["Parameter"]
    assert all(rank == ranks[0] for rank in ranks)


LONG = """
import sys
from pathlib import Path
from lightning.pytorch.callbacks import LambdaCallback
sys.path.insert(0, {folder!r})
from strategy_program import fit, make

if __name__ == "__main__":
    model = make({{}})
    started = LambdaCallback(on_train_batch_end=lambda *_: Path({started!r}).touch())
    fit(model, max_epochs=500, strategy="ddp_fork", devices=2, checkpoint={checkpoint!r}, callbacks=[started])
    print("step", model.trainer.global_step, model.is_trained_, model.sample().n_obs)
"""


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_after_the_same_step(tmp_path):
    """What they have learned is in the model of the process that started them, and in the checkpoint."""
    checkpoint, started = tmp_path / "last.ckpt", tmp_path / "started"
    code = LONG.format(folder=str(Path(__file__).parent), checkpoint=str(checkpoint), started=str(started))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not started.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        told, said = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert b"interrupted at step" in said
    _, step, trained, n_cells = told.splitlines()[-1].split()
    assert int(step) > 0
    assert (trained, n_cells) == (b"True", b"180")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == int(step)
