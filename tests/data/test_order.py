"""The order of contexts: every one once, equal shards, few chunks open at a time, slices mixed as chance mixes them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import chi2

from alphastomics.data._order import (
    PADDING,
    Chunk,
    RoundRobinSampler,
    WindowSampler,
    cut_shards,
    shard_sizes,
    window_order,
)


def chunks_of(sizes, n_cells=10):
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [Chunk(np.arange(a, b), n_cells) for a, b in zip(starts, starts[1:], strict=False)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 4))
def test_shards_hold_every_context_once_and_are_equally_long(sizes, n, multiple):
    cut = cut_shards(chunks_of(sizes), n, multiple)
    numbers = [np.concatenate([chunk.contexts for chunk in each]) for each in cut]
    assert len({len(each) for each in numbers}) == 1
    assert len(numbers[0]) % multiple == 0
    real = np.concatenate(numbers)
    assert sorted(real[real != PADDING]) == list(range(sum(sizes)))
    assert (real == PADDING).sum() < n * (multiple + 1)
    assert sum(len(each) - (each[-1].n_cells == 0) for each in cut) <= len(sizes) + n - 1  # few chunks are cut


@given(st.lists(st.integers(1, 9), min_size=1, max_size=10), st.integers(5, 60), st.integers(0, 9))
def test_a_window_draws_every_context_once_and_holds_no_more_than_the_buffer(sizes, buffer_size, seed):
    chunks = chunks_of(sizes)
    order = window_order(chunks, buffer_size, np.random.default_rng(seed))
    assert sorted(order) == list(range(sum(sizes)))
    owner = np.repeat(np.arange(len(sizes)), sizes)[order]
    first = {k: int(np.argmax(owner == k)) for k in range(len(sizes))}
    last = {k: len(order) - 1 - int(np.argmax(owner[::-1] == k)) for k in range(len(sizes))}
    for step in range(len(order)):
        in_progress = [k for k in first if first[k] <= step <= last[k]]
        assert 10 * len(in_progress) <= max(buffer_size, 10)


def test_padding_comes_last_and_moves_no_draw():
    chunks = chunks_of([3, 4, 5])
    padded = [*chunks, Chunk(np.full(4, PADDING), 0)]
    for buffer_size in (None, 20):
        alone, found = (window_order(each, buffer_size, np.random.default_rng(2)) for each in (chunks, padded))
        np.testing.assert_array_equal(found, [*alone, *[PADDING] * 4])


def test_buffered_contexts_are_shuffled_together():
    chunks = chunks_of([3, 4, 5])
    rng, again = np.random.default_rng(0), np.random.default_rng(0)
    np.testing.assert_array_equal(window_order(chunks, None, rng), again.permutation(12))
    assert len(window_order([], 10, rng)) == 0


def test_slices_are_in_random_order():
    sizes, statistic, freedom = [8, 8, 12, 20], 0.0, 0
    owner = np.repeat(np.arange(4), sizes)
    n = len(owner)
    for seed in range(20):
        order = owner[window_order(chunks_of(sizes), 40, np.random.default_rng(seed))]
        found = Counter(zip(order[:-1].tolist(), order[1:].tolist(), strict=True))
        for a in range(4):
            for b in range(4):
                expected = (n - 1) * sizes[a] / n * (sizes[b] - (a == b)) / (n - 1)
                statistic += (found[a, b] - expected) ** 2 / expected
        freedom += 9
    assert chi2.sf(statistic, freedom) > 0.01


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_ranks_take_equally_many_batches_and_together_all_contexts(world_size, n_workers):
    length, per_batch = 6 * world_size * n_workers, 4
    seen, batches = [], []
    for rank in range(world_size):
        sampler = WindowSampler(length, per_batch, rank=rank, world_size=world_size, n_workers=n_workers)
        batches.append(len(list(sampler)))
        assert batches[-1] == len(sampler)
        for k, batch in enumerate(sampler):
            seen += batch
            shard = {i // 6 for i in batch}
            assert shard == {rank * n_workers + k % n_workers}  # a loader process keeps to its shard
    assert len(set(batches)) == 1
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_see_the_contexts_of_one_process(world_size):
    n_steps, per_batch = 5, 4
    alone = list(RoundRobinSampler(n_steps * world_size * per_batch, per_batch))
    ranks = [
        list(RoundRobinSampler(n_steps * world_size * per_batch, per_batch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(rank) for rank in ranks} == {n_steps}
    for step in range(n_steps):
        together = [i for rank in ranks for i in rank[step]]
        assert together == [i for batch in alone[step * world_size : (step + 1) * world_size] for i in batch]


def test_the_last_batch_of_one_process_has_the_remainder():
    sampler = RoundRobinSampler(10, 4)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(sampler) == 3


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_real_contexts_of_a_batch_are_counted_over_all_ranks(total, per_batch, world_size, n_workers):
    n = world_size * n_workers
    cut = cut_shards(chunks_of([total]), n, per_batch)
    sequence = np.concatenate([chunk.contexts for each in cut for chunk in each])
    for in_turns in (True, False):
        if in_turns:
            length = -(-total // (per_batch * world_size)) * per_batch * world_size
            real, in_shards = np.arange(length) < total, [total]
            samplers: list[RoundRobinSampler | WindowSampler] = [
                RoundRobinSampler(length, per_batch, rank=rank, world_size=world_size) for rank in range(world_size)
            ]
        else:
            real, in_shards = sequence != PADDING, shard_sizes(total, n)
            samplers = [
                WindowSampler(len(sequence), per_batch, rank=rank, world_size=world_size, n_workers=n_workers)
                for rank in range(world_size)
            ]
        batches = zip(*samplers, strict=True)
        expected = [sum(int(real[batch].sum()) for batch in together) for together in batches]
        assert [samplers[0].n_real(i, in_shards) for i in range(len(samplers[0]))] == expected
        assert sum(expected) == total
