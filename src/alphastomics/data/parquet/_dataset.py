"""Description of a dataset: ``metadata.json``, and the metadata of each Parquet file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alphastomics._io import _json
from alphastomics._io._atomic import write_json
from alphastomics._io._errors import describe_error, format_value
from alphastomics._io._untrusted import check_inside, check_memory
from alphastomics.data._schema import TissueSchema
from alphastomics.data.parquet._files import footer_checksum, read_json

if TYPE_CHECKING:
    from os import PathLike

FORMAT, FORMAT_VERSION = "alphastomics-dataset", 2
METADATA, FOLDER = "metadata.json", "data"
SPLITS = ("train", "validation", "test")
METADATA_KEY = b"alphastomics"  # key of the metadata of a Parquet schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A file of a dataset.

    Parameters
    ----------
    file
        Its name in the folder ``data``.
    split
        ``"train"``, ``"validation"`` or ``"test"``.
    groups
        Slice and number of cells of every row group, in order.
    sha256
        SHA-256 of the file.
    footer
        SHA-256 of its footer, compared when the dataset is opened; empty if unknown.
    """

    file: str
    split: str
    groups: tuple[tuple[str, int], ...]
    sha256: str
    footer: str = ""

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return sum(n for _, n in self.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """Description of a dataset.

    Parameters
    ----------
    schema
        Schema of the tissue, fitted to the cells of the training set.
    shards
        Its files.
    unmeasured
        Unmeasured genes of each slice, by the name of the slice; slices without any are left out.
    counts
        Whether all values are counts or 0 and 1, which can be thinned.
    parameters
        Parameters of both stages.
    """

    schema: TissueSchema
    shards: tuple[Shard, ...]
    unmeasured: dict[str, tuple[str, ...]]
    counts: bool
    parameters: dict[str, Any]

    def n_cells(self, split: str) -> int:
        """Number of cells of a split."""
        return sum(shard.n_cells for shard in self.shards if shard.split == split)

    def write(self, folder: Path) -> None:
        """Write ``metadata.json``, which completes a dataset."""
        write_json(
            folder / METADATA,
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "schema": self.schema.to_dict(),
                "shards": [asdict(shard) for shard in self.shards],
                "unmeasured": self.unmeasured,
                "counts": self.counts,
                "parameters": self.parameters,
            },
            unique=True,
        )

    def check(self, folder: Path) -> None:
        """Compare the footers of all files with their checksums, which detects truncated, missing and replaced files.

        Raises
        ------
        ValueError
            If one differs.
        """
        for shard in self.shards:
            path = folder / FOLDER / shard.file
            check_inside(folder, path)
            if footer_checksum(path) != shard.footer and shard.footer:
                raise ValueError(f"{path} does not match {METADATA}; make the dataset again")

    @classmethod
    def read(cls, folder: str | PathLike[str], *, check: bool = True) -> DatasetInfo:
        """Read ``metadata.json``, and with ``check`` also :meth:`check` the files.

        Raises
        ------
        FileNotFoundError
            If it is missing.
        ValueError
            If the file was written by another program or version, or does not match the files of the dataset.
        """
        folder = Path(folder)
        path = folder / METADATA
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} is not a dataset: {METADATA} is missing; make one with alphastomics preprocess"
            )
        check_inside(folder, path)
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"{path} does not describe a dataset of AlphaSTomics; choose another folder")
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format_version {format_value(version)}, and this version of alphastomics reads {FORMAT_VERSION}; "
                "update it, or make the dataset again"
            )
        try:
            info = cls(
                schema=TissueSchema.from_dict(values["schema"]),
                shards=tuple(_shard(entry) for entry in values["shards"]),
                unmeasured={str(name): tuple(map(str, genes)) for name, genes in values["unmeasured"].items()},
                counts=bool(values["counts"]),
                parameters=dict(values["parameters"]),
            )
            check_memory(8 * sum(shard.n_cells for shard in info.shards))  # at least a float64 per cell
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({describe_error(error)}); delete it and make the dataset again"
            ) from error
        if check:
            info.check(folder)
        return info


def _shard(entry: dict[str, Any]) -> Shard:
    file, split = str(entry["file"]), str(entry["split"])
    if "/" in file or "\\" in file or "\0" in file or file.startswith(".") or split not in SPLITS:
        raise ValueError(f"{format_value(file)} is not the name of a file")
    groups = tuple((str(name), _count(n)) for name, n in entry["groups"])
    return Shard(
        file=file, split=split, groups=groups, sha256=str(entry["sha256"]), footer=str(entry.get("footer", ""))
    )


def _count(n: Any) -> int:
    """Number of cells of a row group."""
    if type(n) is not int or n < 0:
        raise ValueError(f"{format_value(n)} is not a number of cells")
    return n


class GeneMetadata(NamedTuple):
    """Genes of a file in the order of its columns, number of coordinates (2 or 3), and genes that slices do not measure."""

    genes: tuple[str, ...]
    n_dims: int
    unmeasured: dict[str, tuple[str, ...]]

    def to_metadata(self) -> dict[bytes, bytes]:
        """Metadata of a Parquet schema."""
        return {METADATA_KEY: json.dumps(self._asdict()).encode()}

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None) -> GeneMetadata | None:
        """Invert :meth:`to_metadata`; None without an entry of this package, a ValueError if it is damaged."""
        if METADATA_KEY not in (metadata or {}):
            return None
        assert metadata is not None
        try:
            values = _json.parse(metadata[METADATA_KEY].decode())
            genes, n_dims = tuple(map(str, values["genes"])), int(values["n_dims"])
            unmeasured = {str(name): tuple(map(str, lacking)) for name, lacking in values["unmeasured"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"its metadata do not contain valid genes ({describe_error(error)})") from error
        if n_dims not in (2, 3) or not 0 < len(set(genes)) == len(genes):
            raise ValueError("its metadata list no genes, a gene twice, or n_dims other than 2 and 3")
        return cls(genes, n_dims, unmeasured)
