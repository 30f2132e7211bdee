r"""Random changes of the genes of a specimen, from which draws of positions follow.

.. math::

    x^{(k)} = f\big(a^{(k)} \odot z + b^{(k)}\big), \qquad
    a_g = \frac{u_g}{\sqrt q}, \quad u_g \sim \text{Bernoulli}(q), \qquad b_g \sim \frac{u_g}{\sqrt q}\,\mathcal N(0, \tau^2)

f places cells with expression z (network units). Which genes are informative, and how far the expression of a gene is shifted,
differs between specimens and between instruments; the network was trained with changes of the same kind (gene dropout and gene
noise). A placement by a random share q of the genes is a draw of a bagged posterior (Huggins & Miller 2023, Bayesian Anal. 18:79),
whose spread includes the differences between reference and query. Genes that are left out move single cells, offsets move all
cells of a kind together: q sets the spread of neighbors and :math:`\tau` that of the whole arrangement. The share is fitted so that
draws agree with each other as well as with the truth, see :mod:`alphastomics.sampling._fit_perturbation`. The offsets of another
specimen cannot be estimated from slices of one; :math:`\tau` depends on the kind of values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """Distribution of the changes.

    Parameters
    ----------
    share
        Share q of the measured genes that a draw uses.
    offset
        Standard deviation of the offset of a gene, network units.
    """

    share: float
    offset: float

    def draw(
        self, measured: NDArray[np.bool_], rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Gain and offset (G,) of a draw; at least one of the ``measured`` genes (G,) is used."""
        genes = np.flatnonzero(measured)
        used = np.zeros(len(measured), dtype=np.float32)
        used[rng.permutation(genes)[: max(1, round(self.share * len(genes)))]] = 1.0
        gain = used / np.sqrt(used.mean())
        return gain, gain * np.float32(self.offset) * rng.standard_normal(len(measured), dtype=np.float32)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Perturbation:
        """Rebuild from plain values; ``ValueError`` if they are out of range."""
        share, offset = float(values["share"]), float(values["offset"])
        if not (0 < share <= 1 and 0 <= offset < float("inf")):
            raise ValueError(f"share={share} is not in (0, 1] or offset={offset} is negative or infinite")
        return cls(share=share, offset=offset)
