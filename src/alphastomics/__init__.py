"""AlphaSTomics: a generative model of the joint distribution of gene expression and cell positions.

Submodules are imported on first use, so ``import alphastomics`` imports neither PyTorch nor scvi-tools.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from alphastomics._messages import show_messages

if TYPE_CHECKING:
    from types import ModuleType

    from . import chains, config, data, datasets, metrics, model, pl, pp, tl

__all__ = ["__version__", "chains", "config", "data", "datasets", "metrics", "model", "pl", "pp", "tl"]

__version__ = version("alphastomics")

show_messages()


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f".{name}", __name__)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
