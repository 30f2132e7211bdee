"""From AnnData to padded batches: schema, sources and contexts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from alphastomics.data._anndata import AnnDataSource
from alphastomics.data._crowding import crowding
from alphastomics.data._fit import fit_schema
from alphastomics.data._partial import PartialExpression, read_partial
from alphastomics.data._schema import TissueSchema
from alphastomics.data._source import CellSource, SliceCells

if TYPE_CHECKING:
    from alphastomics.data._batch import Batch, Context, collate
    from alphastomics.data._contexts import Augmentation, ContextDataset
    from alphastomics.data._loaders import create_dataloaders

# These need torch, which takes seconds to import.
_WITH_TORCH = {
    "Augmentation": "_contexts",
    "Batch": "_batch",
    "Context": "_batch",
    "ContextDataset": "_contexts",
    "collate": "_batch",
    "create_dataloaders": "_loaders",
}

__all__ = [
    "AnnDataSource",
    "Augmentation",
    "Batch",
    "CellSource",
    "Context",
    "ContextDataset",
    "PartialExpression",
    "SliceCells",
    "TissueSchema",
    "collate",
    "create_dataloaders",
    "crowding",
    "fit_schema",
    "read_partial",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"alphastomics.data.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
