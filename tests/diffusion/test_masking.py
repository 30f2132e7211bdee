"""Masking: the masked fraction equals the ratio under every strategy; and which entries each strategy chooses."""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.diffusion import MaskingConfig, MaskStrategy, Process
from alphastomics.diffusion.masking import choose_entries, clean_value, draw_mask, n_masked

STRATEGIES = get_args(MaskStrategy)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def rngs(n: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, i]) for i in range(n)]


def chosen(shape, ratio, strategy, seed=0, value=None):
    rng = np.random.default_rng(seed)
    value = np.random.default_rng(99).standard_normal(shape) if value is None else value
    return choose_entries(shape, n_masked(ratio, shape[0] * shape[1]), strategy, rng, value)


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    padding=st.integers(0, 7),
    n_features=st.integers(1, 40),
    ratio=st.floats(0, 1),
    strategy=st.sampled_from(STRATEGIES),
    discrete=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_masked_fraction_equals_the_ratio(sizes, padding, n_features, ratio, strategy, discrete, seed):
    """Over entries that are there: real cells, wherever they stand, and measured features."""
    rng = np.random.default_rng(seed)
    shape = len(sizes), max(sizes) + padding, n_features
    mask = torch.zeros(shape[:2], dtype=torch.bool)
    for row, n in zip(mask, sizes, strict=True):
        row[rng.permutation(shape[1])[:n]] = True
    features = torch.from_numpy(rng.random((shape[0], n_features)) < 0.7)
    value = torch.from_numpy(rng.standard_normal(shape))
    value = value.round() if discrete else value  # many equal ones, as counts are
    masked = draw_mask(value, mask, features, ratio=ratio, strategy=strategy, rngs=rngs(shape[0], seed))
    entries = mask[:, :, None] & features[:, None, :]
    assert not bool((masked & ~entries).any())
    for i in range(shape[0]):
        n_entries = int(entries[i].sum())
        count = int(masked[i].sum())
        assert count == round(ratio * n_entries)
        assert abs(count - Fraction(ratio) * n_entries) <= Fraction(1, 2) + Fraction(1, 10**9)


@every_strategy
@pytest.mark.parametrize(
    ("shape", "ratio", "count"),
    [
        ((100, 2), 0.33, 66),
        ((512, 2), 0.33, 338),
        ((10, 3), 0.33, 10),
        ((1, 2), 0.33, 1),
        ((1, 200), 0.4, 80),
        ((512, 200), 0.4, 512 * 80),
        ((7, 150), 0.3, 315),
        ((5, 1), 0.5, 2),  # ties go to the even number
    ],
)
def test_masked_counts_round_exactly(strategy, shape, ratio, count):
    assert chosen(shape, ratio, strategy).sum() == count


def test_random_masks_any_entry_alike():
    counts = sum(chosen((6, 5), 0.3, "random", seed).astype(int) for seed in range(4000))
    np.testing.assert_allclose(counts / 4000, 0.3, atol=5 * np.sqrt(0.3 * 0.7 / 4000))


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 30)), ratio=st.floats(0.01, 0.99), seed=st.integers(0, 10_000)
)
def test_blocks_are_runs_of_equal_width_in_every_cell(shape, ratio, seed):
    masked = chosen(shape, ratio, "block", seed)
    widths = masked.sum(1)
    assert np.ptp(widths) <= 1
    edges = np.diff(np.pad(masked.astype(int), ((0, 0), (1, 1))), axis=1)
    assert ((edges == 1).sum(1) == (widths > 0)).all()


def test_blocks_lie_anywhere():
    starts = np.concatenate([chosen((50, 10), 0.3, "block", seed).argmax(1) for seed in range(100)])
    np.testing.assert_allclose(np.bincount(starts) / len(starts), 1 / 8, atol=0.03)


