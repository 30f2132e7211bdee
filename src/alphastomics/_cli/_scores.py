"""Scores of a model on cells whose positions are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alphastomics._cli._files import write_json

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from anndata import AnnData

    from alphastomics.model import AlphaSTomics


def score_model(model: AlphaSTomics, cells: AnnData, *, n_samples: int, n_steps: int | None, seed: int) -> pd.DataFrame:
    """Place the cells of every slice and compare; a table as :func:`alphastomics.tl.evaluate` gives with baselines.

    Raises
    ------
    KeyError
        If the true positions are missing.
    """
    import pandas as pd

    from alphastomics._cli._cells import panels

    options: dict[str, Any] = {"n_samples": n_samples, "n_steps": n_steps, "seed": seed}
    tables = [_score(model, part, **options) for _, part in panels(cells, model.schema.slice_key)]
    return tables[0] if len(tables) == 1 else pd.concat(tables).sort_index(level=0, sort_remaining=False, kind="stable")


def _score(model: AlphaSTomics, cells: AnnData, *, n_samples: int, n_steps: int | None, seed: int) -> pd.DataFrame:
    from alphastomics import tl

    schema = model.schema
    if schema.position_key not in cells.obsm:
        found = ", ".join(map(repr, cells.obsm.keys())) or "nothing"
        raise KeyError(
            f'obsm["{schema.position_key}"] is missing (found: {found}); store the true positions where the reference '
            "of this model has them"
        )
    tl.reconstruct(cells, model=model, n_samples=n_samples, n_steps=n_steps, random_state=seed)

    def there(key: str | None) -> str | None:
        return key if key in cells.obs else None

    return tl.evaluate(
        cells,
        truth=schema.position_key,
        library_key=there(schema.slice_key),
        cell_type_key=there(schema.cell_type_key),
        baselines=True,
        random_state=seed,
    )


def write_scores(path: Path, table: pd.DataFrame) -> None:
    """Write the scores of every slice as JSON."""
    write_json(path, {name: part.droplevel(0).to_dict(orient="index") for name, part in table.groupby(level=0)})
