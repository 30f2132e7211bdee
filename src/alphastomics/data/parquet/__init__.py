"""Datasets on disk: Parquet files of cells, described by ``metadata.json``."""

from alphastomics.data.parquet._dataset import DatasetInfo, Shard

__all__ = ["DatasetInfo", "Shard"]