def test_blocks_skip_genes_that_are_not_measured():
    features = torch.tensor([[True, False, True, True, False, False, True, True]])
    masked = draw_mask(
        torch.zeros(1, 30, 8), torch.ones(1, 30, dtype=torch.bool), features, ratio=0.6, strategy="block", rngs=rngs(1)
    )
    runs = {tuple(row) for row in masked[0][:, features[0]].int().tolist()}
    assert runs == {(1, 1, 1, 0, 0), (0, 1, 1, 1, 0), (0, 0, 1, 1, 1)}


@given(shape=st.tuples(st.integers(1, 20), st.integers(1, 30)), ratio=st.floats(0, 1), seed=st.integers(0, 1000))
def test_structured_masks_the_largest_values(shape, ratio, seed):
    value = np.random.default_rng(seed).standard_normal(shape).round(1)
    masked = chosen(shape, ratio, "structured", seed, value)
    size = np.abs(value)
    assert size[masked].min(initial=np.inf) >= size[~masked].max(initial=0)


def test_equal_values_are_chosen_by_chance():
    counts = sum(chosen((6, 5), 0.3, "structured", seed, np.ones((6, 5))).astype(int) for seed in range(4000))
    np.testing.assert_allclose(counts / 4000, 0.3, atol=5 * np.sqrt(0.3 * 0.7 / 4000))


def test_structured_needs_values():
    with pytest.raises(ValueError, match="values"):
        choose_entries((2, 2), 1, "structured", np.random.default_rng(0))


@every_strategy
def test_draws_depend_on_the_generator_alone(strategy):
    """Neither the rest of the batch, nor its padding, nor where the cells stand in it, moves the draws of a context."""
    value = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([[20], [11], [4]])
    features = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) < 0.8
    options = {"ratio": 0.37, "strategy": strategy}
    together = draw_mask(value, mask, features, rngs=rngs(3), **options)
    for i, rng in enumerate(rngs(3)):
        cells = mask[i]
        one = slice(i, i + 1)
        alone = draw_mask(value[one, cells], mask[one, cells], features[one], rngs=[rng], **options)
        assert torch.equal(alone[0], together[i, cells])


def test_contexts_without_a_generator_are_left_alone():
    value, mask, features = torch.ones(2, 5, 3), torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    masked = draw_mask(value, mask, features, ratio=0.5, strategy="random", rngs=[None, np.random.default_rng(0)])
    assert masked.sum((1, 2)).tolist() == [0, 8]  # 7.5, ties to the even number


@pytest.mark.parametrize("prediction_type", ["x0", "epsilon", "v"])
def test_masked_entries_are_read_with_the_timestep_at_one(prediction_type):
    """What the noisy value holds there changes nothing, also at t = 0, where v would return it as it is."""
    process = Process(prediction_type=prediction_type)
    generator = torch.Generator().manual_seed(0)
    output, z, other = (torch.randn(3, 4, 2, generator=generator) for _ in range(3))
    masked = torch.rand(3, 4, 2, generator=generator) < 0.5
    t = torch.tensor([0.0, 0.4, 0.9])
    x_0 = clean_value(process, output, z, t, masked)
    torch.testing.assert_close(x_0[masked], (-output if prediction_type == "v" else output)[masked])
    assert torch.equal(x_0[~masked], process.x0(output, z, t)[~masked])
    assert torch.equal(clean_value(process, output, torch.where(masked, other, z), t, masked), x_0)
    assert torch.equal(clean_value(process, output, z, t, None), process.x0(output, z, t))


def test_the_share_grows_linearly_and_stays():
    config = MaskingConfig(initial_mask_share=0.2, mask_ramp_steps=10)
    assert [config.share(step) for step in (0, 5, 10, 1000)] == pytest.approx([0.2, 0.6, 1.0, 1.0])
    assert MaskingConfig().share(0) == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask_strategy", "rows"),
        ("expression_mask_ratio", 1.5),
        ("position_mask_ratio", -0.1),
        ("masking_probability", float("nan")),
        ("initial_mask_share", 2),
        ("mask_ramp_steps", -1),
    ],
)
def test_invalid_values_raise(name, value):
    with pytest.raises(ValueError, match=name):
        MaskingConfig(**{name: value})
