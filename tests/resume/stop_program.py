"""Interrupts a training on two processes: ``python stop_program.py FOLDER STRATEGY HOW``, run by ``test_stopping.py``."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch

from alphastomics.train.distributed import launch as watch

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from strategy_program import fit, make

STEP = 5  # at which something happens


class Trouble(pl.Callback):
    """Happens to a process."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == STEP and (act := getattr(self, self.how, None)):
            act(trainer.global_rank)

    def disk(self, rank: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    def memory(self, rank: int) -> None:
        if rank == 1:
            torch.empty(2**50)

    def second_dies(self, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def second_dies_while_first_waits(self, rank: int) -> None:
        self.second_dies(rank)
        time.sleep(1000)

    def first_dies_while_second_waits(self, rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def parent_dies(self, rank: int) -> None:
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)

    def terminated(self, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    folder, strategy, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    watch.GRACE = 2.0
    common = {"strategy": strategy, "devices": 2, "checkpoint": folder / "last.ckpt", "checkpoint_every": 2}
    if how == "time":
        common |= {"batch_size": 30, "accumulate_grad_batches": 2}  # two steps an epoch
        fit(make({}), max_time=0.001, **common)
        state = torch.load(folder / "last.ckpt", weights_only=True)
        progress = state["loops"]["fit_loop"]["epoch_progress"]["current"]
        sys.stdout.write(f"stopped {state['global_step']} {progress['ready'] - progress['processed']}\n")
        model = make({})
        fit(model, max_epochs=2, resume="last", **common)
        sys.stdout.write(f"resumed {model.trainer.global_step} {model.trainer.current_epoch}\n")
        return
    if how == "apart":  # on disks of their own
        fit(make({}), max_epochs=1, **common)
        mine = folder if os.environ["LOCAL_RANK"] == "0" else folder / "elsewhere"
        fit(make({}), max_epochs=2, **(common | {"checkpoint": mine / "last.ckpt", "resume": "last"}))
    fit(make({}), callbacks=[Trouble(how)], max_epochs=50, **common)


if __name__ == "__main__":
    main()
