"""What a Parquet file says of its own columns, so that it can be read without the rest of its dataset."""

from __future__ import annotations

import json
from typing import NamedTuple

from alphastomics import _json
from alphastomics._disk import reason

NOTE = b"alphastomics"  # key of the metadata of a Parquet schema


class Note(NamedTuple):
    """Genes and dimensions of a file.

    Attributes
    ----------
    genes
        Names of the genes, in the order of the columns.
    n_dims
        Coordinates that mean something, 2 or 3.
    unmeasured
        Slice -> genes that it does not measure, where there are any.
    """

    genes: tuple[str, ...]
    n_dims: int
    unmeasured: dict[str, tuple[str, ...]]

    def to_metadata(self) -> dict[bytes, bytes]:
        """Metadata of a schema."""
        return {NOTE: json.dumps(self._asdict()).encode()}

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None) -> Note | None:
        """Undo :meth:`to_metadata`; None where nothing is said.

        Raises
        ------
        ValueError
            If what is said cannot be understood.
        """
        if NOTE not in (metadata or {}):
            return None
        assert metadata is not None
        try:
            values = _json.parse(metadata[NOTE].decode())
            genes, n_dims = tuple(map(str, values["genes"])), int(values["n_dims"])
            unmeasured = {str(name): tuple(map(str, lacking)) for name, lacking in values["unmeasured"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"its metadata do not describe genes ({reason(error)})") from error
        if n_dims not in (2, 3) or not 0 < len(set(genes)) == len(genes):
            raise ValueError("its metadata do not describe genes, each once, in 2 or 3 dimensions")
        return cls(genes, n_dims, unmeasured)
