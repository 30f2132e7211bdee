r"""Masked diffusion: some entries of a modality are hidden from the denoiser, which predicts their clean values.

.. math::

    \lvert M \rvert = \operatorname{round}(r\,\lvert E \rvert), \qquad M \subseteq E, \qquad
    \tilde z = \begin{cases} \tau & \text{in } M \\ z_t & \text{elsewhere} \end{cases}, \qquad
    L_\text{masked} = \frac{1}{\lvert M \rvert} \sum_{(i,f) \in M} (x_{0,if} - \hat x_{0,if})^2

E are the entries of one modality in one context: the N·G pairs (real cell, measured gene) or the N·D pairs (real cell,
axis). round is Python's ``round``: ties go to the even number. :math:`\tau` is a learned token. The input does not depend on
a masked entry, so the output of the network is converted as at timestep 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.config import MaskingConfig, MaskStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.diffusion.process import Process

__all__ = ["MaskStrategy", "MaskingConfig", "choose_entries", "clean_value", "draw_mask", "n_masked"]


def n_masked(ratio: float, n_entries: int) -> int:
    """Number of masked entries among ``n_entries``."""
    return round(ratio * n_entries)


def choose_entries(
    shape: tuple[int, int],
    count: int,
    strategy: MaskStrategy,
    rng: np.random.Generator,
    value: NDArray[np.floating] | None = None,
) -> NDArray[np.bool_]:
    """Choose ``count`` of N * F measured entries.

    Parameters
    ----------
    shape
        (N, F).
    count
        Exact number of entries to choose.
    strategy
        See :class:`~alphastomics.config.MaskingConfig`.
    rng
        Source of every draw.
    value
        Clean values (N, F), which ``"structured"`` needs.
    """
    if not count:
        return np.zeros(shape, dtype=bool)
    if strategy == "block":
        return _blocks(shape, count, rng)
    if strategy == "random":
        score = rng.random(shape, dtype=np.float32)
    elif value is None:
        raise ValueError('strategy="structured" needs the values')
    else:
        score = np.abs(value)
    return _largest(score.reshape(-1), count, rng).reshape(shape)


def _largest(score: NDArray[np.floating], count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Choose exactly the ``count`` largest scores in linear time; ties are broken at random."""
    least = np.partition(score, len(score) - count)[len(score) - count]
    chosen: NDArray[np.bool_] = score > least
    tied = np.flatnonzero(score == least)
    chosen[rng.choice(tied, count - int(chosen.sum()), replace=False)] = True
    return chosen


def _blocks(shape: tuple[int, int], count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Choose one run of features per cell; widths differ by at most one and sum to ``count``."""
    n, n_features = shape
    width, extra = divmod(count, n)
    widths = width + (rng.permutation(n) < extra)
    start = np.floor(rng.random(n) * (n_features - widths + 1))
    feature = np.arange(n_features)
    chosen: NDArray[np.bool_] = (feature >= start[:, None]) & (feature < (start + widths)[:, None])
    return chosen


def draw_mask(
    value: Tensor,
    mask: Tensor,
    features: Tensor,
    *,
    ratio: float,
    strategy: MaskStrategy,
    rngs: Sequence[np.random.Generator | None],
) -> Tensor:
    """Draw the masked entries of every context of a batch, True where masked, (B, N, F).

    Each context draws from its own generator, for its own entries only, so that its draws depend neither on padding nor on
    the rest of the batch. Memory is a few numbers per entry of one context.

    Parameters
    ----------
    value
        Clean values (B, N, F); only ``"structured"`` reads them.
    mask
        Real cells (B, N).
    features
        Measured features (B, F).
    ratio
        Share r of the entries.
    strategy
        See :class:`~alphastomics.config.MaskingConfig`.
    rngs
        Generator of each context; None masks nothing in it.
    """
    masked = np.zeros(tuple(value.shape), dtype=bool)
    for i, rng in enumerate(rngs):
        if rng is None:
            continue
        entries = np.ix_(mask[i].cpu().numpy(), features[i].cpu().numpy())
        shape = len(entries[0]), entries[1].size
        clean = value[i].detach().float().cpu().numpy()[entries] if strategy == "structured" else None
        masked[i][entries] = choose_entries(shape, n_masked(ratio, shape[0] * shape[1]), strategy, rng, clean)
    return torch.from_numpy(masked).to(value.device)


def clean_value(process: Process, output: Tensor, z_t: Tensor, t: Tensor, masked: Tensor | None) -> Tensor:
    """Convert the network's ``output`` (B, N, F) to an estimate of the clean value, at timestep 1 where ``masked``.

    At any other timestep the estimate would contain the noisy value, which is hidden from the network.
    """
    x_0 = process.x0(output, z_t, t)
    return x_0 if masked is None else torch.where(masked, process.x0(output, z_t, torch.ones_like(t)), x_0)
