r"""Ways to place unseen tissue better, each against the default: scores and mean rank over tissues.

All networks are trained for the same number of steps in total, and place the query of each tissue of ``unseen.py``.

- ``not adapted``, ``adapted``: without and with :meth:`AlphaSTomics.adapt`. The other rows of adaptation change one thing: ``one round``;
  ``short``, at most half as many steps;
  ``refined targets``, the layout refined by the neighborhood embedding in place of the conditional mean; ``targets not scaled``;
  ``one network``, without the second one in targets and placement.
- ``two halves``, ``three thirds``: independent networks, each with its share of the steps, without a second one of each. Their conditional
  means are averaged after rigid alignment, and their embeddings are concatenated. Not adapted.
- ``gains removed``: the counts of each gene of the query are divided by its gain. The gain is the ratio of its sum over the query to that
  expected from the 20 reference cells nearest to each cell in principal components, and is estimated again from the divided counts. Not
  adapted.
- ``batch of 2,048``: batches of the default on CUDA in both networks and the adaptation, and 0.7 times as many steps. Adapted.
- ``linear attention``, ``expr_to_pos``, ``half of the counts``: other settings of the training. Adapted.
- ``cell types``: the cell types of reference and query are an input, in tissues that have labels. Adapted.

Run as ``python -m benchmarks.levers``; finished rows are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp
import torch
from scipy.stats import rankdata
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from alphastomics.config import CUDA_BATCH_SIZE
from benchmarks import _models, _placement
from benchmarks._data import find_data
from benchmarks._report import Results, markdown, summarize
from benchmarks._runner import RESULTS
from benchmarks.unseen import COMPARED, TISSUES, queries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold

    Array = NDArray[np.float64]

LABELED = "cell types"
TRAINED: dict[str, dict[str, dict[str, Any]]] = {
    "linear attention": {"model": {"attention": "linear"}},
    "expr_to_pos": {"model": {"mode": "expr_to_pos"}},
    "half of the counts": {"augmentation": {"thinning": 0.5}},
    LABELED: {"model": {"use_cell_types": True}},
    f"batch of {CUDA_BATCH_SIZE:,}": {"defaults": {"DEFAULT_BATCH_SIZE": CUDA_BATCH_SIZE}, "steps": {"share": 0.7}},
}
ADAPTED = ("adapted", "one round", "short", "refined targets", "targets not scaled", "one network")
AVERAGED = {"two halves": 2, "three thirds": 3}
ROWS = ("not adapted", *ADAPTED, *AVERAGED, "gains removed", *TRAINED)
GAIN_CELLS, GAIN_NEIGHBORS, GAIN_ROUNDS = 3000, 20, 6


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.levers", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tissues", nargs="+", choices=TISSUES, default=list(TISSUES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--output", type=Path, default=RESULTS / "levers.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    return parser.parse_args(argv)


def train(reference: AnnData, variant: dict[str, dict[str, Any]], *, seed: int, steps: int) -> AlphaSTomics:
    """A model of a reference, trained for a number of steps."""
    import alphastomics as asx

    reference = reference.copy()
    labels = "cell_type" if "cell_type" in reference.obs else None
    asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id", cell_type_key=labels)
    model = asx.model.AlphaSTomics(reference, random_state=seed, **({"mode": _models.MODE} | variant.get("model", {})))
    changes = variant.get("augmentation", {}) if model.schema.transform == "log1p" else {}
    augmentation = dataclasses.replace(model.default_augmentation(), **changes)
    model.train(
        max_epochs=-1,
        max_steps=round(variant.get("steps", {}).get("share", 1) * steps),
        augmentation=augmentation,
        precision=_models.PRECISION,
        enable_progress_bar=False,
    )
    return model


@contextmanager
def changed_adaptation(row: str) -> Iterator[None]:
    """An adaptation in which one thing is changed."""
    from alphastomics.sampling import _position_draws, _second
    from alphastomics.train import adaptation

    changes: dict[str, Any] = {
        "adapted": nullcontext(),
        "one round": patch.object(adaptation, "ROUNDS", 1),
        "short": patch.multiple(adaptation, SHARE=adaptation.SHARE / 2, PASSES=adaptation.PASSES // 2),
        "refined targets": patch.object(_position_draws, "SamplingConfig", _refined(_position_draws.SamplingConfig)),
        "targets not scaled": patch.object(adaptation, "_scaled", lambda schema, cells, predicted: predicted),
        "one network": patch.object(_second.SecondNetwork, "build", lambda self, network: None),
    }
    with changes[row]:
        yield


def _refined(config: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: config(**(settings | {"refine": None}))


def place_adapted(model: AlphaSTomics, query: AnnData, *, seed: int) -> Array:
    """Placement (n_query, D) by a model that is adapted to the query, whether or not it differs from the reference."""
    with _models.adapted(model, query, always=True):
        return _models.sample(model, query, seed=seed)


def place_averaged(models: Sequence[AlphaSTomics], query: AnnData, *, seed: int) -> Array:
    """Placement (n_query, D) by the average of several networks, in the frame of the first one."""
    from alphastomics.config import SamplingConfig
    from alphastomics.data import AnnDataSource
    from alphastomics.diffusion.geometry import center, kabsch
    from alphastomics.sampling._cells import content_order, encode_cells
    from alphastomics.sampling._layout import refine_layout
    from alphastomics.sampling._overlap import remove_overlaps
    from alphastomics.sampling._position import PositionSampler

    source = AnnDataSource(query, models[0].schema, positions=False)
    (cells,) = source.slices
    rows = content_order(source, cells.rows)
    samplers = [model._make_sampler() for model in models]
    size = SamplingConfig().max_context
    placed = [PositionSampler(each, encode_cells(each.module, source, rows, max_context=size)) for each in samplers]
    first = center(placed[0].mean)
    means = [center(each.mean) for each in placed]
    mean = torch.stack([x @ kabsch(x, first) for x in means]).mean(0)[0]
    if samplers[0].refines:
        feature = torch.cat([each.feature for each in placed], dim=1) / len(placed) ** 0.5
        mean = refine_layout(mean, feature, torch.Generator().manual_seed(seed))
    nearest = samplers[0].fitted.nearest
    assert nearest is not None  # the mode places cells
    position = np.empty(mean.shape)
    position[rows] = remove_overlaps(mean.cpu().double().numpy(), nearest, np.random.default_rng(seed))
    return position


def without_gains(reference: AnnData, query: AnnData, *, seed: int) -> AnnData:
    """The query with the counts of every gene divided by its gain."""
    rng = np.random.default_rng(seed)
    known, cells = (_dense(each)[rng.permutation(each.n_obs)] for each in (reference[:, query.var_names], query))
    known, cells = known[: 2 * GAIN_CELLS], cells[:GAIN_CELLS]
    size = np.median(known.sum(1))
    profile = known / np.maximum(known.sum(1, keepdims=True), 1)
    pca = PCA(min(50, *known.shape), random_state=seed).fit(np.log1p(size * profile))
    search = NearestNeighbors(n_neighbors=GAIN_NEIGHBORS).fit(pca.transform(np.log1p(size * profile)))
    gain = np.ones(query.n_vars)
    for _ in range(GAIN_ROUNDS):
        corrected = cells / gain
        corrected *= size / np.maximum(corrected.sum(1, keepdims=True), np.finfo(float).tiny)
        expected = profile[search.kneighbors(pca.transform(np.log1p(corrected)), return_distance=False)].mean(1)
        efficiency = cells.sum(1) / np.maximum(expected @ gain, np.finfo(float).tiny)
        gain = (cells.sum(0) + 1) / (efficiency @ expected + 1)
        gain /= np.exp(np.median(np.log(gain)))
    divided = query.copy()
    divided.X = sp.csr_matrix((_dense(query) / gain).astype(np.float32))
    return divided


def _dense(cells: AnnData) -> Array:
    return np.asarray(cells.X.toarray() if sp.issparse(cells.X) else cells.X, dtype=np.float64)


def run(results: Results, fold: Fold, rows: Sequence[str], *, seed: int, steps: int) -> None:
    """Place the query of a fold in every unfinished way."""
    from alphastomics.train import defaults

    parameters = {"steps": steps}
    make, labeled = partial(train, fold.reference, steps=steps), fold.with_labels()
    default: AlphaSTomics | None = None
    for row in rows:
        if results.find(parameters, method=row, fold=fold.name, seed=seed) is not None:
            continue
        query = fold.query
        if row in AVERAGED:
            n = AVERAGED[row]
            models = [train(fold.reference, {}, seed=seed * n + i, steps=steps // n) for i in range(n)]
            predicted = place_averaged(models, query, seed=seed)
        elif row == LABELED:
            if labeled is fold:
                continue
            model = train(labeled.reference, TRAINED[row], seed=seed, steps=steps)
            predicted = place_adapted(model, labeled.query, seed=seed)
        elif row in TRAINED:
            changed = TRAINED[row].get("defaults")
            with patch.multiple(defaults, **changed) if changed else nullcontext():
                predicted = place_adapted(make(TRAINED[row], seed=seed), query, seed=seed)
        else:
            default = default or make({}, seed=seed)
            if default.schema.transform != "log1p" and row == "gains removed":
                continue
            if row in ADAPTED:
                with changed_adaptation(row):
                    predicted = place_adapted(default, query, seed=seed)
            else:
                query = without_gains(fold.reference, query, seed=seed) if row == "gains removed" else query
                predicted = _models.sample(default, query, seed=seed)
        scores = _placement.score(fold.truth, fold.in_source_order(predicted))
        results.add(method=row, fold=fold.name, seed=seed, parameters=parameters, scores=scores, seconds=0.0)
        print(f"{fold.name}, {row}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()), flush=True)


def ranks(results: Results, rows: Sequence[str], seeds: Sequence[int]) -> dict[str, float]:
    """Mean rank of every row over tissues and scores, 1 is best, in the folds in which all rows are finished."""
    folds = dict.fromkeys(entry["fold"] for entry in results.entries)
    tables = {fold: summarize(results.entries, rows, [fold], seeds) for fold in folds}
    complete = sorted(fold for fold in folds if all(row in tables[fold] for row in rows))
    tissues = []
    for _, group in groupby(complete, lambda fold: fold.partition(", ")[0]):
        names = list(group)
        scores = [[np.mean([tables[fold][row][score][0] for fold in names]) for row in rows] for score in COMPARED]
        tissues.append(np.mean([rankdata(-np.asarray(line)) for line in scores], axis=0))
    return dict(zip(rows, np.mean(tissues, axis=0).tolist(), strict=True)) if tissues else {}


def main(argv: Sequence[str] | None = None) -> None:
    """Run unfinished rows and print the tables."""
    options = parse(argv)
    folder = find_data(options.data_dir)
    results = Results(options.output, {"benchmark": "levers"})
    for seed in options.seeds:
        for tissue in options.tissues:
            for (fold,) in queries(tissue, folder, seed=seed, shifts=False, ceiling=False):
                run(results, fold, options.rows, seed=seed, steps=options.steps)
    found = ranks(results, options.rows, options.seeds)
    results.write(ranks=found)
    lines = [["fold", "way", *COMPARED]]
    for entry in results.entries:
        lines.append([entry["fold"], entry["method"], *(f"{entry['scores'][score]:.3f}" for score in COMPARED)])
    print(markdown(lines))
    print("\nmean rank:", ", ".join(f"{name} {rank:.2f}" for name, rank in found.items()), flush=True)


if __name__ == "__main__":
    main()
