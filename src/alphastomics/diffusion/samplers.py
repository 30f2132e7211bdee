r"""Samplers: the reverse process from pure noise at t = 1 to a sample at t = 0 in ``n_steps`` steps.

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
from typing import TYPE_CHECKING, Protocol

import torch

from alphastomics.diffusion.process import per_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from alphastomics.config import SamplerName
    from alphastomics.diffusion.process import Process

    Denoise = Callable[[Tensor, Tensor], Tensor]  # (z_t, t) -> estimate of x_0
    JointDenoise = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]  # the same for several modalities
    Noise = Callable[[], Tensor]  # a fresh standard Gaussian shaped like z_t

GRID_POWER = 1.5  # time is this power of the fraction of steps that remain


class Step(Protocol):
    """One reverse step; ``previous`` is (time, estimate of x_0) of the previous step, None at the first."""

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


def time_grid(n_steps: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Times 1 = t_0 > t_1 > ... > t_{n_steps} = 0, denser towards 0; computed in float64, so that no two coincide."""
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}")
    remaining = torch.linspace(1.0, 0.0, n_steps + 1, dtype=torch.float64)
    return (remaining**GRID_POWER).to(device=device, dtype=torch.float32)


@torch.no_grad()
def run_sampler(
    denoise: Denoise, step: Step, noise: Noise, *, n_steps: int, on_step: Callable[[], None] | None = None
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
        Number of calls of the denoiser; 1 returns the conditional mean at t = 1.
    on_step
        Called after each step, for a progress bar.
    """
    (x,) = run_joint_sampler(lambda z, t: (denoise(z[0], t),), (step,), (noise,), n_steps=n_steps, on_step=on_step)
    return x


@torch.no_grad()
def run_joint_sampler(
    denoise: JointDenoise,
    steps: Sequence[Step],
    noises: Sequence[Noise],
    *,
    n_steps: int,
    on_step: Callable[[], None] | None = None,
) -> tuple[Tensor, ...]:
    """Draw one sample per context of several modalities that share their timestep.

    Parameters
    ----------
    denoise
        Function of (z_t of every modality, t (B,)) that returns the estimate of x_0 of every modality.
    steps, noises
        Reverse step and noise of every modality, as in :func:`run_sampler`.
    n_steps, on_step
        As in :func:`run_sampler`.
    """
    z = tuple(noise() for noise in noises)
    times = time_grid(n_steps, device=z[0].device)
    previous: tuple[tuple[Tensor, Tensor] | None, ...] = (None,) * len(z)
    for t, s in zip(times[:-1], times[1:], strict=True):
        t, s = t.expand(len(z[0])), s.expand(len(z[0]))
        x_0 = denoise(z, t)
        if bool((s == 0).all()):
            z = x_0
        else:
            parts = zip(z, x_0, steps, previous, noises, strict=True)
            z = tuple(step(z_m, x_m, t, s, previous_m, noise) for z_m, x_m, step, previous_m, noise in parts)
        previous = tuple((t, x_m) for x_m in x_0)
        if on_step is not None:
            on_step()
    return z
