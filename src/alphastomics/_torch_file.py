"""Files of ``torch.save`` that anyone may have written: tensors and plain values are read, and nothing in them is run.

What is saved is an archive, of which every part lies in the file as it is. A part that is compressed, or that another one
overlaps, is larger in memory than on disk by as much as its author likes, and is refused before anything is read.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"PK"  # how an archive begins
MORE = "it is damaged, or holds more than tensors and plain values, which could run code and is never opened"


def read(path: Path) -> Any:
    """Tensors and plain values of a file; the tensors lie in the file, which is mapped.

    Raises
    ------
    OSError
        If it cannot be opened.
    ValueError
        If it is not what it should be; the message says why, and whoever asks knows which file and what to do.
    """
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
        size = file.seek(0, 2)
        try:
            with zipfile.ZipFile(file) as archive:
                parts = archive.infolist()
        except Exception as error:  # a damaged or crafted file can break a reader in any way
            raise ValueError("it is cut off" if begin == MAGIC else MORE) from error
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError("it is compressed, which torch.save does not do")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles in other protocols and odd tensors, which are refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(MORE) from error
    except Exception as error:  # likewise
        raise ValueError(f"it is damaged ({type(error).__name__})") from error


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is numbers in the memory of this machine, each of them stored."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
