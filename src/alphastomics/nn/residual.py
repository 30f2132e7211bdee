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

import math
from itertools import permutations
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Mixing = Literal["sinkhorn", "birkhoff", "identity"]

ITERATIONS = 20  # of Sinkhorn, in training and inference
START = 8.0  # initial logit of the identity in H^res
MOST_PERMUTED = 4  # streams; 5 have 120 permutations


def sinkhorn(logits: Tensor, *, iterations: int = ITERATIONS) -> Tensor:
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
        result: Tensor = checkpoint(_iterate, logits, iterations, use_reentrant=False, preserve_rng_state=False)
        return result


def _iterate(logits: Tensor, iterations: int) -> Tensor:
    # Normalizing all cells at once, on the last axis, is five times faster.
    log_h = logits.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(iterations):
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
    """H^pre and H^post, (B, N, n), and H^res, (B, N, n, n) or None for the identity, in single precision at least."""

    pre: Tensor
    post: Tensor
    mix: Tensor | None


class HyperConnection(nn.Module):
    """Residual connection of one branch: ``streams = connection(streams, branch)`` instead of ``x + branch(x)``.

    Parameters
    ----------
    d_model
        Channels C of a stream.
    n_streams
        n, 2 or more.
    mixing
        ``"sinkhorn"``; ``"birkhoff"``, a mean of the n! permutations with learned weights, which is exactly doubly
        stochastic (mHC-lite, arXiv:2601.05732); or ``"identity"``: no mixing outside of the branches.

    Raises
    ------
    ValueError
        If the mixing is unknown, or there are fewer than two streams, or more than four with ``"birkhoff"``.
    """

    def __init__(self, d_model: int, *, n_streams: int = 4, mixing: Mixing = "sinkhorn") -> None:
        super().__init__()
        if n_streams < 2:
            raise ValueError(f"n_streams={n_streams}: with one stream a plain residual does the same; take 2 or more")
        if mixing not in ("sinkhorn", "birkhoff", "identity"):
            raise ValueError(f"mixing={mixing!r} is unknown; choose 'sinkhorn', 'birkhoff' or 'identity'")
        if mixing == "birkhoff" and n_streams > MOST_PERMUTED:
            raise ValueError(f"n_streams={n_streams} have {math.factorial(n_streams)} permutations; take 'sinkhorn'")
        self.n_streams, self.mixing = n_streams, mixing
        starts = [_read_logits(n_streams), torch.zeros(n_streams)]
        if mixing != "identity":
            starts.append(_mix_logits(n_streams, mixing))
        self.sizes = [len(start) for start in starts]
        self.phi = nn.Parameter(torch.zeros(n_streams * d_model, sum(self.sizes)))
        self.alpha = nn.Parameter(torch.full((len(starts),), 0.01))
        self.bias = nn.Parameter(torch.cat(starts))
        self.permutations: Tensor
        if mixing == "birkhoff":
            self.register_buffer("permutations", _permutations(n_streams), persistent=False)

    def maps(self, streams: Tensor) -> Maps:
        """Compute H^pre, H^post and H^res from the ``streams`` (B, N, n, C)."""
        with torch.autocast(streams.device.type, enabled=False):
            x = streams.flatten(-2)
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            # Dividing x Φ, not x, by the norm saves memory of the size of the streams.
            mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
            scores = x @ self.phi.to(x.dtype) * (mean_square + torch.finfo(torch.float32).eps).rsqrt()
            parts = zip(self.alpha, scores.split(self.sizes, dim=-1), self.bias.split(self.sizes), strict=True)
            z = [alpha * score + bias for alpha, score, bias in parts]
            return Maps(z[0].sigmoid(), 2 * z[1].sigmoid(), self._mix(z[2]) if len(z) > 2 else None)

    def _mix(self, z: Tensor) -> Tensor:
        if self.mixing == "birkhoff":
            return (z.softmax(-1) @ self.permutations.to(z.dtype)).unflatten(-1, (self.n_streams, self.n_streams))
        return sinkhorn(z.unflatten(-1, (self.n_streams, self.n_streams)))

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
            kept = streams if mix is None else mix @ streams.to(mix.dtype)
            result = (kept + post[..., None] * y.unsqueeze(-2)).to(streams.dtype)
        return result if mask is None else result.masked_fill(~mask[..., None, None], 0.0)


def _read_logits(n: int) -> Tensor:
    """Logits of weights that sum to 1, each about 1 / n; with equal weights, equal streams would stay equal in training."""
    weight = (0.1 * torch.randn(n)).softmax(0)
    return weight.logit()


def _mix_logits(n: int, mixing: Mixing) -> Tensor:
    if mixing == "birkhoff":
        return START * (torch.arange(math.factorial(n)) == 0)  # the first permutation is the identity
    return START * torch.eye(n).flatten()


def _permutations(n: int) -> Tensor:
    """All permutation matrices, (n!, n * n)."""
    return torch.stack([torch.eye(n)[list(order)].flatten() for order in permutations(range(n))])
