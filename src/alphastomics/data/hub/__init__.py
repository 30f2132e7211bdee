"""Datasets on the Hugging Face Hub: upload of what ``preprocess`` wrote, and contexts streamed from there."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from alphastomics.data.hub._upload import Uploaded, upload

if TYPE_CHECKING:
    from alphastomics.data.hub._loaders import create_dataloaders, read_info
    from alphastomics.data.hub._stream import StreamedContexts

# These need torch, which takes seconds to import.
_WITH_TORCH = {"StreamedContexts": "_stream", "create_dataloaders": "_loaders", "read_info": "_loaders"}

__all__ = ["StreamedContexts", "Uploaded", "create_dataloaders", "read_info", "upload"]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"alphastomics.data.hub.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
