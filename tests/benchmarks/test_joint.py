from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ortho_group

from benchmarks import joint


def tissue(seed: int, *, n: int = 900, related: bool = True, packed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Components that follow the position, or not, and positions, on a jittered grid or anywhere."""
    rng = np.random.default_rng(seed)
    side = round(np.sqrt(n / 2))
    if packed:
        grid = np.stack(np.meshgrid(np.arange(2 * side), np.arange(side)), -1).reshape(-1, 2) + 0.5
        position = (grid + rng.uniform(-0.2, 0.2, grid.shape)) / side
    else:
        position = rng.uniform(size=(2 * side**2, 2)) * [2, 1]
    x = position if related else rng.permutation(position)
    return np.column_stack([np.sin([2, 3] * x), rng.normal(size=(len(x), 2))]), position


def area(a, b, n_cells: int = 800) -> float:
    return joint.auc(joint.describe(*a), joint.describe(*b), n_cells, seed=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow
def test_classifier_cannot_separate_two_tissues_of_one_kind(packed):
    # One pair is off by some .04; with regions held out of one tissue alone the mean would be below .4.
    areas = [area(tissue(s, packed=packed), tissue(s + 10, packed=packed)) for s in range(3)]
    assert np.mean(areas) == pytest.approx(0.5, abs=0.06)


def test_classifier_separates_unrelated_neighborhoods():
    assert area(tissue(0, related=False), tissue(1)) > 0.8


def test_classifier_detects_minimum_spacing():
    assert area(tissue(0, packed=True), tissue(1)) > 0.8


def test_features_contain_absolute_density():
    """Two dense halves far apart: ratios between the distances to neighbors would not show it."""
    components, position = tissue(0)
    half = position.copy()
    half[:, 0] += 4 * (half[:, 0] > 1)
    gap = joint.describe(components, half).features[:, -1]
    whole = joint.describe(components, position).features[:, -1]
    assert np.median(gap) < 0.8 * np.median(whole)


def test_classifier_ignores_frame_and_unit():
    components, position = tissue(0)
    expected = joint.describe(components, position)
    moved = joint.describe(components, 7 * position @ ortho_group.rvs(2, random_state=0) + [3, -1])
    np.testing.assert_allclose(moved.features, expected.features)
    np.testing.assert_array_equal(moved.near, expected.near)


def test_blocks_are_equal_parts_in_space():
    _, position = tissue(0)
    block = joint.blocks(position)
    sizes = np.bincount(block, minlength=16)
    assert sizes.min() >= 54
    assert sizes.max() <= 58
    spread = [np.ptp(position[block == b], axis=0).max() for b in range(16)]
    assert max(spread) < 0.7


def test_like_regions_are_held_out_together():
    components, position = tissue(0)
    a, b = joint.describe(components, position), joint.describe(components, -position)
    block = joint.paired_blocks(a, b)
    np.testing.assert_array_equal(block[: len(position)], a.block)
    for i in range(joint.CUTS**2):  # b is a turned: a region is the same cells in another block
        cells = np.flatnonzero(block[len(position) :] == i)
        assert np.bincount(a.block[cells], minlength=16).argmax() == i


def test_no_neighbor_of_a_test_cell_is_trained_on(monkeypatch):
    a, b = joint.describe(*tissue(0)), joint.describe(*tissue(1))
    n = len(a.block)
    near = np.vstack([a.near, b.near + n])
    for described, offset in ((a, 0), (b, n)):
        described.features[:, 0] = np.arange(n) + offset  # the first feature is the number of the cell
    seen = []

    class Recorder:
        def __init__(self, **_):
            pass

        def fit(self, x, y):
            self.train = x[:, 0].astype(int)
            assert (y == (self.train >= n)).all()

        def predict_proba(self, x):
            seen.append((self.train, x[:, 0].astype(int)))
            return np.zeros((len(x), 2))

    monkeypatch.setattr(joint, "HistGradientBoostingClassifier", Recorder)
    assert joint.auc(a, b, n, seed=0) == 0.5
    assert len(seen) == joint.N_FOLDS
    assert sum(len(test) for _, test in seen) == 2 * n
    for train, test in seen:
        assert len(train) > n / 2
        assert not np.isin(near[test], train).any()
        assert not np.isin(near[train], test).any()


def test_components_match_the_reference():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(200, 30)) * np.arange(1, 31)
    components = joint.fit_components(values)
    found = components(values)
    assert found.shape == (200, joint.N_COMPONENTS)
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(components(values[:5]), found[:5])


def test_excess_is_the_mean_over_folds_then_over_seeds():
    entries = [
        {"method": m, "fold": f, "seed": s, "scores": dict.fromkeys(joint.MOMENTS, v + 0.1 * s * (m == joint.SAMPLE))}
        for s in (0, 1)
        for f in "xy"
        for m, v in ((joint.SAMPLE, 0.8), (joint.NEAREST, 0.7), (joint.MEAN, 0.75))
    ]
    found = joint.excess(entries, [0, 1, 2])["auc"]
    assert found[joint.NEAREST] == pytest.approx([0.15, 0.1 / np.sqrt(2)])
    assert found[joint.MEAN] == pytest.approx([0.1, 0.1 / np.sqrt(2)])
    assert joint.excess(entries, [0])["auc_raw"][joint.MEAN] == [pytest.approx(0.05), None]
    assert joint.excess(entries, [2]) == {}


@pytest.mark.slow
def test_library_size_changes_the_raw_score_only(make_tissue):
    reference, held_out = make_tissue(0, n_cells=400), make_tissue(1, n_slices=1, n_cells=400)
    drawn = make_tissue(2, n_slices=1, n_cells=400)
    rng = np.random.default_rng(0)
    held_out.X = rng.binomial(held_out.X.astype(int), 0.15).astype(np.float32)
    areas, each = joint.compare(reference, held_out, [drawn], float(np.median(reference.X.sum(1))), seed=0)
    assert list(areas) == [joint.NEAREST, joint.MEAN, joint.SHUFFLED, joint.SAMPLE]
    assert set(each) == {"s0", "s1"}
    for score in joint.MOMENTS:
        both = [one[score] for one in each.values()]
        assert (areas[joint.NEAREST][score], areas[joint.MEAN][score]) == pytest.approx((min(both), np.mean(both)))
    assert areas[joint.SAMPLE]["auc_raw"] > areas[joint.SAMPLE]["auc"] + 0.1
