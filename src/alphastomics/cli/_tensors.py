"""Read cells from a torch file of tensors.

The file has a dict of tensors for N cells, or for B contexts of up to N cells. All but ``expression`` are optional.

==============================  =====================  =======================================================================
tensor                          shape                  values
==============================  =====================  =======================================================================
``expression``                  (N, G) or (B, N, G)    expression of the genes of the model, in its order
``positions`` or ``position``   (N, D) or (B, N, D)    positions, D = 2 or 3
``slice_id``                    (N,), (B,) or (B, N)   slice, a whole number; by default N cells, or each context, are a slice
``mask``                        (N,) or (B, N)         1 for cells, 0 for padding
==============================  =====================  =======================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics import _keys
from alphastomics._io._errors import format_value, permission_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anndata import AnnData
    from numpy.typing import NDArray
    from torch import Tensor

EXPRESSION, POSITION, SLICES, MASK = "expression", "positions", "slice_id", "mask"
KNOWN = (EXPRESSION, POSITION, "position", SLICES, MASK)


def read_tensors(path: Path, genes: Sequence[str]) -> AnnData:
    """Read a torch file without running code in it; ``genes`` are those of the model.

    The result has expression in ``X`` (CSR), and positions and slices of the file in ``obsm["spatial"]`` and
    ``obs["slice_id"]``. Names of cells are their indices, ``cell_N`` or ``cell_B_N``.
    """
    try:
        return _to_anndata(_load(path), genes)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as .pt: {error}") from error


def _load(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a file as arrays."""
    from alphastomics._io import _torch as _torch_file

    try:
        values = _torch_file.read(path)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except ValueError as error:
        raise ValueError(f"{error}; save a dict of tensors with torch.save") from error
    if not isinstance(values, dict):
        raise ValueError(f"it contains a {type(values).__name__}, not a dict of tensors")
    unknown = [name for name in values if name not in KNOWN]
    if unknown:
        raise ValueError(f"unknown key {format_value(unknown[0])}; the known keys are {', '.join(KNOWN)}")
    if EXPRESSION not in values:
        raise ValueError(f"{EXPRESSION!r} is missing")
    if "position" in values:
        if POSITION in values:
            raise ValueError(f"it has both {POSITION!r} and 'position'; remove one of them")
        values[POSITION] = values.pop("position")
    return {name: _to_numpy(name, value) for name, value in values.items()}


def _to_numpy(name: str, tensor: Any) -> NDArray[Any]:
    import torch

    from alphastomics._io._torch import is_plain

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if not is_plain(tensor):
        raise ValueError(f"{name!r} is not a dense tensor in memory; call .to_dense() or .clone() before saving it")
    return _as_numbers(name, tensor.detach())


def _as_numbers(name: str, tensor: Tensor) -> NDArray[Any]:
    """Floats for expression and positions, whole numbers for slices, booleans for the mask."""
    import torch

    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if name == MASK:
        if tensor.is_complex() or not bool(((tensor == 0) | (tensor == 1)).all()):
            raise ValueError(f"{name!r} must be 1 for cells and 0 for padding")
        return tensor.bool().numpy()
    if tensor.is_complex() or tensor.dtype == torch.bool or (name == SLICES and not whole):
        needed = "whole numbers" if name == SLICES else "numbers"
        raise ValueError(f"{name!r} has dtype {str(tensor.dtype).removeprefix('torch.')}, but must have {needed}")
    if name == SLICES:
        return tensor.to(torch.int64).numpy()
    return tensor.to(torch.float64 if name == POSITION else torch.float32).numpy()


def _to_anndata(tensors: dict[str, NDArray[Any]], genes: Sequence[str]) -> AnnData:
    import anndata as ad
    import pandas as pd
    import scipy.sparse as sp

    expression = tensors[EXPRESSION]
    if expression.ndim not in (2, 3):
        raise ValueError(f"{EXPRESSION!r} has shape {expression.shape}, not (N, G) or (B, N, G)")
    if expression.shape[-1] != len(genes):
        raise ValueError(f"{EXPRESSION!r} has {expression.shape[-1]} columns, but the model has {len(genes)} genes")
    shape = expression.shape[:-1]  # (N,) or (B, N)
    mask = tensors.get(MASK, np.ones(shape, dtype=bool))
    if mask.shape != shape:
        raise ValueError(f"{MASK!r} has shape {mask.shape}, not {shape}")
    if not mask.any():
        raise ValueError("it has no cells")
    x = expression[mask]
    if np.isinf(x).any():
        raise ValueError(f"{EXPRESSION!r} has infinite values")
    names = ["cell_" + "_".join(map(str, index)) for index in np.argwhere(mask)]
    adata = ad.AnnData(sp.csr_matrix(x), obs=pd.DataFrame(index=names), var=pd.DataFrame(index=list(genes)))
    slices = _slices(tensors.get(SLICES), shape)
    if slices is not None:
        adata.obs[_keys.SLICE] = pd.Categorical(slices[mask].astype(str))
    if POSITION in tensors:
        position = tensors[POSITION]
        if position.shape[:-1] != shape or position.shape[-1] not in (2, 3):
            raise ValueError(f"{POSITION!r} has shape {position.shape}, not {(*shape, 2)} or {(*shape, 3)}")
        adata.obsm[_keys.SPATIAL] = position[mask]
    return adata


def _slices(slices: NDArray[np.int64] | None, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    """The slice of every cell, of the shape of the cells; None if all cells form one slice."""
    has_contexts = len(shape) == 2
    if slices is None and has_contexts:
        slices = np.arange(shape[0])
    if slices is not None and has_contexts and slices.shape == shape[:1]:
        slices = np.broadcast_to(slices[:, None], shape)
    if slices is not None and slices.shape != shape:
        raise ValueError(f"{SLICES!r} has shape {slices.shape}, not {shape}")
    return slices
