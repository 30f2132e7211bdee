"""From AnnData to padded batches: schema, sources and contexts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from alphastomics.data._fit_schema import fit_schema
from alphastomics.data._local_density import local_density
from alphastomics.data._partial import PartialExpression, read_partial
from alphastomics.data._schema import TissueSchema
from alphastomics.data._sources import AnnDataSource, CellSource, SliceCells

if TYPE_CHECKING:
    from alphastomics.config import Augmentation
    from alphastomics.data._batch import Batch, Context, RawBatch, collate
    from alphastomics.data._contexts import ContextDataset
    from alphastomics.data._loaders import ContextLoader, create_dataloaders
    from alphastomics.data.parquet._read import read_dataset, read_parquet
    from alphastomics.data.parquet._write import write_parquet

# Imported on first use: they need pyarrow, or torch, which takes seconds to import.
_ON_DEMAND = {
    "Augmentation": "_contexts",
    "Batch": "_batch",
    "Context": "_batch",
    "ContextDataset": "_contexts",
    "ContextLoader": "_loaders",
    "RawBatch": "_batch",
    "collate": "_batch",
    "create_dataloaders": "_loaders",
    "read_dataset": "parquet._read",
    "read_parquet": "parquet._read",
    "write_parquet": "parquet._write",
}

__all__ = [
    "AnnDataSource",
    "Augmentation",
    "Batch",
    "CellSource",
    "Context",
    "ContextDataset",
    "ContextLoader",
    "PartialExpression",
    "RawBatch",
    "SliceCells",
    "TissueSchema",
    "collate",
    "create_dataloaders",
    "local_density",
    "fit_schema",
    "read_dataset",
    "read_parquet",
    "read_partial",
    "write_parquet",
]


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(import_module(f"alphastomics.data.{_ON_DEMAND[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
