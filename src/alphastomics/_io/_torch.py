"""Reading files of ``torch.save`` without running code: ``torch.load(weights_only=True)``, after a check of the size."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"PK"  # the first bytes of a zip archive
UNSAFE = "it is damaged, or contains other objects than tensors and plain values; these could run code and are not read"


def read(path: Path) -> Any:
    """Read tensors, mapped from the file, and plain values.

    The message of a ``ValueError`` (damaged, compressed, or with other objects) does not name the file.
    """
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
        n_bytes = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                content = sum(part.file_size for part in archive.infolist())
        except Exception as error:  # a crafted file can raise anything
            raise ValueError("it is truncated" if start == MAGIC else UNSAFE) from error
    if content > n_bytes:  # compressed, or parts that overlap
        raise ValueError("it unpacks to more than its own size; files of torch.save are not compressed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of objects before it rejects them
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(UNSAFE) from error
    except Exception as error:  # a crafted file can raise anything
        raise ValueError(f"it is damaged ({type(error).__name__})") from error


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, on the CPU, and has a stored value for each element."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
