"""The page that leads from the earlier AlphaSTomics to this one: what it names here exists, tests included."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from alphastomics import config
from alphastomics.main import app

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "seed-map.md"
PLANNED, NOT_CARRIED_OVER = "planned", "not carried over"


class Row(NamedTuple):
    """A row of a table: what the earlier version had, what there is here, and the tests that show it."""

    earlier: str
    here: str
    shown_by: str

    def named(self, column: str) -> list[str]:
        """Names in backticks."""
        return re.findall(r"`([^`]+)`", getattr(self, column))

    @property
    def status(self) -> str:
        """``planned``, ``not carried over``, or empty."""
        return next((s for s in (PLANNED, NOT_CARRIED_OVER) if self.shown_by.startswith(s)), "")


def read_rows() -> list[Row]:
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| earlier |")):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 3, f"not three cells: {line}"
            rows.append(Row(*cells))
    return rows


ROWS = read_rows()


def names(column: str, status: str) -> list[str]:
    """Names of a column in the rows of a status, each once."""
    return list(dict.fromkeys(name for row in ROWS if row.status == status for name in row.named(column)))


# -- what a name stands for --------------------------------------------------------------------------------------------


def find_flags(name: str) -> None:
    """``alphastomics COMMAND --flag …``: the command has these flags."""
    _, *words = name.split()
    if not words:
        return
    command, *flags = words
    assert command in list(app), f"there is no command {command}"
    known = {flag for argument in app[command].assemble_argument_collection() for flag in argument.names}
    assert set(flags) <= known, f"{command} lacks {', '.join(sorted(set(flags) - known))}"


def find_module(name: str) -> None:
    """``python -m MODULE``."""
    assert find_spec(name.removeprefix("python -m ")) is not None


def find_file(name: str) -> None:
    """A file of the repository, or a pattern of some."""
    assert list(ROOT.glob(name)), f"there is no file {name}"


def find_object(name: str) -> None:
    """``room.name``, or ``room.name(parameter, parameter="value")`` with names and choices of its signature."""
    path, _, call = name.partition("(")
    found = resolve_name(f"alphastomics.{path}")
    if not call:
        return
    annotations = annotations_of(found)
    expression = ast.parse(f"f({call}", mode="eval").body
    assert isinstance(expression, ast.Call)
    given: dict[str | None, Any] = {argument.id: None for argument in expression.args if isinstance(argument, ast.Name)}
    assert len(given) == len(expression.args)
    given |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in expression.keywords}
    for parameter, value in given.items():
        assert parameter in annotations, f"{path} has no parameter {parameter}"
        choices = re.search(r"Literal\[(.*?)\]", annotations[parameter])
        if isinstance(value, str) and choices:
            assert value in ast.literal_eval(f"({choices[1]},)"), f"{parameter}={value!r} is no choice"


def annotations_of(found: Any) -> dict[str, str]:
    """Parameters with their types, those that the model takes as declared settings among them."""
    parameters = inspect.signature(found).parameters
    named = {name: (parameter.annotation, found) for name, parameter in parameters.items()}
    takes_settings = inspect.getmodule(found).__name__.startswith("alphastomics.model.")  # type: ignore[union-attr]
    if takes_settings and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        training = found.__name__ == "train"
        declared = (config.TrainingConfig,) if training else (config.NetworkConfig, config.DiffusionSettings)
        for settings in declared:
            named |= {field.name: (field.type, settings) for field in fields(settings)}
    return {name: str(getattr(inspect.getmodule(where), str(kind), kind)) for name, (kind, where) in named.items()}


def find(name: str) -> None:
    """Find what a name of this version stands for; an error if there is no such thing."""
    kinds: list[tuple[str, Callable[[str], None]]] = [
        (r"alphastomics( [a-z0-9]+( --[a-z0-9-]+)*)?", find_flags),
        (r"python -m [a-z_.0-9]+", find_module),
        (r"[\w./*-]+\.(md|py|ipynb|toml|png|cff)|LICENSE|Makefile", find_file),
        (r"[a-z_]+(\.\w+)+(\(.*\))?", find_object),
    ]
    for pattern, look in kinds:
        if re.fullmatch(pattern, name):
            look(name)
            return
    raise AssertionError(f"neither a command, a module, a file nor an object: {name}")


@pytest.mark.parametrize(
    "name",
    [
        "alphastomics frob",
        "alphastomics train --frob",
        "python -m alphastomics.frob",
        "docs/frob*.md",
        "model.Frob",
        "model.AlphaSTomics.frob",
        "model.AlphaSTomics(frob)",
        "model.AlphaSTomics(use_moe, frob=1)",
        'model.AlphaSTomics(attention="frob")',
        'nn.pair.TriangleMultiplication(direction="frob")',
        "frob",
    ],
)
def test_missing_symbols_are_not_found(name: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ImportError)):
        find(name)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_every_row_is_complete() -> None:
    assert len(ROWS) > 100
    assert [row for row in ROWS if not row.earlier or not row.here] == []
    assert [row for row in ROWS if not row.status and not (row.named("here") and row.named("shown_by"))] == []
    assert [row for row in ROWS if row.status and row.named("shown_by")] == []
    assert [row for row in ROWS if row.status == NOT_CARRIED_OVER and row.named("here")] == []


@pytest.mark.parametrize("name", names("here", ""))
def test_existing_symbols_are_found(name: str) -> None:
    find(name)


@pytest.mark.parametrize("name", names("here", PLANNED))
def test_planned_symbols_do_not_exist_yet(name: str) -> None:
    """When this fails, the row has come true: put the test that shows it in the place of `planned`."""
    with pytest.raises((AssertionError, AttributeError, ImportError)):
        find(name)


@cache
def defined_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("node", names("shown_by", ""))
def test_listed_test_exists(node: str) -> None:
    file, _, name = node.partition("::")
    assert name.startswith("test_")
    assert name in defined_in(TESTS / file)


# -- the documents of the earlier version ------------------------------------------------------------------------------

# Python, values and paths of examples.
NOT_NAMES = {
    "False", "Gate", "Linear", "MoE", "Module", "ReLU", "True", "adata", "alphaStomics/", "gate", "gate_scores", "loss", "mean",
    "model", "positions", "print", "read_h5ad", "sampler", "sigmoid", "std", "--upgrade",
}  # fmt: skip


def names_in(text: str) -> set[str]:
    """Names of a document: what is in backticks, flags, files and folders, keys of YAML, identifiers of Python."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    found = set(re.findall(r"`([^`\n]+)`", fenced.sub("", text)))
    found |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    found |= set(re.findall(r"\w[\w-]*\.(?:py|md|MD|yaml|json|parquet|txt|h5ad|npz|ckpt|pt)\b", text))
    for language, code in fenced.findall(text):
        found |= set(re.findall(r"\b[A-Z][a-z]\w*[A-Z]\w*\b", re.sub("#.*", "", code)))
        found |= set(re.findall(r"alphastomics\.main (\w+)", code))
        if language == "yaml":
            found |= set(re.findall(r"^\s*([A-Za-z_]\w*):", code, flags=re.MULTILINE))
        elif language == "python":
            code = re.sub(r'""".*?"""|#.*?$', "", code, flags=re.DOTALL | re.MULTILINE)
            hits = re.findall(r"[\"'](\w+)[\"']|\b(\w+)\s*=[^=]|\b([a-z_]\w*)\(", code)
            found |= {name for hit in hits for name in hit}
        elif language in ("", "plaintext"):
            found |= set(re.findall(r"\b[\w.]+/", code))
    return {name for name in found if name} - NOT_NAMES


@pytest.mark.real
def test_every_name_of_the_earlier_version_is_listed(real_data: Path) -> None:
    documents = sorted((real_data.parent / "seeds").glob("00[0-3]_*.md"))
    if not documents:
        pytest.skip(f"no documents of the earlier version at {real_data.parent / 'seeds'}")
    words = re.findall(r"[\w./-]+", " ".join(name for row in ROWS for name in row.named("earlier")))
    told = {part for word in words for part in (word, *word.split("."))}
    missing = {
        name
        for document in documents
        for name in names_in(document.read_text(encoding="utf-8"))
        if not set(re.findall(r"[\w./-]+", name)) <= told
    }
    assert missing == set()
