r"""Synthetic chains of residues: a folded backbone in closed form, and expression that depends on the structure alone.

A backbone consists of parallel helices and strands that arcs connect. Lengths are in Å. Residue i of the L residues of a
segment with direction a lies at

.. math::

    m + 1.5\, u_i\, a + 2.3\, (\cos \tfrac{5 \pi}{9} u_i\; n_1 + \sin \tfrac{5 \pi}{9} u_i\; n_2)
    \quad \text{(helix)}, \qquad
    m + 3.3\, u_i\, a + 0.94\, (-1)^i\, n_2 \quad \text{(strand)}, \qquad u_i = i - \tfrac{L - 1}{2},

with :math:`(n_1, n_2, a)` right-handed, so that every helix is right-handed (Pauling, Corey and Branson 1951) and
consecutive points are 3.8 Å apart. The centers m lie on a line along :math:`n_1`, at distances that depend on the kinds of the
two neighboring segments; directions alternate, and each is turned by 20 degrees from the previous one. A loop is an arc of m
equal chords c = 3.8 over the gap g between two ends,

.. math::

    \frac{g}{c} = \frac{\sin (m \varphi / 2)}{\sin (\varphi / 2)}, \qquad 0 < \varphi < \frac{2 \pi}{m},

with the fewest chords whose total length is at least 1.5 g, and at least three. The kinds and lengths of the segments
determine the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse
from scipy.optimize import brentq
from scipy.spatial.transform import Rotation

from alphastomics._checks import check_counts, check_seed
from alphastomics._keys import SLICE, SPATIAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Kind = Literal["helix", "strand"]
STRUCTURES = ("helix", "strand", "loop")
BOND = 3.8  # between consecutive alpha carbons
HELIX_RISE, HELIX_TURN, HELIX_RADIUS = 1.5, np.deg2rad(100), 2.3
STRAND_RISE = 3.3
PLEAT = np.sqrt(BOND**2 - STRAND_RISE**2) / 2  # 0.94
HALF_WIDTH = {"helix": 5.0, "strand": 2.4}  # helices are 10 apart, strands of a sheet 4.8
TWIST = np.deg2rad(20)
SLACK, MIN_CHORDS = 1.5, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A helix or a strand of ``length`` residues."""

    kind: Kind
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """Positions (n, 3) of residues in order, in Å, and the index (n,) of their structures in ``STRUCTURES``."""

    points: Array
    structure: NDArray[np.intp]


def lay_backbone(segments: Sequence[Segment]) -> Backbone:
    """Lay the segments in space and connect them."""
    points: list[Array] = []
    structure: list[int] = []
    middle = 0.0
    for k, segment in enumerate(segments):
        if k:
            middle += HALF_WIDTH[segments[k - 1].kind] + HALF_WIDTH[segment.kind]
        direction = (-1) ** k * np.array([0.0, np.sin(k * TWIST), np.cos(k * TWIST)])
        points_of_segment = _segment(segment, direction) + [middle, 0.0, 0.0]
        if k:
            loop = _loop(points[-1][-1], points_of_segment[0], onward=-direction)
            points.append(loop)
            structure += [STRUCTURES.index("loop")] * len(loop)
        points.append(points_of_segment)
        structure += [STRUCTURES.index(segment.kind)] * segment.length
    return Backbone(points=np.concatenate(points), structure=np.array(structure))


def _segment(segment: Segment, direction: Array) -> Array:
    """Points (L, 3) of a segment centered at the origin."""
    n_1 = np.array([1.0, 0.0, 0.0])
    n_2 = np.cross(direction, n_1)
    place = np.arange(segment.length)
    u = (place - (segment.length - 1) / 2)[:, None]
    if segment.kind == "strand":
        return STRAND_RISE * u * direction + PLEAT * ((-1.0) ** place)[:, None] * n_2
    around = np.cos(HELIX_TURN * u) * n_1 + np.sin(HELIX_TURN * u) * n_2
    return HELIX_RISE * u * direction + HELIX_RADIUS * around


