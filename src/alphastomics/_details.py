"""Arguments of a model that say how something is done, by the one that says whether, and what that must be.

The network refuses such an argument where it has no effect, and so does the command line before anything is imported.
"""

from __future__ import annotations

from typing import Any

DETAILS: dict[tuple[str, Any], tuple[str, ...]] = {
    ("use_moe", True): ("num_experts", "moe_top_k", "expert_width"),
    ("attention", "neighbor"): ("sparse_pairs", "n_neighbors"),
    ("pair_features", "factorized"): ("rank", "pair_attention", "pair_residual", "pair_dropout"),
    ("residual", "hyper"): ("n_streams",),
    ("layer_sharing", "block"): ("sharing_block",),
}
