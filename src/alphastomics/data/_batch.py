"""Input of the network: a context, and a batch of padded contexts, before and after the transform of expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data._draws import Draws
    from alphastomics.data._encode import Encoder

# Fields of a context with a value for each cell, which are padded in a batch.
CELL_FIELDS = ("expression", "position", "target", "local_density", "sequence", "cell_type", "rows")


class Context(NamedTuple):
    """N cells of one slice.

    Attributes
    ----------
    expression
        Network units, shape (N, G), float32.
    position
        Model units, shape (N, D), float32; centered on these cells when ``frame="slice"``; NaN when the source has no
        positions.
    measured
        Genes that are measured and not dropped, shape (G,).
    present
        Genes that are measured, shape (G,).
    dropout
        Share r of all genes that are not in `measured`; `expression` contains a factor 1 / sqrt(1 - r).
    target
        Expression without augmentation, network units, shape (N, G), float32; shape (N, 0) unless requested.
    local_density
        Local density around each cell, shape (N, K), float32, see :mod:`alphastomics.data._local_density`; 0 where a training
        step does not use it, shape (N, 0) unless requested.
    sequence
        Index of the cells in the order of the schema, from 0, shape (N, 1), float32; shape (N, 0) without an order.
    cell_type
        Numbers of the cell types in the schema, from 1, 0 where unknown, shape (N,), int64.
    center
        Center of the whole slice in the frame of `position`, shape (D,), float32.
    slice_index
        Number of the slice in the source.
    rows
        Row numbers of the cells in the source, shape (N,), int64; with ``kind="patch"`` the center comes first.
    key
        (seed, epoch, index), int64, which seeds further random draws for this context.
    """

    expression: NDArray[np.float32]
    position: NDArray[np.float32]
    measured: NDArray[np.bool_]
    present: NDArray[np.bool_]
    dropout: float
    target: NDArray[np.float32]
    local_density: NDArray[np.float32]
    sequence: NDArray[np.float32]
    cell_type: NDArray[np.int64]
    center: NDArray[np.float32]
    slice_index: int
    rows: NDArray[np.int64]
    key: NDArray[np.int64]


class RawContext(NamedTuple):
    """A context before its expression is transformed.

    Attributes
    ----------
    context
        The context, with `expression` and `target` in user units.
    factor, target_factor
        Factors of `expression` and `target` before the logarithm, (N,); `target_factor` is None where `target` is
        `expression` itself or empty.
    gain, shift
        Network units are multiplied by `gain`, then `shift` is added, (G,); both are 0 for genes that the context lacks.
    """

    context: Context
    factor: NDArray[np.float32]
    target_factor: NDArray[np.float32] | None
    gain: NDArray[np.float32]
    shift: NDArray[np.float32]


class Batch(NamedTuple):
    """B contexts, padded to the longest of them.

    The fields of :class:`Context` have an axis of length B in front. They are 0 where padded, and `rows` is -1.

    Attributes
    ----------
    mask
        True for real cells, shape (B, N).
    draws
        Random numbers of the training step; None if they are drawn in the step.
    """

    expression: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor
    measured: torch.Tensor
    present: torch.Tensor
    dropout: torch.Tensor
    target: torch.Tensor
    local_density: torch.Tensor
    sequence: torch.Tensor
    cell_type: torch.Tensor
    center: torch.Tensor
    slice_index: torch.Tensor
    rows: torch.Tensor
    key: torch.Tensor
    draws: Draws | None = None


class RawBatch(NamedTuple):
    """A batch before its expression is transformed; see :meth:`ContextLoader.encode`.

    Attributes
    ----------
    batch
        The batch, with `expression` and `target` in user units.
    factor, target_factor
        Factors of `expression` and `target` before the logarithm, (B, N); `target_factor` is None where `target` is
        `expression` itself or empty.
    gain, shift
        Network units are multiplied by `gain`, then `shift` is added, (B, G).
    """

    batch: Batch
    factor: torch.Tensor
    target_factor: torch.Tensor | None
    gain: torch.Tensor
    shift: torch.Tensor


class DrawFunction(Protocol):
    """Function that draws the random numbers of a training step."""

    def __call__(self, batch: Batch) -> Draws:
        """Draw for the contexts of a batch."""

    def given(self, key: NDArray[np.int64]) -> bool:
        """Whether positions, and with them local density, are an input in the context with a ``key``."""


def collate_raw(contexts: Sequence[RawContext], draw: DrawFunction | None) -> RawBatch:
    """Pad contexts to the longest and stack them, as :func:`collate` does, and ``draw`` the random numbers of a training step."""
    raw = _stack_one(contexts[0]) if len(contexts) == 1 and len(contexts[0].factor) else _stack(contexts)
    return raw if draw is None else raw._replace(batch=raw.batch._replace(draws=draw(raw.batch)))


def _stack(contexts: Sequence[RawContext]) -> RawBatch:
    longest = max(1, *(len(each.factor) for each in contexts))
    factor, target_factor = np.ones((2, len(contexts), longest), dtype=np.float32)
    for i, each in enumerate(contexts):
        factor[i, : len(each.factor)] = each.factor
        target_factor[i, : len(each.factor)] = each.factor if each.target_factor is None else each.target_factor
    has_target_factor = any(each.target_factor is not None for each in contexts)
    return RawBatch(
        batch=collate([each.context for each in contexts]),
        factor=torch.from_numpy(factor),
        target_factor=torch.from_numpy(target_factor) if has_target_factor else None,
        gain=torch.from_numpy(np.stack([each.gain for each in contexts])),
        shift=torch.from_numpy(np.stack([each.shift for each in contexts])),
    )


def empty_context(
    n_genes: int, n_dims: int, n_ranks: int, key: NDArray[np.int64], *, sequence: bool = False
) -> Context:
    """A context without cells, which pads the epochs of all processes to the same number of batches.

    ``n_ranks`` is the width of `local_density`, 0 without targets; ``sequence`` is whether cells have an order.
    """
    none = np.empty((0, n_dims), dtype=np.float32)
    return Context(
        expression=np.empty((0, n_genes), dtype=np.float32),
        position=none,
        measured=np.zeros(n_genes, dtype=bool),
        present=np.zeros(n_genes, dtype=bool),
        dropout=0.0,
        target=np.empty((0, n_genes if n_ranks else 0), dtype=np.float32),
        local_density=np.empty((0, n_ranks), dtype=np.float32),
        sequence=np.empty((0, int(sequence)), dtype=np.float32),
        cell_type=np.empty(0, dtype=np.int64),
        center=np.zeros(n_dims, dtype=np.float32),
        slice_index=0,
        rows=np.empty(0, dtype=np.int64),
        key=key,
    )


def collate(contexts: Sequence[Context]) -> Batch:
    """Pad contexts to the longest and stack them.

    Parameters
    ----------
    contexts
        At least one context.

    Returns
    -------
    The batch, contexts in the given order.
    """
    longest = max(1, *(len(context.rows) for context in contexts))

    def stack(name: str) -> torch.Tensor:
        """Pad and stack one field, with numpy: torch would start additional threads in the threads of a loader."""
        parts = [_as_array(getattr(context, name)) for context in contexts]
        if name not in CELL_FIELDS:
            return torch.from_numpy(np.stack(parts))
        padding = -1 if name == "rows" else 0
        stacked = np.full((len(parts), longest, *parts[0].shape[1:]), padding, dtype=parts[0].dtype)
        for row, part in zip(stacked, parts, strict=True):
            row[: len(part)] = part
        return torch.from_numpy(stacked)

    fields: dict[str, Any] = {name: stack(name) for name in Context._fields}
    return Batch(**fields, mask=fields["rows"] >= 0)


def _stack_one(raw: RawContext) -> RawBatch:
    """A batch of one context, without a copy of its cells."""

    def one(value: Any) -> torch.Tensor:
        return torch.from_numpy(_as_array(value)[None])

    fields: dict[str, Any] = {name: one(value) for name, value in raw.context._asdict().items()}
    batch = Batch(**fields, mask=one(np.ones(len(raw.context.rows), dtype=np.bool_)))
    target_factor = None if raw.target_factor is None else one(raw.target_factor)
    return RawBatch(batch, one(raw.factor), target_factor, one(raw.gain), one(raw.shift))


def _as_array(value: Any) -> NDArray[Any]:
    """A field of a context, of which numbers with decimals become float32."""
    return np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)


def encode_batch(raw: RawBatch, encoder: Encoder) -> Batch:
    """Transform a batch to network units and apply gains and shifts; the values of ``raw`` are overwritten."""
    batch, real = raw.batch, raw.batch.mask[..., None]
    network = encoder.encode_tensor(batch.expression, raw.factor)
    target = batch.target
    if target.shape[-1]:
        clean = network if raw.target_factor is None else encoder.encode_tensor(target, raw.target_factor)
        target = clean * real * batch.present[:, None]  # on a CPU, broadcasting `&` to (B, N, G) takes longer
    expression = network.mul_(raw.gain[:, None]).add_(raw.shift[:, None]).mul_(real)
    return batch._replace(expression=expression, target=target)
