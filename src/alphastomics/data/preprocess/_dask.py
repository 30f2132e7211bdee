"""Stages on a Dask cluster: tasks go to its workers, a few at a time, and results come back in order.

A task may run twice: that of a worker that dies is repeated, and a worker that is only disconnected continues. Tasks write to
temporary names of their own and rename, so that both leave the same file.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client, Future

    from alphastomics.data.preprocess._run import Run

CONNECT = 10  # seconds until a scheduler has to answer
WORKERS = 60  # seconds until a cluster has to have a worker, and for which it may have none while it works
# What decides the bytes of a file: one version of each on all machines.
PACKAGES = ("alphastomics", "numpy", "pyarrow", "scipy")
LOCAL: dict[str, Any] = {
    "processes": True,
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",  # None would take a port that may be in use, dashboard or not
    "scheduler_kwargs": {"dashboard": False},
    "memory_limit": 0,  # else the share of a process is that of its cores, however few processes there are
    "silence_logs": logging.CRITICAL,
}


@contextmanager
def dask_cluster(scheduler: str | None = None, *, workers: int | None = None) -> Iterator[Run]:
    """Run stages on a cluster that is there, or on processes of this machine.

    With the latter, a script calls it below ``if __name__ == "__main__":``, since its processes import the script.

    Parameters
    ----------
    scheduler
        Address of the scheduler of a cluster whose workers see files under the same paths.
    workers
        Number of processes to start on this machine in its place, of one thread each.

    Yields
    ------
    What :func:`preprocess`, :func:`stage1` and :func:`stage2` take as ``run``.

    Raises
    ------
    ImportError
        If Dask is not installed.
    OSError
        If no scheduler answers.
    RuntimeError
        If the cluster has no worker, or workers have other versions than this process.
    ValueError
        Unless one of both arguments is given.
    """
    if (scheduler is None) == (workers is None):
        raise ValueError("a cluster is scheduler=… or workers=…, one of them")
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ImportError('A cluster needs a package more: pip install "alphastomics[dask]"') from error
    quiet = {"distributed.admin.large-graph-warning-threshold": "1GB"}  # a task names all genes
    with dask.config.set(quiet), _silence():
        if scheduler is not None:
            with _connect(scheduler, Client) as client:
                _check_workers(client, scheduler)
                yield run_on(client)
            return
        with LocalCluster(n_workers=workers, **LOCAL) as cluster, Client(cluster) as client:
            yield run_on(client)


def run_on(client: Client) -> Run:
    """Run stages on the cluster of a client.

    Parameters
    ----------
    client
        A ``distributed.Client``.

    Returns
    -------
    What :func:`preprocess`, :func:`stage1` and :func:`stage2` take as ``run``. An exception of a task is raised as it is,
    after the tasks that run have ended; workers that die repeatedly and the loss of the cluster are a
    ``RuntimeError``.
    """
    from distributed import CancelledError
    from distributed.comm.core import CommClosedError

    def run(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        waiting, running = list(enumerate(tasks))[::-1], dict[Any, tuple[int, Any]]()
        done: dict[int, Any] = {}
        try:
            for number in range(len(tasks)):
                while number not in done:
                    while waiting and len(running) < max(1, sum(client.nthreads().values())):
                        i, task = waiting.pop()
                        # Not pure: Dask would keep results by what goes in, and files may be gone since.
                        running[client.submit(function, task, pure=False)] = i, task
                    for future in _finished(client, running):
                        i, task = running.pop(future)
                        done[i] = _result(future, task)
                yield done.pop(number)
        except (CancelledError, CommClosedError) as error:
            raise RuntimeError("the cluster is gone; repeat the command once there is one again") from error
        except Exception:
            _await_end(client, running)
            raise
        finally:
            for future in running:
                future.cancel()

    return run


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the log of Dask, whose errors are raised as exceptions."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "distributed"]
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    for each in before:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in before.items():
            each.setLevel(level)


def _connect(address: str, kind: type[Client]) -> Client:
    try:
        return kind(address, timeout=CONNECT)
    except (OSError, ValueError, TypeError, AssertionError, ImportError) as error:  # Dask's, for one mistake or another
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"no Dask scheduler answers at {address} ({reason}); start one with dask scheduler, and pass its address with "
            "scheduler=…"
        ) from error


def _check_workers(client: Client, address: str) -> None:
    """Raise an error for a cluster without workers, or with other versions of packages."""
    try:
        client.wait_for_workers(1, timeout=WORKERS)
    except TimeoutError as error:
        raise RuntimeError(f"the cluster at {address} has no worker; start some with dask worker {address}") from error
    ours = _versions()
    try:
        theirs: dict[str, dict[str, str]] = client.run(_versions)
    except ImportError as error:
        raise RuntimeError(
            f'a worker of {address} cannot import alphastomics ({error}); run pip install "alphastomics[dask]" there'
        ) from error
    for worker, found in theirs.items():
        if differ := [f"{name} {found[name]}, here {ours[name]}" for name in PACKAGES if found[name] != ours[name]]:
            raise RuntimeError(
                f"worker {worker} has other versions ({'; '.join(differ)}), and may write other bytes; install the same there"
            )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def _finished(client: Client, running: dict[Future, Any]) -> set[Future]:
    """Futures that have ended, at least one, in good or bad ways."""
    from distributed import wait

    idle = 0
    while True:
        try:
            return set(wait(list(running), timeout=WORKERS / 2, return_when="FIRST_COMPLETED").done)
        except TimeoutError as error:  # tasks may take long, but not without workers
            idle = 0 if client.nthreads() else idle + 1
            if idle == 2:
                raise RuntimeError("the cluster has no workers any more; start some and repeat the command") from error


def _result(future: Future, task: Any) -> Any:
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        raise RuntimeError(
            f"{error.allowed_failures + 1} workers died while they wrote {task.target}, the last one at "
            f"{error.last_worker.address}, likely for lack of memory; give workers more of it, or pass fewer with workers=…"
        ) from error


def _await_end(client: Client, running: dict[Future, Any]) -> None:
    """Wait for running tasks, so that none of their temporary files remains."""
    from distributed import CancelledError, wait

    with suppress(CancelledError, OSError):  # the cluster is gone, and they with it
        if running and client.nthreads():
            wait(list(running))
