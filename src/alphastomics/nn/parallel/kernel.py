r"""Attention to a part of the keys, with what is needed to put parts together, and its gradient.

.. math::

    s = \gamma\, q k^\top, \qquad \lambda_i = \log \sum_j e^{s_{ij}}, \qquad o_i = \sum_j e^{s_{ij} - \lambda_i} v_j

For the gradient, :math:`\lambda` and o are those of *all* keys. Then the parts of the keys are independent of each
other (Dao et al., NeurIPS 2022, algorithm 4):

.. math::

    p = e^{s - \lambda}, \quad \bar v = p^\top \bar o, \quad
    \bar s = p \odot (\bar o v^\top - \langle \bar o, o \rangle), \quad
    \bar q = \gamma\, \bar s k, \quad \bar k = \gamma\, \bar s^\top q

PyTorch's kernel for CPUs tells :math:`\lambda`. Elsewhere the scores are computed for some rows at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from alphastomics.nn._torch_compat import flash_attention_cpu, flash_attention_cpu_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

BLOCK = 2**24  # scores that are in memory at the same time


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with queries (B, H, n, c) to keys and values (B, H, m, c): o (B, H, n, c) and lambda (B, H, n)."""
    if q.device.type == "cpu":
        return cast("tuple[Tensor, Tensor]", flash_attention_cpu(q, k, v, 0.0, False, scale=scale))
    return attend_by_rows(q, k, v, scale)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``o`` and ``lse``, which is lambda, are those of all keys, ``grad`` is that of o."""
    if q.device.type == "cpu":
        grads = flash_attention_cpu_backward(grad, q, k, v, o, lse, 0.0, False, scale=scale)
        return cast("tuple[Tensor, Tensor, Tensor]", grads)
    return attend_by_rows_backward(grad, q, k, v, o, lse, scale)


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As :func:`attend`, on any device; both in float32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _at_least_float32(q * scale, k, v)
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for rows in _rows(q, k):
            s = q[:, :, rows] @ k.mT
            lse[:, :, rows] = s.logsumexp(dim=-1)
            o[:, :, rows] = (s - lse[:, :, rows, None]).exp() @ v
    return o, lse


def attend_by_rows_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`attend_backward`, on any device; in float32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        grad, q, k, v, o = _at_least_float32(grad, q, k, v, o)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in _rows(q, k):
            grad_o = grad[:, :, rows]
            p = (scale * q[:, :, rows] @ k.mT - lse[:, :, rows, None]).exp()
            grad_v += p.mT @ grad_o
            grad_s = scale * p * (grad_o @ v.mT - (grad_o * o[:, :, rows]).sum(dim=-1, keepdim=True))
            grad_q[:, :, rows] = grad_s @ k
            grad_k += grad_s.mT @ q[:, :, rows]
    return grad_q, grad_k, grad_v


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    b, h, n, _ = q.shape
    size = max(1, BLOCK // (b * h * k.shape[2]))
    return (slice(start, start + size) for start in range(0, n, size))
