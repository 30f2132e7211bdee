r"""The width at which a denoiser has a given number of parameters.

.. math:: d^\star = \arg\min_d \, \lvert P(d) - P \rvert

over the widths d that the heads divide. P(d) grows with d, so the search is by bisection; networks are only counted, never
filled with numbers.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

import torch

from alphastomics.nn.denoiser import Denoiser
from alphastomics.nn.experts import count_parameters

if TYPE_CHECKING:
    from alphastomics.nn.denoiser import DenoiserConfig

WIDEST = 2**20  # steps of the width


def matched_width(config: DenoiserConfig, n_parameters: int) -> int:
    """Width ``d_model`` at which a denoiser comes nearest to ``n_parameters`` in total, all else as in ``config``."""
    step = lcm(2, config.n_heads)  # halves of sines and cosines, and whole heads

    def total(k: int) -> int:
        with torch.device("meta"):
            return count_parameters(Denoiser(replace(config, d_model=step * k))).total

    high = 1
    while total(high) < n_parameters and high < WIDEST:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) < n_parameters else (low, middle)
    nearest = min((k for k in (low, high) if k > 0), key=lambda k: abs(total(k) - n_parameters))
    return step * nearest
