"""Stages on a Dask cluster: the same bytes as without, whoever dies; mistakes are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from alphastomics._io._atomic import remove_temporary, replacing
from alphastomics.data.preprocess import (
    Stage1Options,
    Stage2Options,
    _dask as _cluster,
    dask_cluster,
    preprocess,
    run_on,
)
from alphastomics.data.preprocess._dask import _check_workers, _versions
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from files import files_in, write_slices

pytest.importorskip("distributed")

LIMIT = 200  # seconds, for a machine that is busy
FIRST, SECOND = Stage1Options(cell_type_key="cell_type"), Stage2Options(max_shard_size=60)
TOKENS = ["--cell-type-key", "cell_type"]
# Loaded by every worker: it kills the process that is about to give one of these files its name, the first ones once.
KILLER = """
import os, signal
from pathlib import Path

def replace(source, target, *, rename=os.replace, **kwargs):
    marker = Path({folder!r}) / Path(target).name
    if marker.name in {always!r} or (marker.name in {once!r} and not marker.exists()):
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, **kwargs)

os.replace = replace
"""
CLUSTER = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
ORDER = """
import sys, time
from pathlib import Path
from distributed import Client, LocalCluster
from alphastomics.data.preprocess import run_on

def slow_first(i):
    time.sleep(1.0 if i == 0 else 0.0)
    return i

def fails(i):
    with open(sys.argv[1] if len(sys.argv) > 1 else LOG, "a") as file:
        file.write(f"{i}\\n")
    if i == 2:
        raise KeyError("a mistake of the user")

class Counting(Client):
    most = 0

    def submit(self, *args, **kwargs):
        future = super().submit(*args, **kwargs)
        held = sum(other.status == "pending" for other in self.futures.values())
        Counting.most = max(Counting.most, held)
        return future

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Counting(cluster) as client:
        run = run_on(client)
        assert list(run(slow_first, range(20))) == list(range(20))
        assert 1 <= Counting.most <= 2, Counting.most
        try:
            list(run(fails, range(20)))
        except KeyError as error:
            assert error.args == ("a mistake of the user",)
        else:
            raise AssertionError("no error")
        assert list(run(slow_first, range(3))) == [0, 1, 2]  # it goes on being of use
"""

LOST = """
import os, signal, subprocess, sys, threading, time
from alphastomics.data.preprocess import dask_cluster

def slow(i):
    time.sleep(60)

if __name__ == "__main__":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "cluster.py"]
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        with dask_cluster(process.stdout.readline().strip()) as run:
            threading.Timer(2, lambda: os.killpg(process.pid, signal.SIGKILL)).start()
            try:
                list(run(slow, range(4)))
            except RuntimeError as error:
                print(error)
