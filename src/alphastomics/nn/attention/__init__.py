"""Attention over the cells of a context: one file per kind, all ``forward(x, mask)``."""

from alphastomics.nn.attention.softmax import GateType, SoftmaxAttention

__all__ = ["GateType", "SoftmaxAttention"]
