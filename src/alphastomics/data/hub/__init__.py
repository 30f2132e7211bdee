"""Datasets on the Hugging Face Hub: upload of a dataset on disk, and download to one."""

from alphastomics.data.hub._transfer import Uploaded, download, upload

__all__ = ["Uploaded", "download", "upload"]
