"""Every recipe runs as it is, on two processes of this machine; what no machine without a scheduler can run is read."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.model import AlphaSTomics

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
FILES = ("laptop.sh", "notebook.py", "torchrun.sh", "slurm.sbatch", "kubernetes.yaml")
LIMIT = 120  # seconds
TINY = "--d-model 16 --n-layers 1 --n-heads 2 --context-size 30 --batch-size 60 --mode expr_to_pos".split()
SHORT = [*TINY, "--accelerator", "cpu", "--precision", "32-true", "--epochs", "2"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    synthetic_tissue(n_slices=2, n_cells=90, n_genes=20, random_state=0).write_h5ad(path)
    return path


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """That of a shell in which the package is installed, with commands of ``tmp_path / "bin"`` before others."""
    foreign = ("SLURM", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_", "TORCHELASTIC", "PYTEST_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return plain | {"PATH": path, "OMP_NUM_THREADS": "1"} | more


def command(tmp_path: Path, name: str, text: str) -> None:
    """Put a command in the place of one that is not on this machine."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    path = tmp_path / "bin" / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(tmp_path: Path, *tokens: str, **more: str) -> str:
    done = subprocess.run(
        tokens, cwd=tmp_path, env=environment(tmp_path, **more), capture_output=True, text=True, timeout=LIMIT, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def trained(folder: Path) -> AlphaSTomics:
    model = AlphaSTomics.load(folder / "checkpoints/model", adata=False, accelerator="cpu")
    assert model.is_trained
    return model


def epoch(folder: Path) -> int:
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["epoch"]


def free_port(first: int, last: int) -> int:
    """A free port."""
    for port in range(first, last + 1):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(found.getsockname()[1])
    raise AssertionError("all ports are taken")


# -- content -----------------------------------------------------------------------------------------------------------


def test_the_page_shows_every_recipe_as_it_is():
    page = (ROOT / "docs/scaling.md").read_text()
    shown = re.findall(r"```\{literalinclude\} \.\./recipes/(\S+)", page)
    assert sorted(shown) == sorted(FILES) == sorted(path.name for path in RECIPES.iterdir())


@pytest.mark.parametrize("name", [name for name in FILES if name != "notebook.py"])
def test_the_same_command_starts_and_resumes(name):
    assert "--resume last" in (RECIPES / name).read_text()


@pytest.mark.parametrize("name", ["laptop.sh", "torchrun.sh", "slurm.sbatch"])
def test_bash_can_read_it(name):
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True, timeout=60)


def directives() -> dict[str, str]:
    """Directives of the Slurm file; Slurm ignores those after the first command."""
    head, *rest = re.split(r"^(?!#|$)", (RECIPES / "slurm.sbatch").read_text(), maxsplit=1, flags=re.MULTILINE)
    assert "#SBATCH" not in "".join(rest)
    lines = [line for line in head.splitlines() if line.startswith("#SBATCH")]
    found = dict(re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups(default="") for line in lines)
    assert len(found) == len(lines)
    return found


def test_slurm_requests_one_task_per_gpu():
    asked = directives()
    known = {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "signal", "requeue",
        "open-mode", "output",
    }  # fmt: skip
    assert asked.keys() == known
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]  # and every task sees them all
    assert re.fullmatch(r"\d\d:\d\d:\d\d", asked["time"])
    assert re.fullmatch(r"B:USR1@\d+", asked["signal"])
    assert asked["job-name"] not in ("bash", "interactive")  # with which Lightning ignores Slurm


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    return service, job


