from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from alphastomics.data import TissueSchema
from dense_encoding import encode


def schema(**changes: object) -> TissueSchema:
    fields = {
        "genes": ("a", "b", "c"),
        "transform": "log1p",
        "library_size": 90.0,
        "gene_mean": (1.1, 0.3, 2.0),
        "gene_scale": (0.7, 1 / 3, 1.5),
        "gene_share": (0.2, 0.3, 0.5),
        "frame": "slice",
        "n_dims": 2,
        "scale": 0.1 + 0.2,
        "spacing": 0.02,
        "center": (0.0, 0.0),
        "slices": ("s0",),
        "cell_types": (),
        "position_key": "spatial",
        "slice_key": None,
        "cell_type_key": None,
        "layer": None,
        "sequence_key": None,
    }
    return TissueSchema(**(fields | changes))


def plain(**changes: object) -> TissueSchema:
    return schema(transform="none", library_size=None, gene_share=(), **changes)


@given(
    numbers=hnp.arrays(float, (3, 3), elements=st.floats(1e-300, 1e300)),
    names=st.lists(st.text(), min_size=3, max_size=3, unique=True),
    center=st.tuples(*[st.floats(-1e9, 1e9)] * 3),
)
def test_json_round_trip_is_exact(numbers: np.ndarray, names: list[str], center: tuple[float, ...]) -> None:
    mean, scale, share = (tuple(row) for row in numbers.tolist())
    before = schema(
        genes=tuple(names), gene_mean=mean, gene_scale=scale, gene_share=share, n_dims=3, center=center, frame="shared"
    )
    after = TissueSchema.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after == before
    assert hash(after) == hash(before)


def test_from_dict_names_missing_and_unknown_keys() -> None:
    values = schema().to_dict()
    del values["gene_scale"]
    values["color"] = 1
    with pytest.raises(ValueError, match="gene_scale.*color"):
        TissueSchema.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"genes": ("a", "b", "a")}, "unique"),
        ({"gene_mean": (1.0,)}, "gene_mean|per gene"),
        ({"gene_scale": (1.0, 0.0, 1.0)}, "gene_scale"),
        ({"library_size": None}, "library_size"),
        ({"transform": "sqrt"}, "transform"),
        ({"frame": "free"}, "frame"),
        ({"n_dims": 4, "center": (0.0,) * 4}, "n_dims"),
        ({"center": (0.0,)}, "center"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_inconsistent_fields_are_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema(**changes)


def test_frozen_pickled_and_short() -> None:
    before = schema()
    after = pickle.loads(pickle.dumps(before))
    assert after == before
    np.testing.assert_array_equal(after.decode_expression([[1, 2, 3]]), before.decode_expression([[1, 2, 3]]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.scale = 2.0
    assert len(repr(before)) < 150


def test_target_without_counts_is_an_error() -> None:
    with pytest.raises(ValueError, match="counts"):
        schema(gene_share=(0.0, 0.5, 0.5)).target_library_size([True, False, False])


@settings(deadline=None)
@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.just(3)), elements=st.integers(0, 400)))
def test_counts_come_back(counts: np.ndarray) -> None:
    spec = schema(gene_scale=(1.0, 1.0, 1.0))
    back = spec.decode_expression(encode(spec, counts), counts.sum(1))
    np.testing.assert_allclose(back, counts, rtol=1e-4, atol=1e-3)


def test_generated_cells_get_the_reference_depth_and_no_negative_counts() -> None:
    spec = schema()
    np.testing.assert_allclose(spec.decode_expression(np.zeros((1, 3)))[0], np.expm1(spec.gene_mean), rtol=1e-6)
    assert spec.decode_expression(np.full((1, 3), -10.0)).min() == 0


@settings(deadline=None)
@given(hnp.arrays(float, (4, 3), elements=st.floats(-3, 3)))
def test_untransformed_values_come_back(values: np.ndarray) -> None:
    spec = plain(gene_scale=(1.0, 2.0, 0.8))
    np.testing.assert_allclose(spec.decode_expression(encode(spec, values)), values, atol=1e-5)


@given(hnp.arrays(float, (5, 2), elements=st.floats(-1e5, 1e5)))
def test_positions_come_back(position: np.ndarray) -> None:
    spec = schema(frame="shared", center=(4000.0, -20.0), scale=350.0)
    model = spec.encode_position(position)
    assert model.dtype == np.float32
    np.testing.assert_allclose(model[:, 1], (position[:, 1] + 20.0) / 350.0, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(spec.decode_position(model), position, rtol=1e-6, atol=1e-2)


def test_import_needs_no_torch() -> None:
    code = "import sys, alphastomics.data as d; d.AnnDataSource; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
