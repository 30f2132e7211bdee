r"""Bytes of the tensors that exist while code runs, of tensors with or without data.

.. math::

    \text{peak} = \max_\tau \sum_{s \,\text{alive at}\, \tau} \operatorname{bytes}(s)

over the storages s of all tensors on a device. A dispatch mode counts the storages that operations return until they are freed. PyTorch's
``MemTracker`` gives the same figures but also tracks modules, which takes longer. Results that depend on values are replaced, because
tensors without data (``FakeTensorMode``) have none: every condition is true, every mask is full, and other scalars are 1.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alphastomics.nn._torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    item_operator,
    storage_key,
    tree_iter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, and replaces results that depend on the missing values."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._born: dict[int, int] = {}  # key -> number of storages counted before this one
        self._n_born = self._born_at_peak = 0

    def track(self, *tensors: Tensor) -> None:
        """Count the storages of tensors on the device until they are freed."""
        for tensor in tensors:
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            key = storage_key(tensor)
            if key in self._sizes:
                continue
            self._sizes[key], self._born[key] = storage.nbytes(), self._n_born
            self._n_born += 1
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, key)
            if self.now > self.peak:
                self.peak, self._born_at_peak = self.now, self._n_born

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def at_peak(self, tensor: Tensor) -> bool:
        """Whether a tensor that has not been freed existed at the peak."""
        return self._born[storage_key(tensor)] < self._born_at_peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # called very often
            return func(*args)
        if func is item_operator:  # a scalar is 1, a condition is true
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype is torch.bool:  # a mask is full
            func, args = aten.clone.default, (args[0].flatten(0, args[1][0].ndim - 1),)
        elif func is aten.nonzero.default:
            func, args = aten.new_empty.default, (args[0], [args[0].numel(), args[0].ndim])
            kwargs = {"dtype": torch.int64}
        result = func(*args, **(kwargs or {}))
        self.track(*(value for value in tree_iter(result) if isinstance(value, Tensor)))
        return result


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Create tensors without data within the context; raises ``NotImplementedError`` if a shape depends on values."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NotImplementedError(
            f"the memory of this network cannot be estimated: the shape of {error.func} depends on values"
        ) from error