def container(job: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


def test_kubernetes_requests_indexed_pods_with_the_address_of_the_first():
    service, job = kubernetes()
    assert (service["apiVersion"], service["kind"], service["spec"]["clusterIP"]) == ("v1", "Service", "None")
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    template = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert template["spec"]["restartPolicy"] in ("OnFailure", "Never")  # a Job takes no other
    told = {entry["name"]: entry["value"] for entry in container(job)["env"]}
    assert all(isinstance(value, str) for value in told.values())
    assert told["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(told["NODES"]) == job["spec"]["completions"]
    assert int(told["PROCESSES"]) == container(job)["resources"]["limits"]["nvidia.com/gpu"]
    mounted = {mount["name"] for mount in container(job)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


# -- what they do ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_laptop(cells, tmp_path):
    """And the same line once more, which goes on."""
    tokens = ["bash", str(RECIPES / "laptop.sh"), "--input-data", str(cells), *SHORT]
    run(tmp_path, *tokens, MEMORY="1")
    folder = tmp_path / "outputs/laptop"
    trained(folder)
    assert epoch(folder) == 2
    run(tmp_path, *tokens[:-1], "3", MEMORY="1")
    assert epoch(folder) == 3


@pytest.mark.slow
def test_notebook(tmp_path):
    """Cell by cell in an interactive Python, with another tissue and no GPU."""
    first, *others = re.split(r"^# %%.*\n", (RECIPES / "notebook.py").read_text(), flags=re.MULTILINE)[1:]
    told = "reference = asx.datasets.synthetic_tissue(n_slices=2, n_cells=90, n_genes=20, random_state=0)\n"
    told += "devices = {'accelerator': 'cpu', 'devices': 2}\nsize = {'d_model': 16, 'n_layers': 1, 'n_heads': 2}\n"
    told += "length = {'max_epochs': 2, 'batch_size': 60, 'context_size': 30, 'enable_progress_bar': False}\n"
    check = "assert 'spatial' in placed.obsm\nimport os; os._exit(0)\n"
    program = "\n".join([first, told, *others, check])
    done = subprocess.run(
        [sys.executable, "-i", "-c", program], cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert (tmp_path / "notebook.ckpt").is_file()
    assert AlphaSTomics.load(tmp_path / "notebook_model", adata=False, accelerator="cpu").is_trained


@pytest.mark.slow
def test_torchrun_restarts_all_processes_after_a_failure(cells, tmp_path):
    tokens = ["bash", str(RECIPES / "torchrun.sh"), "--input-data", str(cells), *SHORT[:-1], "30"]
    log, folder, end = tmp_path / "log", tmp_path / "outputs/torchrun", time.monotonic() + LIMIT
    with log.open("w") as out:
        process = subprocess.Popen(
            tokens, cwd=tmp_path, env=environment(tmp_path, PROCESSES="2"), stderr=out, start_new_session=True
        )
    try:
        while not (folder / "config.yaml").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        process.wait(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert process.returncode == 0, said[-3000:]
    assert said.count("Training on 180 cells") == 2  # by the first process, twice
    trained(folder)
    assert epoch(folder) == 30


SRUN = """#!/usr/bin/env bash
# As Slurm does: every task has its number in the environment.
while [[ "$1" == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NODEID=0 SLURM_STEP_ID=0 "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


@pytest.mark.slow
def test_slurm(cells, tmp_path):
    """Two tasks of one machine; the rank is theirs, so that Lightning has read the variables of Slurm."""
    command(tmp_path, "srun", SRUN)
    port = free_port(15001, 24999)
    asked = directives()
    slurm = {
        "SLURM_JOB_ID": f"1{port - 15000:04d}", "SLURM_JOB_NAME": asked["job-name"], "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    said = run(tmp_path, "bash", str(RECIPES / "slurm.sbatch"), "--input-data", str(cells), *SHORT, **slurm)
    trained(tmp_path / "outputs/slurm")
    assert said.count("Training on 180 cells") == 1
    assert {"GLOBAL_RANK: 0, MEMBER: 1/2", "GLOBAL_RANK: 1, MEMBER: 2/2"} == set(
        re.findall(r"GLOBAL_RANK.*\d/\d", said)
    )


def test_slurm_queues_the_job_again_before_its_time_is_over(tmp_path):
    command(tmp_path, "srun", "#!/usr/bin/env bash\ntouch running; exec sleep 60\n")
    command(tmp_path, "scontrol", '#!/usr/bin/env bash\necho "$@" >> asked\n')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    process = subprocess.Popen(
        ["bash", str(RECIPES / "slurm.sbatch")],
        cwd=tmp_path,
        env=environment(tmp_path, **slurm),
        start_new_session=True,
    )
    try:
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.wait(timeout=30)
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_kubernetes(cells, tmp_path):
    """Two pods of one process each, on this machine: one of them writes."""
    prepared = ["--input-dir", str(cells.parent), "--output-dir", str(tmp_path / "dataset")]
    assert main(["preprocess", *prepared]) == 0
    _, job = kubernetes()
    told = {entry["name"]: entry["value"] for entry in container(job)["env"]}
    told |= {
        "PROCESSES": "1", "HEAD": "localhost", "PORT": str(free_port(25000, 29999)),
        "DATA": str(tmp_path / "dataset"), "OUTPUT": str(tmp_path / "outputs"),
    }  # fmt: skip
    tokens = [*container(job)["command"], *container(job)["args"], *SHORT]
    pods = [
        subprocess.Popen(
            tokens, cwd=tmp_path, env=environment(tmp_path, **told, JOB_COMPLETION_INDEX=str(i)), stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(job["spec"]["completions"])
    ]  # fmt: skip
    said = [pod.communicate(timeout=LIMIT)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said[0][-2000:] + said[1][-2000:]
    trained(tmp_path / "outputs/alphastomics")
    assert [text.count("The model is in") for text in said] == [1, 0]
