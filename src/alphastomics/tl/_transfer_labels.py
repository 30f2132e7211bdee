r"""Transfer of labels between cells of a tissue and dissociated cells.

.. math:: c_{i\ell} = \frac1k \lvert\{ j \in N_i : \ell_j = \ell \}\rvert

is the share of the k nearest cells :math:`N_i` that have the label :math:`\ell`. The label of a cell is the one with the largest
share, which is its confidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics import _keys
from alphastomics._provenance import result_record
from alphastomics.data._checks import check_in_memory, check_text
from alphastomics.data._slices import check_labels
from alphastomics.tl._checks import check_model, check_share
from alphastomics.tl._neighbors import nearest_cells

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics.model import AlphaSTomics


def transfer_labels(
    adata: AnnData,
    source: AnnData,
    *,
    model: AlphaSTomics,
    label_key: str = _keys.CELL_TYPE,
    n_neighbors: int = 15,
    min_confidence: float = 0.0,
    key_added: str | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Give cells the labels of similar cells of another dataset.

    With a reference as `source`, labels of the tissue are transferred to dissociated or placed cells; with labeled dissociated cells as
    `source`, they are transferred to the tissue. Cells are compared by the embedding of their expression,
    ``model.get_latent_representation(layer="encoder")``, and positions are not read.

    Parameters
    ----------
    adata
        Cells to label. They may lack some genes of the model.
    source
        Cells with labels. Cells without a label are left out.
    model
        A trained model.
    label_key
        Column of ``source.obs`` with the labels.
    n_neighbors
        Number of similar cells whose labels are counted.
    min_confidence
        Smallest confidence of a label, between 0 and 1; the label of other cells is missing.
    key_added
        Column of ``obs`` for the labels; `label_key` with the suffix ``"_transferred"`` when None.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obs[key_added]``: labels, categorical with the categories of `source`;
    - ``obs[key_added + "_confidence"]``: share of the similar cells that have this label, between 0 and 1;
    - ``uns[key_added]``: parameters, model and versions; see :func:`provenance`.

    Raises
    ------
    KeyError
        If ``source.obs`` has no such column.
    ValueError
        If no cell of `source` has a label, labels are fractional numbers, `n_neighbors` exceeds their number, or `min_confidence` is not
        between 0 and 1.
    RuntimeError
        If the model is not trained.

    See Also
    --------
    impute : Transfer the expression of genes.

    Examples
    --------
    >>> asx.tl.transfer_labels(query, reference, model=model, label_key="cell_type", min_confidence=0.5)
    """
    check_in_memory(adata)
    check_in_memory(source, "source")
    check_model(model)
    check_labels(source, label_key, "label_key")
    check_share("min_confidence", min_confidence)
    key = f"{label_key}_transferred" if key_added is None else key_added
    check_text(key, "key_added", "obs")
    labels = pd.Categorical(source.obs[label_key])
    labeled = np.flatnonzero(labels.codes >= 0)
    if not len(labeled):
        raise ValueError(f'no cell of source has a label in obs["{label_key}"]; pass another label_key=…')
    index = nearest_cells(adata, source[labeled], model, n_neighbors)
    votes = labels.codes[labeled][index]
    count = np.stack([(votes == code).sum(1) for code in range(len(labels.categories))], axis=1)
    confidence = count.max(1) / n_neighbors
    codes = np.where(confidence >= min_confidence, count.argmax(1), -1)
    result = adata.copy() if copy else adata
    result.obs[key] = pd.Categorical.from_codes(codes, dtype=labels.dtype)
    result.obs[f"{key}_confidence"] = confidence
    parameters = {"label_key": label_key, "n_neighbors": n_neighbors, "min_confidence": min_confidence}
    result.uns[key] = result_record(model, "transfer_labels", parameters)
    return result if copy else None
