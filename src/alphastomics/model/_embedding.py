"""Mixin of the model class: embeddings of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphastomics.config import EmbeddingConfig
from alphastomics.data import AnnDataSource
from alphastomics.model._base import ModelBase
from alphastomics.sampling._latent import latent_representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import EmbeddingLayer


class EmbeddingMixin(ModelBase):
    """Embeds cells."""

    def get_latent_representation(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | NDArray[np.int64] | None = None,
        batch_size: int | None = EmbeddingConfig.batch_size,
        layer: EmbeddingLayer = EmbeddingConfig.layer,
        use_positions: bool = EmbeddingConfig.use_positions,
    ) -> NDArray[np.float32]:
        """Embed cells from their expression, the other cells of their slice, and optionally their positions.

        Parameters
        ----------
        adata
            Cells; the reference when None.
        indices
            Rows to embed; all when None. Cells in other rows have no influence on the result.
        batch_size
            Largest number of cells that attend to each other.
        layer
            ``"encoder"``: the embedding before the first block, which depends on the cell alone; ``"transformer"``: the
            embedding after the last block; ``"all"``: both, concatenated.
        use_positions
            Whether positions are used. If not, ``obsm[position_key]`` is not read, and cells are embedded like dissociated
            cells. With ``frame="slice"`` positions need not be registered: the rotation of a slice is estimated from the
            expression of its cells.

        Returns
        -------
        Embeddings of shape (n_cells, d_model), or (n_cells, 2 d_model) for ``"all"``; independent of the order of the rows.
        Embeddings with and without positions are not comparable.

        Raises
        ------
        RuntimeError
            If the model is not trained.
        KeyError
            If ``use_positions=True`` and the query has no positions or slices.
        ValueError
            If ``layer`` is unknown; if ``use_positions=True`` and a cell has no position, or the model was trained with a
            mode other than ``"any"`` and ``"pos_to_expr"``.

        Examples
        --------
        >>> query.obsm["X_alphastomics"] = model.get_latent_representation(query, layer="transformer")
        """
        sampler = self._make_sampler()
        config = EmbeddingConfig(batch_size=batch_size, layer=layer, use_positions=use_positions)
        if use_positions and self.mode not in ("any", "pos_to_expr"):
            raise ValueError(
                f"use_positions=True requires a model trained with mode='any' or 'pos_to_expr', and this one was trained with "
                f"mode={self.mode!r}; pass use_positions=False, or train another model"
            )
        source = AnnDataSource(self._read_query(adata, indices), self.schema, positions=use_positions)
        source.log_kind()
        return latent_representation(sampler, source, layer=layer, max_context=config.max_context)
