r"""A second network, trained without a part of the reference, whose prediction is averaged with that of the trained one.

.. math:: \hat x \leftarrow (1 - w)\, \hat x + w\, \hat x' R, \qquad
          R = \arg\min_{R^\top R = I} \lVert \hat x' R - \hat x \rVert^2, \qquad w = \frac{n'}{n + n'}

with the conditional mean :math:`\hat x'` of the second network and the numbers of steps n and n' in which both networks placed cells. Their
similarities are averaged with the same weights. Errors of networks with other initial weights and other data partly cancel (deep ensembles:
Lakshminarayanan et al. 2017, arXiv:1612.01474), and this one is at hand: it was trained by :mod:`alphastomics.train.cross_fit` to choose the
length of the training. Where all slices share a frame, R is the identity.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphastomics.diffusion.geometry import center, kabsch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from alphastomics.nn import Denoiser


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SecondNetwork:
    """Weights of the second network.

    Parameters
    ----------
    weights
        The weights, by name.
    share
        w, from 0 to 1.

    Raises
    ------
    ValueError
        If the share is not a number from 0 to 1.
    """

    weights: Mapping[str, Tensor]
    share: float

    def __post_init__(self) -> None:
        if not (isinstance(self.share, float) and math.isfinite(self.share) and 0 <= self.share <= 1):
            raise ValueError(f"the share of the second network, {self.share!r}, is not a number from 0 to 1")

    def build(self, network: Denoiser) -> Denoiser:
        """The second network, of the same architecture and on the same device as ``network``, in evaluation mode."""
        second = copy.deepcopy(network)
        second.load_state_dict(self.weights)
        return second.eval()


def weights_of(network: Denoiser) -> dict[str, Tensor]:
    """Copies of the weights of a network on the CPU, by name."""
    return {name: weight.cpu().clone() for name, weight in network.state_dict().items()}


def average_means(mean: Tensor, other: Tensor, share: float, *, shared_frame: bool) -> Tensor:
    """Average (1, N, D) of the conditional means of two networks, both (1, N, D), in the frame of the first one."""
    if not shared_frame:
        other = center(other)
        other = other @ kabsch(other, center(mean))
    return (1 - share) * mean + share * other
