"""How a setting is declared, checked and described.

A setting is a field of one of the dataclasses of this package. Its type holds the choices, its default is the only copy of
the default, and the ``Parameters`` section of the class has its sentence. :func:`setting` adds the range, the name in a file,
the names on the command line, and the setting without which it has no effect. Everything else is derived from these.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from alphastomics._io._errors import LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True)
class Details:
    """What :func:`setting` adds to a field; its parameters."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    key: str | None = None
    flag: str | None = None
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] | None = None
    requires: tuple[Any, ...] | None = None
    from_data: bool = False
    python_only: bool = False
    file_only: bool = False


NO_DETAILS = Details()
MIN_SIMILARITY = 0.6  # of an unknown argument to the known one that is suggested
SISTER_NAMES = {
    "basis": "position_key",
    "batch_key": "slice_key",
    "device": "accelerator",
    "labels_key": "cell_type_key",
    "learning_rate": "lr",
    "library_key": "slice_key",
    "lr": "plan_kwargs",
    "n_epochs": "max_epochs",
    "num_samples": "n_samples",
    "obsm_key": "position_key",
    "sample_key": "slice_key",
    "seed": "random_state",
    "spatial_key": "position_key",
    "use_gpu": "accelerator",
}
"""Arguments of scanpy, squidpy and scvi-tools, what they are called here, and the argument that contains a field."""


def setting(default: Any, **details: Any) -> Any:
    """A field of a dataclass with more than a type and a default.

    Parameters
    ----------
    default
        Default value.
    ge, gt, le, lt
        Bounds of a number.
    key
        Section and key in a file, if they are not ``SECTION`` of the class and the name of the field.
    flag
        Name on the command line, if it is not that of the field with dashes.
    flags
        Further names on the command line.
    off
        Names of the flag that switches a boolean off; ``--no-NAME`` if None.
    requires
        Name of another setting, and those of its values with which this one has an effect.
    from_data
        Whether the value follows from the data unless one is given.
    python_only, file_only
        Whether the setting is an argument of the Python class only, or a key of a file only.
    """
    return field(default=default, metadata={"details": Details(**details)})


