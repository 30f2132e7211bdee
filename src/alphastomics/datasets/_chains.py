"""Synthetic chains: residues in order, whose expression tells their structure and not their place."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse
from scipy.spatial.transform import Rotation

from alphastomics._keys import SLICE, SPATIAL

from ._backbone import STRUCTURES, Segment, lay_backbone

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._backbone import Backbone, Kind

    Array = NDArray[np.float64]

__all__ = ["synthetic_chains"]

RESIDUE, STRUCTURE = "residue", "structure"  # columns of obs
LENGTHS = {"helix": (8, 16), "strand": (5, 8)}
_SHIFT = 50.0  # Å

# How often an amino acid is found in helices, strands and turns, over how often it is found at all.
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
    r"""Generate chains of residues, folded by formula: the example for cells that have an order.

    A chain is a row of helices (8 to 16 residues) and strands (5 to 8), each kind with probability one half, connected
    by loops. They lie side by side with their middles on a line and alternating directions, turned by 20 degrees each:
    helices 10 Å apart, strands 4.8 Å, a helix and a strand 7.4 Å. All helices are right-handed, and the twist is that of
    one hand. The kinds and lengths of the segments in their order decide the fold, noise apart, so that a network that reads
    the expression of all residues and their order can know it. A network that lacks the order cannot: the counts of residue i
    in structure :math:`s_i` are those of a profile of aligned sequences,

    .. math::

        x_i \sim \mathrm{Multinomial}(\mathrm{depth}, p_{s_i}), \qquad p_{sa} \propto P_s(a),

    with the propensities P of the amino acids a (Chou and Fasman 1978), wherever the residue is in the chain.

    Parameters
    ----------
    n_chains
        Number of chains, named ``chain_0``, ``chain_1``, ….
    n_segments
        Fewest and most helices and strands of a chain.
    depth
        Number of sequences in a profile; with 1, ``X`` holds one amino acid for each residue.
    noise
        Standard deviation of the positions along each axis, in Å.
    rotate
        Give every chain its own frame by a random rotation (no reflection) and shift. Otherwise all chains begin with a
        segment about the origin, along the third axis, and go on along the first.
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
        If an argument is out of its range.
    """
    _check(n_chains=n_chains, depth=depth)
    fewest, most = n_segments
    _check(**{"the least of n_segments": fewest})
    if most < fewest:
        raise ValueError(f"n_segments={n_segments} must be the fewest and the most of a chain")
    if not 0 <= noise < np.inf:
        raise ValueError(f"noise={noise} must be finite and not negative")
    if not isinstance(random_state, Integral) or random_state < 0:
        raise ValueError(f"random_state={random_state!r} must be an integer that is not negative")
    chains = []
    for k in range(n_chains):
        rng = np.random.default_rng(np.random.SeedSequence(int(random_state), spawn_key=(k,)))
        chains.append(_draw_chain((fewest, most), depth, noise, rotate, rng))
    adata = _join(chains)
    params = {"n_chains": n_chains, "n_segments": list(n_segments), "depth": depth, "noise": noise, "rotate": rotate}
    params["random_state"] = int(random_state)
    adata.uns["source"] = {"name": "synthetic_chains", "units": "angstrom", "X": "counts", "params": params}
    return adata


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name}={count!r} must be a positive integer")


def _draw_chain(
    n_segments: tuple[int, int], depth: int, noise: float, rotate: bool, rng: np.random.Generator
) -> _Chain:
    """A chain with its residues in random order."""
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
    """A backbone of random segments."""
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
