r"""Embeddings of cells by their expression and, on request, by their positions.

.. math::

    h^0_i = E(x^{expr}_i) \; [+ \, P(x^{pos}_i)], \qquad h^L = \operatorname{trunk}(h^0, t_{expr} = 0, t_{pos} = 1 \; [0])

Without positions the missing token takes their place, with their timestep at 1. Positions that are used are clean, with their
timestep at 0, and in the canonical frame. In a free frame the rotation to it follows from the expression of the cells, so that
moving, turning or mirroring a slice changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.data import local_density
from alphastomics.sampling._canonical import canonical_positions
from alphastomics.sampling._cells import content_order, embed_cells, encode_cells
from alphastomics.sampling._draws import progress_bar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import AnnDataSource, SliceCells
    from alphastomics.sampling._sampler import Sampler


@torch.no_grad()
def latent_representation(
    sampler: Sampler, source: AnnDataSource, *, layer: str, max_context: int
) -> NDArray[np.float32]:
    """Embed the cells of each slice together; see :meth:`AlphaSTomics.get_latent_representation`.

    Positions are used where ``source`` has read them.
    """
    module, device = sampler.module, sampler.device
    width = module.config.d_model * (2 if layer == "all" else 1)
    result = np.empty((source.n_cells, width), dtype=np.float32)
    zero = torch.zeros(1, device=device)
    bar = progress_bar(source.n_cells, "Embedding", unit="cell")
    for cells in source.slices:
        rows, position = _ordered(source, cells)
        if layer == "encoder" and position is None:
            result[rows] = embed_cells(module, source, rows)[0].cpu().numpy()
            bar.update(len(rows))
            continue
        encoded, _, contexts, order = encode_cells(module, source, rows, max_context=max_context)
        x = None
        if position is not None:
            canonical = canonical_positions(sampler, source, rows, position, max_context=max_context)
            x = torch.from_numpy(canonical).to(device)
            density = torch.from_numpy(local_density(position)).to(device)
            encoded = encoded + module.embed_position(x[None], zero, local_density=density[None])[0]
        t_pos = zero + float(x is None)
        parts = {"encoder": encoded}
        if layer != "encoder":
            out = torch.zeros_like(encoded)
            for index, _ in contexts:
                h, sequence = encoded[index][None], None if order is None else order[index][None]
                if x is None:
                    h = h + module.position_missing
                x_context = None if x is None else x[index][None]
                latent = module.trunk(h, zero, t_pos, None, (), position=x_context, sequence=sequence).latent
                out[index] = latent[0].float()
            parts["transformer"] = out
        names = ("encoder", "transformer") if layer == "all" else (layer,)
        result[rows] = torch.cat([parts[name] for name in names], dim=1).cpu().numpy()
        bar.update(len(rows))
    bar.close()
    return result


def _ordered(source: AnnDataSource, cells: SliceCells) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """Rows of a slice in an order that does not depend on that of the rows, and the positions (N, D) in that order."""
    if cells.position is None:
        return content_order(source, cells.rows), None
    n_missing = int((~np.isfinite(cells.position).all(axis=1)).sum())
    if n_missing:
        raise ValueError(
            f"Slice {cells.name!r} has {n_missing} cells without a position in "
            f'obsm["{source.schema.position_key}"]; store positions there, remove these cells, or pass '
            "use_positions=False."
        )
    # Cells with equal expression are sorted by position.
    rows = content_order(source, cells.rows[np.lexsort(cells.position.T)])
    return rows, cells.position[np.searchsorted(cells.rows, rows)]
