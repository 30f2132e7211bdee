"""Files of ``torch.save`` that anyone may have written: tensors and plain values are read, and nothing in them is run.

What is saved is an archive, of which every part lies in the file as it is. A part that is compressed, or that another one
overlaps, is larger in memory than on disk by as much as its author likes, and is refused before anything is read. So are
values that hold others again and again: a tuple of two, which are a tuple of two, which are one, and so on, takes few bytes
to write, and whoever compares it with another one walks through all of its 2ⁿ parts.
"""

from __future__ import annotations

import pickle
import pickletools
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

MOST_PARTS = 10**8  # walked through in seconds
GROW = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")  # opcodes that put something into what is there
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
        with zipfile.ZipFile(path) as archive:
            pickles = [part for part in parts if part.filename.lower().endswith("data.pkl")]  # as PyTorch looks for it
            too_many = any(_count_parts(archive.read(part)) > MOST_PARTS for part in pickles)
    except Exception as error:  # likewise
        raise ValueError(MORE) from error
    if too_many:
        raise ValueError("its values hold others so often that nobody could walk through them")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles in other protocols and odd tensors, which are refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(MORE) from error
    except Exception as error:  # likewise
        raise ValueError(f"it is damaged ({type(error).__name__})") from error


def _count_parts(pickled: bytes) -> int:
    """How many values the steps of a pickle take up, each with all that it holds; not on from ``MOST_PARTS``.

    What the pickle would do is done with sizes in the place of values, one number each, so that what grows does so
    wherever it is held.
    """
    mark: list[int] = []
    stack: list[list[int]] = []
    memo: dict[Any, list[int]] = {}
    parts = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name, before = opcode.name, opcode.stack_before
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(mark)
        else:
            taken, n = [], len(before)
            if pickletools.markobject in before:
                n = before.index(pickletools.markobject)
                while (top := stack.pop()) is not mark:
                    taken.append(top)
            taken += [stack.pop() for _ in range(n)]
            value = taken.pop() if name in GROW else [1]
            observed = sum(size for (size,) in taken)
            value[0] += observed
            parts += observed
            stack += [value] * len(opcode.stack_after)
            if parts > MOST_PARTS:
                break
    return parts


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is numbers in the memory of this machine, each of them stored."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_nested:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