def _loop(start: Array, end: Array, *, onward: Array) -> Array:
    """Points strictly between two ends, on an arc that leaves the line between them in direction ``onward``."""
    gap = float(np.linalg.norm(end - start))
    along = (end - start) / gap
    normal = onward - (onward @ along) * along
    normal /= np.linalg.norm(normal)
    n_chords = max(MIN_CHORDS, ceil(SLACK * gap / BOND))

    def excess(angle: float) -> float:
        return np.sin(n_chords * angle / 2) / np.sin(angle / 2) - gap / BOND

    angle = brentq(excess, 1e-6, 2 * np.pi / n_chords)
    heading = angle * (np.arange(n_chords - 1) - (n_chords - 1) / 2)  # angle of each chord but the last to ``along``
    steps = np.cos(heading)[:, None] * along - np.sin(heading)[:, None] * normal
    return start + BOND * steps.cumsum(0)


RESIDUE, STRUCTURE = "residue", "structure"  # columns of obs
LENGTHS = {"helix": (8, 16), "strand": (5, 8)}
_SHIFT = 50.0  # Å

# Frequency of an amino acid in helices, strands and turns, relative to its overall frequency.
# Chou and Fasman 1978, Annu. Rev. Biochem. 47, 251.
PROPENSITIES = {
    "Ala": (1.42, 0.83, 0.66), "Arg": (0.98, 0.93, 0.95), "Asn": (0.67, 0.89, 1.56), "Asp": (1.01, 0.54, 1.46),
    "Cys": (0.70, 1.19, 1.19), "Gln": (1.11, 1.10, 0.98), "Glu": (1.51, 0.37, 0.74), "Gly": (0.57, 0.75, 1.56),
    "His": (1.00, 0.87, 0.95), "Ile": (1.08, 1.60, 0.47), "Leu": (1.21, 1.30, 0.59), "Lys": (1.16, 0.74, 1.01),
    "Met": (1.45, 1.05, 0.60), "Phe": (1.13, 1.38, 0.60), "Pro": (0.57, 0.55, 1.52), "Ser": (0.77, 0.75, 1.43),
    "Thr": (0.83, 1.19, 0.96), "Trp": (1.08, 1.37, 0.96), "Tyr": (0.69, 1.47, 1.14), "Val": (1.06, 1.70, 0.50),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chain:
    counts: NDArray[np.float32]
    spatial: Array
    structure: NDArray[np.intp]
    residue: NDArray[np.intp]


def synthetic_chains(
    *,
    n_chains: int = 64,
    n_segments: tuple[int, int] = (3, 6),
    depth: int = 50,
    noise: float = 0.1,
    rotate: bool = True,
    random_state: int = 0,
) -> ad.AnnData:
    r"""Generate folded chains of residues in closed form: example data for cells that have an order.

    A chain is a sequence of helices (8 to 16 residues) and strands (5 to 8), each kind with probability one half, connected
    by loops. They lie side by side with their centers on a line and alternating directions, each turned by 20 degrees from
    the previous one: helices 10 Å apart, strands 4.8 Å, a helix and a strand 7.4 Å. All helices are right-handed, and all
    turns have the same sense. Apart from noise, the kinds and lengths of the segments in order determine the fold, so that a
    network can predict it from the expression and the order of all residues, but not without the order: the counts of
    residue i in structure :math:`s_i` are those of a profile of aligned sequences,

    .. math::

        x_i \sim \mathrm{Multinomial}(\mathrm{depth}, p_{s_i}), \qquad p_{sa} \propto P_s(a),

    with the propensities P of the amino acids a (Chou and Fasman 1978), independent of the place of the residue in the chain.

    Parameters
    ----------
    n_chains
        Number of chains, named ``chain_0``, ``chain_1``, ….
    n_segments
        Fewest and most helices and strands of a chain.
    depth
        Number of sequences in a profile; with 1, ``X`` contains one amino acid for each residue.
    noise
        Standard deviation of the positions along each axis, in Å.
    rotate
        Whether to apply a random rotation (no reflection) and shift to every chain. Otherwise the first segment of every
        chain is centered at the origin along the third axis, and the others follow along the first axis.
    random_state
        Seed. Chain *k* does not depend on the number of chains.

    Returns
    -------
    An :class:`~anndata.AnnData` with the residues of each chain in random order, and

    - ``X``: counts of the 20 amino acids, CSR float32;
    - ``obs["slice_id"]``: the chain; ``obs["structure"]``: ``helix``, ``strand`` or ``loop``, categorical;
    - ``obs["residue"]``: place in the chain, from 0;
    - ``obsm["spatial"]``: positions of alpha carbons in Å, (n, 3), consecutive ones 3.8 apart before the noise;
    - ``uns["source"]``: parameters.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check_counts(n_chains=n_chains, depth=depth)
    if np.shape(n_segments) != (2,):
        raise ValueError(f"n_segments={n_segments} must be (minimum, maximum)")
    fewest, most = n_segments
    check_counts(**{"n_segments[0]": fewest, "n_segments[1]": most})
    if most < fewest:
        raise ValueError(f"n_segments={n_segments} must be (minimum, maximum)")
    if not 0 <= noise < np.inf:
        raise ValueError(f"noise={noise} must be finite and not negative")
    seed = check_seed(random_state)
    chains = []
    for k in range(n_chains):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(k,)))
        chains.append(_draw_chain((fewest, most), depth, noise, rotate, rng))
    adata = _join(chains)
    params = {"n_chains": n_chains, "n_segments": list(n_segments), "depth": depth, "noise": noise, "rotate": rotate}
    params["random_state"] = int(random_state)
    adata.uns["source"] = {"name": "synthetic_chains", "units": "angstrom", "X": "counts", "params": params}
    return adata


def _draw_chain(
    n_segments: tuple[int, int], depth: int, noise: float, rotate: bool, rng: np.random.Generator
) -> _Chain:
    """Draw a chain with its residues in random order."""
    backbone = _draw_backbone(n_segments, rng)
    n = len(backbone.structure)
    propensity = np.array(list(PROPENSITIES.values())).T
    counts = rng.multinomial(depth, (propensity / propensity.sum(1, keepdims=True))[backbone.structure])
    points = backbone.points + noise * rng.normal(size=(n, 3))
    rotation, shift = Rotation.random(random_state=rng), rng.uniform(-_SHIFT, _SHIFT, size=3)
    if rotate:
        points = rotation.apply(points) + shift
    residue = rng.permutation(n)
    return _Chain(
        counts=counts[residue].astype(np.float32),
        spatial=points[residue],
        structure=backbone.structure[residue],
        residue=residue,
    )


def _draw_backbone(n_segments: tuple[int, int], rng: np.random.Generator) -> Backbone:
    """Draw a backbone of random segments."""
    segments = []
    for _ in range(rng.integers(n_segments[0], n_segments[1], endpoint=True)):
        kind: Kind = "helix" if rng.random() < 0.5 else "strand"
        segments.append(Segment(kind=kind, length=int(rng.integers(*LENGTHS[kind], endpoint=True))))
    return lay_backbone(segments)


def _join(chains: list[_Chain]) -> ad.AnnData:
    sizes = [len(chain.residue) for chain in chains]
    names = [f"chain_{k}" for k in range(len(chains))]
    residue = np.concatenate([chain.residue for chain in chains])
    number = np.repeat(np.arange(len(chains)), sizes)
    obs = pd.DataFrame(
        {
            SLICE: pd.Categorical.from_codes(number, categories=names),
            RESIDUE: residue,
            STRUCTURE: pd.Categorical.from_codes(
                np.concatenate([chain.structure for chain in chains]), categories=list(STRUCTURES)
            ),
        },
        index=[f"{names[k]}_residue_{i}" for k, i in zip(number, residue, strict=True)],
    )
    return ad.AnnData(
        X=sparse.csr_matrix(np.concatenate([chain.counts for chain in chains])),
        obs=obs,
        var=pd.DataFrame(index=list(PROPENSITIES)),
        obsm={SPATIAL: np.concatenate([chain.spatial for chain in chains])},
    )
