r"""Curriculum over the length of contexts: few cells first, all of them later.

.. math::

    p(t) &= \operatorname{clamp}\Big(\frac{t - t_{\text{warmup}}}{t_{\text{growth}}}, 0, 1\Big), \qquad
    n(t) = \lfloor n_{\min} + a(p)\,(n_{\max} - n_{\min}) \rfloor \\
    a(p) &= p \;\;\text{(linear)}, \qquad \tfrac12 (1 - \cos \pi p) \;\;\text{(cosine)}, \qquad
    p^2 \;\;\text{(exponential)} \\
    n(t) &= \lfloor n_{\min} (n_{\max} / n_{\min})^p \rfloor \;\;\text{(geometric)}

t counts steps of the optimiser. Only the geometric schedule grows exponentially: the length doubles in equal times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl

if TYPE_CHECKING:
    from collections.abc import Callable

ScheduleKind = Literal["linear", "cosine", "exponential", "geometric"]

ROUNDING = 1e-9  # what cos and powers may lack of a whole number


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSchedule:
    """Length of a context at a step.

    Parameters
    ----------
    shortest, longest
        n_min and n_max, in cells.
    warmup
        Number of steps at the shortest length.
    growth
        Number of steps from there to the longest.
    kind
        How the length grows.

    Raises
    ------
    ValueError
        If the lengths are not 1 <= shortest <= longest, a number of steps is negative, or the kind is unknown.
    """

    shortest: int
    longest: int
    warmup: int = 0
    growth: int
    kind: ScheduleKind = "linear"

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest} and longest={self.longest} must be 1 <= shortest <= longest")
        for name in ("warmup", "growth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} counts steps and must not be negative")
        if self.kind not in get_args(ScheduleKind):
            known = ", ".join(map(repr, get_args(ScheduleKind)))
            raise ValueError(f"kind={self.kind!r} is unknown; choose from {known}")

    def length(self, step: int) -> int:
        """Number of cells at a step of the optimiser, counted from 0."""
        if step >= self.warmup + self.growth:
            return self.longest
        # Fractions, because the floor of a float can miss a whole number by one.
        p = Fraction(max(0, step - self.warmup), max(1, self.growth))
        low, high = self.shortest, self.longest
        if self.kind == "geometric":
            return int(low * (high / low) ** float(p) + ROUNDING)
        if self.kind == "cosine":
            return int(low + (1 - math.cos(math.pi * p)) / 2 * (high - low) + ROUNDING)
        return int(low + (p if self.kind == "linear" else p**2) * (high - low))


class LengthCurriculum(pl.Callback):
    """Says how long the contexts of the next epoch are.

    A length holds for an epoch, in which every cell comes once, and loaders cut contexts ahead. It is told before Lightning
    asks for the loader of that epoch, if ``reload_dataloaders_every_n_epochs`` is 1. The state in a checkpoint is the epoch
    and the step at which it began: resumed in its midst, training goes on with the same length.

    Parameters
    ----------
    schedule
        The lengths.
    set_length
        Is told the length: what cuts the contexts.
    """

    def __init__(self, schedule: LengthSchedule, set_length: Callable[[int], None]) -> None:
        self.schedule, self.set_length = schedule, set_length
        self.epoch = self.step = 0  # the epoch, and the step at its beginning

    @property
    def length(self) -> int:
        """Number of cells of a context in this epoch."""
        return self.schedule.length(self.step)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tell the first length, before anything asks how many batches there are."""
        self.set_length(self.length)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a checkpoint at the last batch of an epoch, training goes on with the next one."""
        if trainer.is_last_batch:
            self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the length of the next epoch."""
        self._end_epoch(trainer)
        self.set_length(self.length)

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        self.epoch, self.step = trainer.current_epoch + 1, trainer.global_step

    def progress(self, trainer: pl.Trainer) -> float:
        """Share of the epochs or of the steps that is done, whichever is further; epochs differ in how many steps they have."""
        done = trainer.global_step / trainer.max_steps if trainer.max_steps > 0 else 0.0
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            return done
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        return max(done, (self.epoch * steps + trainer.global_step - self.step) / (trainer.max_epochs * steps))

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the step at which it began, for a checkpoint."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the epoch of a checkpoint, and tell its length: some strategies restore after the fit has begun."""
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]
        self.set_length(self.length)
