"""The benchmark of the scores, on a small slice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import scores


@pytest.mark.slow
def test_every_score_is_measured_and_written(tmp_path, capsys):
    file = tmp_path / "scores.json"
    scores.main(["--cells", "300", "--genes", "40", "--output", str(file)])
    content = json.loads(file.read_text())
    assert (content["n_cells"], content["n_genes"]) == (300, 40)
    assert set(content["seconds"]) == {"all", "positions", "expression", "clusters", "agreement"}
    wanted = {"distance_spearman", "pearson_gene", "moran_correlation", "modality_agreement", "adjusted_rand"}
    assert wanted < set(content["scores"])
    assert np.isfinite(list(content["scores"].values())).all()
    assert content["beyond_data"] > 0
    assert "beyond the data" in capsys.readouterr().out
