"""Counts the entries of the largest tensor, to test that no matrix of all pairs is made."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Number of entries of the largest storage that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return result
