r"""Hyper-connections: residual streams mixed by doubly stochastic matrices (mHC; Xie et al. 2025, arXiv:2512.24880).

.. math::

    x' &= H^{res} x + H^{post} \otimes F\Big(\sum_k H^{pre}_k x_k\Big), \qquad x \in \mathbb R^{n \times C} \\
    (z^{pre}, z^{post}, z^{res}) &= \alpha \odot \big(\operatorname{RMSNorm}(\operatorname{vec} x)\, \Phi\big) + b \\
    H^{pre} &= \sigma(z^{pre}), \qquad H^{post} = 2 \sigma(z^{post}), \qquad H^{res} = \operatorname{Sinkhorn}(z^{res})

per cell, after Zhu et al. (ICLR 2025). F is a branch without a residual. The rows of H^res sum to 1, so that mixing is a mean
over streams, and its columns sum to 1, so that no stream is lost: the product over any number of layers neither grows nor
vanishes. :func:`expand` makes the n streams before the first layer, :func:`reduce` averages them after the last.

At initialization Φ = 0, H^pre sums to 1, H^post = 1 and H^res is nearly I: equal streams stay equal, and the network is a
plain residual network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

N_ITERATIONS = 20  # of Sinkhorn, in training and inference
IDENTITY_LOGIT = 8.0  # initial logit of the identity in H^res


def sinkhorn(logits: Tensor) -> Tensor:
    """Doubly stochastic matrices (..., n, n) near exp(``logits``) (..., n, n), in single precision at least.

    Columns and rows are normalized in turn, rows last (Sinkhorn & Knopp 1967), in the logarithmic domain to prevent
    overflow. Near a permutation this converges slowly: after 20 iterations sums of columns may be off by hundredths, which
    accumulate over 64 layers. A final correction (Altschuler et al. 2017, algorithm 2) makes rows and columns sum to 1 after
    any number of iterations. For n = 2 the limit has a closed form. The iterations are recomputed in the backward pass,
    because storing them takes more memory than the streams.
    """
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logits.shape[-1] == 2:
            corner = (
                logits.diagonal(dim1=-2, dim2=-1).sum(-1) - logits.flip(-1).diagonal(dim1=-2, dim2=-1).sum(-1)
            ) / 2
            same, other = corner.sigmoid(), (-corner).sigmoid()
            return torch.stack([torch.stack([same, other], -1), torch.stack([other, same], -1)], -2)
        result: Tensor = checkpoint(_iterate, logits, use_reentrant=False, preserve_rng_state=False)
        return result


def _iterate(logits: Tensor) -> Tensor:
    # Normalizing all cells at once, on the last axis, is five times faster.
    log_h = logits.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(N_ITERATIONS):
        log_h = log_h.log_softmax(0).log_softmax(1)
    return _round(log_h.exp()).movedim((0, 1), (-2, -1))


def _round(h: Tensor) -> Tensor:
    """Correct matrices ``h`` (n, n, ...), whose rows sum to 1, so that columns sum to 1 as well."""
    h = h / h.sum(0, keepdim=True).clamp_min(1)
    row_gap, column_gap = ((1 - h.sum(axis, keepdim=True)).clamp_min(0) for axis in (1, 0))
    return h + row_gap * column_gap / row_gap.sum(0, keepdim=True).clamp_min(torch.finfo(h.dtype).eps)


def expand(x: Tensor, n_streams: int) -> Tensor:
    """Equal streams (B, N, n, C) from ``x`` (B, N, C), before the first layer."""
    return x.unsqueeze(-2).repeat_interleave(n_streams, dim=-2)


def reduce(streams: Tensor) -> Tensor:
    """Mean (B, N, C) of ``streams`` (B, N, n, C), after the last layer."""
    return streams.mean(-2)


class Residual(nn.Module):
    """Plain residual connection, x + branch(x), with the interface of :class:`HyperConnection`."""

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, C) to (B, N, C)."""
        return x + branch(x)


class Maps(NamedTuple):
    """H^pre and H^post, (B, N, n), and H^res, (B, N, n, n), in single precision at least."""

    pre: Tensor
    post: Tensor
    mix: Tensor


class HyperConnection(nn.Module):
    """Residual connection of one branch: ``streams = connection(streams, branch)`` instead of ``x + branch(x)``.

    Parameters
    ----------
    d_model
        Channels C of a stream.
    n_streams
        n, 2 or more.

    Raises
    ------
    ValueError
        If there are fewer than two streams.
    """

    def __init__(self, d_model: int, *, n_streams: int = 4) -> None:
        super().__init__()
        if n_streams < 2:
            raise ValueError(f"n_streams={n_streams} must be at least 2; use residual='plain' for one stream")
        self.n_streams = n_streams
        initial = _read_logits(n_streams), torch.zeros(n_streams), IDENTITY_LOGIT * torch.eye(n_streams).flatten()
        self.sizes = [len(logits) for logits in initial]
        self.phi = nn.Parameter(torch.zeros(n_streams * d_model, sum(self.sizes)))
        self.alpha = nn.Parameter(torch.full((len(initial),), 0.01))
        self.bias = nn.Parameter(torch.cat(initial))

    def maps(self, streams: Tensor) -> Maps:
        """Compute H^pre, H^post and H^res from the ``streams`` (B, N, n, C)."""
        with torch.autocast(streams.device.type, enabled=False):
            x = streams.flatten(-2)
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            # Dividing x Φ, not x, by the norm saves memory of the size of the streams.
            mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
            scores = x @ self.phi.to(x.dtype) * (mean_square + torch.finfo(torch.float32).eps).rsqrt()
            parts = zip(self.alpha, scores.split(self.sizes, dim=-1), self.bias.split(self.sizes), strict=True)
            pre, post, mix = (alpha * score + bias for alpha, score, bias in parts)
            mix = sinkhorn(mix.unflatten(-1, (self.n_streams, self.n_streams)))
            return Maps(pre.sigmoid(), 2 * post.sigmoid(), mix)

    def forward(self, streams: Tensor, branch: Callable[[Tensor], Tensor], mask: Tensor | None = None) -> Tensor:
        """Run the branch and add its output to the mixed streams.

        Parameters
        ----------
        streams
            (B, N, n, C).
        branch
            Map from (B, N, C) to (B, N, C), including its norm but no residual.
        mask
            Real cells (B, N); the streams of others are set to 0.
        """
        pre, post, mix = self.maps(streams)
        with torch.autocast(streams.device.type, enabled=False):  # rounded to half precision, rows do not sum to 1
            read = (pre.unsqueeze(-2) @ streams.to(pre.dtype)).squeeze(-2).to(streams.dtype)
        y = branch(read)
        with torch.autocast(streams.device.type, enabled=False):
            result = (mix @ streams.to(mix.dtype) + post[..., None] * y.unsqueeze(-2)).to(streams.dtype)
        return result if mask is None else result.masked_fill(~mask[..., None, None], 0.0)


def _read_logits(n: int) -> Tensor:
    """Logits of weights that sum to 1, each about 1 / n; with equal weights, equal streams would stay equal in training."""
    weight = (0.1 * torch.randn(n)).softmax(0)
    return weight.logit()
