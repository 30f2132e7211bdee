"""Plots of reconstructions and their uncertainty, training curves, comparisons, attention and experts."""

from __future__ import annotations

from alphastomics.pl._comparison import comparison
from alphastomics.pl._history import history
from alphastomics.pl._layers import attention_gates, attention_maps, attention_sinks, expert_usage
from alphastomics.pl._reconstruction import reconstruction
from alphastomics.pl._uncertainty import uncertainty

__all__ = [
    "attention_gates",
    "attention_maps",
    "attention_sinks",
    "comparison",
    "expert_usage",
    "history",
    "reconstruction",
    "uncertainty",
]
