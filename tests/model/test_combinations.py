"""All options of the network together, two by two: every pair of values that go together, and no pair that does not."""

from __future__ import annotations

import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.nn.pair import factors
from alphastomics.sampling import _fit_expression

if TYPE_CHECKING:
    from anndata import AnnData

Row = dict[str, Any]

NETWORK: dict[str, tuple[Any, ...]] = {
    "attention": ("full", "linear", "geometric", "neighbor", "axial"),
    "pair_features": (None, "factorized"),
    "rank": ("auto", 24),
    "pair_attention": (None, "triangle", "axial", "cross"),
    "pair_residual": ("mix", "tangent", "distribute"),
    "pair_dropout": (0.0, 0.2),
    "sparse_pairs": ("coordinate", "sequence", "hybrid"),
    "n_neighbors": (32, 3),
    "residual": ("plain", "hyper"),
    "n_streams": (4, 2),
    "layer_sharing": ("none", "universal", "alternating", "block"),
    "sharing_block": (4, 2),
    "bottleneck": (None, 4),
    "use_moe": (False, True),
    "gate_type": ("headwise", "elementwise", "none"),
    "use_qk_norm": (True, False),
}
TISSUE: dict[str, tuple[Any, ...]] = {
    "mode": ("expr_to_pos", "pos_to_expr", "joint", "any"),
    "ordered": (False, True),
    "n_dims": (2, 3),
    "frame": ("slice", "shared"),
    "enable_masking": (False, True),
}
FACTORS = NETWORK | TISSUE
# Where an option is not what a value of another one needs, the latter takes its default, which comes first.
NEEDS: list[tuple[str, tuple[Any, ...], str, tuple[Any, ...]]] = [
    ("pair_features", ("factorized",), "attention", ("geometric", "neighbor")),
    ("rank", (24,), "pair_features", ("factorized",)),
    ("pair_attention", ("triangle", "axial", "cross"), "pair_features", ("factorized",)),
    ("pair_residual", ("tangent", "distribute"), "pair_features", ("factorized",)),
    ("pair_dropout", (0.2,), "pair_features", ("factorized",)),
    ("sparse_pairs", ("sequence", "hybrid"), "attention", ("neighbor",)),
    ("sparse_pairs", ("sequence", "hybrid"), "ordered", (True,)),
    ("n_neighbors", (3,), "attention", ("neighbor",)),
    ("n_streams", (2,), "residual", ("hyper",)),
    ("sharing_block", (2,), "layer_sharing", ("block",)),
    ("bottleneck", (4,), "use_moe", (False,)),
    ("gate_type", ("elementwise",), "attention", ("full", "geometric", "neighbor", "axial")),
]


def allowed(row: Row) -> bool:
    """Whether no value of the row needs another one."""
    return all(row[name] not in values or row[other] in needed for name, values, other, needed in NEEDS)


def pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))


def possible(first: tuple[str, Any], second: tuple[str, Any]) -> Row | None:
    """A row with both values, or None: what they need is given to them, and all else takes its default."""
    fixed = dict([first, second])
    for other in ("pair_features", "attention", "ordered", "residual", "layer_sharing"):
        needs = [needed for name, values, o, needed in NEEDS if o == other and fixed.get(name) in values]
        if needs and other not in fixed:
            fixed[other] = next((v for v in FACTORS[other] if all(v in needed for needed in needs)), FACTORS[other][0])
    row = {name: fixed.get(name, values[0]) for name, values in FACTORS.items()}
    return row if allowed(row) else None


def new_row(wanted: Any, missing: set[Any], rng: random.Random) -> Row:
    """A row with a pair of values, and in each other place the one that makes most missing pairs with those chosen before."""
    row, chosen = dict(possible(*wanted) or {}), dict(wanted)
    needed = {other for _, _, other, _ in NEEDS}
    for name in sorted(rng.sample(list(FACTORS), len(FACTORS)), key=lambda name: name not in needed):
        if name in chosen:
            continue

        def gain(value: Any, name: str = name) -> int:
            return sum((one, (name, value)) in missing or ((name, value), one) in missing for one in chosen.items())

        choices = [value for value in rng.sample(FACTORS[name], len(FACTORS[name])) if allowed(row | {name: value})]
        row[name] = chosen[name] = max(choices, key=gain)
    return {name: row[name] for name in FACTORS}


