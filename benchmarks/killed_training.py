"""Equality of the model after a training was killed and resumed.

A small model, with dropout, experts, masks, accumulated gradients (one process) and growing contexts, is trained without interruption by
one process and by two (``ddp``). Then the same training is killed with SIGKILL at random steps and run again with the same
arguments, so that it resumes from its last checkpoint (``resume="last"``). Of two processes, either both or one is killed; in the
latter case the other must end by itself. The weights and the history must have the same bytes.
Run as ``python -m benchmarks.killed_training``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import _training_to_kill as training
from benchmarks._report import machine, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "killed_training.json"
MODULE = "benchmarks._training_to_kill"
LIMIT = 300.0  # seconds of a training
BOUND = 60.0  # seconds after a kill by which all other processes must have ended
SEED = 0
THREADS = 1  # of each process


class Kill(NamedTuple):
    """How a training is killed.

    Attributes
    ----------
    devices
        Number of processes.
    step
        Step during which a process is killed.
    delay
        Seconds after the start of that step.
    victim
        Which process is killed; None for all of them.
    """

    devices: int
    step: int
    delay: float
    victim: int | None


def start(folder: Path, devices: int) -> subprocess.Popen[bytes]:
    """Start the training in its own session, with its output in a file beside the folder."""
    command = [sys.executable, "-W", "ignore", "-m", MODULE, str(folder), str(devices)]
    unset = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["OMP_NUM_THREADS"] = str(THREADS)
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def read_log(folder: Path) -> str:
    """Output of a training."""
    return folder.with_suffix(".log").read_text()


def finish(folder: Path, devices: int) -> dict[str, str]:
    """Train to the end and return hashes of the files."""
    process = start(folder, devices)
    try:
        status = process.wait(LIMIT)
    finally:
        end(process.pid)
    if status:
        raise RuntimeError(f"a training ended with status {status}: {read_log(folder)[-2000:]}")
    config = json.loads((folder / "model" / "config.json").read_text())
    contents = {
        "model.safetensors": (folder / "model" / "model.safetensors").read_bytes(),
        "history": json.dumps(config["history"], sort_keys=True).encode(),
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def end(session: int) -> None:
    """Kill all processes of a session."""
    for number in members(session):
        os.kill(number, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def kill(folder: Path, how: Kill) -> dict[str, Any]:
    """Start and kill a training; return the step, and the seconds until all processes had ended."""
    process, watched = start(folder, how.devices), folder / f"{how.victim or 0}.step"
    try:
        number = victim(watched, how.step, process)
        if number is None:
            raise RuntimeError(f"a training ended before step {how.step}: {read_log(folder)[-2000:]}")
        time.sleep(how.delay)
        began = time.monotonic()
        if how.victim is None:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(number, signal.SIGKILL)
        while members(process.pid) and time.monotonic() - began < BOUND:
            process.poll()
            time.sleep(0.05)
        left, status = len(members(process.pid)), process.wait(BOUND)
    finally:
        end(process.pid)
    return {
        "step": int(watched.read_text().split()[1]),
        "seconds_to_end": round(time.monotonic() - began, 2),
        "left_over": left,
        "status": status,
    }


def victim(path: Path, step: int, process: subprocess.Popen[bytes]) -> int | None:
    """Process number from a progress file, once the step is reached; None if the training ends before."""
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists():
            number, reached = path.read_text().split()
            if int(reached) >= step:
                return int(number)
        time.sleep(0.002)
    return None


def compare(how: Kill, truth: dict[str, str], folder: Path) -> dict[str, Any]:
    """Kill a training, resume it, and compare the files."""
    folder.mkdir()
    ended = kill(folder, how)
    checkpoint = (folder / "last.ckpt").is_file()
    found = finish(folder, how.devices)
    others = how.victim is not None
    outcome = {
        **how._asdict(),
        "killed": ended,
        "had_checkpoint": checkpoint,
        "names_remedy": "continues with resume='last'" in read_log(folder) if others else None,
        "sha256": found,
        "identical": found == truth,
    }
    shutil.rmtree(folder)
    folder.with_suffix(".log").unlink()
    return outcome


def plan(n_single: int, n_double: int, n_steps: int, rng: random.Random) -> list[Kill]:
    """Kills at random steps; of two processes, both, the second or the first is killed in turn."""
    kills = [Kill(1, rng.randrange(1, n_steps), rng.uniform(0, 0.03), None) for _ in range(n_single)]
    victims = (None, 1, 0)
    return kills + [
        Kill(2, rng.randrange(1, n_steps), rng.uniform(0, 0.03), victims[i % len(victims)]) for i in range(n_double)
    ]


def measure(n_single: int, n_double: int, folder: Path) -> dict[str, Any]:
    """Uninterrupted and killed trainings."""
    truths, n_steps = {}, 0
    for devices in [1] * bool(n_single) + [2] * bool(n_double):
        (folder / f"undisturbed_{devices}").mkdir()
        truths[devices] = finish(folder / f"undisturbed_{devices}", devices)
        n_steps = int((folder / f"undisturbed_{devices}" / "0.step").read_text().split()[1]) + 1
    kills = plan(n_single, n_double, n_steps, random.Random(SEED))
    runs = [compare(how, truths[how.devices], folder / f"killed_{i}") for i, how in enumerate(kills)]
    return {"n_steps": n_steps, "undisturbed": {str(n): truth for n, truth in truths.items()}, "runs": runs}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.killed_training", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--single", type=int, default=10, help="killed trainings of one process")
    parser.add_argument("--double", type=int, default=10, help="killed trainings of two processes")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Kill trainings and print how many give the same files."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        found = measure(options.single, options.double, Path(name))
    runs = found["runs"]
    content = {
        "benchmark": "killed_training",
        "parameters": {
            "single": options.single,
            "double": options.double,
            "seed": SEED,
            "every": training.EVERY,
            "threads": THREADS,
            "cells": training.SIZES,
            "model": training.MODEL,
            "training": training.TRAINING,
        },
        "identical": all(each["identical"] for each in runs),
        "longest_seconds_to_end": max(each["killed"]["seconds_to_end"] for each in runs),
        "left_over": sum(each["killed"]["left_over"] for each in runs),
        **found,
        "versions": versions() | {"lightning": version("lightning")},
        "machine": machine(),
    }
    write_json(options.output, content)
    for devices, name in ((1, "one process"), (2, "two processes")):
        own = [each for each in runs if each["devices"] == devices]
        same = sum(each["identical"] for each in own)
        print(f"{name}: {same} of {len(own)} killed trainings give the same files as the uninterrupted one")


if __name__ == "__main__":
    main()
