"""Tissues on disk: the columns of a dataset, what its ``metadata.json`` says, and cells read from it."""

from alphastomics.data.parquet._dataset import DatasetInfo, Shard

__all__ = ["DatasetInfo", "Shard"]
