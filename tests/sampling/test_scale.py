"""The radius of a layout: of whole slices, parts of them and pools of several, and where it is kept."""

from __future__ import annotations

import pytest
import torch

from alphastomics.sampling._scale import restore_radius, rms_radius

REFERENCE = {"reference_radius": 0.8, "n_reference": 400}


def layout(n: int, scale: float, n_dims: int = 2) -> torch.Tensor:
    return scale * (torch.rand(n, n_dims, generator=torch.Generator().manual_seed(1)) * 2 - 1) - 3


@pytest.mark.parametrize(("n", "share"), [(400, 1), (1000, 1), (100, 0.5)])
def test_a_contracted_layout_gets_the_radius_of_as_many_cells(n, share):
    x = layout(n, 0.3)
    y = restore_radius(x, **REFERENCE)
    assert rms_radius(y) == pytest.approx(share * 0.8, rel=1e-5)
    torch.testing.assert_close(y.mean(0), x.mean(0), atol=1e-5, rtol=0)
    torch.testing.assert_close((y - y.mean(0)) / rms_radius(y), (x - x.mean(0)) / rms_radius(x), atol=1e-5, rtol=0)


def test_a_layout_is_never_contracted():
    torch.testing.assert_close(restore_radius(layout(400, 2.0), **REFERENCE), layout(400, 2.0))


def test_coinciding_cells_stay():
    x = torch.full((4, 2), 0.25)
    assert torch.equal(restore_radius(x, **REFERENCE), x)
