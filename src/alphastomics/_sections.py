"""Dataclasses whose fields are keys of a file or sections of them: from nested mappings, and back."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from alphastomics._io._errors import LONGEST, format_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Value(NamedTuple):
    """A value with its key (``training.learning_rate``) and its option (``lr``)."""

    key: str
    option: str | None
    value: Any


def mapping(values: Any, where: str) -> dict[str, Any]:
    """A section as a dict of its own; nothing is an empty one."""
    if values is None:
        return {}
    if not hasattr(values, "items"):
        raise ValueError(f"{where} must hold keys with values, not {_kind(values)}")
    return dict(values.items())


def build(cls: type[Any], values: Mapping[str, Any], source: str, others: Iterable[str] = ()) -> Any:
    """A configuration of nested mappings; ``others`` are sections that were read already, for messages.

    Raises
    ------
    ValueError
        If a key is not known, or a value of another type.
    """
    names = {entry.name for entry in fields(cls)}
    for name in values:
        if name not in names:
            raise ValueError(f"{source}: {said(name)} is not known; {suggestion(cls, str(name), [*names, *others])}")
    return _section(cls, cls, values, source, ())


def _section(root: type[Any], cls: type[Any], values: Mapping[str, Any], source: str, path: tuple[str, ...]) -> Any:
    hints = get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        key = ".".join((*path, said(name)))
        if name not in hints:
            raise ValueError(f"{source}: {key} is not known; {suggestion(root, str(name), hints, path)}")
        kind = hints[name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            arguments[name] = _section(root, kind, mapping(value, f"{source}: {key}"), source, (*path, name))
        else:
            arguments[name] = _converted(value, kind, f"{source}: {key}")
    return cls(**arguments)


def suggestion(root: type[Any], name: str, names: Iterable[str], path: tuple[str, ...] = ()) -> str:
    """The key that was meant: one with that name elsewhere, or the option of that name, or one of `names` that looks alike."""
    for leaf in leaves(root()):
        if name in (leaf.option, leaf.key.rpartition(".")[2]):
            return f"did you mean {leaf.key}?"
    return nearest(name, names, path)


def nearest(name: str, names: Iterable[str], path: tuple[str, ...] = ()) -> str:
    """The name that looks most like an unknown one, as a question."""
    (found,) = get_close_matches(name[:LONGEST], names, n=1, cutoff=0)  # which takes time with the square of the length
    return f"did you mean {'.'.join((*path, found))}?"


def _converted(value: Any, kind: Any, where: str) -> Any:
    """A value as the type of its key, which is a union with None."""
    kinds = get_args(kind)
    if value is None:
        return None
    if float in kinds and not isinstance(value, bool) and (str not in kinds or not isinstance(value, str)):
        number = _number(value)
        value = value if number is None else number
    for one in kinds:
        if type(value) is one or (get_origin(one) is Literal and value in get_args(one)):
            return value
        if one is Path and isinstance(value, str | Path):
            return Path(value)
    wanted = " or ".join(
        _TYPES.get(one) or f"one of {', '.join(get_args(one))}" for one in kinds if one is not NoneType
    )
    raise ValueError(f"{where} must be {wanted}, not {text(value)}")


def _number(value: Any) -> float | None:
    """A finite number, also one in text such as ``1e-4``, which other readers of YAML take for text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "keys with values" if hasattr(value, "items") else f"the value {text(value)}"


def text(value: Any) -> str:
    """A value in a message, as a file has it, and no longer than a line."""
    if isinstance(value, list) or hasattr(value, "items"):
        return _kind(value)
    return str(value).lower() if isinstance(value, bool) else format_value(value)


def said(name: Any) -> str:
    """A key in a message, as a file has it, in one line and no longer than that."""
    found = str(name)
    return found if found.isprintable() and len(found) <= LONGEST else format_value(found)


def plain(section: Any) -> dict[str, Any]:
    """Nested values of YAML."""
    found: dict[str, Any] = {}
    for entry in fields(section):
        value = getattr(section, entry.name)
        found[entry.name] = plain(value) if is_dataclass(value) else str(value) if isinstance(value, Path) else value
    return found


def leaves(section: Any, path: tuple[str, ...] = ()) -> Iterator[Value]:
    """All values, also None."""
    for entry in fields(section):
        value, here = getattr(section, entry.name), (*path, entry.name)
        if is_dataclass(value):
            yield from leaves(value, here)
        else:
            yield Value(".".join(here), entry.metadata.get("option", entry.name), value)


def from_options(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """A configuration of the values of options."""
    arguments = {}
    for entry in fields(cls):
        if is_dataclass(entry.default):
            arguments[entry.name] = from_options(type(entry.default), options)
        else:
            name = entry.metadata.get("option", entry.name)
            arguments[entry.name] = None if name is None else options[name]
    return cls(**arguments)
