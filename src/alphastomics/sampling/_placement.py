"""How a placement follows from the conditional mean and the neighborhood embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Steps of a placement.

    Parameters
    ----------
    retrieval
        Weight of retrieved positions, from 0 to 1; that of the conditional mean is the rest
        (:mod:`alphastomics.sampling._retrieval`). It is fitted on cells that a network has not seen.
    refine
        Whether the layout is refined (:mod:`alphastomics.sampling._layout`), as it is for counts.
    """

    retrieval: float
    refine: bool

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Placement:
        """Rebuild from plain values; ``ValueError`` if they are invalid."""
        retrieval, refine = float(values["retrieval"]), values["refine"]
        if not (0 <= retrieval <= 1 and isinstance(refine, bool)):
            raise ValueError(f"retrieval={retrieval} is not in [0, 1], or refine={refine!r} is not a truth value")
        return cls(retrieval=retrieval, refine=refine)
