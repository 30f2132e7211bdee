r"""Exact attention over cells that are split over W processes.

.. math:: o_i = \sum_j \operatorname{softmax}_j\big(\gamma\, q_i \cdot k_j - 10^4 (1 - m_j)\big)\, v_j

i runs over the n cells of this process, j over the keys of all, m of every process. Two exchanges give the same result:

- :func:`ulysses` sends q, k, v and o from cells of all heads to all cells of some heads, and back (Jacobs et al., 2023). It
  sends least, but needs W to divide H.
- :func:`~alphastomics.nn.parallel.ring.ring` sends k and v in W - 1 steps, while attention is computed.

The memory of a process is O(n). The mask m is a further column of q and k: it needs neither a separate exchange nor a kernel with masks, and attention to
padding only is finite. Relative to the weight of a real cell, exp(-10^4) is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from alphastomics.nn.parallel.ring import ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.nn.parallel.sequence import SequenceParallel

    Exchange = Callable[[Tensor, Tensor, Tensor, SequenceParallel, float], Tensor]


def ulysses(q: Tensor, k: Tensor, v: Tensor, parallel: SequenceParallel, scale: float) -> Tensor:
    """Attention (B, H, n, c) of the queries of this process, (B, H, n, c), to the keys of all; k and v are (B, H, m, c)."""
    cells = [x.shape[-2] for x in (q, k, v)]
    qkv = parallel.resplit(torch.cat([q, k, v], dim=-2), whole=-3, split=-2).unflatten(-2, (-1, sum(cells)))
    q, k, v = (x.flatten(-3, -2) for x in qkv.split(cells, dim=-2))
    o = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return parallel.resplit(o, whole=-2, split=-3)


def choose_exchange(n_heads: int, world_size: int) -> Exchange:
    """Choose :func:`ulysses` if W divides H, else the ring."""
    return ulysses if n_heads % world_size == 0 else ring


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, parallel: SequenceParallel, *, scale: float) -> Tensor:
    """As :func:`split_attention`, for q, k and v of equal width that already contain a column for padding."""
    if parallel.world_size == 1:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    return choose_exchange(q.shape[1], parallel.world_size)(q, k, v, parallel, scale)


def split_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, parallel: SequenceParallel, *, key_mask: Tensor | None = None
) -> Tensor:
    """Attention of the cells of this process to the keys of all processes.

    Parameters
    ----------
    q, k
        (B, H, n, d_h) and (B, H, m, d_h), with n and m the same on all processes, as from :meth:`SequenceParallel.split`.
    v
        (B, H, m, d_v).
    mask
        Real cells (B, n).
    key_mask
        Which keys are those of real cells, (B, m); ``mask`` if None.
    parallel
        The processes.

    Returns
    -------
    (B, H, n, d_v), 0 where ``mask`` is false.
    """
    scale = q.shape[-1] ** -0.5
    padding, of_keys = (~(mask if real is None else real)[:, None, :, None] for real in (mask, key_mask))
    exchange = choose_exchange(q.shape[1], parallel.world_size)
    o = exchange(*_with_mask(q, k, v, padding, of_keys, scale), parallel, scale)
    return o[..., : v.shape[-1]].masked_fill(padding, 0.0)


def _with_mask(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor, of_keys: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a column for padding, (B, 1, n, 1) and (B, 1, m, 1), to q and k, and pad q, k and v to equal widths, for fast kernels.

    The factor 10^4 is divided among q and k, so that float16 can represent both.
    """
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    q, k, v = (x.to(dtype).masked_fill(hidden, 0.0) for x, hidden in ((q, padding), (k, of_keys), (v, of_keys)))
    known = q.new_full((*q.shape[:-1], 1), 100.0)
    hidden = k.new_zeros((*k.shape[:-1], 1)).masked_fill(of_keys, -100.0 / scale)
    width = max(q.shape[-1] + 1, v.shape[-1])
    q, k = torch.cat([q, known], dim=-1), torch.cat([k, hidden], dim=-1)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v
