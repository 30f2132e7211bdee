"""Texts of labels, such as names of slices and cell types, for any type of the column."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray


def label_name(label: object) -> str:
    """Text of a label; a column of integers is one of floats if a label is missing."""
    return str(int(label)) if isinstance(label, float | np.floating) and label.is_integer() else str(label)


def label_names(labels: pd.Series) -> NDArray[np.object_]:
    """Texts of a column of labels (n,), None where one is missing."""
    import pandas as pd

    codes, unique = pd.factorize(labels)
    return np.array([*map(label_name, unique), None], dtype=object)[codes]  # the code of a missing label is -1
