"""Placement of chains of residues with and without the order of the cells.

Generated chains (:func:`alphastomics.chains.synthetic_chains`) consist of helices and strands, and their expression contains the
secondary structure of a residue but not its position. One model uses the order (``sequence_key="residue"``: relative positions in
factorized pair features, and neighbors along the chain), a second one is also trained with the frame-aligned point error, and a
third is the same network without the order, which has no neighbors, because positions are absent. All are trained for the same
number of steps and place held-out chains. Scores, means over these chains: ``fape``, the frame-aligned point error;
``fape_mirrored``, that of the mirror image of the prediction, larger than ``fape`` if the handedness is correct;
``distance_spearman``; ``rmsd``, the root mean square distance in Å after the best rotation and shift, without reflection;
``bond``, the median distance of consecutive residues in Å, which is 3.8.

All chains are in one frame. With ``--frame slice`` each has its own frame, and the model, for which a slice equals its mirror
image, may choose the handedness of every chain. Run as ``python -m benchmarks.chains``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._report import Results, summarize, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

RESULT = Path(__file__).parent / "results" / "chains.json"
ORDERED, FRAMES, UNORDERED, CHANCE = "with order", "with order and FAPE", "without order", "chance"
FOLD = "generated"
SCORES = ("fape", "fape_mirrored", "distance_spearman", "rmsd", "bond")
NETWORK = {"pair_features": "factorized", "d_model": 64, "n_layers": 3, "dropout": 0.0}
ALONG = {"attention": "neighbor", "sparse_pairs": "sequence", "n_neighbors": 16}
MODELS = {
    ORDERED: ALONG,
    FRAMES: ALONG,
    UNORDERED: {"attention": "neighbor", "sparse_pairs": "coordinate", "n_neighbors": 16},
}
PLANS = {FRAMES: {"lambda_fape": 1.0}}  # beside the losses of every plan
TRAINING = {"batch_size": 640, "context_size": 80}
CHAIN = {"n_segments": (2, 4)}  # 33 residues on average, fewer than the size of a context
HELD_OUT_SEED = 10_000


def place(method: str, train: AnnData, query: AnnData, *, frame: str, steps: int, seed: int) -> NDArray[np.float64]:
    """Positions of the residues of ``query`` (n, 3) by a model trained on ``train``."""
    import alphastomics as asx

    model_class = asx.model.AlphaSTomics
    order = None if method == UNORDERED else "residue"
    model_class.setup_anndata(train, slice_key="slice_id", sequence_key=order, frame=frame)
    model = model_class(train, mode="expr_to_pos", random_state=seed, **NETWORK, **MODELS[method])
    model.train(
        max_epochs=-1,
        max_steps=steps,
        augmentation=asx.data.Augmentation(gene_dropout=0.0),  # there are too many chains to memorize
        plan_kwargs=PLANS.get(method),
        enable_progress_bar=False,
        **TRAINING,
    )
    return model.sample(query, mode="expr_to_pos", random_state=seed).obsm["spatial_reconstructed"]


def score(truth: AnnData, predicted: NDArray[np.float64]) -> dict[str, float]:
    """Mean of every score over the chains."""
    from alphastomics.chains import chain_fape
    from alphastomics.metrics import distance_spearman, rigid_align

    rows = []
    for name in truth.obs["slice_id"].cat.categories:
        chain = (truth.obs["slice_id"] == name).to_numpy()
        order = truth.obs["residue"].to_numpy()[chain]
        y, x = truth.obsm["spatial"][chain], predicted[chain]
        aligned, _ = rigid_align(x, y, reflection=False)
        bonds = np.linalg.norm(np.diff(x[np.argsort(order)], axis=0), axis=1)
        rmsd = np.sqrt(np.square(aligned - y).sum(1).mean())
        fapes = chain_fape(y, x, order), chain_fape(y, x * [1, 1, -1], order)
        rows.append([*fapes, distance_spearman(y, x), rmsd, np.median(bonds)])
    return dict(zip(SCORES, np.mean(rows, axis=0).tolist(), strict=True))


def run(method: str, parameters: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Scores of one method on held-out chains."""
    from alphastomics.chains import synthetic_chains
    from alphastomics.metrics import chance_positions

    frame = parameters["frame"]
    chain = {**CHAIN, "rotate": frame == "slice"}
    query = synthetic_chains(n_chains=parameters["held_out"], random_state=HELD_OUT_SEED, **chain)
    if method == CHANCE:
        names = query.obs["slice_id"].to_numpy()
        predicted = np.empty_like(query.obsm["spatial"])
        for name in np.unique(names):
            predicted[names == name] = chance_positions(query.obsm["spatial"][names == name], random_state=seed)
    else:
        train = synthetic_chains(n_chains=parameters["chains"], random_state=seed, **chain)
        predicted = place(method, train, query, frame=frame, steps=parameters["steps"], seed=seed)
    return score(query, predicted)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chains", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--chains", type=int, default=512, help="number of training chains")
    parser.add_argument("--held-out", type=int, default=32, help="number of held-out chains")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--frame", choices=["shared", "slice"], default="shared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run unfinished trainings and print the table."""
    options = parse(argv)
    sizes = {"chains": options.chains, "held_out": options.held_out, "steps": options.steps, "frame": options.frame}
    results = Results(options.output, {"benchmark": "chains"})
    methods = (CHANCE, *MODELS)
    for seed in options.seeds:
        for method in methods:
            network = {} if method == CHANCE else {**NETWORK, **MODELS[method], **TRAINING, **PLANS.get(method, {})}
            parameters = {**sizes, **CHAIN, **network}
            if results.find(parameters, method=method, fold=FOLD, seed=seed):
                continue
            start = time.monotonic()
            scores = run(method, parameters, seed)
            seconds = time.monotonic() - start
            results.add(method=method, fold=FOLD, seed=seed, seconds=seconds, parameters=parameters, scores=scores)
    summary = summarize(results.entries, methods, [FOLD], options.seeds)
    results.write(summary=summary)
    print(table(summary, SCORES))


if __name__ == "__main__":
    main()
