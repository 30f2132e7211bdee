"""From a folder of ``.h5ad`` files to a dataset: slices one by one, then all of them together."""

from alphastomics.config import Stage1Options, Stage2Options
from alphastomics.data.preprocess._dask import dask_cluster, run_on
from alphastomics.data.preprocess._run import preprocess, stage1, stage2

__all__ = ["Stage1Options", "Stage2Options", "dask_cluster", "preprocess", "run_on", "stage1", "stage2"]
