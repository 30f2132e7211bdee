r"""The forward process of training: what the network receives for a batch of contexts.

.. math:: z = \alpha(t)\, x + \sigma(t)\, \varepsilon, \qquad \varepsilon \sim \mathcal N(0, I)

for expression x with the timesteps of :mod:`alphastomics.train.timesteps`. Positions are clean or absent. Some entries of
expression are observed while the others are sampled, and entries may be masked.

With ``frame="slice"`` the positions of a context are known up to a rigid motion. Where positions are an input, the true positions
are first aligned to the conditional mean that the network predicts without them, so that all inputs are in one frame, the
*canonical frame*; see ``docs/theory.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device

from alphastomics.diffusion import Process
from alphastomics.diffusion.deformation import Deformation, deform
from alphastomics.diffusion.geometry import center, kabsch, rotate
from alphastomics.train.draws import TRAINING, VALIDATION, DrawContexts
from alphastomics.train.timesteps import Masks, draw_masks

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import PlanConfig
    from alphastomics.data import Batch
    from alphastomics.data._draws import Draws
    from alphastomics.diffusion import MaskingConfig, Mode
    from alphastomics.nn import Denoiser


FRAME_FIELDS = (
    "expression",
    "position",
    "mask",
    "sequence",
    "cell_type",
)  # of a batch that determine the canonical frame
FRAME_CELLS = 128  # of a context, from which the canonical frame is estimated


class Noised(NamedTuple):
    """A batch with noise: clean values, noisy expression, timesteps and masks.

    Attributes
    ----------
    x_expr, x_pos
        Clean expression (B, N, G) and positions (B, N, D); those that are an input are in the canonical frame.
    z_expr
        Noisy expression (B, N, G).
    t_expr, t_pos
        Timesteps (B,).
    measured
        Genes (B, G) that the input has.
    observed
        Observed entries (B, N, G) of expression, 1 or 0; None if expression is not sampled.
    masks
        Masked entries.
    """

    x_expr: Tensor
    x_pos: Tensor
    z_expr: Tensor
    t_expr: Tensor
    t_pos: Tensor
    measured: Tensor
    observed: Tensor | None
    masks: Masks


class ForwardProcess:
    """Noise, frame, observed and masked entries of the inputs of a :class:`~alphastomics.nn.Denoiser` in training.

    Parameters
    ----------
    module
        The denoiser, which predicts the canonical frame.
    config
        Settings of the training.
    mode
        What the denoiser is trained to sample.
    diffusion
        Diffusion process of expression.
    shared_frame
        Whether all slices are registered to one frame; positions are then neither aligned nor centered.
    masking
        Which entries are masked in training; None: none.

    Attributes
    ----------
    weights_sharded
        Whether the weights are sharded; all processes must then call the network equally often.

    Raises
    ------
    ValueError
        If ``masking`` is given and the denoiser has no mask tokens.
    """

    def __init__(
        self,
        module: Denoiser,
        config: PlanConfig,
        *,
        mode: Mode,
        diffusion: Process | None,
        shared_frame: bool,
        masking: MaskingConfig | None,
    ) -> None:
        if masking is not None and not module.config.mask_tokens:
            raise ValueError("masking requires a denoiser with mask_tokens=True; pass masking=None")
        self.module, self.config = module, config
        self.mode: Mode = mode
        self.diffusion = diffusion or Process()
        self.shared_frame, self.masking = shared_frame, masking
        self.weights_sharded = False

    def drawing(self, purpose: int) -> DrawContexts:
        """What draws the random numbers of a batch, for the loaders."""
        types = bool(self.module.config.n_cell_types)
        return DrawContexts(mode=self.mode, config=self.config, cell_types=types, purpose=purpose)

    def draw(self, batch: Batch, purpose: int = TRAINING) -> Draws:
        """The random numbers of a batch: those of its loader, or new ones if it has none, on its device."""
        if batch.draws is not None:
            return batch.draws
        return move_data_to_device(self.drawing(purpose)(batch), batch.position.device)

    def canonical(self, batch: Batch, x_pos: Tensor) -> Tensor:
        """Positions ``x_pos`` (B, N, D) rotated or reflected into the canonical frame."""
        mask = batch.mask
        # The cells are spread evenly over the real cells of a context, which come first, whatever the padding.
        n_cells = mask.sum(1, keepdim=True)
        number = torch.arange(min(FRAME_CELLS, mask.shape[1]), device=mask.device) * (-(-n_cells // FRAME_CELLS))
        context, subset_mask = torch.arange(len(mask), device=mask.device)[:, None], number < n_cells
        subset = context, number.clamp_max(mask.shape[1] - 1)
        training = self.module.training
        self.module.eval()
        with torch.no_grad():
            mean = self.conditional_mean(
                batch.expression[subset],
                subset_mask,
                sequence_of(batch.sequence[subset]),
                self.cell_types(batch.cell_type[subset]),
            )
        self.module.train(training)
        subset_position = center(batch.position[subset], subset_mask)
        rotation = kabsch(subset_position, mean, subset_mask.to(mean.dtype))
        return rotate(x_pos, rotation)

    def centered(self, batch: Batch, t_pos: Tensor) -> Tensor:
        """Positions relative to the center of the context, or to that of the slice where they are an input."""
        about_slice = (batch.position - batch.center[:, None]) * batch.mask[..., None]
        return torch.where((t_pos < 1)[:, None, None], about_slice, center(batch.position, batch.mask))

    def observed_values(self, batch: Batch, x_expr: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ``observed`` entries of expression are measured, 1 or 0, and their values, both (B, N, G).

        Completely observed cells keep their values. Partly observed cells are thinned and lack genes like any augmented input,
        because the network could recognize a cell by its exact values and memorize it.
        """
        observed = observed.to(x_expr.dtype)  # operations on Booleans take many times as long on a CPU
        whole = (observed.sum(-1, keepdim=True) == observed.shape[-1]).to(x_expr.dtype)
        thinned = batch.expression * (1 - batch.dropout).sqrt()[:, None, None]
        present = batch.present.to(x_expr.dtype)[:, None]
        measured = torch.lerp(present * batch.measured[:, None], present, whole)
        return observed * measured, torch.lerp(thinned, x_expr, whole)

    def cell_types(self, cell_type: Tensor) -> Tensor | None:
        """The cell types (B, N); None if the network does not use them."""
        return cell_type if self.module.config.n_cell_types else None

    def conditional_mean(
        self, expression: Tensor, mask: Tensor, sequence: Tensor | None = None, cell_type: Tensor | None = None
    ) -> Tensor:
        """Conditional mean of the positions (B, N, D) given expression (B, N, G)."""
        zero, one = expression.new_zeros(len(expression)), expression.new_ones(len(expression))
        output = self.module(
            expression, None, zero, one, mask, predict=("position",), cell_type=cell_type, sequence=sequence
        )
        return self.predicted_position(output.position, mask)

    def predicted_position(self, output: Tensor, mask: Tensor) -> Tensor:
        """Positions that the network predicts, centered unless the frame is shared."""
        return output.float() if self.shared_frame else center(output.float(), mask)

    def noised(self, batch: Batch, draws: Draws, purpose: int, step: int = 0) -> Noised:
        """Add noise to expression, and mask entries as configured for this step of the optimizer."""
        t_expr, t_pos = draws.t_expr, draws.t_pos
        x_pos = self.moved_positions(batch, draws)
        x_expr, values, measured, observed = batch.expression, batch.expression, batch.measured, None
        if self.mode != "expr_to_pos":
            sampled = (t_expr > 0)[:, None]
            x_expr = torch.where(sampled[..., None], batch.target, x_expr)
            measured = measured | (sampled & batch.present)
            observed, values = self.observed_values(batch, x_expr, draws.observed)
            z_expr = self.diffusion.noise(x_expr, t_expr, draws.noise) * measured.unsqueeze(1)
            z_expr = torch.lerp(z_expr, values, observed)
        else:
            z_expr = x_expr * measured.unsqueeze(1)
        masks = Masks()
        if self.masking is not None and purpose != VALIDATION:
            share = self.masking.share(step)
            masks = draw_masks(self.masking, batch, x_expr, x_pos, measured, draws, share=share)
        if observed is not None and masks.expression is not None:
            observed = observed * ~masks.expression  # a masked entry is not observed
        return Noised(x_expr, x_pos, z_expr, t_expr, t_pos, measured, observed, masks)

    def moved_positions(self, batch: Batch, draws: Draws) -> Tensor:
        """Positions (B, N, D); those that are an input are in the canonical frame and deformed.

        Positions that are absent stay as they are, so that no loss depends on the rest of the batch.
        """
        if self.shared_frame:
            return batch.position
        x, given = self.centered(batch, draws.t_pos), draws.given
        if self.weights_sharded:  # all processes must evaluate the network
            canonical = self.canonical(batch, x).index_select(0, given)
        elif len(given):
            part = batch._replace(**{name: getattr(batch, name).index_select(0, given) for name in FRAME_FIELDS})
            canonical = self.canonical(part, x.index_select(0, given))
        else:
            return x
        if draws.deformation is not None:
            canonical = deform(canonical, Deformation(*draws.deformation))
        return x.index_copy(0, given, canonical)


def sequence_of(column: Tensor) -> Tensor | None:
    """Sequence index (B, N) of the cells from the column (B, N, S) of a batch; None if S = 0."""
    return column[..., 0] if column.shape[-1] else None
