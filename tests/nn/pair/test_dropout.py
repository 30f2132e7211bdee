"""What dropout of rows and columns shares, and what it does not."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn.pair import PairDropout, PairFactors


@pytest.mark.parametrize(("shared_over", "axis"), [("row", 1), ("column", 2)])
def test_the_draw_is_shared_over_one_axis_of_the_cells_and_never_over_the_batch(shared_over, axis, make_factors):
    factors = make_factors(b=4, c=5, n=40)
    kept = PairDropout(0.25, shared_over)(factors).dense() / factors.dense()  # (B, N, N, C)
    first = kept.select(axis, 0).unsqueeze(axis)
    torch.testing.assert_close(kept, first.expand_as(kept))
    draw = first.squeeze(axis)  # (B, N, C)
    torch.testing.assert_close(draw, (draw > 0) / 0.75, check_dtype=False)
    assert 0.2 < float((draw == 0).double().mean()) < 0.3
    for one in range(4):
        for other in range(one):
            assert not torch.equal(draw[one] > 0, draw[other] > 0)
    assert not torch.equal(draw[..., 0] > 0, draw[..., 1] > 0)


def test_nothing_is_dropped_outside_training_or_at_rate_zero(make_factors):
    factors = make_factors()
    assert PairDropout(0.5, "row").eval()(factors) is factors
    assert PairDropout(0.0, "column")(factors) is factors


def test_features_are_kept_on_average():
    factors = PairFactors(torch.ones(1, 1, 20_000, 1), torch.ones(1, 1, 20_000, 1))
    dropped = PairDropout(0.4, "column")(factors)
    assert float(dropped.left.mean()) == pytest.approx(1, abs=0.03)
