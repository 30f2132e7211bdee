r"""Noise schedule: how much signal is left at time :math:`u = t/T \in [0, 1]`.

.. math::

    f(u) = \cos^2\!\Big(\tfrac{\pi}{2}\,\frac{u^\nu + s}{1 + s}\Big), \qquad
    \alpha_u = \frac{f(u)}{f(0)} \;\text{(cosine)} \quad\text{or}\quad
    \alpha_u = \sqrt{\frac{f(u)}{f(0)}} \;\text{(cosine\_nd)}, \qquad
    \sigma_u = \sqrt{1 - \alpha_u^2}

``cosine`` is the convention of LUNA and of the earlier AlphaSTomics; ``cosine_nd`` is that of Nichol & Dhariwal (2021).
Both are variance preserving with :math:`\sigma_0 = 0` and :math:`\alpha_1 = 0` exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch

from alphastomics.config import DiffusionSettings, ScheduleName

if TYPE_CHECKING:
    from torch import Tensor

MIN_TIME = 0.01  # time below which values are not noised
MAX_LOG_SNR = 10.0  # log(alpha / sigma) is infinite at t = 0 and t = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineSchedule:
    """Variance-preserving cosine schedule.

    Parameters
    ----------
    name
        ``"cosine"`` (signal is the squared cosine) or ``"cosine_nd"`` (signal is the cosine, Nichol & Dhariwal).
    nu
        Exponent of time; values above 1 spend more steps at low noise.
    s
        Offset that keeps the first steps from being vanishingly small.
    """

    name: ScheduleName = DiffusionSettings.schedule
    nu: float = 1.0
    s: float = 0.008

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ValueError(f"schedule={self.name!r} is unknown; choose from {get_args(ScheduleName)}")
        if self.nu <= 0 or self.s < 0:
            raise ValueError(f"nu must be positive and s non-negative, got nu={self.nu}, s={self.s}")

    def alpha(self, u: Tensor) -> Tensor:
        """Signal at time ``u`` in [0, 1], same shape."""
        angle = 0.5 * math.pi * (u.clamp(0, 1) ** self.nu + self.s) / (1 + self.s)
        cosine = torch.cos(angle) / math.cos(0.5 * math.pi * self.s / (1 + self.s))
        cosine = torch.where(u >= 1, 0.0, torch.where(u <= 0, 1.0, cosine))
        return cosine**2 if self.name == "cosine" else cosine

    def sigma(self, u: Tensor) -> Tensor:
        """Noise at time ``u`` in [0, 1], same shape."""
        # 1 - alpha^2 cancels near u = 0; cos^2 a_0 - cos^2 a = sin(a - a_0) sin(a + a_0) does not.
        a_0 = 0.5 * math.pi * self.s / (1 + self.s)
        step = 0.5 * math.pi * u.clamp(0, 1) ** self.nu / (1 + self.s)
        squared = (step.sin() * (step + 2 * a_0).sin() / math.cos(a_0) ** 2).clamp(0, 1)
        squared = squared * (2 - squared) if self.name == "cosine" else squared
        return torch.where(u >= 1, 1.0, squared.sqrt())

    def log_snr(self, u: Tensor) -> Tensor:
        """Half log signal-to-noise ratio, log(alpha / sigma), clamped to +-10."""
        alpha, sigma = self.alpha(u), self.sigma(u)
        tiny = torch.finfo(alpha.dtype).tiny
        return (alpha.clamp_min(tiny).log() - sigma.clamp_min(tiny).log()).clamp(-MAX_LOG_SNR, MAX_LOG_SNR)
