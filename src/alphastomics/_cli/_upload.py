"""Options of ``upload``; like ``_options.py``, nothing here imports the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from alphastomics._cli._options import DATA


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadOptions:
    """How a dataset is shown on the Hub.

    Parameters
    ----------
    private
        Only the organisation sees it.
    license
        License for the card, as the Hub writes it: ``cc-by-4.0``, ``mit``, …
    overwrite
        Replace another dataset, and a card, that the repository holds.
    """

    private: Annotated[bool, Parameter(negative=())] = False
    license: str | None = None
    overwrite: Annotated[bool, Parameter(negative=())] = False
