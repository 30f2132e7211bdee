"""The embedding is a sum of three terms, and its ranks are nested."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn.pair import PairEmbedding, PairFactors, RelativePosition, Template


@pytest.fixture
def embedding() -> PairEmbedding:
    torch.manual_seed(0)
    order = RelativePosition(5, n_frequencies=3)
    return PairEmbedding(6, 5, 20, template=Template(5, 2), relative_position=order).double()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 11, 8, generator=generator, dtype=torch.float64)
    return {"x": 3 * x[..., 2:], "position": x[..., :2], "index": torch.randperm(22, generator=generator).view(2, 11)}


def test_the_sum_is_exact(embedding, inputs, mask):
    x = inputs["x"]
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    left, right = torch.einsum("scrd,bnd->sbcnr", embedding.weight, normed)
    tokens = torch.einsum("bcir,bcjr->bijc", left, right) * (mask[:, :, None] & mask[:, None])[..., None]
    template, order = embedding.template(inputs["position"], mask), embedding.relative_position(inputs["index"], mask)
    p = embedding(**inputs, mask=mask)
    assert p.rank == 20
    torch.testing.assert_close(p.dense(), tokens + template.dense() + order.dense())


def test_positions_are_weighted_by_their_trust(embedding, inputs, mask):
    full, none = embedding(**inputs, mask=mask), embedding(**inputs, mask=mask, trust=torch.zeros(2).double())
    template = embedding.template(inputs["position"], mask).dense()
    torch.testing.assert_close(none.dense(), full.dense() - template)
    part = embedding(**inputs, mask=mask, trust=torch.tensor([1.0, 0.3]).double()).dense()
    torch.testing.assert_close(part, torch.stack([full.dense()[0], (none.dense() + 0.3 * template)[1]]))


def test_a_smaller_rank_takes_the_first_ranks(embedding, inputs, mask):
    for rank in (11, 15, 20):
        every = embedding(**inputs, mask=mask)
        expected = PairFactors(every.left[..., :rank], every.right[..., :rank], mask)
        torch.testing.assert_close(embedding(**inputs, mask=mask, rank=rank).left, expected.left)
        torch.testing.assert_close(embedding(**inputs, mask=mask, rank=rank).right, expected.right)


def test_tokens_alone_are_of_unit_size():
    torch.manual_seed(0)
    p = PairEmbedding(64, 32, 8)(torch.randn(1, 100, 64)).dense().detach()
    assert 0.7 < float(p.square().mean().sqrt()) < 1.4


def test_nothing_of_padding_remains(embedding, inputs, mask):
    p = embedding(**inputs, mask=mask)
    changed = {
        "x": inputs["x"].masked_fill(~mask[..., None], 50.0),
        "position": inputs["position"].masked_fill(~mask[..., None], -3.0),
        "index": inputs["index"].masked_fill(~mask, 99),
    }
    torch.testing.assert_close(embedding(**changed, mask=mask).dense(), p.dense())
    assert not p.left[1, :, ~mask[1]].any()
    assert not p.right[1, :, ~mask[1]].any()


def test_all_parameters_learn(embedding, inputs):
    embedding(**inputs).dense().square().sum().backward()
    for name, parameter in embedding.named_parameters():
        assert bool(parameter.grad.any()), name


def test_factors_keep_the_precision_of_their_input_under_autocast():
    embedding = PairEmbedding(6, 5, 8, template=Template(5, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = embedding(torch.randn(1, 4, 6), position=torch.randn(1, 4, 2))
    assert p.left.dtype == p.right.dtype == torch.float32


def test_missing_inputs_raise(embedding, inputs):
    with pytest.raises(ValueError, match="position="):
        embedding(inputs["x"], index=inputs["index"])
    with pytest.raises(ValueError, match="index="):
        embedding(inputs["x"], position=inputs["position"])
    with pytest.raises(ValueError, match="rank=10"):
        embedding(**inputs, rank=10)
    with pytest.raises(ValueError, match="max_rank=4"):
        PairEmbedding(6, 5, 4, template=Template(5, 2))
