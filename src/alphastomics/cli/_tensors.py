"""Reading of cells from a torch file of tensors.

=================  =================================  ======================================================================
tensor             shape                              what
=================  =================================  ======================================================================
``expression``     (N, G), or (B, N, G)               values of the genes of the model, in its order
``positions``      (N, D), or (B, N, D), if there     D is 2 or 3; also as ``position``
``slice_id``       (N,), or (B,) or (B, N), if there  whole numbers; without it each of the B is a slice, and N cells are one
``mask``           that of the cells, if there        which cells there are; the others are padding
=================  =================================  ======================================================================
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

    The result has ``X`` as CSR, and ``obsm["spatial"]`` and ``obs["slice_id"]`` if these are known. Cells are named by
    their index, or by the index of their context and that in the context.
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
        raise ValueError(f"it holds a {type(values).__name__}, not a dict of tensors")
    unknown = [name for name in values if name not in KNOWN]
    if unknown:
        raise ValueError(f"it holds {format_value(unknown[0])}, which is none of {', '.join(KNOWN)}")
    if EXPRESSION not in values:
        raise ValueError(f"{EXPRESSION!r} is missing")
    if "position" in values:
        if POSITION in values:
            raise ValueError(f"it holds {POSITION!r} and 'position'; leave one out")
        values[POSITION] = values.pop("position")
    return {name: _to_numpy(name, value) for name, value in values.items()}


def _to_numpy(name: str, tensor: Any) -> NDArray[Any]:
    import torch

    from alphastomics._io._torch import is_plain

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if not is_plain(tensor):
        raise ValueError(f"{name!r} is no plain tensor; call .to_dense() or .clone() before it is saved")
    return _as_numbers(name, tensor.detach())


def _as_numbers(name: str, tensor: Tensor) -> NDArray[Any]:
    """Floats for expression and positions, whole numbers for slices, booleans for the mask."""
    import torch

    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if name == MASK:
        if tensor.is_complex() or not bool(((tensor == 0) | (tensor == 1)).all()):
            raise ValueError(f"{name!r} must be 1 for a cell and 0 for none")
        return tensor.bool().numpy()
    if tensor.is_complex() or tensor.dtype == torch.bool or (name == SLICES and not whole):
        wanted = "whole numbers" if name == SLICES else "numbers"
        raise ValueError(f"{name!r} holds {str(tensor.dtype).removeprefix('torch.')} values, not {wanted}")
    if name == SLICES:
        return tensor.to(torch.int64).numpy()
    return tensor.to(torch.float64 if name == POSITION else torch.float32).numpy()


def _to_anndata(tensors: dict[str, NDArray[Any]], genes: Sequence[str]) -> AnnData:
    import anndata as ad
    import pandas as pd
    import scipy.sparse as sp

    expression = tensors[EXPRESSION]
    if expression.ndim not in (2, 3):
        raise ValueError(f"{EXPRESSION!r} is of shape {expression.shape}, not (N, G) or (B, N, G)")
    if expression.shape[-1] != len(genes):
        raise ValueError(f"{EXPRESSION!r} has {expression.shape[-1]} columns, and the model has {len(genes)} genes")
    of_cells = expression.shape[:-1]
    there = tensors.get(MASK, np.ones(of_cells, dtype=bool))
    if there.shape != of_cells:
        raise ValueError(f"{MASK!r} is of shape {there.shape}, and there are {of_cells} cells")
    if not there.any():
        raise ValueError("there are no cells in it")
    x = expression[there]
    if np.isinf(x).any():
        raise ValueError(f"{EXPRESSION!r} has infinite values")
    names = ["cell_" + "_".join(map(str, place)) for place in np.argwhere(there)]
    adata = ad.AnnData(sp.csr_matrix(x), obs=pd.DataFrame(index=names), var=pd.DataFrame(index=list(genes)))
    slices = _slices(tensors.get(SLICES), of_cells)
    if slices is not None:
        adata.obs[_keys.SLICE] = pd.Categorical(slices[there].astype(str))
    if POSITION in tensors:
        position = tensors[POSITION]
        if position.shape[:-1] != of_cells or position.shape[-1] not in (2, 3):
            raise ValueError(f"{POSITION!r} is of shape {position.shape}, not {(*of_cells, 2)} or {(*of_cells, 3)}")
        adata.obsm[_keys.SPATIAL] = position[there]
    return adata


def _slices(given: NDArray[np.int64] | None, of_cells: tuple[int, ...]) -> NDArray[np.int64] | None:
    """The slice of every cell; None where all are one."""
    batched = len(of_cells) == 2
    if given is None:
        given = np.arange(of_cells[0]) if batched else None
    if given is not None and batched and given.shape == of_cells[:1]:
        given = np.broadcast_to(given[:, None], of_cells)
    if given is not None and given.shape != of_cells:
        raise ValueError(f"{SLICES!r} is of shape {given.shape}, and there are {of_cells} cells")
    return given
