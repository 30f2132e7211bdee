"""Every class and function of ``nn`` and ``diffusion`` is reached from what a user calls: the code is read, not run."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[1] / "src" / "alphastomics"
ENTRIES = ("model", "tl", "pp", "pl", "datasets", "config", "main")
CHECKED = ("nn", "diffusion")
Name = tuple[str, str]  # module and name in it


class Module(NamedTuple):
    """What a file defines, and what it imports under which name."""

    defined: dict[str, list[ast.stmt]]
    imported: dict[str, Name]
    loose: list[ast.stmt]  # statements that run on import and bind nothing


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = parse(ast.parse(path.read_text(encoding="utf-8")))
    return found


def parse(tree: ast.Module) -> Module:
    module = Module({}, {}, [])
    for node in ast.walk(tree):  # imports within functions and for types count as those at the top
        if isinstance(node, ast.ImportFrom | ast.Import):
            module.imported.update(imports(node))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)]
        for name in names:
            module.defined.setdefault(name, []).append(node)
        if not names:
            module.loose.append(node)
    return module


def imports(node: ast.ImportFrom | ast.Import) -> Iterator[tuple[str, Name]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, (node.module or "", alias.name)
        elif alias.asname:
            yield alias.asname, (alias.name, "")


def references(module: str, node: ast.AST) -> Iterator[Name]:
    """Names of this package that code uses, as they stand in the module."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield module, part.id
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            target = modules()[module].imported.get(part.value.id)
            if target is not None:
                yield f"{target[0]}.{target[1]}".rstrip("."), part.attr


def resolve(name: Name) -> Name | None:
    """Where a name is defined, through all imports; None outside of the package."""
    module, symbol = name
    if module not in modules():
        return None
    if symbol in modules()[module].defined:
        return name
    target = modules()[module].imported.get(symbol)
    return None if target is None or target == name else resolve(target)


def public(module: str) -> list[Name]:
    """Names of ``__all__``, or all without an underscore."""
    this = modules()[module]
    if "__all__" in this.defined:
        return [(module, name) for name in ast.literal_eval(this.defined["__all__"][0].value)]
    return [(module, name) for name in this.defined if not name.startswith("_")]


def reached() -> set[Name]:
    waiting = [name for entry in ENTRIES for name in public(f"alphastomics.{entry}")]
    seen: set[Name] = set()
    imported: set[str] = set()
    while waiting:
        name = resolve(waiting.pop())
        if name is None or name in seen:
            continue
        seen.add(name)
        module = modules()[name[0]]
        nodes = list(module.defined[name[1]])
        if name[0] not in imported:
            imported.add(name[0])
            nodes += module.loose
        waiting += [reference for node in nodes for reference in references(name[0], node)]
    return seen


def kept(module: str) -> list[Name]:
    """Classes and functions that a module defines, private ones as well."""
    return [
        (module, name)
        for name, nodes in modules()[module].defined.items()
        if isinstance(nodes[0], ast.FunctionDef | ast.ClassDef) and name != "_"
    ]


@pytest.mark.parametrize("package", CHECKED)
def test_every_class_and_function_is_reached_from_an_argument_of_the_user(package):
    checked = [
        name for module in modules() if f"{module}.".startswith(f"alphastomics.{package}.") for name in kept(module)
    ]
    assert len(checked) > 20
    assert sorted(set(checked) - reached()) == []


# Called by torch; and a number that the specification of long contexts names.
CALLED_BY_OTHERS = {"forward", "backward", "extra_repr", "compression_ratio"}


def test_every_method_is_called_somewhere():
    used = set()
    for path in SOURCE.rglob("*.py"):
        used |= {part.attr for part in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(part, ast.Attribute)}
    methods = {
        (module, node.name, part.name)
        for module in modules()
        if module.startswith(tuple(f"alphastomics.{package}" for package in CHECKED))
        for nodes in modules()[module].defined.values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("__")
    }
    assert len(methods) > 50
    assert sorted(method for method in methods if method[2] not in used | CALLED_BY_OTHERS) == []


def test_the_walk_sees_what_nothing_reaches():
    tree = parse(ast.parse("import torch.nn.functional as F\nfrom a import b as c\ndef f():\n    return c(F.x)\nf()\n"))
    assert list(tree.defined) == ["f"]
    assert tree.imported == {"F": ("torch.nn.functional", ""), "c": ("a", "b")}
    assert len(tree.loose) == 1
    assert ("alphastomics.nn.denoiser", "Denoiser") in reached()
    assert ("alphastomics.nn.denoiser", "nothing") not in reached()
