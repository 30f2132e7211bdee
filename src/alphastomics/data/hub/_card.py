"""The card of a dataset on the Hub, ``README.md``, whose header ``datasets.load_dataset`` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from alphastomics.data.parquet._dataset import FOLDER, SPLITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alphastomics.data.parquet._dataset import DatasetInfo, Shard

TAGS = ("alphastomics", "spatial-transcriptomics", "single-cell", "biology")
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
         (10**8, "10M<n<100M"), (10**9, "100M<n<1B"))  # fmt: skip
LARGEST = "n>1B"

COLUMNS = {
    "cell_id": "name of the cell",
    "slice_id": "name of the slice",
    "cell_type": "cell type; null if unknown",
    "library_size": "sum of the values of the measured genes",
    "position": "three coordinates in the units of the input",
    "expression": "values of all genes, untransformed, in the order of `schema.genes` in `metadata.json`",
    "indices": "genes with nonzero values, as indices of `schema.genes` in `metadata.json`",
    "values": "values of these genes, untransformed",
}


def dataset_card(info: DatasetInfo, repo_id: str, columns: Sequence[str], license: str | None = None) -> str:
    """Text of ``README.md``; ``license`` is an identifier of the Hub, for example ``"cc-by-4.0"``, and omitted when None."""
    header = yaml.safe_dump(_header(info, repo_id, license), sort_keys=False, allow_unicode=True)
    name = repo_id.rpartition("/")[2]
    return f"---\n{header}---\n\n# {name}\n\n{_contents(info)}\n{_columns(columns)}\n{_loading(info, repo_id)}\n{_making(info)}"


def _shards(info: DatasetInfo) -> dict[str, list[Shard]]:
    """Files of every split that has files."""
    found = {split: [shard for shard in info.shards if shard.split == split] for split in SPLITS}
    return {split: shards for split, shards in found.items() if shards}


def _header(info: DatasetInfo, repo_id: str, license: str | None) -> dict[str, Any]:
    n_cells = sum(shard.n_cells for shard in info.shards)
    files = {
        split: f"{FOLDER}/{shards[0].file}" if len(shards) == 1 else f"{FOLDER}/{split}-*.parquet"
        for split, shards in _shards(info).items()
    }
    return {
        **({} if license is None else {"license": license}),
        "pretty_name": repo_id.rpartition("/")[2],
        "tags": list(TAGS),
        "size_categories": [next((name for size, name in SIZES if n_cells < size), LARGEST)],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": path} for split, path in files.items()],
            }
        ],
    }


def _contents(info: DatasetInfo) -> str:
    schema = info.schema
    slices = {name for shard in info.shards for name, _ in shard.groups}
    rows = [
        f"| {split} | {sum(shard.n_cells for shard in shards):,} | "
        f"{len({name for shard in shards for name, _ in shard.groups}):,} | {len(shards):,} |"
        for split, shards in _shards(info).items()
    ]
    n_cells = sum(shard.n_cells for shard in info.shards)
    about = [
        f"Spatial transcriptomics: {n_cells:,} cells with expression of {schema.n_genes:,} genes and positions in "
        f"{schema.n_dims}D, in {len(slices):,} slices.",
        "Values are counts." if info.counts else "",
        f"{len(schema.cell_types):,} cell types are labeled." if schema.cell_types else "",
        f"{len(info.unmeasured):,} slices have unmeasured genes, which `unmeasured` in `metadata.json` lists."
        if info.unmeasured
        else "",
    ]
    return "\n".join(
        [
            " ".join(filter(None, about)),
            "",
            "| split | cells | slices | files |",
            "| --- | ---: | ---: | ---: |",
            *rows,
            "",
        ]
    )


def _columns(columns: Sequence[str]) -> str:
    rows = [f"| `{name}` | {COLUMNS.get(name, '')} |" for name in columns]
    return "\n".join(
        [
            "## Columns",
            "",
            "| column | content |",
            "| --- | --- |",
            *rows,
            "",
            "A row group holds cells of one slice along a Hilbert curve. `metadata.json` holds the schema (genes, "
            "transform, scales) and the checksum of every file.",
            "",
        ]
    )


def _loading(info: DatasetInfo, repo_id: str) -> str:
    split, shards = next(iter(_shards(info).items()))
    return f"""## Loading

With [AlphaSTomics](https://alphastomics.readthedocs.io/), as batches of cells of one slice:

```python
from alphastomics.data import create_dataloaders, hub

train, validation, test = create_dataloaders(hub.download("{repo_id}"))
```

With datasets:

```python
from datasets import load_dataset

cells = load_dataset("{repo_id}", split="{split}", streaming=True)
```

With pyarrow:

```python
import pyarrow.parquet as pq
from huggingface_hub import HfFileSystem

cells = pq.read_table("datasets/{repo_id}/{FOLDER}/{shards[0].file}", filesystem=HfFileSystem())
```
"""


def _making(info: DatasetInfo) -> str:
    schema = info.schema
    made = {
        "transform, applied when cells are read": schema.transform,
        "frame": schema.frame,
        **info.parameters.get("stage2", {}),
    }
    rows = [f"| {name} | {value} |" for name, value in made.items()]
    return "\n".join(
        [
            "## Preprocessing",
            "",
            "With `alphastomics preprocess`:",
            "",
            "| parameter | value |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )
