"""Random damage to bytes and to nested values of JSON and YAML."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

LONG = "x" * 3000
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308, -1e308),
    *(
        float("nan"),
        float("inf"),
        "",
        "0",
        "nan",
        "1e999",
        "a\nb",
        "\x00",
        "\ud800",
        "../../etc/passwd",
        "/etc/passwd",
        LONG,
    ),
    *([], {}, [[]], [None], {"": None}, [1, "a"], [1] * 500, DEEP, {"a": {"b": 1}}, {"__reduce__": "os.system"}),
)
ODD_TEXTS = (
    *(
        "NaN",
        "-Infinity",
        "1e999",
        "9" * 5000,
        "-" + "9" * 400,
        "[" * 5000,
        "{" * 5000,
        '{"a":' * 3000,
        "\\ud800",
        '"\\ud800"',
    ),
    *(
        "*a",
        "&a [*a, *a]",
        "!!python/object/apply:os.system ['true']",
        "!!bool maybe",
        "!!int [1]",
        "!!float x",
        "!!map 3",
    ),
    *(
        '"\\UFFFFFFFF"',
        "? [1]\n: 2",
        "<<: {a: 1}",
        "\t",
        "%YAML 9.9",
        "---",
        "\x00",
        "\ufeff",
        "|\n x",
        ">-",
        "0x10",
        "1_0",
        "- -",
    ),
)


def mutate_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes of which some are flipped, removed, moved, repeated or random."""
    size = max(1, len(data))
    start, length = int(rng.integers(size)), int(min(size, 2 ** rng.uniform(0, 12)))
    kind = rng.choice(["flip", "flip", "flip", "overwrite", "cut", "remove", "insert", "splice", "fill", "random"])
    if kind == "flip":
        changed = bytearray(data)
        for place in rng.integers(size, size=int(2 ** rng.uniform(0, 5))) if data else ():
            changed[place] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    if kind == "cut":
        return data[:start]
    if kind == "remove":
        return data[:start] + data[start + length :]
    if kind == "random":
        return rng.bytes(int(rng.integers(0, 5000)))
    other = int(rng.integers(size))
    new = {"splice": data[other : other + length], "fill": bytes([int(rng.choice([0, 255]))]) * length}
    added = new.get(kind, rng.bytes(length))
    return data[:start] + added + data[start + (0 if kind == "insert" else length) :]


def mutate_values(values: Any, rng: np.random.Generator) -> Any:
    """Nested values of which one or two are removed, renamed, of another type, or huge."""
    values = copy.deepcopy(values)
    for _ in range(1 + int(rng.random() < 0.3)):
        places = list(_places(values))
        if not places:
            break
        # Few values lie near the root, and they matter most, so depths are chosen with equal probability.
        depth = rng.choice(sorted({depth for depth, *_ in places}))
        candidates = [place for place in places if place[0] == depth]
        _, container, key = candidates[int(rng.integers(len(candidates)))]
        _change(container, key, rng)
    return values


def _places(values: Any, depth: int = 0) -> Any:
    """Depth, container and key of every value; only some of long lists."""
    if depth > 12:
        return
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for number, (key, value) in enumerate(items):
        if number < 40:
            yield depth, values, key
            yield from _places(value, depth + 1)


def _change(container: Any, key: Any, rng: np.random.Generator) -> None:
    kind = rng.choice(["odd", "odd", "odd", "remove", "rename", "shorten", "number"])
    value = container[key]
    if kind == "remove":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[f"{key}_" if rng.random() < 0.7 else str(ODD_VALUES[int(rng.integers(len(ODD_VALUES)))])] = (
            container.pop(key)
        )
    elif kind == "shorten" and isinstance(value, (list, str)):
        container[key] = value[: len(value) // 2] if rng.random() < 0.5 else value + value
    elif kind == "number" and isinstance(value, (int, float)):
        container[key] = [-value, value * 1000, value + 1, value / 3, str(value)][int(rng.integers(5))]
    else:
        container[key] = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]


def mutate_text(text: str, rng: np.random.Generator) -> str:
    """Text with a piece replaced by one that is hard to parse, or with a repeated line."""
    start = int(rng.integers(max(1, len(text))))
    if rng.random() < 0.2:
        lines = text.splitlines(keepends=True)
        line = int(rng.integers(max(1, len(lines))))
        return "".join([*lines[: line + 1], *lines[line:]])
    odd = ODD_TEXTS[int(rng.integers(len(ODD_TEXTS)))]
    return text[:start] + odd + text[start + int(rng.integers(8)) :]


def mutate_document(values: Any, dump: Callable[[Any], str], rng: np.random.Generator) -> bytes:
    """Bytes of a document with changed values, text or bytes."""
    kind = rng.random()
    if kind < 0.75:
        return dump(mutate_values(values, rng)).encode("utf-8", "surrogatepass")
    if kind < 0.9:
        return mutate_text(dump(values), rng).encode("utf-8", "surrogatepass")
    return mutate_bytes(dump(values).encode(), rng)


def as_json(values: Any) -> str:
    """Serialize, including values that are not JSON: NaN and lone surrogates."""
    return json.dumps(values)
