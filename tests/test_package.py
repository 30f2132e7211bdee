"""The package: import time, public names, types, metadata, documentation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import alphastomics
from alphastomics import _keys

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "alphastomics"
SUBMODULES = ["config", "datasets", "metrics", "model", "pl", "pp", "tl"]
HEAVY = {"torch", "scvi", "lightning", "scanpy", "squidpy", "pandas", "matplotlib"}


def in_fresh_interpreter(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return run.stdout


def test_import_takes_less_than_a_second() -> None:
    code = "from time import perf_counter as t; a = t(); import alphastomics; print(t() - a)"
    assert min(float(in_fresh_interpreter(code)) for _ in range(3)) < 1.0


def test_import_loads_nothing_heavy() -> None:
    loaded = in_fresh_interpreter("import sys, alphastomics; print(*sys.modules)").split()
    assert HEAVY.isdisjoint(loaded)


@pytest.mark.parametrize("submodule", ["config", "datasets", "metrics", "data._schema"])
def test_submodule_does_not_import_torch(submodule: str) -> None:
    loaded = in_fresh_interpreter(f"import sys, alphastomics.{submodule}; print(*sys.modules)").split()
    assert "torch" not in loaded


@pytest.mark.parametrize("name", dir(alphastomics))
def test_listed_name_resolves(name: str) -> None:
    assert getattr(alphastomics, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nonsense'"):
        alphastomics.nonsense  # noqa: B018


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_public_names_exist_and_are_documented(submodule: str) -> None:
    module = import_module(f"alphastomics.{submodule}")
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{submodule}.{name} has no docstring"


def test_version_matches_the_project_and_its_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert alphastomics.__version__ == version("alphastomics") == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project["version"]


def test_console_script_points_to_main() -> None:
    (script,) = entry_points(group="console_scripts", name="alphastomics")
    assert script.value == "alphastomics.main:main"


def test_dependencies_have_lower_bounds_and_lightning_an_upper_one() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = [r for r in requirements if not re.fullmatch(r"[a-z0-9-]+>=[0-9.]+", r)]
    assert [re.fullmatch(r"lightning>=[0-9.]+,<[0-9.]+", r) is not None for r in others] == [True]


def test_library_never_prints() -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


@pytest.mark.parametrize("name", ["LICENSE", "CITATION.cff", "CHANGELOG.md", "README.md", "src/alphastomics/py.typed"])
def test_file_of_a_scverse_package_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_keys_are_distinct() -> None:
    keys = [value for name, value in vars(_keys).items() if name.isupper()]
    assert len(keys) == len(set(keys))


def documented_names() -> list[str]:
    text = (ROOT / "docs" / "api.md").read_text()
    names = []
    for block in re.findall(r"```\{eval-rst\}\n(.*?)```", text, flags=re.DOTALL):
        (module,) = re.findall(r"^\.\. currentmodule:: (\S+)$", block, flags=re.MULTILINE)
        names += [f"{module}.{name}" for name in re.findall(r"^    ([A-Za-z_]\w*)$", block, flags=re.MULTILINE)]
    return names


@pytest.mark.parametrize("name", documented_names())
def test_documented_name_exists(name: str) -> None:
    assert resolve_name(name) is not None


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_public_name_is_in_the_api_page(submodule: str) -> None:
    public = {f"alphastomics.{submodule}.{name}" for name in import_module(f"alphastomics.{submodule}").__all__}
    assert public <= set(documented_names())