def covering_array() -> tuple[list[Row], list[Row]]:
    """Rows that have every possible pair of values, found greedily; and rows with the pairs that are not possible."""
    values = [(name, value) for name, choices in FACTORS.items() for value in choices]
    every = [pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]]
    missing = {pair for pair in every if possible(*pair) is not None}
    refused = [dict(pair) for pair in every if possible(*pair) is None]
    rng, rows = random.Random(2), []
    while missing:
        candidates = [new_row(rng.choice(sorted(missing, key=str)), missing, rng) for _ in range(12)]
        rows.append(max(candidates, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows, refused


ROWS, REFUSED = covering_array()
SIZES = {"d_model": 16, "n_layers": 3, "n_heads": 2}
each_row = pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))


def network_of(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in NETWORK if name in row}


def test_the_array_covers_every_pair():
    assert len(ROWS) <= 36
    assert all(allowed(row) for row in ROWS)
    covered = set.union(*(pairs(row) for row in ROWS))
    values = [(name, value) for name, choices in FACTORS.items() for value in choices]
    for pair in itertools.combinations(values, 2):
        if pair[0][0] != pair[1][0]:
            assert (pair in covered) == (possible(*pair) is not None)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: ", ".join(f"{name}={value}" for name, value in row.items()))
def test_excluded_combinations_raise_with_a_reason(row):
    config = {"n_genes": 4, "n_dims": row.get("n_dims", 2), "sequence": row.get("ordered", False)} | network_of(row)
    with pytest.raises(ValueError, match="|".join(row)):
        Denoiser(DenoiserConfig(**(SIZES | config)))


# -- the network -------------------------------------------------------------------------------------------------------


def run(denoiser: Denoiser, row: Row, n: int = 20, padded: int = 0) -> torch.Tensor:
    """All outputs of four contexts, whose positions are noisy, clean and absent, (B, N, F)."""
    generator = torch.Generator().manual_seed(3)
    dtype = next(denoiser.parameters()).dtype
    expression = torch.randn(4, n, 5, generator=generator, dtype=dtype)
    position = torch.randn(4, n, row["n_dims"], generator=generator, dtype=dtype)
    sequence = torch.randn(4, n, generator=generator, dtype=dtype) if row["ordered"] else None
    masked = (None, None)
    if row["enable_masking"]:
        masked = tuple(torch.rand(x.shape, generator=generator) < 0.2 for x in (expression, position))
    extra = {
        "local_density": torch.linspace(-1, 1, 9, dtype=dtype).expand(4, n, 9),
        "observed": torch.zeros(4, n, 5, dtype=torch.bool).index_fill(1, torch.arange(3), True),
    }
    if padded:
        pad = (0, 0, 0, padded)
        expression, position = (torch.nn.functional.pad(x, pad, value=9.0) for x in (expression, position))
        sequence = None if sequence is None else torch.nn.functional.pad(sequence, (0, padded), value=9.0)
        masked = tuple(None if x is None else torch.nn.functional.pad(x, pad) for x in masked)
        extra = {name: torch.nn.functional.pad(x, pad) for name, x in extra.items()}
    output = denoiser(
        expression,
        position,
        torch.tensor([0.0, 1.0, 0.3, 0.2], dtype=dtype),
        torch.tensor([0.6, 0.0, 1.0, 0.3], dtype=dtype),
        (torch.arange(n + padded) < n).expand(4, -1) if padded else None,
        sequence=sequence,
        masked=masked,
        **extra,
    )
    alone = denoiser.cell_neighborhood(expression)
    parts = [output.expression, output.position, denoiser.neighborhood(output.latent), alone]
    return torch.cat(parts, dim=-1)[:, :n]


