"""Examples in docstrings: each of them runs, on small cells and with short trainings, and outputs are those that it shows."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import re
from functools import partial, wraps
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import pytest

import alphastomics as asx
from files import write_slices
from small_models import BRIEF, SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anndata import AnnData

SOURCE = Path(__file__).parents[2] / "src" / "alphastomics"
# Trainings, and draws of which each is a placement.
SLOW = re.compile(r"\.train\(|tl\.compare\(|n_samples=|tl\.reconstruct\((?!.*model=)")
NEEDS_SPATIALDATA = re.compile(r"\bsdata\b")

pytestmark = [
    # A network that was trained for a moment places the cells in a disk, which fits an outline in every orientation.
    pytest.mark.filterwarnings("ignore:the outline does not determine the frame:UserWarning"),
    # huggingface_hub sends files in a way that httpx advises against.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    # ome-zarr 0.15 and anndata 0.12, when a SpatialData is written.
    pytest.mark.filterwarnings("ignore:Call to deprecated class Scaler:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning"),
]


class Example(NamedTuple):
    """The examples of a docstring."""

    name: str
    text: str
    file: Path
    line: int


def read_examples() -> Iterator[Example]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        yield from examples_in(ast.parse(file.read_text(encoding="utf-8")), name, file)


def examples_in(node: Any, name: str, file: Path) -> Iterator[Example]:
    """Docstrings with a prompt of a module, a class or a function, and of what is defined in it."""
    text = ast.get_docstring(node)
    if text is not None and ">>> " in text:
        yield Example(name, text, file, node.body[0].lineno - 1)
    for each in node.body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            yield from examples_in(each, f"{name}.{each.name}", file)


def parameters() -> Iterator[Any]:
    for example in read_examples():
        marks = [pytest.mark.slow] * (SLOW.search(example.text) is not None)
        yield pytest.param(example, id=example.name, marks=marks)


class Outputs(doctest.OutputChecker):
    """Compares the outputs that an example shows; it need not show all."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def short_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks, which are trained for an epoch, whatever width and time an example asks for."""
    from alphastomics.model import AlphaSTomics

    train, init = AlphaSTomics.train, AlphaSTomics.__init__

    @wraps(train)
    def train_briefly(self: AlphaSTomics, **kwargs: Any) -> None:
        kwargs.pop("max_time", None)
        train(self, **(kwargs | BRIEF | {"max_epochs": 1}))

    @wraps(init)
    def init_small(self: AlphaSTomics, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **(kwargs | SMALL))

    monkeypatch.setattr(AlphaSTomics, "train", train_briefly)
    monkeypatch.setattr(AlphaSTomics, "__init__", init_small)


# -- objects that examples take for granted ----------------------------------------------------------------------------


@pytest.fixture
def last(reference: AnnData) -> Callable[[], AnnData]:
    """A copy of the last slice."""
    return lambda: reference[reference.obs["slice_id"] == "slice_2"].copy()


@pytest.fixture
def adata(reference: AnnData) -> AnnData:
    """All slices, with clusters and with predictions of both modalities."""
    reference.obs["leiden"] = reference.obs["cell_type"]
    reference.layers["predicted"] = reference.X[::-1].copy()
    reference.obsm["spatial_reconstructed"] = reference.obsm["spatial"][::-1].copy()
    return reference


@pytest.fixture
def half_known(reference: AnnData) -> AnnData:
    """All slices, in which every other cell has a position."""
    cells = reference.copy()
    cells.obsm["spatial"][::2] = np.nan
    return cells


@pytest.fixture
def more_genes(last: Callable[[], AnnData]) -> AnnData:
    """A slice with ten genes that the model does not have."""
    cells = last()
    others = cells[:, :10].copy()
    others.var_names = [f"other_{name}" for name in others.var_names]
    return ad.concat([cells, others], axis="var", merge="first")


@pytest.fixture
def loaded(everything: Any, reference: AnnData, tmp_path: Path) -> Any:
    """The shared model for all modes, in an object of its own, which an example may change."""
    everything.save(tmp_path / "shared")
    return type(everything).load(tmp_path / "shared", adata=reference.copy())


