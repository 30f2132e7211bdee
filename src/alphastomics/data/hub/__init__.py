"""Upload and download of datasets, to and from the Hugging Face Hub."""

from alphastomics.data.hub._transfer import Uploaded, download, upload

__all__ = ["Uploaded", "download", "upload"]
