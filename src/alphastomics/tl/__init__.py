"""Tools: place cells, judge where they were placed, and look inside the network."""

from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._layers import attention_gates, attention_maps, attention_sinks, expert_usage
from alphastomics.tl._reconstruct import reconstruct

__all__ = ["attention_gates", "attention_maps", "attention_sinks", "evaluate", "expert_usage", "reconstruct"]
