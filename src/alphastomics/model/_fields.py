"""Registry fields: scvi-tools' own refuse slices they have not seen and cells without coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scvi.data.fields import NumericalObsField, ObsmField

if TYPE_CHECKING:
    from anndata import AnnData

SCHEMA = "tissue_schema"  # where the schema is in the registry


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
