"""Which entries are held: kinds and shares."""

from __future__ import annotations

import numpy as np
import pytest

from alphastomics.train.timesteps import CELL_SHARE, CELLS, GENE_SHARE, GENES, NOTHING, draw_observed

N_CELLS, N_GENES = 200, 80


def kind_of(observed: np.ndarray) -> str:
    if not observed.any():
        return "nothing"
    if (observed == observed[:, :1]).all():
        return "cells"
    return "genes" if (observed == observed[:1]).all() else "entries"


def test_kinds_come_with_their_shares():
    draws = [draw_observed(N_CELLS, N_GENES, np.random.default_rng([0, i])) for i in range(1000)]
    kinds = np.array([kind_of(observed) for observed in draws])
    expected = {"nothing": NOTHING, "cells": CELLS - NOTHING, "genes": GENES - CELLS, "entries": 1 - GENES}
    for kind, share in expected.items():
        assert (kinds == kind).mean() == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 1000))
    shares = np.array([observed.mean() for observed in draws])
    for kind, (low, high) in {"cells": CELL_SHARE, "genes": GENE_SHARE, "entries": GENE_SHARE}.items():
        found = shares[kinds == kind]
        assert low - 0.1 < found.min()
        assert found.max() < high + 0.1
        assert found.max() - found.min() > 0.7 * (high - low)
    assert np.median(shares[kinds == "cells"]) < 0.2  # few cells are held more often than many
