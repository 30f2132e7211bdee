"""Arguments that a tool takes for the model that it trains."""

from __future__ import annotations

import inspect
from typing import Any

PARTS = ("setup", "init", "train", "sample")


def sort_arguments(
    kwargs: dict[str, Any], *, caller: str, sample: frozenset[str] = frozenset()
) -> dict[str, dict[str, Any]]:
    """Sort arguments by what takes them.

    Parameters
    ----------
    kwargs
        Arguments of :class:`~alphastomics.model.AlphaSTomics`, of its ``setup_anndata`` and ``train``, of a Lightning
        trainer, and of its ``sample``.
    caller
        Name of the function that was given them, for errors.
    sample
        Those of ``sample`` that the caller takes.

    Returns
    -------
    The arguments of ``setup``, ``init``, ``train`` and ``sample``.

    Raises
    ------
    TypeError
        If an argument is unknown.
    """
    import lightning.pytorch as pl

    from alphastomics.model import AlphaSTomics

    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters) - {"self", "adata", "registry", "kwargs", "trainer_kwargs"}

    known: dict[str, set[str]] = {
        "setup": names(AlphaSTomics.setup_anndata),
        "init": names(AlphaSTomics.__init__),
        "train": names(AlphaSTomics.train) | names(pl.Trainer.__init__),
        "sample": set(sample),
    }
    result: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for key, value in kwargs.items():
        part = next((part for part in PARTS if key in known[part]), None)
        if part is None:
            raise TypeError(f"{caller}() got an unexpected argument {key!r}; no part of the model takes it")
        result[part][key] = value
    return result
