"""How a result was made, to be read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from alphastomics._provenance import differing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anndata import AnnData

WIDTH, INDENT = 100, 14
# Of a training, what is told in a sentence of its own.
COUNTS = {"n_steps": "steps", "n_epochs": "epochs", "n_cells": "cells", "n_genes": "genes", "n_slices": "slices"}
NAMED = ("seed", "precision", "device", "system")


class Provenance(Mapping[str, dict[str, Any]]):
    """How results were made: a mapping from their keys in ``uns`` to what is recorded there.

    A record has ``function`` and its ``params``, ``model`` (its arguments, and the beginning of the SHA-256 of its
    ``weights``), ``training``, ``machine`` and ``versions``. In a notebook it is shown as a table, elsewhere as text.

    Parameters
    ----------
    records
        Keys, and what is recorded under them.
    """

    def __init__(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        self._records = {key: dict(record) for key, record in records.items()}

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._records[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def differing(self) -> dict[str, tuple[str, str | None]]:
        """Versions of a result, or of the training of its model, that are others here; first those, then those here."""
        return {name: both for record in self.values() for name, both in _differing(record).items()}

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(_lines(key, record)) for key, record in self.items())

    def _repr_html_(self) -> str:
        return "".join(_table(key, record) for key, record in self.items())


def provenance(adata: AnnData, key: str | None = None) -> Provenance:
    """Tell how results were made: by which model, with which parameters, seeds and versions.

    What :func:`reconstruct` and :meth:`~alphastomics.model.AlphaSTomics.sample` write carries it along in ``uns``, also
    through files. Versions of libraries that are others here are warned of: the same seed may then give other bits.

    Parameters
    ----------
    adata
        Cells with such results.
    key
        Which of them, ``"spatial_reconstructed"`` for example; all when None.

    Returns
    -------
    What is recorded, to be read, or asked like a mapping.

    Raises
    ------
    KeyError
        If there is no such result.

    Examples
    --------
    >>> asx.tl.reconstruct(query, model=model)
    >>> asx.tl.provenance(query)
    >>> asx.tl.provenance(query)["spatial_reconstructed"]["versions"]["torch"]
    """
    records = {name: record for name, record in adata.uns.items() if _is_record(record)}
    if key is not None and key not in records:
        others = ", ".join(map(repr, records)) or "none"
        raise KeyError(
            f'uns["{key}"] does not tell how something was made (found: {others}); pass another key=…, or none'
        )
    if not records:
        raise KeyError(
            "uns tells of nothing that AlphaSTomics has made; tl.reconstruct and AlphaSTomics.sample write it"
        )
    found = Provenance(records if key is None else {key: records[key]})
    if found.differing:
        warnings.warn(
            f"Made with {_versions(found.differing)}: the same seed may give other bits here.",
            UserWarning,
            stacklevel=2,
        )
    return found


def _is_record(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), Mapping) for name in ("params", "versions"))


def _differing(record: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    return differing(_part(_part(record, "training"), "versions")) | differing(record["versions"])


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a record; empty where there is none, as in what earlier versions wrote."""
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def _versions(found: Mapping[str, tuple[str, str | None]]) -> str:
    return ", ".join(f"{name} {there} ({here or 'not'} here)" for name, (there, here) in found.items())


def _parts(record: Mapping[str, Any]) -> dict[str, str]:
    """What is told of a result, part by part."""
    training = _part(record, "training")
    counts = [f"{training[name]} {what}" for name, what in COUNTS.items() if name in training]
    named = [f"{name} {training[name]}" for name in NAMED if name in training]
    parts = {
        "parameters": _listed(record["params"]),
        "model": _listed(_part(record, "model")),
        "trained": ", ".join([*counts, *named]),
        "arguments": _listed(_part(training, "arguments")),
        "plan": _listed(_part(training, "plan")),
        "with": _named(_part(training, "versions")),
        "made on": ", ".join(str(value) for _, value in sorted(_part(record, "machine").items())),
        "versions": _named(record["versions"]),
        "other here": _versions(_differing(record)),
    }
    return {name: text for name, each in parts.items() if (text := _printable(each))}


def _printable(text: str) -> str:
    """What may be shown of a text that a file brought: nothing that a terminal obeys."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _named(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _listed(values: Mapping[str, Any], prefix: str = "") -> str:
    found = []
    for name, value in sorted(values.items()):  # files keep no other order
        if isinstance(value, Mapping):
            found.append(_listed(value, f"{prefix}{name}."))
        else:
            found.append(f"{prefix}{name}={value}")
    return ", ".join(found)


def _title(key: str, record: Mapping[str, Any]) -> str:
    function = record.get("function")
    return _printable(f"{key}, by {function}" if isinstance(function, str) else key)


def _lines(key: str, record: Mapping[str, Any]) -> Iterator[str]:
    yield _title(key, record)
    for name, text in _parts(record).items():
        first, *others = wrap(text, WIDTH - INDENT, break_on_hyphens=False)
        yield f"  {name:<{INDENT - 2}}{first}"
        yield from (" " * INDENT + line for line in others)


def _table(key: str, record: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in _parts(record).items()
    )
    return f"<table><caption>{escape(_title(key, record))}</caption>{rows}</table>"
