r"""Samplers: the reverse process to a sample at t = 0 in ``n_steps`` steps.

It starts from pure noise at t = 1, or from a noised value :math:`x_0` at any time :math:`t_0` (Meng et al. 2022,
arXiv:2108.01073), the less changed the smaller :math:`t_0` is:

.. math:: z_{t_0} = \alpha_{t_0} x_0 + \sigma_{t_0} \varepsilon, \qquad \varepsilon \sim \mathcal N(0, I), \qquad
    t_k = t_0 \, (1 - k / n)^{3/2}.

Given the denoiser's estimate :math:`\hat x_0(z_t, t)`, a step from t to s < t is

.. math::

    \text{ddpm:}\quad & z_s \sim q(z_s \mid z_t, \hat x_0) \\
    \text{ddim:}\quad & z_s = \alpha_s \hat x_0 + \sqrt{\sigma_s^2 - \eta^2 v}\;\hat\varepsilon + \eta \sqrt{v}\,\xi,
        \quad v = \operatorname{Var} q(z_s \mid z_t, \hat x_0) \\
    \text{dpm++2m:}\quad & z_s = \tfrac{\sigma_s}{\sigma_t} z_t - \alpha_s (e^{-h} - 1)\, \hat D,
        \quad \hat D = (1 + \tfrac{h}{2h'})\,\hat x_0(t) - \tfrac{h}{2h'}\,\hat x_0(t')

with :math:`h = \lambda_s - \lambda_t` and :math:`\lambda = \log(\alpha/\sigma)`; a prime marks the previous step (Ho et al.
2020; Song et al. 2021; Lu et al. 2022). The last step returns :math:`\hat x_0`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from alphastomics.diffusion.process import per_cell

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.config import SamplerName
    from alphastomics.diffusion.process import Process

    Denoise = Callable[[Tensor, Tensor], Tensor]  # (z_t, t) -> estimate of x_0
    Noise = Callable[[], Tensor]  # a fresh standard Gaussian shaped like z_t

GRID_POWER = 1.5  # time is this power of the fraction of steps that remain


class Start(NamedTuple):
    """Value x_0 (B, N, D) that is noised to the time ``t`` in (0, 1], where a chain starts."""

    x_0: Tensor
    t: float


class Step(Protocol):
    """One reverse step; ``previous`` is (time, estimate of x_0) of the previous step, None at the first."""

    @property
    def process(self) -> Process:
        """Process of the modality."""

    def __call__(
        self, z_t: Tensor, x_0: Tensor, t: Tensor, s: Tensor, previous: tuple[Tensor, Tensor] | None, noise: Noise
    ) -> Tensor:
        """From z_t to z_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DDIM:
    """Implicit step; ``eta`` = 0 is deterministic, ``eta`` = 1 is the ancestral step (ddpm)."""

    process: Process
    eta: float = 0.0

    def __call__(
        self, z_t: Tensor, x_0: Tensor, t: Tensor, s: Tensor, previous: tuple[Tensor, Tensor] | None, noise: Noise
    ) -> Tensor:
        """From z_t to z_s."""
        alpha_s, sigma_s = self.process.coefficients(s, z_t)
        variance = self.eta**2 * self.process.posterior(z_t, x_0, t, s)[1]
        epsilon = self.process.epsilon(x_0, z_t, t)
        z_s = alpha_s * x_0 + (sigma_s**2 - variance).clamp_min(0).sqrt() * epsilon
        return z_s if self.eta == 0 else z_s + variance.sqrt() * noise()


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPM:
    """Ancestral step: a draw from the posterior q(z_s | z_t, x_0)."""

    process: Process

    def __call__(
        self, z_t: Tensor, x_0: Tensor, t: Tensor, s: Tensor, previous: tuple[Tensor, Tensor] | None, noise: Noise
    ) -> Tensor:
        """From z_t to a draw of z_s."""
        mean, variance = self.process.posterior(z_t, x_0, t, s)
        return mean + variance.sqrt() * noise()


