"""Every class, function and method of the package is reached from what a user calls: the code is read, not run."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "alphastomics"
Name = tuple[str, str]  # module and name in it


class Module(NamedTuple):
    """What a file defines, and what it imports under which names."""

    defined: dict[str, list[ast.stmt]]
    imported: dict[str, set[Name]]
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
            for name, target in imports(node):
                module.imported.setdefault(name, set()).add(target)
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
        elif isinstance(part, ast.Attribute):
            owners = {owner.id for owner in ast.walk(part.value) if isinstance(owner, ast.Name)}
            for owner in owners & modules()[module].imported.keys():
                for target in modules()[module].imported[owner]:
                    yield f"{target[0]}.{target[1]}".rstrip("."), part.attr


def resolve(name: Name) -> set[Name]:
    """Where a name is defined, through all imports; nowhere outside of the package."""
    module, symbol = name
    if module not in modules():
        return set()
    if symbol in modules()[module].defined:
        return {name}
    targets = modules()[module].imported.get(symbol, set()) - {name}
    return {found for target in targets for found in resolve(target)}


@cache
def entries() -> frozenset[Name]:
    """What a user calls: the names of the API, except those of networks and processes, and the commands."""
    module = ""
    names: set[Name] = set()
    for line in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
            module = found[1]
        elif (found := re.fullmatch(r"    (\w+)", line)) and not module.endswith((".nn", ".diffusion")):
            names.add((module, found[1]))
    main = modules()["alphastomics.main"].defined.items()
    names |= {("alphastomics.main", name) for name, (node, *_) in main if getattr(node, "decorator_list", None)}
    return frozenset({*names, ("alphastomics.main", "main")})


@cache
def reached() -> frozenset[Name]:
    waiting = list(entries())
    seen: set[Name] = set()
    imported: set[str] = set()
    while waiting:
        for name in resolve(waiting.pop()) - seen:
            seen.add(name)
            module = modules()[name[0]]
            nodes = list(module.defined[name[1]])
            if name[0] not in imported:
                imported.add(name[0])
                nodes += module.loose
            waiting += [reference for node in nodes for reference in references(name[0], node)]
    return frozenset(seen)


def definitions() -> list[tuple[Name, ast.FunctionDef | ast.ClassDef]]:
    """Classes and functions of all modules, private ones as well, except those that Python calls."""
    return [
        ((module, name), node)
        for module in modules()
        for name, (node, *_) in modules()[module].defined.items()
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and name != "_" and not name.startswith("__")
    ]


def test_every_class_and_function_is_reached_from_what_a_user_calls():
    names = {name for name, _ in definitions()}
    assert len(names) > 1000
    assert sorted(names - reached()) == []


def bases(name: Name) -> Iterator[Name]:
    """Classes from which a class inherits; those outside of the package as (module, "")."""
    yield name
    (node, *_) = modules()[name[0]].defined[name[1]]
    for base in node.bases if isinstance(node, ast.ClassDef) else []:
        found = {where for reference in references(name[0], base) for where in resolve(reference)}
        for where in found:
            yield from bases(where)
        if not found:
            yield ast.unparse(base), ""


# Called by torch; and a number that the specification of long contexts names.
CALLED_BY_OTHERS = {"forward", "backward", "extra_repr", "compression_ratio"}
PLAIN_BASES = {"nn.Module", "NamedTuple", "Protocol", "torch.autograd.Function", "Exception", "ValueError"}


@cache
def api() -> set[Name]:
    """Functions and classes of the API, with those from which they inherit."""
    return {base for entry in entries() for name in resolve(entry) for base in bases(name)}


def has_hooks(name: Name) -> bool:
    """Whether a class inherits from one of another package, which calls its methods."""
    return bool({base for base, symbol in bases(name) if not symbol} - PLAIN_BASES)


def test_every_method_is_called_somewhere():
    """Methods of the API are for users; those of subclasses of other packages may be hooks."""
    used = {
        part.attr
        for path in SOURCE.rglob("*.py")
        for part in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(part, ast.Attribute)
    }
    methods = set()
    for name, node in definitions():
        if isinstance(node, ast.ClassDef) and name not in api() and not has_hooks(name):
            defined = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            methods |= {(*name, method) for method in defined if not method.startswith("__")}
    assert len(methods) > 200
    assert sorted(method for method in methods if method[2] not in used | CALLED_BY_OTHERS) == []


OPTIONAL_CHECKED = ("nn", "diffusion", "sampling", "data", "train")  # their functions are hardly called by users
CALLED_BY_OTHER_NAMES = {"__call__", "forward", "__torch_dispatch__", "ContextDataModule", "ContextTrainer"}


def optional_arguments(function: ast.FunctionDef, *, method: bool) -> Iterator[tuple[str, int | None]]:
    """Arguments with a default, and their place if they can be passed by position."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args][method:]
    for place in range(len(positional) - len(arguments.defaults), len(positional)):
        yield positional[place].arg, place
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield argument.arg, None


def calls() -> dict[str, list[ast.Call]]:
    """All calls by the last part of the name that is called."""
    found: dict[str, list[ast.Call]] = {}
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                found.setdefault(name, []).append(call)
    return found


def passes(call: ast.Call, argument: str, place: int | None) -> bool:
    """Whether a call may pass an argument; unpacked arguments may be any."""
    unpacked = any(isinstance(value, ast.Starred) for value in call.args)
    by_place = place is not None and len(call.args) > place
    return unpacked or by_place or any(keyword.arg in (None, argument) for keyword in call.keywords)


def test_every_optional_argument_is_passed_somewhere():
    """Otherwise it is a constant."""
    called = calls()
    checked, never = 0, []
    for (module, symbol), node in definitions():
        if module.split(".")[1] not in OPTIONAL_CHECKED or (module, symbol) in api():
            continue
        functions = [node] if isinstance(node, ast.FunctionDef) else node.body
        for function in functions:
            if not isinstance(function, ast.FunctionDef):
                continue
            name = symbol if function.name == "__init__" else function.name
            if name in CALLED_BY_OTHER_NAMES or (name != symbol and has_hooks((module, symbol))):
                continue
            for argument, place in optional_arguments(function, method=function is not node):
                checked += 1
                if not any(passes(call, argument, place) for call in called.get(name, [])):
                    never.append((module, symbol, function.name, argument))
    assert checked > 50
    assert never == []


def test_unreachable_code_is_detected():
    tree = parse(ast.parse("import torch.nn.functional as F\nfrom a import b as c\ndef f():\n    return c(F.x)\nf()\n"))
    assert list(tree.defined) == ["f"]
    assert tree.imported == {"F": {("torch.nn.functional", "")}, "c": {("a", "b")}}
    assert len(tree.loose) == 1
    assert ("alphastomics.nn.denoiser", "Denoiser") in reached()
    assert ("alphastomics.nn.denoiser", "nothing") not in reached()
