"""Tensors without data, and a count of the bytes that they would take."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

aten = torch.ops.aten


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, and answers what is asked of values that are not there."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._born: dict[int, int] = {}  # number of storages that had been counted before
        self._n_born = self._born_at_peak = 0

    def hold(self, *tensors: Tensor) -> None:
        """Count the storages of tensors on the device until they are freed."""
        for tensor in tensors:
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
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
        """Whether a tensor that is still there was there at the peak."""
        return self._born[tensor.untyped_storage()._cdata] < self._born_at_peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for at every turn
            return func(*args)
        if func is aten._local_scalar_dense.default:  # a number is 1, and a condition holds
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype is torch.bool:  # a mask is full
            func, args = aten.clone.default, (args[0].flatten(0, args[1][0].ndim - 1),)
        elif func is aten.nonzero.default:
            func, args = aten.new_empty.default, (args[0], [args[0].numel(), args[0].ndim])
            kwargs = {"dtype": torch.int64}
        result = func(*args, **(kwargs or {}))
        self.hold(*(value for value in tree_iter(result) if isinstance(value, Tensor)))
        return result


@contextmanager
def no_data() -> Iterator[None]:
    """Tensors that are made have no data; refuse what needs it."""
    fake = _fake_tensors()
    try:
        with fake.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except (fake.DataDependentOutputException, fake.DynamicOutputShapeException) as error:
        raise NotImplementedError(
            f"the memory of this network cannot be estimated: the shape of {error.func} depends on values"
        ) from error


def _fake_tensors() -> ModuleType:
    try:
        from torch._subclasses import fake_tensor
    except ImportError:
        raise ImportError(
            f"torch {torch.__version__} has no torch._subclasses.fake_tensor, with which memory is estimated; "
            "install a version that has it (2.6 to 2.13 do), or train without an estimate"
        ) from None
    return fake_tensor
