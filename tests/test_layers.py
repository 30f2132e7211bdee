"""Imports between the packages point one way, those for types included."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# What each package may import, beside modules that start with an underscore and have no package of their own.
BELOW: dict[str, set[str]] = {
    "config": set(),
    "diffusion": {"config"},
    "nn": {"config"},
    "data": {"config"},
    "datasets": set(),
    "metrics": set(),
    "chains": {"metrics"},
    "sampling": {"config", "data", "diffusion", "metrics", "nn"},
    "train": {"chains", "config", "data", "diffusion", "nn"},
    "model": {"config", "data", "diffusion", "nn", "sampling", "train"},
    "pp": {"data"},
    "tl": {"config", "data", "metrics", "model", "nn", "sampling", "train"},
    "pl": {"data", "metrics", "tl"},
}


@cache
def modules() -> dict[str, Path]:
    """Files of the package, by dotted name."""
    found = {}
    for path in (SOURCE / "alphastomics").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of the package, at any depth of its code."""
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        base = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names if alias.name in modules()}
            elif isinstance(node, ast.ImportFrom):
                start = ".".join(base.split(".")[: len(base.split(".")) + 1 - node.level]) if node.level else ""
                origin = ".".join(part for part in (start, node.module) if part)
                for alias in node.names:
                    full = f"{origin}.{alias.name}"
                    targets |= {target for target in (full if full in modules() else origin,) if target in modules()}
        targets.discard(name)
    return found


def package_of(module: str) -> str:
    return (module.split(".") + [""])[1]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle in a graph, as a path that ends where it starts; empty without one."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for target in sorted(graph.get(node, ())):
                if found := search(target, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := search(node, []))), [])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_modules_import_in_no_circle():
    assert circle(imports()) == []


@pytest.mark.parametrize("package", sorted(BELOW))
def test_packages_import_only_what_is_below(package):
    targets = {
        package_of(target)
        for name, found in imports().items()
        if package_of(name) == package
        for target in found
        if package_of(target) != package
    }
    assert {target for target in targets if target and not target.startswith("_")} <= BELOW[package]


def test_every_package_has_a_place():
    packages = {path.parent.name for path in (SOURCE / "alphastomics").glob("*/__init__.py")}
    assert packages == set(BELOW) | {"_io", "cli"}
