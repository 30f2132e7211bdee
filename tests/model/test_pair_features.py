"""Options of the layers on pair features, from the arguments of the model: every value trains, and is in the network."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alphastomics.model import AlphaSTomics
from alphastomics.nn.pair import (
    AxialAttention,
    Distribute,
    FactorCrossAttention,
    PairDropout,
    RankMix,
    TangentStep,
    TriangleAttention,
)

PAIRED: dict[str, Any] = {"attention": "geometric", "pair_features": "factorized"}
CASES = [
    ({"pair_attention": "triangle"}, TriangleAttention),
    ({"pair_attention": "axial"}, AxialAttention),
    ({"pair_attention": "cross"}, FactorCrossAttention),
    ({"pair_residual": "mix"}, RankMix),
    ({"pair_residual": "tangent"}, TangentStep),
    ({"pair_residual": "distribute"}, Distribute),
    ({"pair_dropout": 0.5}, PairDropout),
]


@pytest.mark.parametrize(("option", "part"), CASES, ids=str)
def test_every_value_trains(option, part, small, make_model, train_briefly, tmp_path):
    model = make_model(small, **PAIRED, **option)
    parts = [module for module in model.module.modules() if isinstance(module, part)]
    assert parts
    before = {name: value.clone() for name, value in model.module.named_parameters()}
    train_briefly(model, max_epochs=2)
    learned = {name for name, value in model.module.named_parameters() if not torch.equal(value, before[name])}
    names = {name for name in before if name.startswith("surroundings.pairs.stack.")}
    assert names & learned
    own = {id(parameter) for module in parts for parameter in module.parameters()}
    assert all(name in learned for name, value in model.module.named_parameters() if id(value) in own)
    model.save(tmp_path / "model")
    loaded = AlphaSTomics.load(tmp_path / "model", adata=False)
    assert loaded.module.config == model.module.config


def test_dropout_is_drawn_again_where_layers_are_recomputed(small, make_model):
    """The gradient of recomputed layers is that of layers which keep their activations."""
    from alphastomics.nn.pair import PairFactors
    from alphastomics.nn.random import ContextGenerators, drawing_from

    pairs = make_model(small, **PAIRED, pair_dropout=0.5).module.surroundings.pairs.double().train()
    generator = torch.Generator().manual_seed(0)
    x, position = (torch.randn(2, 20, n, generator=generator, dtype=torch.float64) for n in (32, 2))
    trust = torch.ones(2, dtype=torch.float64)
    for parameter in pairs.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)

    def gradient(run: Any, generators: ContextGenerators | None) -> torch.Tensor:
        pairs.zero_grad()
        torch.manual_seed(1)
        with drawing_from(generators):
            result: PairFactors = run()
        (result.left.square().sum() + result.right.square().sum()).backward()
        return torch.cat([parameter.grad.flatten() for parameter in pairs.stack.parameters()])

    def kept() -> PairFactors:
        embedded = pairs.embedding(x, position=position, trust=trust, rank=pairs.rank_for(20))
        return pairs.stack(embedded)

    for make in (lambda: None, lambda: ContextGenerators.seeded([3, 4], [20, 20], torch.device("cpu"))):
        again = gradient(lambda: pairs(x, position, trust), make())
        torch.testing.assert_close(again, gradient(kept, make()))
        assert not torch.equal(again, gradient(lambda: pairs.eval()(x, position, trust), make()))
        pairs.train()


@pytest.mark.parametrize("option", [{"pair_attention": "axial"}, {"pair_residual": "tangent"}, {"pair_dropout": 0.5}])
def test_options_of_pair_features_need_pair_features(option, small, make_model):
    with pytest.raises(ValueError, match=f"{next(iter(option))}.*pair_features"):
        make_model(small, **option)
