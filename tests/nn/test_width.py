"""The width at which a denoiser has a given size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters, matched_width

CONFIG = DenoiserConfig(n_genes=20, n_dims=2, d_model=16, n_layers=1, n_heads=4)


def total(width: int) -> int:
    return count_parameters(Denoiser(replace(CONFIG, d_model=width))).total


@pytest.mark.parametrize("n_parameters", [1, 10_000, 27_345, 31_192, 60_000])
def test_the_width_is_the_nearest_possible(n_parameters):
    found = matched_width(CONFIG, n_parameters)
    nearest = min(abs(total(width) - n_parameters) for width in range(4, 60, 4))
    assert found % 4 == 0
    assert abs(total(found) - n_parameters) == nearest


def test_the_size_of_a_width_gives_the_width():
    assert [matched_width(CONFIG, total(width)) for width in (4, 16, 36)] == [4, 16, 36]


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [({"n_heads": 3}, 3), ({"bottleneck": 3}, 12), ({"use_moe": True, "num_experts": 5, "expert_width": "split"}, 20)],
)
def test_widths_are_those_that_the_settings_permit(settings, multiple):
    config = replace(CONFIG, d_model=60, **settings)
    width = matched_width(config, 20_000)
    assert width % multiple == 0
    Denoiser(replace(config, d_model=width))
