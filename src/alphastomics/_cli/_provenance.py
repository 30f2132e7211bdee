"""What a file tells of how its results were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alphastomics._disk import reason

if TYPE_CHECKING:
    from pathlib import Path


def read_uns(path: Path) -> dict[str, Any]:
    """Read ``uns`` of an ``.h5ad`` file, and nothing else of it.

    Raises
    ------
    ValueError
        If it is none.
    """
    import anndata as ad
    import h5py

    from alphastomics.data._h5ad import check_contents

    try:
        check_contents(path, lambda name: name.startswith("/uns/"))
        with h5py.File(path) as file:
            return dict(ad.io.read_elem(file["uns"])) if "uns" in file else {}
    except Exception as error:  # a damaged file can break the reader in any way
        raise ValueError(
            f"{path} cannot be read as .h5ad: {reason(error)}; see that it is whole and readable, or name another"
        ) from error
