"""Tools: place cells, and judge where they were placed."""

from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._reconstruct import reconstruct

__all__ = ["evaluate", "reconstruct"]
