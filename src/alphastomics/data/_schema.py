"""The schema of a tissue: genes, frame, scales and keys, and the transforms between user units and network units."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from alphastomics.config import Frame  # noqa: TC001  read at run time
from alphastomics.data._values import DESCRIPTIONS, DETECTED, ValueKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

ResolvedTransform = Literal["log1p", "none"]  # of the settings, after "auto"

CLIP = 10.0
"""Network units of expression stay within ± this many standard deviations."""

_HALF = re.compile("[\ud800-\udfff]")
_NAMES = ("genes", "slices", "cell_types")
_NUMBERS = ("gene_mean", "gene_scale", "gene_share", "center")
_TUPLES = (*_NAMES, *_NUMBERS)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TissueSchema:
    r"""Description of a tissue, shared by registry, dataset and saved model.

    Expression :math:`x` in user units is transformed to network units
    :math:`(f(x) - \text{mean}_g) / \text{scale}_g`, clipped to ±10. Under ``"log1p"``,
    :math:`f(x) = \log(1 + x\,T / \ell)` with :math:`\ell` the library size of the cell over the measured genes and
    :math:`T` = `library_size` times the share of the measured genes; under ``"none"``, :math:`f(x) = x`.
    Positions are transformed to model units :math:`(x - \text{center}) / \text{scale}`.

    Parameters
    ----------
    genes
        Names of the genes, in the order of the network, length G.
    transform
        ``"log1p"`` or ``"none"``.
    library_size
        Median library size of the reference cells, the depth at which expression is compared; None under ``"none"``.
    gene_mean, gene_scale
        Mean and standard deviation of the transformed values over the reference cells, length G. The standard
        deviation is floored at a tenth of the median over varying genes, so that a gene that is constant in the
        reference has no huge values in a query.
    gene_share
        Share of each gene in the counts of the reference, length G; empty under ``"none"``. A query that lacks genes is
        scaled to the depth that the reference has on the shared genes.
    frame
        ``"slice"``: positions of a slice are defined up to rotation, reflection and translation. ``"shared"``: all slices
        are registered to one frame.
    n_dims
        2 or 3.
    scale
        User units per model unit: the root-mean-square radius of a slice divided by sqrt(`n_dims`), median over the
        reference slices (``"slice"``), or that of all reference cells about `center` (``"shared"``). Coordinates then
        have about unit variance per axis, as does the noise in which a variance-preserving diffusion ends.
    spacing
        Distance from a cell to its nearest neighbor, user units: median over the cells of a slice, then over the
        reference slices. Coincident cells do not count.
    center
        Origin of model units in user units, length `n_dims`; zeros for ``frame="slice"``, where each context is
        centered on its own cells.
    slices
        Names of the reference slices, sorted.
    cell_types
        Names of the cell types, sorted; their order gives the integer codes.
    position_key, slice_key, cell_type_key, layer, sequence_key
        Keys in ``obsm``, ``obs``, ``obs``, ``layers`` (None: ``X``) and ``obs``.
    value_kind
        Kind of the values of the reference, such as ``"counts"`` or ``"binary"``, with which that of a query is compared; None
        if it is not recorded.
    plane
        Number and value of a third column of the positions that is constant, which is left out of them; `n_dims` is then 2. With
        ``frame="slice"`` the column is constant within each slice, and the value is that of the first slice. None if there is none.

    Raises
    ------
    ValueError
        If the fields contradict one another.
    """

    genes: tuple[str, ...]
    transform: ResolvedTransform
    library_size: float | None
    gene_mean: tuple[float, ...]
    gene_scale: tuple[float, ...]
    gene_share: tuple[float, ...]
    frame: Frame
    n_dims: int
    scale: float
    spacing: float
    center: tuple[float, ...]
    slices: tuple[str, ...]
    cell_types: tuple[str, ...]
    position_key: str
    slice_key: str | None
    cell_type_key: str | None
    layer: str | None
    sequence_key: str | None
    value_kind: ValueKind | None = None
    plane: tuple[int, float] | None = None
    # Arrays of the tuples above: converting 20,000 floats on every batch would cost more than the batch.
    _mean: NDArray[np.float64] = field(init=False, compare=False)
    _scale: NDArray[np.float64] = field(init=False, compare=False)
    _share: NDArray[np.float64] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self._validate()
        for name, values in (("_mean", self.gene_mean), ("_scale", self.gene_scale), ("_share", self.gene_share)):
            object.__setattr__(self, name, np.asarray(values, dtype=np.float64))

    def _validate(self) -> None:
        n_genes = len(self.genes)
        log1p = self.transform == "log1p"
        rules = {
            "transform must be 'log1p' or 'none'": self.transform in ("log1p", "none"),
            "frame must be 'slice' or 'shared'": self.frame in ("slice", "shared"),
            "genes must be at least one and unique": 0 < n_genes == len(set(self.genes)),
            "gene_mean and gene_scale must have one value per gene": len(self.gene_mean)
            == len(self.gene_scale)
            == n_genes,
            "gene_scale must be positive": all(value > 0 for value in self.gene_scale),
            "gene_share must have one value per gene under 'log1p' and be empty under 'none'": len(self.gene_share)
            == n_genes * log1p,
            "library_size must be positive under 'log1p' and None under 'none'": self.library_size > 0
            if log1p and self.library_size is not None
            else not log1p and self.library_size is None,
            "n_dims must be 2 or 3": self.n_dims in (2, 3),
            "center must have n_dims values": len(self.center) == self.n_dims,
            "scale must be positive": self.scale > 0,
            "spacing must be positive": self.spacing > 0,
            "plane must be a column from 0 to 2 and its value, with n_dims=2": self.plane is None
            or (self.n_dims == 2 and self.plane[0] in (0, 1, 2)),
            "value_kind is unknown": self.value_kind is None or self.value_kind in DESCRIPTIONS,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"TissueSchema: {'; '.join(broken)}")

    def __repr__(self) -> str:
        return (
            f"TissueSchema({self.n_genes} genes, transform={self.transform!r}, {len(self.slices)} slices, "
            f"{self.n_dims}D, frame={self.frame!r}, scale={self.scale:.4g})"
        )

    @property
    def n_genes(self) -> int:
        """Number of genes G."""
        return len(self.genes)

    @property
    def n_columns(self) -> int:
        """Number of columns of positions in user units, the constant one included."""
        return self.n_dims if self.plane is None else 3

    @property
    def is_detected(self) -> bool:
        """Whether values are counts, log-normalized or binary, of which more are 0 if fewer molecules are detected."""
        return self.transform == "log1p" or self.value_kind in DETECTED

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types; floats keep every bit through JSON."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self) if spec.init}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TissueSchema:
        """Rebuild a schema from `to_dict`.

        Parameters
        ----------
        values
            One entry per field, tuples as lists.

        Returns
        -------
        The schema, equal to the one written.

        Raises
        ------
        ValueError
            If a field is missing or unknown, or of another type; the message names it.
        """
        names = {spec.name for spec in dataclasses.fields(cls) if spec.init}
        # Files of earlier versions record neither the kind of the values nor a plane.
        problems = {"missing": names - {"value_kind", "plane"} - set(values), "unknown": set(values) - names}
        if any(problems.values()):
            listed = "; ".join(f"{word}: {', '.join(sorted(keys))}" for word, keys in problems.items() if keys)
            raise ValueError(f"not a TissueSchema of this version ({listed})")
        if wrong := next((name for name, value in values.items() if not _is_of_type(name, value)), None):
            raise ValueError(f"TissueSchema: {wrong} has the wrong type or is not finite")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**fields)

    def target_library_size(self, measured: ArrayLike | None = None) -> float:
        """Library size of a median reference cell over the measured genes.

        Parameters
        ----------
        measured
            Mask over the genes, shape (G,); all of them when None.

        Returns
        -------
        Sum of user units per cell, to which expression is scaled before the logarithm.

        Raises
        ------
        ValueError
            Under ``transform="none"``, or if the measured genes have no counts in the reference.
        """
        if self.library_size is None:
            raise ValueError('the library size is undefined under transform="none"')
        if measured is None:
            return self.library_size
        mask = np.asarray(measured, dtype=bool)
        target = self.library_size if mask.all() else self.library_size * float(self._share[mask].sum())
        if target <= 0:
            raise ValueError("the measured genes have no counts in the reference; use other genes")
        return target

    def decode_expression(self, network: ArrayLike, library_size: ArrayLike | None = None) -> NDArray[np.float32]:
        """Transform expression from network units to user units.

        Parameters
        ----------
        network
            Network units, shape (k, G).
        library_size
            Library sizes to restore, shape (k,) or one number; the reference median when None. Ignored under
            ``transform="none"``.

        Returns
        -------
        User units, shape (k, G). Under ``"log1p"`` values are never negative. A gene that was not measured (0 in
        network units) has its reference mean.
        """
        values = np.asarray(network, dtype=np.float64) * self._scale + self._mean
        if self.transform == "log1p":
            values = np.maximum(np.expm1(values), 0.0)
            if library_size is not None:
                sizes = np.asarray(library_size, dtype=np.float64)
                values *= (sizes / self.target_library_size()).reshape(-1, 1)
        return values.astype(np.float32)

    def encode_position(self, position: ArrayLike) -> NDArray[np.float32]:
        """Transform positions from user units to model units, shape (..., D).

        With ``frame="slice"`` this only scales: a context is centered on its own cells when it is drawn.
        """
        model: NDArray[np.float64] = (np.asarray(position, dtype=np.float64) - np.asarray(self.center)) / self.scale
        return model.astype(np.float32)

    def decode_position(self, position: ArrayLike) -> NDArray[np.float64]:
        """Transform positions from model units to user units, shape (..., D)."""
        user: NDArray[np.float64] = np.asarray(position, dtype=np.float64) * self.scale + np.asarray(self.center)
        return user


def _is_of_type(name: str, value: Any) -> bool:
    """Whether a value that was read is of the type of its field."""
    if name in _TUPLES:
        kind = _is_text if name in _NAMES else _is_number
        return isinstance(value, (list, tuple)) and all(map(kind, value))
    if name in ("scale", "spacing"):
        return _is_number(value)
    if name == "library_size":
        return value is None or _is_number(value)
    if name == "plane":
        is_list = isinstance(value, (list, tuple)) and len(value) == 2
        return value is None or (is_list and isinstance(value[0], Integral) and all(map(_is_number, value)))
    if name == "n_dims":
        return isinstance(value, Integral) and not isinstance(value, bool)
    return _is_text(value) or (value is None and name not in ("transform", "frame", "position_key"))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    """Whether a value is text without lone surrogates, which JSON can escape and UTF-8 cannot encode."""
    return isinstance(value, str) and not _HALF.search(value)
