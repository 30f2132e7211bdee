"""From a folder of ``.h5ad`` files to a dataset: slices one by one, then all of them together."""

from alphastomics.data.preprocess._options import Stage1Options, Stage2Options
from alphastomics.data.preprocess._run import preprocess, stage1, stage2

__all__ = ["Stage1Options", "Stage2Options", "preprocess", "stage1", "stage2"]