"""


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    tissue = synthetic_tissue(n_slices=4, n_cells=(90, 70, 40, 60), n_genes=25, random_state=0)
    return write_slices(tissue, tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def serial(raw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    preprocess(raw, folder, FIRST, SECOND)
    return folder


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """Address of a cluster of two workers."""
    script = tmp_path_factory.mktemp("cluster") / "cluster.py"
    script.write_text(CLUSTER)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(LIMIT)


def command(*tokens, **environment):
    return subprocess.run(
        [sys.executable, "-m", "alphastomics", *map(str, tokens)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def stderr_lines(text):
    """What is on stderr besides progress."""
    return [
        line
        for line in text.replace("\r", "\n").splitlines()
        if line.strip() and not line.startswith(("Reading slices", "Writing files"))
    ]


def killer(folder, *, once=(), always=()):
    """Environment in which workers die."""
    script = folder / "killer.py"
    script.write_text(KILLER.format(folder=str(folder), once=once, always=always))
    return {
        "DASK_DISTRIBUTED__WORKER__PRELOAD": str([str(script)]),
        # A worker that dies counts against every task that it had, also those that it had not begun.
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1" if always else "5",
    }


def test_killed_workers_are_replaced_with_the_same_result(raw, serial, tmp_path):
    names = ("00002.arrow", "00001.json", "train-00001.parquet")
    tokens = ["--input-dir", raw, "--output-dir", tmp_path / "out", "--max-shard-size", 60, *TOKENS]
    done = command("preprocess", *tokens, "--workers", 2, **killer(tmp_path, once=names))
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / name).exists() for name in names)  # they were killed indeed
    assert files_in(tmp_path / "out") == files_in(serial)
    (line,) = stderr_lines(done.stderr)
    assert "is in" in line


@pytest.mark.slow
def test_work_that_kills_every_worker_gives_a_short_error(raw, tmp_path):
    tokens = ["--input-dir", raw, "--output-dir", tmp_path / "out", "--workers", 1]
    done = command("stage1", *tokens, **killer(tmp_path, always=("00001.arrow",)))
    assert done.returncode == 1
    (line,) = stderr_lines(done.stderr)
    assert "2 workers" in line
    assert "00001" in line
    assert "--workers" in line


@pytest.mark.slow
def test_an_existing_cluster_writes_the_same_bytes(raw, serial, scheduler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and paths are those of this process, not of the workers
    slices = Path("out") / "_intermediate_slices"
    done = command("stage1", "--input-dir", raw, "--output-dir", slices, *TOKENS, "--scheduler", scheduler)
    assert done.returncode == 0, done.stderr
    tokens = ["--input-dirs", slices, "--output-dir", "out", "--max-shard-size", 60]
    done = command("stage2", *tokens, "--scheduler", scheduler)
    assert done.returncode == 0, done.stderr
    assert files_in(tmp_path / "out") == files_in(serial)


@pytest.mark.slow
def test_errors_are_the_same_as_without_a_cluster(scheduler, tmp_path, capsys):
    raw = tmp_path / "raw"
    raw.mkdir()
    tissue = synthetic_tissue(n_slices=1, n_cells=40, n_genes=10, random_state=0)
    tissue.X = tissue.X.astype(np.float32)
    tissue.X.data[5] = np.nan
    tissue.write_h5ad(raw / "a.h5ad")
    tokens = ["stage1", "--input-dir", str(raw), "--output-dir"]
    assert main([*tokens, str(tmp_path / "serial")]) == 1
    expected = stderr_lines(capsys.readouterr().err)
    done = command(*tokens, tmp_path / "out", "--scheduler", scheduler)
    assert done.returncode == 1
    assert stderr_lines(done.stderr) == expected
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["stage1.json"]


def test_unreachable_scheduler_is_an_error(raw, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_cluster, "CONNECT", 1)
    address = "tcp://127.0.0.1:9"
    assert main(["stage1", "--input-dir", str(raw), "--output-dir", str(tmp_path / "out"), "--scheduler", address]) == 1
    (line,) = stderr_lines(capsys.readouterr().err)
    assert address in line
    assert "--scheduler" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--scheduler", "tcp://a:1", "--workers", "2"], "--scheduler … and --workers …"),
        (["--scheduler", "nonsense"], "nonsense"),
    ],
)
def test_invalid_cluster_arguments_give_a_short_error(raw, tmp_path, capsys, tokens, message):
    assert main(["stage1", "--input-dir", str(raw), "--output-dir", str(tmp_path / "out"), *tokens]) == 1
    (line,) = stderr_lines(capsys.readouterr().err)
    assert message in line
    assert not (tmp_path / "out").exists()


def test_missing_dask_names_the_extra(raw, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["stage1", "--input-dir", str(raw), "--output-dir", str(tmp_path / "out"), "--workers", "2"]) == 1
    (line,) = stderr_lines(capsys.readouterr().err)
    assert 'pip install "alphastomics[dask]"' in line


@pytest.mark.parametrize("arguments", [{}, {"scheduler": "tcp://a:1", "workers": 2}])
def test_two_cluster_arguments_raise(arguments):
    with pytest.raises(ValueError, match="scheduler.*workers"), dask_cluster(**arguments):
        pass


@pytest.mark.slow
def test_results_are_in_order_and_errors_are_not_retried(tmp_path):
    script, log = tmp_path / "order.py", tmp_path / "log"
    script.write_text(ORDER.replace("LOG", repr(str(log))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    tried = log.read_text().split()
    assert tried.count("2") == 1
    assert len(tried) < 20  # what had not begun never began


@pytest.mark.slow
def test_a_lost_cluster_raises_without_waiting(tmp_path):
    (tmp_path / "cluster.py").write_text(CLUSTER)
    (tmp_path / "lost.py").write_text(LOST)
    command = [sys.executable, "lost.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert "cluster is lost" in done.stdout, done.stderr


class Cluster:
    """A client whose workers are unsuitable."""

    def __init__(self, answer):
        self.answer = answer

    def wait_for_workers(self, n_workers, timeout):
        if self.answer is TimeoutError:
            raise TimeoutError

    def run(self, function):
        if self.answer is ImportError:
            raise ModuleNotFoundError("No module named 'alphastomics'")
        return {"tcp://w:1": function() | self.answer}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (TimeoutError, "tcp://s:1.*worker"),
        (ImportError, "alphastomics.*pip install"),
        ({"pyarrow": "0.1"}, r"tcp://w:1.*pyarrow 0\.1"),
    ],
)
def test_unsuitable_workers_raise(answer, message):
    with pytest.raises(RuntimeError, match=message):
        _check_workers(Cluster(answer), "tcp://s:1")
    _check_workers(Cluster(_versions()), "tcp://s:1")


def test_work_without_workers_raises(monkeypatch):
    import distributed

    def wait(*_, **__):
        raise TimeoutError

    class Nothing:
        def cancel(self):
            pass

    class Empty:
        submit = staticmethod(lambda *_, **__: Nothing())
        nthreads = staticmethod(dict)

    monkeypatch.setattr(distributed, "wait", wait)
    with pytest.raises(RuntimeError, match="workers"):
        list(run_on(Empty())(int, [1, 2]))


def test_two_writers_of_the_same_file_do_not_interfere(tmp_path):
    path, other = tmp_path / "file", tmp_path / "mine.tmp"
    other.write_text("of somebody else")

    @contextmanager
    def started(text):
        with replacing(path, unique=True) as temporary:
            temporary.write_text(text)
            yield

    with started("whole"):
        with started("whole too"):
            pass
        assert path.read_text() == "whole too"
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [path, other]
    with replacing(path, unique=True) as temporary:
        temporary.touch()
        remove_temporary(tmp_path)
        assert not temporary.exists()
        temporary.write_text("again")
    assert sorted(tmp_path.iterdir()) == [path, other]