@pytest.fixture
def with_experts(train_on: Callable[..., Any], small: AnnData) -> Any:
    return train_on(small, use_moe=True, max_epochs=1)


@pytest.fixture
def make(request: pytest.FixtureRequest, last: Callable[[], AnnData]) -> dict[str, Callable[[], Any]]:
    """Functions that make the objects, by their names in the examples."""

    def get(fixture: str) -> Callable[[], Any]:
        return lambda: request.getfixturevalue(fixture)

    names = ["another_query", "held_out", "located", "query", "tissue"]
    return dict.fromkeys(names, last) | {
        "adata": get("adata"),
        "dissociated": get("more_genes"),
        "model": get("loaded"),
        "model_with_experts": get("with_experts"),
        "reference": lambda: get("reference")()[:600].copy(),
        "sdata": lambda: asx.pp.to_spatialdata(get("reference")()),
        "true": lambda: get("reference")().obsm["spatial"],
    }


@pytest.fixture
def special(
    make: dict[str, Callable[[], Any]], request: pytest.FixtureRequest
) -> dict[str, dict[str, Callable[[], Any]]]:
    """Objects of single examples, by the name of the example."""

    def logarithms(name: str) -> AnnData:
        import scanpy as sc

        cells = make[name]()
        sc.pp.normalize_total(cells)
        sc.pp.log1p(cells)
        return cells

    def on_disk() -> AnnData:
        from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess

        preprocess(write_slices(make["adata"](), Path("raw")), Path("dataset"), Stage1Options(), Stage2Options())
        return make["adata"]()

    def on_the_hub() -> Any:
        request.getfixturevalue("hub")
        make["model"]().push_to_hub("organization/name")

    few = {"adata": lambda: request.getfixturevalue("small")}  # trained on several times
    model = "model._persistence.PersistenceMixin."
    return {
        "model._model.AlphaSTomics.from_parquet": {"dataset": on_disk},
        f"{model}from_pretrained": {"organization": on_the_hub},
        f"{model}push_to_hub": {"organization": lambda: request.getfixturevalue("hub")},
        "pl._comparison.comparison": few,
        "pp._counts.restore_counts": {name: partial(logarithms, name) for name in ("reference", "query")},
        "tl._compare_configurations.Configuration": few,
        "tl._compare.compare": few,
        "tl._reconstruct.reconstruct": {"adata": lambda: request.getfixturevalue("half_known")},
    }


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", list(parameters()))
def test_example(example, make, special, short_trainings, tmp_path, monkeypatch):
    if NEEDS_SPATIALDATA.search(example.text):
        pytest.importorskip("spatialdata", reason="needs the extra alphastomics[spatialdata]")
    monkeypatch.chdir(tmp_path)
    makers = make | special.get(example.name, {})
    test = doctest.DocTestParser().get_doctest(example.text, {}, example.name, str(example.file), example.line)
    code = "".join(each.source for each in test.examples)
    named = {name: function() for name, function in makers.items() if re.search(rf"\b{name}\b", code)}
    test.globs = {"asx": asx, "dataclasses": dataclasses} | named
    report: list[str] = []
    doctest.DocTestRunner(Outputs(), optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("submodule", ["pl", "pp", "tl"])
def test_every_function_has_an_example(submodule):
    module = import_module(f"alphastomics.{submodule}")
    functions = [getattr(module, name) for name in module.__all__ if isfunction(getattr(module, name))]
    assert functions
    assert [each.__name__ for each in functions if ">>> " not in each.__doc__] == []


def test_every_method_of_the_model_has_an_example():
    from alphastomics.model import AlphaSTomics
    from alphastomics.model._base import ModelBase

    methods = {
        name: getattr(AlphaSTomics, name)
        for kind in AlphaSTomics.__mro__
        if issubclass(kind, ModelBase) and kind is not ModelBase
        for name, value in vars(kind).items()
        if not name.startswith("_") and (isfunction(value) or isinstance(value, classmethod))
    }
    assert {"from_parquet", "sample", "train"} <= methods.keys()
    assert [name for name, method in methods.items() if ">>> " not in method.__doc__] == []
