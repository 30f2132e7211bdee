from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _held_out, _models, directions, embeddings, gene_inpainting, joint, pos_to_expr, uncertainty

SCRIPTS = {
    "directions": directions,
    "embeddings": embeddings,
    "gene_inpainting": gene_inpainting,
    "joint": joint,
    "pos_to_expr": pos_to_expr,
    "uncertainty": uncertainty,
}


def test_one_place_for_the_model_of_a_tissue_fold_mode_and_seed():
    assert _models.model_path(None, "t", "f", mode="any", seed=0) is None
    keys = [(t, f, m, s) for t in ("t", "u") for f in ("f", "g") for m in ("any", "joint") for s in (0, 1)]
    paths = {_models.model_path(Path("m"), t, f, mode=m, seed=s) for t, f, m, s in keys}
    assert len(paths) == len(keys)
    assert Path("m/t/f_any_seed0") in paths


@pytest.mark.parametrize("name", SCRIPTS)
def test_all_have_the_same_options(name):
    arguments = "--seeds 4 --minutes 1 --model-dir m --output o.json --data-dir d --benchmark seqfish".split()
    options = _held_out.parse(_held_out.parser(name), arguments)
    assert (options.seeds, options.minutes, options.model_dir) == ([4], 1, Path("m"))
    default = _held_out.parse(_held_out.parser(name), ["--benchmark", "seqfish"])
    assert (default.minutes, default.output.name) == (12.0, f"{name}_seqfish.json")
    assert _held_out.parse(_held_out.parser(name), ["--minutes", "0"]).minutes is None  # the package chooses


@pytest.mark.slow
def test_one_model_serves_all_and_finished_runs_are_kept(make_tissue, tmp_path, monkeypatch, capsys):
    folds = {"observed": (make_tissue(0), make_tissue(1, n_slices=1))}
    monkeypatch.setattr(_held_out, "labeled_folds", lambda *_: folds)
    monkeypatch.setattr(_held_out, "find_data", lambda _: tmp_path)
    trained, train = [], _models.train_or_load

    def counted(reference, *, mode, path, **arguments):
        if not path.is_dir():
            trained.append(mode)
        return train(reference, mode=mode, path=path, **arguments)

    monkeypatch.setattr(_models, "train_or_load", counted)
    contents = {}
    for again in (False, True):
        for name, script in SCRIPTS.items():
            output = tmp_path / f"{name}.json"
            paths = ["--model-dir", str(tmp_path / "m"), "--output", str(output)]
            script.main(["--benchmark", "starmap_mpfc", "--seeds", "0", "--minutes", "0.02", *paths])
            content = json.loads(output.read_text())
            assert np.isfinite([v for e in content["entries"] for v in e["scores"].values()]).all()
            assert not again or content == contents[name]
            contents[name] = content
        if not again:
            assert "observed, seed 0, " in capsys.readouterr().out
    assert sorted(trained) == ["any", "expr_to_pos", "pos_to_expr"]
    assert "observed, seed 0, " not in capsys.readouterr().out
    of_any = {e["model"] for c in contents.values() for e in c["entries"] if e["parameters"].get("mode") == "any"}
    assert len(of_any) == 1
    assert set(contents["directions"]["compared"]) == set(directions.COMPARED)
    assert set(contents["gene_inpainting"]["ratios"]) == set(gene_inpainting.QUESTIONS)
    assert set(contents["joint"]["excess"]) == set(joint.MOMENTS)
    assert set(contents["embeddings"]["summary"]) == {embeddings.PCS, embeddings.AVERAGED, *embeddings.EMBEDDINGS}
    assert set(contents["uncertainty"]["summary"]) == {*uncertainty.POSITION_ROWS, *uncertainty.EXPRESSION_ROWS}
