"""Stages on a Dask cluster: a few tasks at a time are submitted to workers, and results are yielded in order.

A task may run twice: the task of a worker that dies is repeated, and a worker that is only disconnected continues.
Tasks write to unique temporary names and rename, so that both runs leave the same file.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from alphastomics.config import ClusterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client, Future

    from alphastomics.data.preprocess._run import Run

CONNECT = 10  # seconds to wait for a scheduler
WORKERS = 60  # seconds to wait for a worker, at the start and when all workers are lost
# The bytes of a file depend on these versions, which must be the same on all machines.
PACKAGES = ("alphastomics", "numpy", "pyarrow", "scipy")
LOCAL: dict[str, Any] = {
    "processes": True,
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",  # None would need the default port, even without the dashboard
    "scheduler_kwargs": {"dashboard": False},
    "memory_limit": 0,  # else a process gets the share of its cores in the memory, even if it is the only one
    "silence_logs": logging.CRITICAL,
}


@contextmanager
def dask_cluster(scheduler: str | None = None, *, workers: int | None = None) -> Iterator[Run]:
    """Run stages on an existing cluster, or on processes of this machine.

    With processes of this machine, call it below ``if __name__ == "__main__":``, since they import the script.

    Parameters
    ----------
    scheduler
        Address of the scheduler of a cluster whose workers have the files under the same paths.
    workers
        Number of processes, of one thread each, to start on this machine instead.

    Yields
    ------
    The argument `run` of :func:`preprocess`, :func:`stage1` and :func:`stage2`.

    Raises
    ------
    ImportError
        If Dask is not installed.
    OSError
        If no scheduler answers.
    RuntimeError
        If the cluster has no worker, or workers have other versions of packages than this process.
    ValueError
        Unless exactly one of `scheduler` and `workers` is given.
    """
    ClusterConfig(scheduler=scheduler, workers=workers)  # checks the values
    if scheduler is None and workers is None:
        raise ValueError("scheduler and workers are both None; pass one of them")
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ImportError('Dask is not installed; run pip install "alphastomics[dask]"') from error
    quiet = {"distributed.admin.large-graph-warning-threshold": "1GB"}  # a task holds the names of all genes
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
    The argument `run` of :func:`preprocess`, :func:`stage1` and :func:`stage2`. It raises an exception of a task unchanged,
    after the running tasks have ended, and a ``RuntimeError`` if workers die repeatedly or the cluster is lost.
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
                        # Not pure: Dask would cache results by their arguments, and files may have been deleted since.
                        running[client.submit(function, task, pure=False)] = i, task
                    for future in _finished(client, running):
                        i, task = running.pop(future)
                        done[i] = _result(future, task)
                yield done.pop(number)
        except (CancelledError, CommClosedError) as error:
            raise RuntimeError(
                "the connection to the cluster is lost; restart the cluster and repeat the command"
            ) from error
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
    except (OSError, ValueError, TypeError, AssertionError, ImportError) as error:  # of a wrong address
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
        raise RuntimeError(f"the cluster at {address} has no worker; start one with dask worker {address}") from error
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
                f"worker {worker} has other versions ({'; '.join(differ)}), and may write different files; install the same versions"
            )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def _finished(client: Client, running: dict[Future, Any]) -> set[Future]:
    """Futures that have ended, with or without an error, at least one."""
    from distributed import wait

    idle = 0
    while True:
        try:
            return set(wait(list(running), timeout=WORKERS / 2, return_when="FIRST_COMPLETED").done)
        except TimeoutError as error:  # no task has ended, which is an error only without workers
            idle = 0 if client.nthreads() else idle + 1
            if idle == 2:
                raise RuntimeError("the cluster has lost its workers; start workers and repeat the command") from error


def _result(future: Future, task: Any) -> Any:
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        raise RuntimeError(
            f"{error.allowed_failures + 1} workers died while they wrote {task.target}, the last one at "
            f"{error.last_worker.address}, probably for lack of memory; give workers more memory, or pass fewer with workers=…"
        ) from error


def _await_end(client: Client, running: dict[Future, Any]) -> None:
    """Wait for running tasks, so that no temporary files remain."""
    from distributed import CancelledError, wait

    with suppress(CancelledError, OSError):  # the tasks end with the cluster
        if running and client.nthreads():
            wait(list(running))
