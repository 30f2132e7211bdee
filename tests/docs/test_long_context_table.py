"""The page on long contexts: what its table names exists, tests included, and it has every name of the specification."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "long-context.md"


def load(path: Path) -> ModuleType:
    """A file of tests as a module: ``tests`` is no package, and others may have installed one of that name."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


seed_map = load(ROOT / "tests" / "test_seed_map.py")


class Row(NamedTuple):
    """A row of the table."""

    specification: str
    ours: str
    equation: str
    test: str

    def named(self, column: str) -> list[str]:
        """Names in backticks."""
        return re.findall(r"`([^`]+)`", getattr(self, column))


def read_rows() -> list[Row]:
    _, _, table = PAGE.read_text(encoding="utf-8").partition("## Names of the specification\n")
    rows = []
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| specification |", "| its code |")):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 4, f"not four cells: {line}"
            rows.append(Row(*cells))
    return rows


ROWS = read_rows()


def names(column: str) -> list[str]:
    """Names of a column, each once."""
    return list(dict.fromkeys(name for row in ROWS for name in row.named(column)))


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_row_is_complete() -> None:
    assert len(ROWS) > 40
    assert [row for row in ROWS if not (row.specification and row.equation)] == []
    assert [row for row in ROWS if not (row.named("ours") and row.named("test"))] == []


@pytest.mark.parametrize("name", names("ours"))
def test_listed_symbol_is_importable(name: str) -> None:
    if name.startswith("tests/"):  # an oracle, which no network uses
        file, _, oracle = name.partition("::")
        assert hasattr(load(ROOT / file), oracle)
        return
    assert name.startswith("alphastomics.")
    seed_map.find_object(name.removeprefix("alphastomics."))


@pytest.mark.parametrize("node", names("test"))
def test_listed_test_exists(node: str) -> None:
    file, _, name = node.partition("::")
    assert ROOT / "tests" / file != Path(__file__), "this file would run itself"
    assert name in seed_map.defined_in(ROOT / "tests" / file)


# -- the specification -------------------------------------------------------------------------------------------------

CLASSES = {
    "AdaptiveCheckpointManager", "AdaptiveFactorizationRank", "AdaptiveMHCConfig", "AlternatingSharedLayers", "AxialAttention",
    "BlockSharedLayers", "BottleneckLayer", "CheckpointConfig", "CheckpointedSequential", "ChunkedLossComputation",
    "ChunkedTriangleAttention", "ChunkedTriangleAttentionEndingNode", "ChunkedTriangleAttentionStartingNode",
    "CompressedStructureNet", "DepthwiseSeparableLayer", "DistributedModelWrapper", "DynamicBatchSize",
    "FactorizedAxialAttention", "FactorizedPairFeatureNet", "FactorizedPairRefinementLayer", "FactorizedPairTransformLayer",
    "FactorizedPairTransformNet", "FactorizedRelPos", "FactorizedTemplate", "FactorizedTriangleMultiplication",
    "FactorizedTriangleMultiplicationIncoming", "FactorizedTriangleMultiplicationOutgoing",
    "FactorizedTriangleMultiplicativeUpdate", "GradientAccumulator", "LongSequenceDenoiser", "MemoryEstimator",
    "MixedPrecisionTrainer", "PairTransform", "PairTransformNet", "PairTransition", "ProgressiveTrainingScheduler",
    "SelectiveMixedPrecision", "SequenceTensorParallel", "SharedLayerModule", "SparseKNNPairSelector", "Stage3TrainingManager",
}  # fmt: skip
# Functions, and arguments that it names apart from a formula or an example.
FUNCTIONS = {
    "ApplyBlock", "compute_fape_loss_chunked", "get_adaptive_config", "get_compression_ratio", "growth_schedule",
    "include_all_local", "local_window", "reconstruct_pair",
}  # fmt: skip
# Works of others, parts of PyTorch, and symbols of its formulas.
NOT_NAMES = {"AlphaFold2", "BiasFeatures", "LayerNorm", "MobileNet", "ReLU", "RelPos", "forward"}


def names_in(text: str) -> set[str]:
    """Words in camel case, identifiers in backticks, classes and functions of examples."""
    found = set(re.findall(r"\b[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*[A-Z][A-Za-z0-9]*\b", text))
    return found | set(re.findall(r"`([A-Za-z_]\w*)`", text)) | set(re.findall(r"\b(?:class|def) (\w+)", text))


def test_every_name_of_the_specification_is_listed() -> None:
    assert (CLASSES | FUNCTIONS) - set(names("specification")) == set()


@pytest.mark.real
def test_these_are_the_names_of_the_specification(real_data: Path) -> None:
    documents = sorted((real_data.parent / "seeds").glob("004_*.md"))
    if not documents:
        pytest.skip(f"no specification at {real_data.parent / 'seeds'}")
    (document,) = documents
    assert names_in(document.read_text(encoding="utf-8")) - NOT_NAMES == CLASSES | FUNCTIONS
