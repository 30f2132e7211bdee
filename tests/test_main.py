"""The command line, from tokens to files."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from files import error_line

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

TINY = ["--d-model", "16", "--n-layers", "1", "--n-heads", "2", "--context-size", "64"]
SHORT = [*TINY, "--epochs", "2", "--accelerator", "cpu"]
COMMANDS = ["demo", "reconstruct", "train", "sample", "test", "extract", "compare", "upload"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ref.h5ad`` (two slices), ``query.h5ad`` (the third, with its positions), and the run ``run/``, trained on the first."""
    folder = tmp_path_factory.mktemp("tissue")
    tissue = synthetic_tissue(n_cells=90, n_genes=20, random_state=0)
    is_query = (tissue.obs["slice_id"] == "slice_2").to_numpy()
    tissue[~is_query].write_h5ad(folder / "ref.h5ad")
    tissue[is_query].write_h5ad(folder / "query.h5ad")
    tokens = [
        "train",
        "--input-data",
        str(folder / "ref.h5ad"),
        "--output-dir",
        str(folder),
        "--exp-name",
        "run",
        *SHORT,
    ]
    assert main([*tokens, "--mode", "expr_to_pos", "--cell-type-key", "cell_type"]) == 0
    return folder


@pytest.fixture
def query(folder: Path) -> list[str]:
    return ["--checkpoint", str(folder / "run"), "--input-data", str(folder / "query.h5ad"), "--accelerator", "cpu"]


def files_in(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["alphastomics", "alphastomics.main"])
def test_package_runs_as_a_module(module):
    run = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert all(re.search(rf"^│ {command} ", run.stdout, flags=re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("module", ["alphastomics", "alphastomics.main"])
def test_a_failure_is_the_exit_code_of_the_process(module):
    run = subprocess.run([sys.executable, "-m", module, "frob"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith('alphastomics: Unknown command "frob"')
    assert run.stderr.count("\n") == 1


def test_help_takes_less_than_a_second() -> None:
    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "alphastomics", "--help"], capture_output=True, check=True, timeout=60)
        after = os.times()
        # Of the processor, not of the clock: a busy machine is not a slow program.
        return sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))

    assert min(seconds() for _ in range(3)) < 1.0


@pytest.mark.parametrize("tokens", [["--help"], ["train", "--help"], ["compare", "--help"], ["--version"], ["train"]])
def test_torch_is_imported_on_demand(tokens):
    code = f"import sys; from alphastomics.main import main; main({tokens}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert {"torch", "scvi", "lightning", "scanpy", "pandas", "matplotlib"}.isdisjoint(run.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    flags = re.findall(r"^│ \*? *(--[a-z-]+)[^│]*? {2,}(\S[^│]*)│", text, flags=re.MULTILINE)
    assert len(flags) > 4
    assert [flag for flag, help_ in flags if help_.startswith("[")] == []


def test_version(capsys):
    from alphastomics import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


# -- train, sample, test, extract ------------------------------------------------------------------------------------


