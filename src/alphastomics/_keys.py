"""Every key that the package reads by default or writes into an AnnData, in one place."""

from __future__ import annotations

SPATIAL = "spatial"
"""``obsm``: positions, in the units of the user."""

SLICE = "slice_id"
"""``obs``: the slice of a cell."""

CELL_TYPE = "cell_type"
"""``obs``: the label of a cell."""

INSTANCE = "instance_id"
"""``obs``: the identifier of a cell among the instances of its element in a SpatialData."""

RECONSTRUCTED = "spatial_reconstructed"
"""``obsm``: sampled positions; ``uns``: what is needed to sample them again."""

UNCERTAINTY_SUFFIX = "_uncertainty"
"""``obs[RECONSTRUCTED + ...]``: standard deviation of aligned draws from halves of the genes."""

PLACED_SUFFIX = "_placed"
"""``obs[RECONSTRUCTED + ...]``: whether the cell was placed, or is part of the reference."""

DRAW = "draw"
"""``obs``: the number of the draw that a sampled cell belongs to."""

LIBRARY_SIZE = "library_size"
"""``obs``: total counts to which the expression of a cell was restored."""

SD = "sd"
"""``layers``: standard deviation of expression over the draws."""

POSITION_UNCERTAINTY = "position_uncertainty"
"""``obs`` of a sampled AnnData: root mean square distance of aligned draws from halves of the genes."""

POSITION_SCORES = "position_scores"
"""``uns``: scores of predicted positions, one row per slice."""

EXPRESSION_SCORES = "expression_scores"
"""``uns``: scores of predicted expression, one row per slice."""

CLUSTER_SCORES = "cluster_scores"
"""``uns``: scores of clusters against labels, one row per slice."""

MORAN = "morans_i"
"""``uns``: Moran's I, one row per slice and gene."""

MODALITY_AGREEMENT = "modality_agreement"
"""``uns``: agreement of expression and position with a reference, one row per slice."""

GATES = "attention_gates"
"""``obsm``: mean gate of each head for each cell; ``uns``: their means and spreads."""

SINKS = "attention_sinks"
"""``obsm``: mean attention that each cell receives; ``uns``: the largest share per slice, layer and head."""

MAPS = "attention_maps"
"""``obsm``: attention that chosen cells pay to each cell."""

EXPERTS = "experts"
"""``obs[EXPERTS + "_layer_0"]``, …: the most probable expert of a cell; ``uns``: use of the experts."""

COMPARISON = "comparison"
"""``uns``: configurations that were compared: a summary, the runs, their curves."""

MEASURED_IN = "measured_in"
"""``varm``: which slices measure a gene, a column for each; only where they differ."""

LATENT = "X_alphastomics"
"""``obsm`` of what ``alphastomics extract`` writes: embeddings."""

PROVENANCE = "alphastomics"
"""``uns`` of a sampled AnnData: how it was made."""
