"""Registry fields: scvi-tools' own refuse slices they have not seen and cells without coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
from scvi.data import AnnDataManager
from scvi.data.fields import LayerField, NumericalObsField, ObsmField

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics.data import CellSource, TissueSchema
    from alphastomics.model._model import AlphaSTomics

SCHEMA = "tissue_schema"  # where the schema is in the registry
LARGEST_SLICE = "largest_slice"  # and the number of cells of the largest slice


class PositionField(ObsmField):
    """Coordinates in ``obsm``; a query may lack them."""

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Register the coordinates of ``adata_target`` if it has some, else keep the state of the source."""
        if self.attr_key in adata_target.obsm:
            return super().transfer_field(state_registry, adata_target, **kwargs)
        return state_registry


class ColumnField(NumericalObsField):
    """A column of ``obs`` that is only referred to: any values, also new ones; a query may lack it."""

    def transfer_field(self, state_registry: dict[str, Any], adata_target: AnnData, **kwargs: Any) -> dict[str, Any]:
        """Nothing is transferred: names are read where they are needed."""
        return state_registry


def schema_fields(schema: TissueSchema) -> list[Any]:
    """The fields of a tissue."""
    columns = (("slice", schema.slice_key), ("cell_type", schema.cell_type_key), ("sequence", schema.sequence_key))
    return [
        LayerField("X", schema.layer, is_count_data=False, correct_data_format=False),
        PositionField("position", schema.position_key),
        *(ColumnField(name, key) for name, key in columns if key is not None),
    ]


def largest_slice(adata: AnnData, schema: TissueSchema) -> int:
    """Number of cells of the largest slice."""
    if schema.slice_key is None or schema.slice_key not in adata.obs:
        return int(adata.n_obs)
    return int(adata.obs[schema.slice_key].value_counts().max())


def dataset_registry(cls: type[AlphaSTomics], source: CellSource) -> dict[str, Any]:
    """What a registry says of cells that are not in an AnnData: that of an empty one, with their number."""
    schema = source.schema
    keys = [key for key in (schema.slice_key, schema.cell_type_key) if key is not None]
    header = ad.AnnData(
        np.zeros((1, schema.n_genes), dtype=np.float32),
        obs=pd.DataFrame(dict.fromkeys(keys, ["0"]), index=["0"]),
        var=pd.DataFrame(index=list(schema.genes)),
        obsm={schema.position_key: np.zeros((1, schema.n_dims))},
    )
    names = ("layer", "position_key", "slice_key", "cell_type_key", "frame", "sequence_key", "transform")
    arguments = {name: getattr(schema, name) for name in names}
    setup = {"model_name": cls.__name__, "setup_args": arguments, "setup_method_name": "setup_anndata"}
    manager = AnnDataManager(fields=schema_fields(schema), setup_method_args=setup)
    manager._registry[SCHEMA] = schema.to_dict()
    manager._registry[LARGEST_SLICE] = max(len(cells.rows) for cells in source.slices)
    manager.register_fields(header)
    fields = manager.registry["field_registries"]
    fields["X"]["summary_stats"]["n_cells"] = source.n_cells
    fields["X"]["state_registry"]["n_obs"] = source.n_cells
    return dict(manager.registry)
