"""Private names of PyTorch that the package uses, each with the reason and its future public replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Fake tensors, with which the memory of a step is estimated. Replace when `torch.compiler` or `torch.utils` exports a fake
# mode; `torch.device("meta")` is public but loses the device, on which the implementation of attention depends.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Interception of every operation, and iteration over its nested results. Documented by PyTorch, but not under public names;
# replace tree_iter by `torch.utils.pytree` when PyTorch 2.6 is no longer supported.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "default_store",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "has_amx",
    "item_operator",
    "storage_key",
    "tree_iter",
]

# Attention with its log-sum-exp, which `scaled_dot_product_attention` does not return. Replace by
# `torch.nn.attention.flex_attention(return_lse=True)` when it has a gradient on the CPU.
flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# The operator of `Tensor.item`, which a dispatch mode replaces for fake tensors; there is no public name.
item_operator = torch.ops.aten._local_scalar_dense.default


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage; ``data_ptr()`` is 0 for all fake tensors."""
    return tensor.untyped_storage()._cdata


def has_amx() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware; replace by ``torch.cpu.get_capabilities``."""
    return torch.cpu._is_amx_tile_supported()


def default_store() -> Any:
    """Key-value store of the default process group; there is no public accessor."""
    return dist.distributed_c10d._get_default_store()
