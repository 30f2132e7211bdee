"""Options of the two stages."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Split = Literal["cell", "slice", "animal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage1Options:
    """Options of stage 1: genes and keys of the input.

    Parameters
    ----------
    genes
        Names of the genes, in order; when None all genes of all files, in the order of first occurrence. Genes that a
        file lacks are unmeasured in its slices.
    layer
        Key of expression in ``layers``; ``X`` when None.
    position_key
        Key of positions in ``obsm``.
    position_is_3d
        Whether positions have three coordinates.
    z_spacing
        Distance between consecutive sections with 2D positions, in units of the positions. z is the number of the section
        times this distance; sections are sorted by the numbers in their names (2 before 10).
    slice_key
        Key of slices in ``obs``. When None, slices are ``obs["slice_id"]`` if it exists, else every file is one slice.
    animal_key
        Key of animals in ``obs``; unknown when None.
    cell_type_key
        Key of labels in ``obs``; no labels when None.
    log_normalize
        Whether values are counts, which are scaled to a common library size and log-transformed when they are read from
        the dataset. If False, values are not transformed.
    """

    genes: tuple[str, ...] | None = None
    layer: str | None = None
    position_key: str = "spatial"
    position_is_3d: bool = False
    z_spacing: float = 0.0
    slice_key: str | None = None
    animal_key: str | None = None
    cell_type_key: str | None = None
    log_normalize: bool = True

    def __post_init__(self) -> None:
        if self.genes is not None and len(set(self.genes)) < len(self.genes):
            repeated = sorted({gene for gene in self.genes if self.genes.count(gene) > 1})[:5]
            raise ValueError(f"the gene list names genes more than once: {', '.join(map(repr, repeated))}")
        if self.genes is not None and not self.genes:
            raise ValueError("the gene list is empty")
        if not math.isfinite(self.z_spacing):
            raise ValueError(f"z_spacing={self.z_spacing} must be a finite number")
        if self.z_spacing and self.position_is_3d:
            raise ValueError(
                "position_is_3d and z_spacing exclude each other: the height of a cell is its third coordinate, or that of its "
                "section; leave one out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        return values | {"genes": None if self.genes is None else list(self.genes)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage2Options:
    """Options of stage 2: how a dataset is split and scaled.

    Parameters
    ----------
    split
        Unit that is assigned to training, validation or test: ``"cell"``, ``"slice"`` or ``"animal"``.
    train_ratio, val_ratio
        Shares of these units; the rest is the test set.
    max_shard_size
        Largest number of cells in a file.
    frame
        ``"slice"`` or ``"shared"``, as in :class:`~alphastomics.data.TissueSchema`.
    scale
        Whether genes are standardized to mean 0 and variance 1 when they are read.
    normalize_position
        Whether the scale and center of :class:`~alphastomics.data.TissueSchema` are fitted to the positions. If False, the
        scale is 1 and the center 0. Files hold positions in units of the input in either case.
    scale_per_slice
        Whether genes are instead standardized among the cells of each slice, after the log transform. Files then hold
        these values, and a model is trained on them and samples them.
    seed
        Seed of the split.
    """

    split: Split = "cell"
    train_ratio: float = 0.8
    val_ratio: float = 0.1
    max_shard_size: int = 100_000
    frame: Literal["slice", "shared"] = "slice"
    scale: bool = True
    normalize_position: bool = True
    scale_per_slice: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in ("cell", "slice", "animal"):
            raise ValueError(f"split={self.split!r} is none of 'cell', 'slice', 'animal'")
        if not (
            0 < self.train_ratio <= 1 and 0 <= self.val_ratio < 1 and self.train_ratio + self.val_ratio <= 1 + 1e-9
        ):
            raise ValueError(
                f"train_ratio={self.train_ratio} and val_ratio={self.val_ratio} must lie in [0, 1], the first above 0, and "
                "sum to at most 1; the rest is the test set"
            )
        if self.scale_per_slice and not self.scale:
            raise ValueError("scale_per_slice=True needs scale=True")
        if self.max_shard_size < 1:
            raise ValueError(f"max_shard_size={self.max_shard_size} must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