def test_train_writes_a_run_and_nothing_else(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = logging.getLogger("alphastomics").handlers[:]
    tokens = ["train", "--input-data", str(folder / "ref.h5ad"), *SHORT]
    assert main([*tokens, "--no-gated-attention", "--no-use-qk-norm", "--lambda-neighbor", "0", "--seed", "3"]) == 0
    run = tmp_path / "outputs/alphastomics"
    model, state = ["checkpoints/model/config.json", "checkpoints/model/model.safetensors"], ["checkpoints/last.ckpt"]
    assert files_in(run) == [*state, *model, "config.yaml", "logs/metrics.csv"]
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"]
    init = json.loads((run / model[0]).read_text())["init"]
    assert (init["attention"], init["use_qk_norm"], init["d_model"], init["random_state"]) == ("linear", False, 16, 3)
    assert logging.getLogger("alphastomics").handlers == before
    assert main(tokens) == 1
    (run / "logs/notes.txt").write_text("mine")
    (run / "logs/scores.json").write_text("old")
    assert main([*tokens, "--overwrite"]) == 0
    assert json.loads((run / model[0]).read_text())["init"]["random_state"] == 0
    assert (run / "logs/notes.txt").read_text() == "mine"
    assert not (run / "logs/scores.json").exists()
    assert pd.read_csv(run / "logs/metrics.csv", index_col="epoch").index.tolist() == [0, 1]


def test_training_is_the_same_as_in_python(folder, tmp_path):
    from alphastomics.model import AlphaSTomics

    reference = ad.read_h5ad(folder / "ref.h5ad")
    AlphaSTomics.setup_anndata(reference, cell_type_key="cell_type")
    model = AlphaSTomics(reference, mode="expr_to_pos", d_model=16, n_layers=1, n_heads=2, random_state=0)
    model.train(max_epochs=2, context_size=64, accelerator="cpu", enable_progress_bar=False)
    model.save(tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == (
        folder / "run/checkpoints/model/model.safetensors"
    ).read_bytes()


def sampled(query: list[str], path: Path, *tokens: str) -> AnnData:
    assert main(["sample", *query, "--output", str(path), *tokens]) == 0
    return ad.read_h5ad(path)


def test_sample_matches_the_model(folder, query, tmp_path, monkeypatch):
    from alphastomics.model import AlphaSTomics

    monkeypatch.chdir(tmp_path)
    cells = ad.read_h5ad(folder / "query.h5ad")
    model = AlphaSTomics.load(folder / "run/checkpoints/model", adata=False, accelerator="cpu")
    placed = sampled(query, tmp_path / "new" / "out.h5ad", "--seed", "5", "--refine")
    expected = model.sample(cells, refine=True, random_state=5)
    np.testing.assert_array_equal(placed.obsm["spatial_reconstructed"], expected.obsm["spatial_reconstructed"])
    unrefined = model.sample(cells, refine=False, random_state=5)
    assert not np.array_equal(placed.obsm["spatial_reconstructed"], unrefined.obsm["spatial_reconstructed"])
    assert list(placed.obs_names) == list(cells.obs_names)
    assert files_in(tmp_path) == ["new/out.h5ad"]


def test_every_direction_is_sampled(folder, tmp_path):
    from alphastomics.model import AlphaSTomics

    model, out = str(tmp_path / "any/checkpoints/model"), tmp_path / "out.h5ad"
    tokens = ["train", "--input-data", str(folder / "ref.h5ad"), "--output-dir", str(tmp_path), "--exp-name", "any"]
    assert main([*tokens, *SHORT, "--mode", "any"]) == 0
    loaded = AlphaSTomics.load(model, adata=False, accelerator="cpu")
    steps = ["--n-steps", "3", "--output", str(out)]
    cells = ad.read_h5ad(folder / "query.h5ad")
    query = ["sample", "--checkpoint", model, "--input-data", str(folder / "query.h5ad"), *steps]
    assert main([*query, "--sample-mode", "pos_to_expr", "--n-samples", "2", "--reduce", "mean"]) == 0
    expected = loaded.sample(cells, mode="pos_to_expr", n_steps=3, n_samples=2, reduce="mean")
    np.testing.assert_array_equal(ad.read_h5ad(out).X.toarray(), expected.X.toarray())
    assert main(["sample", "--checkpoint", model, "--sample-mode", "joint", "--n-cells", "40", *steps]) == 0
    expected = loaded.sample(mode="joint", n_cells=40, n_steps=3)
    np.testing.assert_array_equal(ad.read_h5ad(out).obsm["spatial"], expected.obsm["spatial"])


def test_steps_of_positions_are_an_error(query, tmp_path, capsys):
    for tokens in (["--n-steps", "3"], ["--sampler", "ddim"]):
        assert main(["sample", *query, "--output", str(tmp_path / "out.h5ad"), *tokens]) != 0
        assert re.search(rf"{tokens[0]} requires --sample-mode pos_to_expr or joint", error_line(capsys))
    assert files_in(tmp_path) == []


def test_sample_reads_positions_only_to_inpaint(folder, query, tmp_path):
    cells = ad.read_h5ad(folder / "query.h5ad")
    truth = cells.obsm["spatial"].copy()
    cells.obsm["spatial"][:30] = np.nan
    cells.write_h5ad(tmp_path / "partly.h5ad")
    partly = [*query[:3], str(tmp_path / "partly.h5ad"), *query[4:]]
    free, blind, observed = (
        sampled(tokens, tmp_path / "out.h5ad", *more).obsm["spatial_reconstructed"]
        for tokens, more in ((query, []), (partly, []), (partly, ["--inpaint"]))
    )
    np.testing.assert_array_equal(free, blind)
    np.testing.assert_array_equal(observed[30:], truth[30:])
    assert np.isfinite(observed).all()


def test_sample_draws_and_reduces(query, tmp_path):
    every = sampled(query, tmp_path / "a.h5ad", "--n-samples", "2")
    medoid = sampled(query, tmp_path / "b.h5ad", "--n-samples", "2", "--reduce", "medoid")
    assert list(every.obs["draw"].unique()) == [0, 1]
    assert every.n_obs == 2 * medoid.n_obs
    draws = every.obsm["spatial_reconstructed"].reshape(2, medoid.n_obs, 2)
    assert any(np.array_equal(draw, medoid.obsm["spatial_reconstructed"]) for draw in draws)
    assert (medoid.obs["spatial_reconstructed_uncertainty"] > 0).all()


def test_test_prints_and_writes_the_scores_of_evaluate(folder, query, tmp_path, capsys, monkeypatch):
    from alphastomics import tl
    from alphastomics.model import AlphaSTomics

    monkeypatch.chdir(tmp_path)
    assert main(["test", *query, "--output", "scores.json"]) == 0
    text = capsys.readouterr().out
    cells = ad.read_h5ad(folder / "query.h5ad")
    tl.reconstruct(cells, model=AlphaSTomics.load(folder / "run/checkpoints/model", adata=False, accelerator="cpu"))
    expected = tl.evaluate(cells, baselines=True, cell_type_key="cell_type")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores) == ["slice_2"]
    assert list(scores["slice_2"]) == ["prediction", "chance", "oracle"]
    for kind, values in scores["slice_2"].items():
        assert values == pytest.approx(expected.loc[("slice_2", kind)].to_dict())
        assert all(f"{value:.4g}" in text for value in values.values())
    assert files_in(tmp_path) == ["scores.json"]


def test_slices_that_were_trained_on_are_named_by_test(folder, query, capsys):
    assert main(["test", *query]) == 0
    assert "trained on" not in capsys.readouterr().err
    assert main(["test", *query[:2], "--input-data", str(folder / "ref.h5ad"), *query[4:]]) == 0
    text = capsys.readouterr().err
    assert "2 of 2 slices have the names of slices that the model was trained on ('slice_0', 'slice_1')" in text


def test_extract_writes_plain_arrays(folder, query, tmp_path):
    from alphastomics.model import AlphaSTomics

    assert main(["extract", *query, "--output", str(tmp_path / "z.npz"), "--layer", "all"]) == 0
    cells = ad.read_h5ad(folder / "query.h5ad")
    with np.load(tmp_path / "z.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["latent", "obs_names"]
        assert arrays["obs_names"].tolist() == cells.obs_names.tolist()
        model = AlphaSTomics.load(folder / "run/checkpoints/model", adata=False, accelerator="cpu")
        np.testing.assert_array_equal(arrays["latent"], model.get_latent_representation(cells, layer="all"))
    assert files_in(tmp_path) == ["z.npz"]


def test_extract_shows_progress(folder, tmp_path, capsys):
    tokens = ["--checkpoint", str(folder / "run"), "--input-data", str(folder / "query.h5ad")]
    assert main(["extract", *tokens, "--output", str(tmp_path / "z.npz")]) == 0
    assert re.search(r"Embedding: 100%\|.*\| 90/90 ", capsys.readouterr().err)


# -- compare ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(folder, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    tokens = ["compare", "--input-data", str(folder / "ref.h5ad"), "--output-dir", "out", *TINY, "--accelerator", "cpu"]
    tokens += ["--configurations", "linear", "gated_matched", "--max-steps", "2", "--seeds", "3", "4"]
    return [*tokens, "--n-samples", "2", "--n-steps", "2", "--max-cells", "40", "--cell-type-key", "cell_type"]


@pytest.mark.slow
def test_compare_writes_the_tables_of_the_function(folder, comparison, tmp_path, capsys):
    from alphastomics import tl

    assert main(comparison) == 0
    text = capsys.readouterr().out
    names = [f"out/comparison.{suffix}" for suffix in ("csv", "json", "md", "png")]
    assert files_in(tmp_path) == names
    before = {name: (tmp_path / name).read_bytes() for name in names}
    expected = tl.compare(
        ad.read_h5ad(folder / "ref.h5ad"), configurations=["linear", "gated_matched"], seeds=[3, 4], max_steps=2,
        d_model=16, n_layers=1, n_heads=2, context_size=64, accelerator="cpu", n_samples=2, n_steps=2, max_cells=40,
        cell_type_key="cell_type", enable_progress_bar=False,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "out/comparison.csv", index_col=0)
    assert table.index.tolist() == ["linear", "gated_matched", "chance", "oracle"]
    times = [name for name in table if "seconds" in name]
    pd.testing.assert_frame_equal(
        table.drop(columns=times).astype(float), expected.drop(columns=times).astype(float), rtol=1e-5
    )
    assert before["out/comparison.png"].startswith(b"\x89PNG")
    header, _, *lines = (tmp_path / "out/comparison.md").read_text().splitlines()
    written = [dict(zip(header.split(" | "), line.split(" | "), strict=True)) for line in lines]
    mean, sd = expected.loc["linear", ["distance_spearman", "distance_spearman_sd"]]
    assert written[0]["distance_spearman"] == f"{mean:.4g} ± {sd:.2g}"
    assert [row["parameters"] for row in written] == [str(n) for n in expected["parameters"][:2]] + ["–", "–"]
    assert re.search(rf"distance_spearman +{mean:.4g}", text)
    # The second call has nothing to train.
    assert main(comparison) == 0
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items() if "png" not in name)


@pytest.mark.slow
def test_compare_reads_parquet(folder, comparison, tmp_path):
    from alphastomics.data import write_parquet

    write_parquet(ad.read_h5ad(folder / "ref.h5ad"), tmp_path / "ref.parquet")
    tables = []
    for name, source in (("a", str(folder / "ref.h5ad")), ("b", "ref.parquet")):
        assert main(replaced(replaced(comparison, ["--output-dir", name]), ["--input-data", source])) == 0
        tables.append(pd.read_csv(tmp_path / name / "comparison.csv", index_col=0))
    tables = [table.drop(columns=[name for name in table if "seconds" in name]) for table in tables]
    pd.testing.assert_frame_equal(*tables)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--output-dir", "text"], "text "),
        (["--output-dir", "full"], r"full .*comparison\.json"),
        (["--configurations", "gates"], "'gates'.*--configurations"),
        (["--held-out", "slice_7"], "'slice_7'.*--held-out"),
        (["--max-time", "3"], "--max-time.*--max-steps"),
        (["--max-time", "soon"], "max_time='soon'|--max-time"),
        (["--mode", "joint"], "joint"),
    ],
)
def test_an_invalid_comparison_gives_a_short_error(comparison, tokens, message, tmp_path, capsys):
    (tmp_path / "text").write_text("no")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    before = files_in(tmp_path)
    assert main(replaced(comparison, tokens)) in (1, 2)
    assert re.search(message, error_line(capsys))
    assert files_in(tmp_path) == before