class Setting(NamedTuple):
    """A declared setting.

    Attributes
    ----------
    name
        Name of the field, of the argument in Python and, with dashes, of the flag.
    hint
        Type.
    default
        Default value.
    key
        Name in a file, such as ``training.learning_rate``.
    text
        The sentence.
    details
        Everything else.
    """

    name: str
    hint: Any
    default: Any
    key: str
    text: str
    details: Details

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.details.flag or flag(self.name)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Members of the type: classes and ``Literal``."""
        return get_args(self.hint) if get_origin(self.hint) not in (None, Literal) else (self.hint,)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Permitted strings."""
        return tuple(word for kind in self.kinds if get_origin(kind) is Literal for word in get_args(kind))

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, such as ``"must be at least 1"``; None if nothing is."""
        if value is None or self.hint is Any:
            return None
        if self.choices and value not in self.choices and not (_is_number(value) and self._takes_numbers):
            if str in self.kinds or not isinstance(value, str | int | float):
                return None
            number = " or a number" * self._takes_numbers
            return f"is unknown; choose from {', '.join(map(repr, self.choices))}{number}"
        if isinstance(value, str) and (str in self.kinds or value in self.choices):
            return None
        if self.kinds == (str,):
            return "must be text"
        if bool in self.kinds and isinstance(value, str):  # any text is true
            return "must be True or False"
        classes: tuple[Any, ...] = tuple(kind for kind in self.kinds if is_dataclass(kind))
        if classes and not isinstance(value, classes):
            return f"must be {' or '.join(kind.__name__ for kind in classes)}(…)"
        return self._out_of_range(value) if self._takes_numbers else None

    @property
    def _takes_numbers(self) -> bool:
        return int in self.kinds or float in self.kinds

    def _out_of_range(self, value: Any) -> str | None:
        d = self.details
        bounds = (d.ge, d.gt, d.le, d.lt)
        if all(bound is None for bound in bounds):
            fractional = float not in self.kinds and isinstance(value, Real) and not isinstance(value, Integral)
            number = "a number" if float in self.kinds else "a whole number"
            return f"must be {number}" if fractional or isinstance(value, str) else None
        fits = (
            _is_number(value)
            and (float in self.kinds or isinstance(value, Integral))
            and math.isfinite(value)
            and (d.ge is None or value >= d.ge)
            and (d.gt is None or value > d.gt)
            and (d.le is None or value <= d.le)
            and (d.lt is None or value < d.lt)
        )
        if fits:
            return None
        whole = "" if float in self.kinds else "a whole number "
        if (d.ge is not None or d.gt is not None) and (d.le is not None or d.lt is not None):
            low = f"[{d.ge:g}" if d.gt is None else f"({d.gt:g}"
            high = f"{d.le:g}]" if d.lt is None else f"{d.lt:g})"
            return f"must {'be a whole number' if whole else 'lie'} in {low}, {high}"
        if d.gt is not None:
            return f"must be {whole or 'finite and '}greater than {d.gt:g}"
        return f"must be {whole or 'finite and '}at least {d.ge:g}"


def flag(name: str) -> str:
    """Name of a setting on the command line."""
    return f"--{name.replace('_', '-')}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@cache
def settings_of(cls: Any) -> dict[str, Setting]:
    """Settings of a dataclass by name, in order."""
    hints, texts, found = get_type_hints(cls), descriptions(cls), {}
    for entry in fields(cls):
        details = entry.metadata.get("details", NO_DETAILS)
        section = getattr(cls, "SECTION", "")
        default = None if entry.default is MISSING else entry.default
        key = details.key or f"{section}.{entry.name}"
        found[entry.name] = Setting(entry.name, hints[entry.name], default, key, texts.get(entry.name, ""), details)
    return found


@cache
def descriptions(cls: Any) -> dict[str, str]:
    """The ``Parameters`` sections of a class and of those it inherits from, by name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = cleandoc(base.__doc__ or "").partition("Parameters\n----------\n")
        section = re.split(r"\n\n?[A-Z]\w+\n-{3,}", section)[0]
        for names, text in re.findall(r"^(\w[\w, ]*)\n((?:(?:    .*)?\n?)+)", section, flags=re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def documented(cls: Any) -> Callable[[F], F]:
    """Replace ``{settings}`` in the docstring of a function by the settings of a dataclass."""

    def decorate(function: F) -> F:
        lines = [f"{name}\n        {text}" for name, text in descriptions(cls).items()]
        function.__doc__ = (function.__doc__ or "").replace("{settings}", "\n    ".join(lines))
        return function

    return decorate


def check(config: Any) -> None:
    """Check every setting of a dataclass by itself, and that none is set that has no effect.

    Raises
    ------
    ValueError
        If a value is not permitted, or a setting lacks the one that it requires.
    """
    cls: Any = type(config)
    declared = settings_of(cls)
    for name, entry in declared.items():
        value = getattr(config, name)
        if value is None and entry.default is not None:
            raise ValueError(f"{name}=None is not a value; leave it out for the default, {entry.default!r}")
        problem = entry.problem(value)
        if problem is not None:
            raise ValueError(f"{name}={value!r} {problem}")
    for entry in unmet(declared, vars(config)):
        switch, *needed = entry.details.requires or ()
        raise ValueError(
            f"{entry.name}={getattr(config, entry.name)!r} requires {switch}={' or '.join(map(repr, needed))}; "
            f"pass it, or omit {entry.name}"
        )


def unmet(declared: Mapping[str, Setting], values: Mapping[str, Any]) -> Iterator[Setting]:
    """Settings that differ from their default although the setting that they require has another value."""
    for name, entry in declared.items():
        if entry.details.requires is None or values[name] == entry.default:
            continue
        switch, *needed = entry.details.requires
        if switch in values and values[switch] not in needed:
            yield entry


def check_names(values: Mapping[str, Any], *classes: Any) -> None:
    """Check that keyword arguments are settings of some classes.

    Raises
    ------
    TypeError
        If a name is unknown; the message suggests the most similar one.
    """
    names = [name for cls in classes for name in settings_of(cls)]
    for name in values:
        if name not in names:
            raise unexpected_argument(name, names)


def unexpected_argument(name: str, names: Iterable[str], caller: str = "") -> TypeError:
    """The error for an unknown argument of a function, with the known one that was probably meant, if one is similar."""
    names, meant, field_name = list(names), name, ""
    while meant in SISTER_NAMES and meant not in names:
        field_name, meant = meant, SISTER_NAMES[meant]
    similar = [meant] if meant in names else get_close_matches(name[:LONGEST], names, n=1, cutoff=MIN_SIMILARITY)
    where = f"{caller}() got an " if caller else ""
    remedy = f"did you mean {similar[0]!r}?" if similar else "leave it out"
    if field_name and similar == ["plan_kwargs"]:
        remedy = f"pass plan_kwargs={{{field_name!r}: …}}"
    return TypeError(f"{where}unexpected keyword argument {name!r}; {remedy}")


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that is most similar to an unknown one."""
    return get_close_matches(name[:LONGEST], names, n=1, cutoff=0)[0]  # time is quadratic in the length


def split_arguments(values: Mapping[str, Any], *classes: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Keyword arguments as those of each class, and the others."""
    parts = [{name: value for name, value in values.items() if name in settings_of(cls)} for cls in classes]
    taken = {name for part in parts for name in part}
    return parts, {name: value for name, value in values.items() if name not in taken}