@dataclass(frozen=True, kw_only=True, slots=True)
class DPMSolver2M:
    """Second-order multistep solver of the probability-flow equation; deterministic."""

    process: Process

    def __call__(
        self, z_t: Tensor, x_0: Tensor, t: Tensor, s: Tensor, previous: tuple[Tensor, Tensor] | None, noise: Noise
    ) -> Tensor:
        """From z_t to z_s."""
        alpha_t, sigma_t = self.process.coefficients(t, z_t)
        alpha_s, sigma_s = self.process.coefficients(s, z_t)
        if previous is not None:
            t_previous, x_0_previous = previous
            log_previous, log_t, log_s = (self.process.schedule.log_snr(u) for u in (t_previous, t, s))
            # Extrapolation is undefined where the clamped log SNR is constant.
            gain = torch.where(log_t > log_previous, (log_s - log_t) / (2 * (log_t - log_previous)), 0.0)
            x_0 = x_0 + per_cell(gain, x_0) * (x_0 - x_0_previous)
        # alpha_s e^{-h} = sigma_s alpha_t / sigma_t, finite at both ends.
        return sigma_s / sigma_t * (z_t - alpha_t * x_0) + alpha_s * x_0


def make_step(name: SamplerName, process: Process, *, eta: float = 0.0) -> Step:
    r"""Make the reverse step of a sampler.

    Parameters
    ----------
    name
        ``"ddpm"``, ``"ddim"`` or ``"dpm++2m"``; see the equations of the module.
    process
        Process of the modality.
    eta
        :math:`\eta` of ``"ddim"``, share of the noise of ``"ddpm"``; others do not use it.

    Raises
    ------
    ValueError
        If the name is unknown.
    """
    if name == "ddpm":
        return DDPM(process=process)
    if name == "ddim":
        return DDIM(process=process, eta=eta)
    if name == "dpm++2m":
        return DPMSolver2M(process=process)
    raise ValueError(f"sampler={name!r} is unknown; choose 'ddpm', 'ddim' or 'dpm++2m'")


def time_grid(n_steps: int, start: float = 1.0, *, device: torch.device | str = "cpu") -> Tensor:
    """Times ``start`` = t_0 > t_1 > ... > t_{n_steps} = 0, denser towards 0; computed in float64, so that no two coincide."""
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}")
    if not 0 < start <= 1:
        raise ValueError(f"start must be a time above 0 and at most 1, got {start}")
    remaining = torch.linspace(1.0, 0.0, n_steps + 1, dtype=torch.float64)
    return (start * remaining**GRID_POWER).to(device=device, dtype=torch.float32)


@torch.no_grad()
def run_sampler(
    denoise: Denoise,
    step: Step,
    noise: Noise,
    *,
    n_steps: int,
    start: Start | None = None,
    on_step: Callable[[], None] | None = None,
) -> Tensor:
    """Draw one sample per context.

    Parameters
    ----------
    denoise
        Function of (z_t (B, N, D), t (B,)) that returns the estimate of x_0, (B, N, D), given what is observed: cells,
        the other modality, masks.
    step
        Reverse step of :func:`make_step`.
    noise
        Function that draws a standard Gaussian (B, N, D), projected like the noise of the forward process.
    n_steps
        Number of calls of the denoiser; 1 returns the conditional mean at the first time.
    start
        Value that is noised, and the time at which the chain starts. None: pure noise at t = 1.
    on_step
        Called after each step, for a progress bar.
    """
    z = noise()
    times = time_grid(n_steps, 1.0 if start is None else start.t, device=z.device)[:, None].expand(-1, len(z))
    if start is not None:
        z = step.process.noise(start.x_0, times[0], z)
    previous: tuple[Tensor, Tensor] | None = None
    for k, (t, s) in enumerate(zip(times[:-1], times[1:], strict=True), start=1):
        x_0 = denoise(z, t)
        z = x_0 if k == n_steps else step(z, x_0, t, s, previous, noise)
        previous = t, x_0
        if on_step is not None:
            on_step()
    return z
