"""Plots. Matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from ._comparison import comparison
from ._history import history
from ._layers import attention_gates, attention_maps, attention_sinks, expert_usage
from ._reconstruction import reconstruction

__all__ = [
    "attention_gates",
    "attention_maps",
    "attention_sinks",
    "comparison",
    "expert_usage",
    "history",
    "reconstruction",
]
