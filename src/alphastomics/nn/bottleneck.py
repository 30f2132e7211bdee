r"""A residual branch that works at a fraction of the width (He et al. 2016; Houlsby et al. 2019).

.. math:: y = x + U f(D \operatorname{LN}(x)), \qquad D \in \mathbb R^{C/r \times C}, \quad U \in \mathbb R^{C \times C/r}

U starts at zero: at first the layer is the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class Bottleneck(nn.Module):
    """Narrow residual branch around any operation on cells.

    Parameters
    ----------
    d_model
        Width C.
    ratio
        r; C must be a multiple.
    operation
        f, a module ``(h, mask=mask)`` from and to (B, N, C / r), such as an attention over the cells without a residual of its
        own; None for a GELU.

    Raises
    ------
    ValueError
        If the width is not a multiple of the ratio.
    """

    def __init__(self, d_model: int, *, ratio: int = 4, operation: nn.Module | None = None) -> None:
        super().__init__()
        if ratio < 1 or d_model % ratio:
            raise ValueError(f"d_model={d_model} is not a multiple of ratio={ratio}")
        self.norm = nn.LayerNorm(d_model)
        self.down = nn.Linear(d_model, d_model // ratio)
        self.operation = operation
        self.up = nn.Linear(d_model // ratio, d_model)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def branch(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """U f(D LN(x)), without the residual, as :class:`~alphastomics.nn.residual.HyperConnection` takes it."""
        h = self.down(self.norm(x))
        y: Tensor = self.up(F.gelu(h) if self.operation is None else self.operation(h, mask=mask))
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` (B, N, C) to (B, N, C), 0 where ``mask`` (B, N) is false."""
        y = x + self.branch(x, mask)
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)
