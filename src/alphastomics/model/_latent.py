"""Embeddings of cells whose positions are absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.model._position_chain import content_order, embed_cells, split_contexts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import AnnDataSource
    from alphastomics.model._model import AlphaSTomics


@torch.no_grad()
def latent_representation(
    model: AlphaSTomics, source: AnnDataSource, *, layer: str, max_context: int
) -> NDArray[np.float32]:
    """Embed the cells of each slice together; see :meth:`AlphaSTomics.get_latent_representation`."""
    module, device = model.module, model.module.device
    width = module.config.d_model * (2 if layer == "all" else 1)
    result = np.empty((source.n_cells, width), dtype=np.float32)
    zero, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    for cells in source.slices:
        rows = content_order(source, cells.rows)
        encoded = embed_cells(module, source, rows, device)
        parts = {"encoder": encoded}
        if layer != "encoder":
            out = torch.zeros_like(encoded)
            for index, _ in split_contexts(len(rows), max_context, device):
                h = encoded[index][None] + module.position_missing
                out[index] = module.trunk(h, zero, one, None, ()).latent[0].float()
            parts["transformer"] = out
        wanted = ("encoder", "transformer") if layer == "all" else (layer,)
        result[rows] = torch.cat([parts[name] for name in wanted], dim=1).cpu().numpy()
    return result
