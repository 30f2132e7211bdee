r"""Gaussian process of expression: forward process, parameterizations, and the exact reverse step.

.. math::

    z_t &= \alpha_t x_0 + \sigma_t \varepsilon, \qquad \varepsilon \sim \mathcal N(0, I) \\
    q(z_s \mid z_t, x_0) &= \mathcal N\big(a\rho\, z_t + \alpha_s (1 - a^2\rho)\, x_0,\; \rho\,(\sigma_t^2 - a^2\sigma_s^2) I\big),
    \qquad \rho = \sigma_s^2/\sigma_t^2,\; a = \alpha_t/\alpha_s,\; s < t

(Ho et al. 2020; Kingma et al. 2021, eq. 25-27.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import torch

from alphastomics.config import DiffusionSettings, Mode, PredictionType
from alphastomics.diffusion.schedule import CosineSchedule

if TYPE_CHECKING:
    from torch import Tensor

MODES: tuple[Mode, ...] = get_args(Mode)
MAX_RATIO = 2.2e4  # exp(10): sigma / alpha where epsilon-prediction is inverted near pure noise


def per_cell(value: Tensor, like: Tensor) -> Tensor:
    """One number per context, (B,), shaped to multiply ``like`` (B, N, ...)."""
    return value.reshape(-1, *(1,) * (like.ndim - 1)).to(like.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Forward and reverse Gaussian process.

    Parameters
    ----------
    schedule
        Signal and noise against time.
    prediction_type
        Quantity that the network predicts: the clean value ``"x0"``, the noise ``"epsilon"``, or
        ``"v"`` = alpha * epsilon - sigma * x0 (Salimans & Ho 2022), which is close to the noise at low noise and to the
        negative clean value at low signal.
    """

    schedule: CosineSchedule = field(default_factory=CosineSchedule)
    prediction_type: PredictionType = DiffusionSettings.prediction_type

    def __post_init__(self) -> None:
        if self.prediction_type not in get_args(PredictionType):
            raise ValueError(
                f"prediction_type={self.prediction_type!r} is unknown; choose from {get_args(PredictionType)}"
            )

    def coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """alpha_t and sigma_t of timesteps ``t`` (B,), shaped to multiply ``like`` (B, N, ...)."""
        return per_cell(self.schedule.alpha(t), like), per_cell(self.schedule.sigma(t), like)

    def noise(self, x_0: Tensor, t: Tensor, epsilon: Tensor) -> Tensor:
        """z_t = alpha_t x_0 + sigma_t epsilon; x_0 and epsilon (B, N, .), t (B,)."""
        alpha, sigma = self.coefficients(t, x_0)
        return alpha * x_0 + sigma * epsilon

    def x0(self, output: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """Convert the network's ``output`` to an estimate of the clean value.

        At t = 1 z_t does not depend on x0, and the noise does not determine it: the output of an ``"epsilon"`` network is
        then taken as x0 itself.
        """
        alpha, sigma = self.coefficients(t, z_t)
        if self.prediction_type == "x0":
            return output
        if self.prediction_type == "v":
            return alpha * z_t - sigma * output
        return torch.where(alpha == 0, output, (z_t - sigma * output) / alpha.clamp_min(1 / MAX_RATIO))

    def loss_weight(self, t: Tensor, *, maximum: float) -> Tensor:
        """Weight 1 / sigma_t^2, at most ``maximum``, with which the squared error of x0 equals that of v."""
        sigma = self.schedule.sigma(t)
        return (1 / sigma.clamp_min(1e-6) ** 2).clamp_max(maximum)

    def epsilon(self, x_0: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """Noise in ``z_t`` if the clean value is ``x_0``."""
        alpha, sigma = self.coefficients(t, z_t)
        return (z_t - alpha * x_0) / sigma.clamp_min(1 / MAX_RATIO)

    def posterior(self, z_t: Tensor, x_0: Tensor, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (B, N, .) and variance (B, 1, 1) of q(z_s | z_t, x_0) for s < t."""
        alpha_t, sigma_t = self.coefficients(t, z_t)
        alpha_s, sigma_s = self.coefficients(s, z_t)
        rho = (sigma_s / sigma_t) ** 2
        a = alpha_t / alpha_s
        mean = a * rho * z_t + alpha_s * (1 - a**2 * rho) * x_0
        variance = (rho * (sigma_t**2 - a**2 * sigma_s**2)).clamp_min(0)
        return mean, variance

    @classmethod
    def of(cls, settings: DiffusionSettings) -> Process:
        """Make the process from ``settings``."""
        schedule = CosineSchedule(name=settings.schedule, nu=settings.nu)
        return cls(schedule=schedule, prediction_type=settings.prediction_type)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Process:
        """Rebuild from :meth:`to_dict`."""
        return cls(schedule=CosineSchedule(**values["schedule"]), prediction_type=values["prediction_type"])
