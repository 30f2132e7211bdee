"""The model class and the errors of its training."""

from alphastomics.model._model import AlphaSTomics
from alphastomics.train import DeadProcessError, NonFiniteLossError, NotEnoughMemoryError

__all__ = ["AlphaSTomics", "DeadProcessError", "NonFiniteLossError", "NotEnoughMemoryError"]
