"""Keys of AnnData that the package reads by default or writes."""

from __future__ import annotations

SPATIAL = "spatial"
"""``obsm``: positions, (n_cells, 2 or 3)."""

SLICE = "slice_id"
"""``obs``: the slice of a cell."""

CELL_TYPE = "cell_type"
"""``obs``: the label of a cell."""

INSTANCE = "instance_id"
"""``obs``: identifier of a cell in its element of a SpatialData (``instance_key``)."""

RECONSTRUCTED = "spatial_reconstructed"
"""``obsm``: predicted positions; ``uns``: their provenance."""

UNCERTAINTY_SUFFIX = "_uncertainty"
"""``obs[RECONSTRUCTED + ...]``: scaled median distance of aligned draws from the prediction."""

CONFIDENCE_SUFFIX = "_confidence"
"""``obs[RECONSTRUCTED + ...]``: share of cells like those of the reference that match it no better than this cell."""

PLACED_SUFFIX = "_placed"
"""``obs[RECONSTRUCTED + ...]``: True for predicted positions, False for those of the reference."""

TIED_SUFFIX = "_tied"
"""``obs[RECONSTRUCTED + ...]``: True for cells that no input of the network distinguishes from another one of their slice."""

POSITION_SUFFIXES = (PLACED_SUFFIX, UNCERTAINTY_SUFFIX, CONFIDENCE_SUFFIX, TIED_SUFFIX)
"""``obs[RECONSTRUCTED + ...]``: all columns that may accompany predicted positions."""

DRAW = "draw"
"""``obs``: number of the draw of a sampled cell."""

LIBRARY_SIZE = "library_size"
"""``obs``: total counts to which the sampled expression of a cell is scaled."""

SD = "sd"
"""``layers``: standard deviation of expression over the draws."""

POSITION_SCORES = "position_scores"
"""``uns``: scores of predicted positions, one row per slice."""

EXPRESSION_SCORES = "expression_scores"
"""``uns``: scores of predicted expression, one row per slice."""

CLUSTER_SCORES = "cluster_scores"
"""``uns``: scores of clusters against labels, one row per slice."""

MORAN = "morans_i"
"""``uns``: Moran's I, one row per slice and gene."""

MODALITY_AGREEMENT = "modality_agreement"
"""``uns``: agreement of expression and positions with real slices, one row per slice."""

GATES = "attention_gates"
"""``obsm``: mean gate of each cell and head; ``uns``: means and standard deviations by layer and head."""

SINKS = "attention_sinks"
"""``obsm``: mean attention that each cell receives; ``uns``: its maximum by slice, layer and head."""

MAPS = "attention_maps"
"""``obsm``: attention weights of selected query cells."""

EXPERTS = "experts"
"""``obs[EXPERTS + "_layer_0"]``, …: most probable expert of a cell; ``uns``: usage by layer and expert."""

COMPARISON = "comparison"
"""``uns``: tables of a comparison: ``summary``, ``runs`` and ``curves``."""

MEASURED_IN = "measured_in"
"""``varm``: whether each slice (column) measures a gene; only if slices differ."""

LATENT = "X_alphastomics"
"""``obsm`` of what ``alphastomics extract`` writes: embeddings."""

PROVENANCE = "alphastomics"
"""``uns`` of a sampled AnnData: its provenance."""
