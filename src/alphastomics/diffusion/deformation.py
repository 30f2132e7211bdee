r"""Random smooth deformation of a slice: data augmentation for the differences in shape between specimens of a tissue.

.. math::

    x \leftarrow x (I + s A) + s \sum_{k=1}^{K} \sin(x\,\omega_k + \varphi_k)\, a_k,
    \qquad A_{ij}, a_{kj}\max(\lVert\omega_k\rVert, \tfrac12) / c \sim \mathcal N(0, 1),\; \omega_k \sim \mathcal N(0, \ell^{-2} I),\;
    \varphi_k \sim U(0, 2\pi)

Positions that are inputs of the network are deformed in training. Without deformation the network memorizes the shape of the reference
slices, and moves cells of a new specimen towards their positions there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

N_WAVES = 6
LENGTH_SCALE = 0.8  # model units: a slice spans about four
WAVE_SHARE = 0.6  # c, strength of the waves relative to the linear part


class Deformation(NamedTuple):
    r"""Parameters of a deformation in D dimensions, or of one for each of B slices.

    Attributes
    ----------
    linear
        :math:`I + s A`, shape (..., D, D).
    frequency
        :math:`\omega`, columns of shape (..., D, K).
    phase
        :math:`\varphi`, shape (..., 1, K).
    amplitude
        :math:`s a`, rows of shape (..., K, D).
    """

    linear: Tensor
    frequency: Tensor
    phase: Tensor
    amplitude: Tensor


def draw_deformation(n_dims: int, strength: float, rng: np.random.Generator) -> Deformation:
    """Draw a deformation of slices in model units; ``strength`` s = 0 leaves them as they are."""
    linear = np.eye(n_dims) + strength * rng.standard_normal((n_dims, n_dims))
    frequency = rng.standard_normal((n_dims, N_WAVES)) / LENGTH_SCALE
    phase = rng.uniform(0, 2 * np.pi, (1, N_WAVES))
    # Slow waves are almost shifts, so their amplitude is bounded.
    length = np.maximum(np.linalg.norm(frequency, axis=0), 0.5)[:, None]
    amplitude = WAVE_SHARE * strength * rng.standard_normal((N_WAVES, n_dims)) / length
    return Deformation(*map(torch.from_numpy, (linear, frequency, phase, amplitude)))


def deform(x: Tensor, deformation: Deformation) -> Tensor:
    """Deform positions ``x`` (..., N, D) in model units."""
    linear, frequency, phase, amplitude = (part.to(x) for part in deformation)
    with torch.autocast(x.device.type, enabled=False):
        return x @ linear + torch.sin(x @ frequency + phase) @ amplitude
