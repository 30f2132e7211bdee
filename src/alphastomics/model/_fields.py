"""Fields of the registry, which accept new slices and cells without coordinates, unlike those of scvi-tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
from scvi.data import AnnDataManager
from scvi.data.fields import BaseAnnDataField, LayerField, NumericalObsField, ObsmField

from alphastomics.data import TissueSchema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anndata import AnnData

    from alphastomics.data import CellSource

SCHEMA = "tissue"  # name of the field
SETUP = ("layer", "position_key", "slice_key", "cell_type_key", "frame", "sequence_key", "transform")


class SchemaField(BaseAnnDataField):
    """The schema of a tissue and the number of cells of its largest slice, counted in the AnnData when None."""

    registry_key = SCHEMA
    attr_name = attr_key = ""
    is_empty = False

    def __init__(self, schema: TissueSchema, largest_slice: int | None = None) -> None:
        self.schema, self.largest_slice = schema, largest_slice

    def validate_field(self, adata: AnnData) -> None:
        """Do nothing, because the data were checked when the schema was fitted."""

    def register_field(self, adata: AnnData) -> dict[str, Any]:
        """The schema as plain values, and the number of cells of the largest slice."""
        largest = self.largest_slice
        if largest is None:
            key = self.schema.slice_key
            counted = key is not None and key in adata.obs
            largest = int(adata.obs[key].value_counts().max()) if counted else int(adata.n_obs)
        return {"schema": self.schema.to_dict(), "largest_slice": largest}

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Use the schema of the source registry."""
        return {**self.register_field(adata_target), "schema": state_registry["schema"]}

    def get_summary_stats(self, state_registry: dict[str, Any]) -> dict[str, int]:
        """The number of cells of the largest slice."""
        return {"largest_slice": state_registry["largest_slice"]}

    def view_state_registry(self, state_registry: dict[str, Any]) -> None:
        """Show nothing, because the arguments of ``setup_anndata`` are shown already."""

    def get_data_registry(self) -> dict[str, Any]:
        """An empty registry, because the field has no data in the AnnData."""
        return {}


class PositionField(ObsmField):
    """Coordinates in ``obsm``; a query may lack them, or the column that is constant in the reference."""

    def __init__(self, schema: TissueSchema) -> None:
        super().__init__("position", schema.position_key)
        self.n_dims = schema.n_dims

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Register the coordinates of ``adata_target`` if it has them, else use the source registry."""
        position = adata_target.obsm.get(self.attr_key)
        planar = len(state_registry[self.COLUMN_NAMES_KEY]) > self.n_dims
        if position is not None and not (planar and position.shape[1] == self.n_dims):
            return super().transfer_field(state_registry, adata_target, **kwargs)
        return state_registry


class ColumnField(NumericalObsField):
    """A column of ``obs``; a query may have new values in it or lack it."""

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Use the source registry."""
        return state_registry


def schema_fields(schema: TissueSchema, largest_slice: int | None = None) -> list[BaseAnnDataField]:
    """The registry fields of a tissue."""
    columns = (("slice", schema.slice_key), ("cell_type", schema.cell_type_key), ("sequence", schema.sequence_key))
    return [
        SchemaField(schema, largest_slice),
        LayerField("X", schema.layer, is_count_data=False, correct_data_format=False),
        PositionField(schema),
        *(ColumnField(name, key) for name, key in columns if key is not None),
    ]


def schema_values(registry: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in a registry, as plain values."""
    values: dict[str, Any] = registry["field_registries"][SCHEMA]["state_registry"]["schema"]
    return values


def read_schema(registry: Mapping[str, Any]) -> TissueSchema:
    """The schema in a registry."""
    return TissueSchema.from_dict(schema_values(registry))


def check_registry(registry: Mapping[str, Any], schema: TissueSchema) -> None:
    """Raise ``ValueError`` if the fields of a registry do not agree with its schema."""
    entries = registry["field_registries"]
    for field in schema_fields(schema):
        parts = [entries[field.registry_key][part] for part in ("data_registry", "state_registry", "summary_stats")]
        described = all(isinstance(part, dict) for part in parts)
        if described and isinstance(field, PositionField):
            described = isinstance(parts[1].get("column_names"), list)
        if not described:
            raise ValueError(f"the registry does not describe {field.registry_key}")
    stats = entries["X"]["summary_stats"]
    if stats["n_vars"] != schema.n_genes or entries["X"]["state_registry"]["n_vars"] != schema.n_genes:
        raise ValueError(f"the registry and the schema ({schema.n_genes} genes) have different numbers of genes")
    counts = (stats["n_cells"], entries[SCHEMA]["summary_stats"]["largest_slice"])
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("the registry has no valid number of cells")


def dataset_registry(name: str, source: CellSource) -> dict[str, Any]:
    """Registry for the class ``name`` and cells on disk: that of an AnnData of one cell, with the true number of cells."""
    schema = source.schema
    keys = [key for key in (schema.slice_key, schema.cell_type_key) if key is not None]
    header = ad.AnnData(
        np.zeros((1, schema.n_genes), dtype=np.float32),
        obs=pd.DataFrame(dict.fromkeys(keys, ["0"]), index=["0"]),
        var=pd.DataFrame(index=list(schema.genes)),
        obsm={schema.position_key: np.zeros((1, schema.n_columns))},
    )
    arguments = {key: getattr(schema, key) for key in SETUP}
    setup = {"model_name": name, "setup_args": arguments, "setup_method_name": "setup_anndata"}
    largest = max(len(cells.rows) for cells in source.slices)
    manager = AnnDataManager(fields=schema_fields(schema, largest), setup_method_args=setup)
    manager.register_fields(header)
    registry = dict(manager.registry)
    registry["field_registries"]["X"]["summary_stats"]["n_cells"] = source.n_cells
    registry["field_registries"]["X"]["state_registry"]["n_obs"] = source.n_cells
    return registry
