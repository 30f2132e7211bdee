"""Random numbers of the contexts of a batch, drawn on the CPU and moved to the device of training with the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class Draws(NamedTuple):
    """Random numbers of B contexts of at most N cells.

    Numbers, keys and ``placed`` stay on the CPU, so that a step on a GPU depends on no value that it would have to wait for.

    Attributes
    ----------
    t_expr, t_pos
        Timesteps (B,) of both modalities.
    noise
        Standard normal noise (B, N, G) of expression, 0 where padded and at timesteps 0 and 1; (B, N, 0) if expression is not sampled.
    observed
        Entries of expression (B, N, G) that are observed while the others are sampled; (B, N, 0) if expression is not sampled.
    hidden_type
        Cells (B, N) whose type is hidden; (B, 0) if types are not an input.
    absent, given
        Numbers of the contexts, (P,) and (M,), whose positions are absent, and of those whose positions are an input.
    deformation
        Parameters of the deformations of the M contexts; None if they are not deformed.
    placed
        For each context, whether its positions are absent.
    n_cells
        For each context, its number of cells, without padding.
    key
        Keys (B, 3), which seed further draws.
    """

    t_expr: torch.Tensor
    t_pos: torch.Tensor
    noise: torch.Tensor
    observed: torch.Tensor
    hidden_type: torch.Tensor
    absent: torch.Tensor
    given: torch.Tensor
    deformation: tuple[torch.Tensor, ...] | None
    placed: tuple[bool, ...]
    n_cells: tuple[int, ...]
    key: NDArray[np.int64]
