"""Scores of predicted tissue: pure functions on arrays, in memory that does not grow with the square of the cells."""

from __future__ import annotations

from ._align import RigidTransform, aligned_rmsd, procrustes_disparity, rigid_align
from ._distances import contact_precision, distance_matrix_mse, distance_spearman, judge_cells
from ._neighbors import knn_preservation, nearest_neighbor_ks
from ._position import chance_positions, oracle_positions, position_scores

__all__ = [
    "RigidTransform",
    "aligned_rmsd",
    "chance_positions",
    "contact_precision",
    "distance_matrix_mse",
    "distance_spearman",
    "judge_cells",
    "knn_preservation",
    "nearest_neighbor_ks",
    "oracle_positions",
    "position_scores",
    "procrustes_disparity",
    "rigid_align",
]
