"""Look inside a trained network: gates and sinks of its attention, what chosen cells attend to, use of its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphastomics import _keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics


def attention_gates(
    model: AlphaSTomics, adata: AnnData, *, key_added: str = _keys.GATES, copy: bool = False
) -> AnnData | None:
    """Gates of the attention for each cell; healthy ones have a mean of 0.5 ± 0.2.

    Positions are not read: the network sees the expression of the cells of each slice.

    Parameters
    ----------
    model
        A trained model whose attention has gates.
    adata
        Cells.
    key_added
        Where to write.
    copy
        Whether to return a modified copy instead of writing to ``adata``.

    Returns
    -------
    None, or the copy. Written are ``obsm[key_added]``, a table of the cells with the mean gate of each layer and head,
    and ``uns[key_added]["summary"]``, a table of ``layer``, ``head``, ``mean`` and ``sd`` over cells and channels.

    Raises
    ------
    ValueError
        If the model has no gates, is not trained, or never saw cells without positions.
    """
    from alphastomics.model._layers import gate_values, query_source

    mean, summary = gate_values(model, query_source(model, adata))
    _, n_layers, n_heads = mean.shape
    names = [f"layer_{layer}_head_{head}" for layer in range(n_layers) for head in range(n_heads)]
    table = _layer_table("head", mean=summary[..., 0], sd=summary[..., 1])
    result = adata.copy() if copy else adata
    result.obsm[key_added] = pd.DataFrame(mean.reshape(len(mean), -1), index=adata.obs_names, columns=names)
    result.uns[key_added] = {"summary": table}
    return result if copy else None


def attention_sinks(
    model: AlphaSTomics, adata: AnnData, *, key_added: str = _keys.SINKS, copy: bool = False
) -> AnnData | None:
    """Attention that each cell receives, and the largest share that any cell gets: the attention sink.

    Positions are not read. The attention matrix is visited by blocks of rows and never held.

    Parameters
    ----------
    model
        A trained model.
    adata
        Cells.
    key_added
        Where to write.
    copy
        Whether to return a modified copy instead of writing to ``adata``.

    Returns
    -------
    None, or the copy. Written are ``obsm[key_added]``, a table of the cells with the mean attention, over cells and
    heads, that they receive in each layer, and ``uns[key_added]["summary"]``, a table of ``slice``, ``layer``,
    ``head``, ``share`` (largest mean attention that a cell receives) and ``uniform`` (1 / n, which is no sink).

    Raises
    ------
    ValueError
        If the model is not trained, or never saw cells without positions.
    """
    from alphastomics.model._layers import query_source, sink_values

    received, slices, n_cells, share = sink_values(model, query_source(model, adata))
    tables = [
        _layer_table("head", share=shares).assign(uniform=1 / n).assign(slice=name)
        for name, n, shares in zip(slices, n_cells, share, strict=True)
    ]
    names = [f"layer_{layer}" for layer in range(received.shape[1])]
    result = adata.copy() if copy else adata
    result.obsm[key_added] = pd.DataFrame(received, index=adata.obs_names, columns=names)
    table = pd.concat(tables, ignore_index=True)
    result.uns[key_added] = {"summary": table[["slice", "layer", "head", "share", "uniform"]]}
    return result if copy else None


def attention_maps(
    model: AlphaSTomics,
    adata: AnnData,
    cells: Sequence[str] | Sequence[int] | NDArray[Any],
    *,
    layer: int = -1,
    head: int | None = None,
    key_added: str = _keys.MAPS,
    copy: bool = False,
) -> AnnData | None:
    """What chosen cells attend to.

    Positions are not read, and only the rows of the chosen cells are computed of the attention matrix.

    Parameters
    ----------
    model
        A trained model.
    adata
        Cells.
    cells
        Names or row numbers of the chosen cells, or True for each of them.
    layer
        Number of the layer, from the end if negative.
    head
        Number of the head; None takes the mean over heads.
    key_added
        Where to write.
    copy
        Whether to return a modified copy instead of writing to ``adata``.

    Returns
    -------
    None, or the copy. Written are ``obsm[key_added]``, a table with one column for each chosen cell: the attention that
    it pays to every cell, which sums to 1 over its slice, NaN in other slices; and the parameters in ``uns[key_added]``.

    Raises
    ------
    KeyError
        If there is no such cell.
    ValueError
        If there is no such layer or head, no cell was chosen, or the model cannot be asked.
    """
    from alphastomics.model._layers import attention_rows, query_source

    config = model.module.config
    rows = _row_numbers(adata, cells)
    if not -config.n_layers <= layer < config.n_layers:
        raise ValueError(f"layer={layer} is out of range; the model has {config.n_layers} layers")
    if head is not None and not 0 <= head < config.n_heads:
        raise ValueError(f"head={head} is out of range; the model has {config.n_heads} heads")
    number = layer % config.n_layers
    weights = attention_rows(model, query_source(model, adata), rows, layer=number, head=head)
    names = adata.obs_names[rows].astype(str)
    result = adata.copy() if copy else adata
    result.obsm[key_added] = pd.DataFrame(weights, index=adata.obs_names, columns=names)
    result.uns[key_added] = {"params": {"layer": number, "head": "mean" if head is None else head}}
    return result if copy else None


def expert_usage(
    model: AlphaSTomics, adata: AnnData, *, key_added: str = _keys.EXPERTS, copy: bool = False
) -> AnnData | None:
    """Which experts the cells go to.

    Parameters
    ----------
    model
        A trained model with experts.
    adata
        Cells; positions are not read.
    key_added
        Where to write.
    copy
        Whether to return a modified copy instead of writing to ``adata``.

    Returns
    -------
    None, or the copy. Written are ``obs[key_added + "_layer_0"]`` and so on, the most probable expert of each cell
    (categorical), and ``uns[key_added]["summary"]``, a table of ``layer``, ``expert``, ``usage`` (share of all
    assignments, 1 / E when balanced) and ``probability`` (mean over the cells).

    Raises
    ------
    ValueError
        If the model has no experts, is not trained, or never saw cells without positions.
    """
    from alphastomics.model._layers import expert_values, query_source

    first, usage, probability = expert_values(model, query_source(model, adata))
    names = [str(expert) for expert in range(usage.shape[1])]
    result = adata.copy() if copy else adata
    for layer, chosen in enumerate(first.T):
        result.obs[f"{key_added}_layer_{layer}"] = pd.Categorical.from_codes(chosen, categories=names)
    result.uns[key_added] = {"summary": _layer_table("expert", usage=usage, probability=probability)}
    return result if copy else None


def _layer_table(part: str, **values: NDArray[np.float64]) -> pd.DataFrame:
    """One row for each layer and head or expert of ``values``, all (L, n_parts)."""
    n_layers, n_parts = next(iter(values.values())).shape
    layers, parts = np.divmod(np.arange(n_layers * n_parts), n_parts)
    return pd.DataFrame({"layer": layers, part: parts} | {name: value.ravel() for name, value in values.items()})


def _row_numbers(adata: AnnData, cells: Sequence[str] | Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    chosen = np.atleast_1d(np.asarray(cells))
    if chosen.dtype == bool:
        if chosen.shape != (adata.n_obs,):
            raise ValueError(f"cells is a mask of shape {chosen.shape}; there are {adata.n_obs} cells")
        rows = np.flatnonzero(chosen)
    elif np.issubdtype(chosen.dtype, np.integer):
        if ((chosen < 0) | (chosen >= adata.n_obs)).any():
            raise KeyError(f"cells has row numbers outside 0 to {adata.n_obs - 1}")
        rows = chosen.astype(np.int64)
    else:
        rows = adata.obs_names.get_indexer(chosen)
        if (rows < 0).any():
            raise KeyError(f"there is no cell {str(chosen[rows < 0][0])!r}; pass names of obs_names or row numbers")
    if not len(rows):
        raise ValueError("cells is empty; name at least one")
    return np.asarray(rows, dtype=np.int64)
