"""The card of a model: what the Hub and people read of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from alphastomics._provenance import versions
from alphastomics.data.hub._card import TAGS
from alphastomics.nn import count_parameters

if TYPE_CHECKING:
    from alphastomics.model._model import AlphaSTomics

LIBRARY = "alphastomics"
MODES = {
    "expr_to_pos": "places cells by their expression",
    "pos_to_expr": "writes expression into places",
    "joint": "draws whole slices",
    "any": "places cells by their expression, writes expression into places, and draws whole slices",
}


def model_card(model: AlphaSTomics, repo_id: str, license: str | None = None) -> str:
    """Text of ``README.md``.

    Parameters
    ----------
    model
        The model.
    repo_id
        Where it goes.
    license
        As the Hub writes it, for example ``"cc-by-4.0"``; none is named when None.
    """
    named = {} if license is None else {"license": license}
    header = {**named, "library_name": LIBRARY, "tags": [*TAGS, "diffusion"]}
    text = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    name = repo_id.rpartition("/")[2]
    parts = [
        f"# {name}",
        f"A diffusion transformer over expression and positions of cells. It {MODES[model.mode]}.",
        _loading(model, repo_id),
        "## What it was trained on",
        _table(_tissue(model)),
        "`config.json` lists the genes. " + _held(model),
        "## How it was made",
        _table(_making(model)),
    ]
    return f"---\n{text}---\n\n" + "\n\n".join(parts) + "\n"


def _loading(model: AlphaSTomics, repo_id: str) -> str:
    modes = ("expr_to_pos", "pos_to_expr") if model.mode == "any" else (model.mode,)
    reads = "n_cells=2000" if model.mode == "joint" else "cells"
    return f"""With [AlphaSTomics](https://alphastomics.readthedocs.io/) (`pip install "alphastomics[hub]"`):

```python
import alphastomics as asx

model = asx.model.AlphaSTomics.from_pretrained("{repo_id}")
sampled = model.sample({reads}, mode="{modes[0]}")
```"""


def _tissue(model: AlphaSTomics) -> dict[str, Any]:
    schema = model.schema
    values = "counts" if schema.transform == "log1p" else "values as they are"
    return {
        "cells": f"{model.summary_stats.n_cells:,}",
        "slices": f"{len(schema.slices):,}",
        "genes": f"{schema.n_genes:,}",
        "dimensions": schema.n_dims,
        "expression": f"{values}, in `{'X' if schema.layer is None else f'layers[{schema.layer!r}]'}`",
        "positions": f"in `obsm[{schema.position_key!r}]`, frame `{schema.frame}`",
    }


def _held(model: AlphaSTomics) -> str:
    if model.exemplars_ is None:
        return "No expression of a cell of the reference is in this model."
    return (
        f"The model holds expression of {len(model.exemplars_.expression):,} cells of its reference, with which it completes "
        "others."
    )


def _making(model: AlphaSTomics) -> dict[str, Any]:
    init = model.init_params_["non_kwargs"]
    told = {name: init[name] for name in ("mode", "attention", "d_model", "n_layers", "n_heads", "random_state")}
    epochs = max((len(table) for table in (model.history_ or {}).values()), default=0)
    return {**told, "parameters": f"{count_parameters(model.module).total:,}", "epochs": epochs, **versions()}


def _table(values: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in values.items())])