def replaced(tokens: list[str], new: list[str]) -> list[str]:
    """Tokens with another value of one option, or with a further option."""
    if new[0] not in tokens:
        return [*tokens, *new]
    start = tokens.index(new[0])
    end = next((i for i in range(start + 1, len(tokens)) if tokens[i].startswith("--")), len(tokens))
    return tokens[:start] + new + tokens[end:]


# -- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_demo(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setattr("alphastomics.datasets.synthetic_tissue", partial(synthetic_tissue, n_cells=90, n_genes=20))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # the table is as wide as the terminal
    return ["demo", "--output-dir", "demo", *SHORT]


def check_demo(folder: Path, text: str) -> dict[str, dict[str, float]]:
    """The files of a demo, and that what was printed is what was written."""
    assert files_in(folder) == [
        f"demo/{name}" for name in ("reconstruction.h5ad", "reconstruction.png", "report.html", "scores.json")
    ]
    scores = json.loads((folder / "demo/scores.json").read_text())
    assert list(scores) == ["AlphaSTomics", "25-NN regression", "chance", "oracle within type"]
    header, *lines = text.splitlines()
    assert [header.index(name) for name in scores] == sorted(header.index(name) for name in scores)
    printed = {line.split()[0]: line.split()[1:] for line in lines}
    for name in scores["chance"]:
        assert [float(value) for value in printed[name]] == pytest.approx(
            [values[name] for values in scores.values()], rel=1e-3
        )
    image = (folder / "demo/reconstruction.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    report = (folder / "demo/report.html").read_text()
    assert base64.b64encode(image).decode() in report
    assert f"<td>{scores['AlphaSTomics']['distance_spearman']:.4g}</td>" in report
    assert not re.search(r"""(src|href)=["'](?!data:)""", report)
    return scores


def table_in(text: str) -> str:
    """What was printed, without the progress bar."""
    return text[text.index(" AlphaSTomics ") :].rstrip("\n")


def test_demo_fails_loudly_when_the_regression_is_better(tiny_demo, tmp_path, capsys, monkeypatch):
    def perfect(query: AnnData, reference: AnnData) -> np.ndarray:
        return query.obsm["spatial"]

    monkeypatch.setattr("alphastomics.cli._scores.knn_positions", perfect)
    assert main(tiny_demo) == 1
    captured = capsys.readouterr()
    assert re.search(r"alphastomics: .* did not score higher than 25-NN.* and 1\.000.*--max-time", captured.err)
    check_demo(tmp_path, table_in(captured.out))


def test_demo_hides_the_positions_of_the_third_slice(tiny_demo, tmp_path, capsys, monkeypatch):
    from alphastomics import tl

    def reconstruct(query: AnnData, **options: object) -> None:
        assert list(query.obsm) == []
        placed.append(query.n_obs)
        original(query, **options)

    def useless(query: AnnData, reference: AnnData) -> np.ndarray:
        slices.extend(reference.obs["slice_id"].unique())
        return np.random.default_rng(0).normal(size=query.obsm["spatial"].shape)

    placed, slices, original = [], [], tl.reconstruct
    monkeypatch.setattr(tl, "reconstruct", reconstruct)
    monkeypatch.setattr("alphastomics.cli._scores.knn_positions", useless)
    assert main([*tiny_demo, "--seed", "1"]) == 0
    assert placed == [90]
    assert slices == ["slice_0", "slice_1"]
    check_demo(tmp_path, table_in(capsys.readouterr().out))
    cells = ad.read_h5ad(tmp_path / "demo/reconstruction.h5ad")
    assert sorted(cells.obsm) == ["spatial", "spatial_anatomy", "spatial_reconstructed"]
    assert set(cells.obs["slice_id"]) == {"slice_2"}


def test_other_processes_of_a_demo_only_train(tiny_demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("alphastomics.cli._compare.is_first", lambda: False)
    assert main(tiny_demo) == 0
    assert " AlphaSTomics " not in capsys.readouterr().out
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("mode", ["joint", "pos_to_expr"])
def test_a_mode_that_places_no_cells_is_refused_before_training(tiny_demo, mode, capsys, tmp_path, no_training):
    assert main([*tiny_demo, "--mode", mode]) == 1
    assert f"mode={mode!r}" in error_line(capsys) or f"--mode {mode}" in error_line(capsys)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("time", ["301", "00:00:05:01"])
def test_demo_is_short(tiny_demo, time, capsys, tmp_path):
    assert main([*tiny_demo, "--max-time", time]) == 1
    assert re.search(r"300 s\b.*--max-time", error_line(capsys))
    assert files_in(tmp_path) == []


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    code = main(["demo", "--output-dir", "demo", "--max-epochs", "20", "--max-time", "100"])
    captured = capsys.readouterr()
    scores = check_demo(tmp_path, table_in(captured.out))
    model, regression, chance, _ = (values["distance_spearman"] for values in scores.values())
    # So short a training need not suffice to win, but the exit code must agree with the scores.
    assert code == (0 if model > regression else 1)
    assert model > chance + 0.2


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "code", "message"),
    [
        ("frob", 2, 'Unknown command "frob"'),
        ("train --output-dir m", 1, "--data-dir or --input-data"),
        ("train --input-data none.h5ad --output-dir m", 1, '"none.h5ad" does not exist'),
        ("train --input-data REF --output-dir m --dmodel 3", 2, "Did you mean --d-model"),
        ("train --input-data REF --output-dir m --mode both", 2, "--mode. Choose from"),
        ("train --input-data text --output-dir m", 1, "text "),
        ("train --input-data REF --output-dir . --exp-name text", 1, "text "),
        ("train --input-data REF --exp-name a/b", 1, "--exp-name 'a/b'"),
        ("train --input-data REF --output-dir m --slice-key a", 1, r'obs\["a"\] .* --slice-key …'),
        ("train --input-data REF --output-dir m --layer a", 1, r'layers\["a"\] .* --layer …'),
        ("train --input-data REF --output-dir m --gene-dropout 1", 2, "--gene-dropout"),
        ("train --input-data REF --output-dir m --max-time soon", 1, "max_time='soon'"),
        ("train --input-data REF --output-dir m --num-experts 8", 1, "^alphastomics: --num-experts.*--use-moe"),
        (
            "sample --checkpoint MODEL --input-data REF --output o.h5ad --sample-mode pos_to_expr",
            1,
            "--sample-mode pos_to_expr.* --mode pos_to_expr.* --mode expr_to_pos",
        ),
        (
            "extract --checkpoint MODEL --input-data REF --output z.npz --use-positions",
            1,
            "--use-positions.*--mode pos_to_expr",
        ),
        ("sample --checkpoint empty --input-data REF --output o.h5ad", 1, r"config\.json"),
        ("sample --checkpoint MODEL --input-data REF --output empty.h5ad", 1, r"empty\.h5ad"),
        ("test --checkpoint MODEL --input-data BARE", 1, r'obsm\["spatial"\]'),
    ],
)
def test_invalid_input_gives_a_short_error(tokens, code, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no")
    for name in ("empty", "empty.h5ad"):
        (tmp_path / name).mkdir()
    bare = ad.read_h5ad(folder / "query.h5ad")
    del bare.obsm
    bare.write_h5ad("bare.h5ad")
    before = files_in(tmp_path)
    model = str(folder / "run/checkpoints/model")
    stand_ins = {"REF": str(folder / "ref.h5ad"), "MODEL": model, "BARE": "bare.h5ad"}
    assert main([stand_ins.get(token, token) for token in tokens.split()]) == code
    assert re.search(message, error_line(capsys))
    assert files_in(tmp_path) == before


def test_traceback_on_request(tmp_path):
    (tmp_path / "x.h5ad").write_text("no")
    tokens = ["train", "--input-data", str(tmp_path / "x.h5ad"), "--output-dir", str(tmp_path / "m")]
    with pytest.raises(ValueError, match=r"x\.h5ad") as caught:
        main([*tokens, "--traceback"])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_bug_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(path: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr("alphastomics.data._h5ad.read_h5ad", broken)
    (tmp_path / "x.h5ad").touch()
    with pytest.raises(AttributeError, match="thing"):
        main(["train", "--input-data", str(tmp_path / "x.h5ad"), "--output-dir", str(tmp_path / "m")])
