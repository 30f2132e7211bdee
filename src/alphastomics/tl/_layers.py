"""Attention gates, attention sinks, attention maps and expert usage of a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphastomics import _keys
from alphastomics.data._checks import check_text, check_type
from alphastomics.tl._checks import check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics


def attention_gates(
    model: AlphaSTomics, adata: AnnData, *, key_added: str = _keys.GATES, copy: bool = False
) -> AnnData | None:
    """Compute the mean attention gate of each cell, layer and head.

    The network receives the expression of the cells of each slice and no positions. A mean of 0.5 ± 0.2 over cells is usual.

    Parameters
    ----------
    model
        A trained model whose attention has gates.
    adata
        Cells.
    key_added
        Key of ``obsm`` and ``uns`` for the results.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obsm[key_added]``: table with the mean gate over channels, (n_cells, n_layers · n_heads), columns ``layer_0_head_0``,
      …;
    - ``uns[key_added]["summary"]``: table of ``layer``, ``head``, ``mean`` and ``sd`` over cells and channels.

    Raises
    ------
    RuntimeError
        If the model is not trained.
    ValueError
        If the attention has no gates.

    Examples
    --------
    >>> asx.tl.attention_gates(model, query)
    >>> asx.pl.attention_gates(query)
    """
    from alphastomics.sampling._layers import gate_values, query_source

    check_model(model)
    check_text(key_added, "key_added", "uns")
    sampler = model._make_sampler()
    mean, summary = gate_values(sampler, query_source(sampler, adata))
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
    """Compute the mean attention that each cell receives, and its maximum: the attention sink.

    The network receives the expression of the cells of each slice and no positions. The attention matrix is computed in
    blocks of rows, so memory is linear in the number of cells.

    Parameters
    ----------
    model
        A trained model.
    adata
        Cells.
    key_added
        Key of ``obsm`` and ``uns`` for the results.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obsm[key_added]``: table with the attention that each cell receives, mean over query cells and heads,
      (n_cells, n_layers), columns ``layer_0``, …;
    - ``uns[key_added]["summary"]``: table of ``slice``, ``layer``, ``head``, ``share`` (largest mean attention that a cell
      receives) and ``uniform`` (1 / n, its value without a sink).

    Raises
    ------
    RuntimeError
        If the model is not trained.

    Examples
    --------
    >>> asx.tl.attention_sinks(model, query)
    >>> query.uns["attention_sinks"]["summary"].groupby("layer")["share"].max()
    """
    from alphastomics.sampling._layers import query_source, sink_values

    check_model(model)
    check_text(key_added, "key_added", "uns")
    sampler = model._make_sampler()
    received, slices, n_cells, share = sink_values(sampler, query_source(sampler, adata))
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
    """Compute the attention weights of selected cells.

    The network receives the expression of the cells of each slice and no positions. Only the rows of the attention matrix
    that belong to the selected cells are computed.

    Parameters
    ----------
    model
        A trained model.
    adata
        Cells.
    cells
        Names or row numbers of the selected cells, or a boolean mask, (n_cells,).
    layer
        Index of the layer; negative values count from the end.
    head
        Index of the head; None for the mean over heads.
    key_added
        Key of ``obsm`` and ``uns`` for the results.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obsm[key_added]``: table with one column per selected cell, (n_cells, n_selected): its attention weights, which sum to
      1 over its context and are NaN elsewhere; a context is a slice, or a part of one of more than 32,768 cells;
    - ``uns[key_added]["params"]``: ``layer`` and ``head``.

    Raises
    ------
    KeyError
        If a cell does not exist.
    RuntimeError
        If the model is not trained.
    ValueError
        If no cell is selected, or one twice, or the layer or head does not exist.

    Examples
    --------
    >>> asx.tl.attention_maps(model, query, query.obs_names[:3], layer=0)
    >>> asx.pl.attention_maps(query)
    """
    from alphastomics.sampling._layers import attention_rows, query_source

    check_model(model)
    check_text(key_added, "key_added", "uns")
    config = model.module.config
    check_type(adata)
    rows = _row_numbers(adata, cells)
    if not -config.n_layers <= layer < config.n_layers:
        raise ValueError(
            f"layer={layer} is out of range; the model has {config.n_layers} layers, pass 0 to {config.n_layers - 1}"
        )
    if head is not None and not 0 <= head < config.n_heads:
        raise ValueError(
            f"head={head} is out of range; the model has {config.n_heads} heads, pass 0 to {config.n_heads - 1}"
        )
    names = adata.obs_names[rows].astype(str)
    if not names.is_unique:
        raise ValueError(
            f"cells=… has {names[names.duplicated()][0]!r} more than once; remove repeated cells, or call adata.obs_names_make_unique()"
        )
    number = layer % config.n_layers
    sampler = model._make_sampler()
    weights = attention_rows(sampler, query_source(sampler, adata), rows, layer=number, head=head)
    result = adata.copy() if copy else adata
    result.obsm[key_added] = pd.DataFrame(weights, index=adata.obs_names, columns=names)
    result.uns[key_added] = {"params": {"layer": number, "head": "mean" if head is None else head}}
    return result if copy else None


def expert_usage(
    model: AlphaSTomics, adata: AnnData, *, key_added: str = _keys.EXPERTS, copy: bool = False
) -> AnnData | None:
    """Compute which experts cells are routed to.

    Parameters
    ----------
    model
        A trained model with experts.
    adata
        Cells. Positions are not read.
    key_added
        Prefix of the columns of ``obs``, and key of ``uns``.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obs[key_added + "_layer_0"]``, …: most probable expert of each cell (categorical);
    - ``uns[key_added]["summary"]``: table of ``layer``, ``expert``, ``usage`` (fraction of all assignments, 1 / n_experts if
      balanced) and ``probability`` (mean routing probability over cells).

    Raises
    ------
    RuntimeError
        If the model is not trained.
    ValueError
        If the model has no experts.

    Examples
    --------
    >>> asx.model.AlphaSTomics.setup_anndata(reference, slice_key="slice_id")
    >>> model = asx.model.AlphaSTomics(reference, use_moe=True)
    >>> model.train(max_time=300)
    >>> asx.tl.expert_usage(model, query)
    >>> asx.pl.expert_usage(query)
    """
    from alphastomics.sampling._layers import expert_values, query_source

    check_model(model)
    check_text(key_added, "key_added", "uns")
    sampler = model._make_sampler()
    first, usage, probability = expert_values(sampler, query_source(sampler, adata))
    names = [str(expert) for expert in range(usage.shape[1])]
    result = adata.copy() if copy else adata
    for layer, chosen in enumerate(first.T):
        result.obs[f"{key_added}_layer_{layer}"] = pd.Categorical.from_codes(chosen, categories=names)
    result.uns[key_added] = {"summary": _layer_table("expert", usage=usage, probability=probability)}
    return result if copy else None


def _layer_table(part: str, **values: NDArray[np.float64]) -> pd.DataFrame:
    """Long table of values by layer and head or expert, each (n_layers, n_parts)."""
    n_layers, n_parts = next(iter(values.values())).shape
    layers, parts = np.divmod(np.arange(n_layers * n_parts), n_parts)
    return pd.DataFrame({"layer": layers, part: parts} | {name: value.ravel() for name, value in values.items()})


def _row_numbers(adata: AnnData, cells: Sequence[str] | Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Rows of cells given by name, row number or mask, (n_selected,)."""
    chosen = np.atleast_1d(np.asarray(cells))
    if chosen.dtype == bool:
        if chosen.shape != (adata.n_obs,):
            raise ValueError(f"cells is a mask of shape {chosen.shape}; pass one of shape ({adata.n_obs},)")
        rows = np.flatnonzero(chosen)
    elif np.issubdtype(chosen.dtype, np.integer):
        if ((chosen < 0) | (chosen >= adata.n_obs)).any():
            raise KeyError(
                f"cells has row numbers outside 0 to {adata.n_obs - 1}; pass numbers in this range as cells=…"
            )
        rows = chosen.astype(np.int64)
    else:
        rows = adata.obs_names.get_indexer(chosen)
        if (rows < 0).any():
            raise KeyError(f"there is no cell {str(chosen[rows < 0][0])!r}; pass obs_names or row numbers as cells=…")
    if not len(rows):
        raise ValueError("cells=… is empty; pass at least one cell")
    return np.asarray(rows, dtype=np.int64)
