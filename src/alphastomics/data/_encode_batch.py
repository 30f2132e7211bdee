"""Network units of batches, see :mod:`alphastomics.data._encode`: the same formula on the device that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from alphastomics.data._encode import affine
from alphastomics.data._schema import CLIP

if TYPE_CHECKING:
    from alphastomics.data._batch import Batch, RawBatch
    from alphastomics.data._schema import TissueSchema


class BatchEncoder:
    """From user units to network units for batches, on the device where they are.

    Parameters
    ----------
    schema
        The tissue.
    """

    def __init__(self, schema: TissueSchema) -> None:
        self._log1p = schema.transform == "log1p"
        self._affine = tuple(torch.from_numpy(values) for values in affine(schema))

    def __call__(self, raw: RawBatch) -> Batch:
        """Transform a batch and change it as its contexts ask for; the values of ``raw`` are overwritten."""
        batch, real = raw.batch, raw.batch.mask[..., None]
        network = self._transform(batch.expression, raw.factor)
        target = batch.target
        if target.shape[-1]:
            clean = network if raw.target_factor is None else self._transform(target, raw.target_factor)
            target = clean * (real & batch.present[:, None])
        expression = network.mul_(raw.gain[:, None]).add_(raw.shift[:, None]).mul_(real)
        return batch._replace(expression=expression, target=target)

    def _transform(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        self._affine = slope, offset = tuple(each.to(values.device) for each in self._affine)
        if self._log1p:
            values.mul_(factor[..., None]).log1p_()
        return values.mul_(slope).add_(offset).clamp_(-CLIP, CLIP)
