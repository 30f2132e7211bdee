"""What a user holds: the model class."""

from alphastomics.model._model import AlphaSTomics
from alphastomics.train import NonFiniteLossError

__all__ = ["AlphaSTomics", "NonFiniteLossError"]
