"""Options of the two stages."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Split = Literal["cell", "slice", "animal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage1Options:
    """Keys of the input.

    Parameters
    ----------
    genes
        Names of the genes, in order; every gene that any file has when None, in the order in which they are met. Genes that
        a file lacks count as unmeasured there.
    layer
        Where expression is: a layer, or ``X`` when None.
    position_key
        Where positions are in ``obsm``.
    position_is_3d
        Whether these have three coordinates.
    z_spacing
        Distance between sections of two coordinates, in their units: z is the number of the section, in the order of
        the numbers in their names (2 before 10), times this.
    slice_key
        Where the slice of a cell is in ``obs``; None takes ``obs["slice_id"]`` if it is there, else every file is a slice.
    animal_key
        Where the animal of a cell is in ``obs``, if anywhere.
    cell_type_key
        Where labels are in ``obs``, if anywhere.
    log_normalize
        Whether values are counts, which are brought to one library size and to logarithms when they are read from the
        dataset. If not, they are taken as they are.
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
    """How a dataset is divided and scaled.

    Parameters
    ----------
    split
        What stays together in training, validation or test: nothing (``"cell"``), slices, or animals.
    train_ratio, val_ratio
        Shares of the cells, slices or animals; the rest is the test set.
    max_shard_size
        Largest number of cells in a file.
    frame
        ``"slice"`` or ``"shared"``, as in :class:`~alphastomics.data.TissueSchema`.
    scale
        Whether genes are brought to unit variance when they are read.
    normalize_position
        Whether the network sees positions in units of the radius of a slice, as
        :class:`~alphastomics.data.TissueSchema` has it. If not, its scale is 1 and its center 0. Files hold the units of the
        input in either case.
    scale_per_slice
        Whether every gene of every slice is brought to mean 0 and variance 1 among the cells of that slice instead, after
        logarithms. That is what files then hold, and what a model sees and samples.
    seed
        Decides the split.
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