@each_row
def test_every_parameter_learns_and_padding_changes_nothing(row, monkeypatch):
    """Bar 26: never without a gradient, and within 20 steps with one that is not zero. Bar 25 afterwards."""
    torch.manual_seed(0)
    config = {"n_genes": 5, "n_dims": row["n_dims"], "sequence": row["ordered"], "mask_tokens": row["enable_masking"]}
    denoiser = Denoiser(DenoiserConfig(**SIZES, n_latent=4, **config, **network_of(row)))
    own = dict(denoiser.named_parameters())
    optimizer, silent = torch.optim.AdamW(own.values(), lr=1e-2), set(own)
    for _ in range(20):
        optimizer.zero_grad()
        (run(denoiser, row) - 1).square().mean().backward()
        optimizer.step()
        assert [name for name, p in own.items() if p.grad is None] == []
        silent -= {name for name, p in own.items() if bool(p.grad.any())}
        if not silent:
            break
    assert silent == set()
    # Gram matrices are singular if there are fewer cells than ranks, and rounding is divided by what is added to them.
    ratio = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    monkeypatch.setattr(factors, "RIDGE", factors.RIDGE * ratio)
    with torch.no_grad():
        denoiser.eval().double()
        torch.testing.assert_close(run(denoiser, row, padded=5), run(denoiser, row), atol=1e-9, rtol=0)


@each_row
def test_shapes_are_computed_without_memory(row):
    """As :meth:`AlphaSTomics.load` computes them before it reads any weights."""
    config = {"n_genes": 5, "n_dims": row["n_dims"], "sequence": row["ordered"], "mask_tokens": row["enable_masking"]}
    made = DenoiserConfig(**SIZES, **config, **network_of(row))
    with torch.device("meta"):
        empty = Denoiser(made).state_dict()
    assert {tensor.device.type for tensor in empty.values()} == {"meta"}
    shapes = {name: tensor.shape for name, tensor in empty.items()}
    assert shapes == {name: tensor.shape for name, tensor in Denoiser(made).state_dict().items()}


# -- the model ---------------------------------------------------------------------------------------------------------


@functools.cache
def tissue(n_dims: int) -> AnnData:
    adata = synthetic_tissue(n_slices=2, n_cells=40, n_genes=12, n_dims=n_dims, random_state=0)
    adata.obs["order"] = np.random.default_rng(0).permutation(adata.n_obs)
    return adata


def sampled(model: AlphaSTomics, cells: AnnData, mode: str) -> bytes:
    if mode == "joint":
        result = model.sample(n_cells=30, mode=mode, n_steps=2)
        values = [result.obsm["spatial"], result.X.toarray()]
    else:
        query = cells.copy()
        if mode == "expr_to_pos":
            del query.obsm["spatial"]
        steps = {} if mode == "expr_to_pos" else {"n_steps": 2}
        result = model.sample(query, mode=mode, **steps)
        values = [result.obsm["spatial_reconstructed"] if mode == "expr_to_pos" else result.X.toarray()]
    assert all(np.isfinite(value).all() for value in values)
    return b"".join(value.tobytes() for value in values)


@pytest.mark.slow
@each_row
def test_trains_saves_loads_and_samples(row, train_briefly, tmp_path, monkeypatch):
    # What is fitted before expression is sampled would take most of the time.
    monkeypatch.setattr(_fit_expression, "MARGINAL_STEPS", 2)
    monkeypatch.setattr(_fit_expression, "fit_dependence", lambda sampler: None)
    cells = tissue(row["n_dims"])
    reference = cells.copy()
    setup = {"frame": row["frame"], "sequence_key": "order" if row["ordered"] else None}
    AlphaSTomics.setup_anndata(reference, **setup)
    options = network_of(row) | {"mode": row["mode"], "enable_masking": row["enable_masking"]}
    model = AlphaSTomics(reference, **(SIZES | options))
    before = model.module.state_dict()["blocks.0.norm_1.modulation.bias"].clone()
    train_briefly(model, max_epochs=2, context_size=40, batch_size=80)
    assert not torch.equal(model.module.state_dict()["blocks.0.norm_1.modulation.bias"], before)
    model.save(tmp_path / "m")
    loaded = AlphaSTomics.load(tmp_path / "m", adata=False)
    assert loaded.module.config == model.module.config
    for mode in ("expr_to_pos", "joint") if row["mode"] == "any" else (row["mode"],):
        assert sampled(loaded, cells, mode) == sampled(model, cells, mode)
