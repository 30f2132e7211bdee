r"""A curriculum over the length of contexts.

.. math::

    p(t) &= \operatorname{clamp}\Big(\frac{t - t_{\text{warmup}}}{t_{\text{growth}}}, 0, 1\Big), \qquad
    n(t) = \lfloor n_{\min} + a(p)\,(n_{\max} - n_{\min}) \rfloor \\
    a(p) &= p \;\;\text{(linear)}, \qquad \tfrac12 (1 - \cos \pi p) \;\;\text{(cosine)}, \qquad
    p^2 \;\;\text{(quadratic)} \\
    n(t) &= \lfloor n_{\min} (n_{\max} / n_{\min})^p \rfloor \;\;\text{(geometric)}

t counts steps of the optimizer.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args

import lightning.pytorch as pl

from alphastomics.config import GrowthKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from alphastomics.data import ContextDataset

logger = logging.getLogger(__name__)

ROUNDING = 1e-9  # tolerance below a whole number, for cos and powers


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSchedule:
    """Number of cells of a context at each step of the optimizer: n(t) in the equations of ``alphastomics.train.curriculum``.

    Parameters
    ----------
    shortest, longest
        n_min and n_max, in cells.
    warmup
        t_warmup: number of steps at the shortest length.
    growth
        t_growth: number of steps over which the length grows to the longest.
    kind
        How the length grows: ``"linear"``, ``"cosine"``, ``"quadratic"`` or ``"geometric"``.

    Raises
    ------
    ValueError
        If the lengths are not 1 <= shortest <= longest, a number of steps is negative, or the kind is unknown.
    """

    shortest: int
    longest: int
    warmup: int = 0
    growth: int
    kind: GrowthKind = "linear"

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest} and longest={self.longest} must be 1 <= shortest <= longest")
        for name in ("warmup", "growth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.kind not in get_args(GrowthKind):
            known = ", ".join(map(repr, get_args(GrowthKind)))
            raise ValueError(f"kind={self.kind!r} is unknown; choose from {known}")

    def length(self, step: int) -> int:
        """Number of cells at a step of the optimizer, counted from 0."""
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
    """Sets the length of the contexts of each epoch with ``set_length``.

    The length is constant within an epoch, because every cell occurs once in an epoch and loaders cut contexts ahead. It
    is set before Lightning requests the loader of the epoch, if ``reload_dataloaders_every_n_epochs`` is 1. A checkpoint holds
    the epoch and the step at which it began; a training that is resumed within an epoch keeps the length.
    """

    def __init__(self, schedule: LengthSchedule, set_length: Callable[[int], None]) -> None:
        self.schedule, self.set_length = schedule, set_length
        self.epoch = self.step = 0  # current epoch, and the step at which it began

    @property
    def length(self) -> int:
        """Number of cells of a context in this epoch."""
        return self.schedule.length(self.step)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the first length, before Lightning requests the number of batches."""
        self.set_length(self.length)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the epoch at its last batch, because a checkpoint written then resumes with the next epoch."""
        if trainer.is_last_batch:
            self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the length of the next epoch."""
        self._end_epoch(trainer)
        self.set_length(self.length)

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        self.epoch, self.step = trainer.current_epoch + 1, trainer.global_step

    def progress(self, trainer: pl.Trainer) -> float:
        """Share of the epochs or of the steps that is done, whichever is larger; epochs differ in their number of steps."""
        done = trainer.global_step / trainer.max_steps if trainer.max_steps > 0 else 0.0
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            return done
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        return max(done, (self.epoch * steps + trainer.global_step - self.step) / (trainer.max_epochs * steps))

    def state_dict(self) -> dict[str, Any]:
        """Current epoch, and the step at which it began."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the epoch and set its length again, because some strategies restore after ``on_fit_start``."""
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]
        self.set_length(self.length)


def make_curriculum(
    dataset: ContextDataset,
    set_context_size: Callable[[int], None],
    *,
    kind: GrowthKind | None,
    shortest: int,
    warmup: int,
    growth: int | None,
    n_steps: int | None,
) -> LengthCurriculum | None:
    """The curriculum over the length of contexts; None if their length is constant.

    Parameters
    ----------
    dataset
        Training contexts of full length.
    set_context_size
        Sets the number of cells of a context in the loaders.
    kind, shortest, warmup
        As in :class:`LengthSchedule`; None for a constant length.
    growth
        As there; None: until half of ``n_steps``.
    n_steps
        Number of steps of the training; None if it is limited by time alone.

    Raises
    ------
    ValueError
        If the arguments contradict each other.
    """
    if kind is None:
        return None
    if growth is None:
        if n_steps is None:
            raise ValueError("growth_steps= is required, because max_time= does not determine the number of steps")
        growth = max(0, n_steps // 2 - warmup)
    longest = min(dataset.context_size, dataset.largest_slice)
    schedule = LengthSchedule(shortest=min(shortest, longest), longest=longest, warmup=warmup, growth=growth, kind=kind)
    logger.info(
        "Contexts grow from %d to %d cells (%s) in %d steps.", schedule.shortest, longest, kind, warmup + growth
    )
    return LengthCurriculum(schedule, set_context_size)
