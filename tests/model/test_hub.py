"""Models on a stand-in of the Hub: what arrives is the model and a card, and what comes back is the model."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from files import files_in

# huggingface_hub sends files in a way that httpx advises against.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.usefixtures("no_other_network"),
]

TOKEN = "hf_secretsecretsecret"
REPO = "lab/tissue"
FILES = {"model.safetensors", "config.json", "README.md"}


def sent(hub):
    return {name: hub.repositories[REPO].files[name] for name in FILES}


def card(hub):
    _, header, body = sent(hub)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(header), body


@pytest.fixture
def unreachable_hub(monkeypatch):
    """Point the Hub to a port without a server."""
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        yield lambda: monkeypatch.setattr(constants, "ENDPOINT", url)


# -- there and back ------------------------------------------------------------------------------------------------------


def test_a_pushed_model_is_loaded_bit_by_bit(hub, trained, folder, reference, positions_of):
    url = trained.push_to_hub(REPO)
    assert url == f"{hub.url}/{REPO}"
    assert set(hub.repositories[REPO].files) == FILES | {".gitattributes"}
    assert {name: sent(hub)[name] for name in files_in(folder)} == files_in(folder)
    assert {each.token for each in hub.requests if not each.path.startswith("/lfs/")} == {TOKEN}
    loaded = AlphaSTomics.from_pretrained(REPO)
    assert loaded.adata is None
    assert positions_of(loaded.sample(reference)) == positions_of(trained.sample(reference))
    assert AlphaSTomics.from_pretrained(REPO, reference).adata is reference


def test_other_files_of_a_repository_are_not_downloaded(hub, trained, tmp_path):
    trained.push_to_hub(REPO)
    files = hub.repositories[REPO].files
    for name in ("model.py", "adata.h5ad", "pytorch_model.bin", "sub/model.safetensors", "config.json.pkl"):
        files[name] = b"other"
    del hub.requests[:]
    AlphaSTomics.from_pretrained(REPO)
    assert {each.path.partition("/resolve/")[2].partition("/")[2] for each in hub.sent("GET", "/resolve/")} == FILES
    found = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert found == FILES


def test_a_version_is_found_by_its_name(hub, trained, everything, weights_of):
    trained.push_to_hub(REPO)
    hub.repositories[REPO].tag("first")
    everything.push_to_hub(REPO, overwrite=True, commit_message="Another")
    assert hub.repositories[REPO].commits == ["Upload model with alphastomics", "Another"]
    assert weights_of(AlphaSTomics.from_pretrained(REPO, revision="first")) == weights_of(trained)
    assert weights_of(AlphaSTomics.from_pretrained(REPO)) == weights_of(everything)


def test_a_local_folder_takes_precedence_over_the_hub(hub, trained, folder, tmp_path, weights_of):
    trained.push_to_hub(REPO)
    del hub.requests[:]
    (tmp_path / "lab").mkdir()
    shutil.copytree(folder, tmp_path / REPO)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert weights_of(AlphaSTomics.from_pretrained(REPO)) == weights_of(trained)
    assert weights_of(AlphaSTomics.from_pretrained(folder)) == weights_of(trained)
    assert not hub.requests


def test_a_cached_model_needs_no_network(hub, trained, weights_of, unreachable_hub):
    trained.push_to_hub(REPO)
    AlphaSTomics.from_pretrained(REPO)
    unreachable_hub()
    assert weights_of(AlphaSTomics.from_pretrained(REPO)) == weights_of(trained)


def test_a_token_that_is_given_is_used(hub, trained, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="token.*hf auth login"):
        trained.push_to_hub(REPO)
    assert not hub.requests
    trained.push_to_hub(REPO, token=TOKEN, private=True)
    assert hub.repositories[REPO].private
    AlphaSTomics.from_pretrained(REPO, token=TOKEN)
    assert {each.token for each in hub.requests if not each.path.startswith("/lfs/")} == {TOKEN}


def test_the_command_line_takes_a_model_of_the_hub(hub, trained, reference, tmp_path, capsys):
    trained.push_to_hub(REPO)
    hub.repositories[REPO].tag("v1")
    reference.write_h5ad(tmp_path / "cells.h5ad")
    tokens = ["extract", "--input-data", str(tmp_path / "cells.h5ad"), "--output"]
    for number, name in enumerate((f"hf://{REPO}", f"hf://{REPO}@v1")):
        assert main([*tokens, str(tmp_path / f"{number}.npz"), "--checkpoint", name]) == 0, capsys.readouterr().err
    del hub.requests[:]
    assert main([*tokens, str(tmp_path / "3.npz"), "--checkpoint", REPO]) == 2  # a name like this may be a folder's
    assert "hf://organization/name" in capsys.readouterr().err
    assert main([*tokens, str(tmp_path / "3.npz"), "--checkpoint", f"hf://{REPO}@v2"]) == 1
    assert "revision of lab/tissue" in capsys.readouterr().err


# -- what is there already -----------------------------------------------------------------------------------------------


def test_a_second_push_sends_nothing(hub, trained):
    trained.push_to_hub(REPO)
    commits = list(hub.repositories[REPO].commits)
    del hub.requests[:]
    trained.push_to_hub(REPO)
    assert not hub.sent("PUT", "")
    assert not hub.sent("POST", "commit|preupload|batch")
    assert hub.repositories[REPO].commits == commits


def test_another_model_is_replaced_on_request_alone(hub, trained, everything):
    trained.push_to_hub(REPO)
    before = sent(hub)
    with pytest.raises(ValueError, match=r"lab/tissue.*(model|config)\S+.*overwrite=True"):
        everything.push_to_hub(REPO)
    assert sent(hub) == before
    everything.push_to_hub(REPO, overwrite=True)
    assert sent(hub)["model.safetensors"] != before["model.safetensors"]


def test_an_edited_card_is_kept(hub, trained):
    trained.push_to_hub(REPO)
    hub.repositories[REPO].files["README.md"] = b"by hand"
    trained.push_to_hub(REPO)
    assert sent(hub)["README.md"] == b"by hand"
    trained.push_to_hub(REPO, overwrite=True)
    assert b"library_name: alphastomics" in sent(hub)["README.md"]


def test_a_private_model_is_not_sent_to_a_public_repository(hub, trained):
    trained.push_to_hub(REPO)
    del hub.requests[:]
    with pytest.raises(ValueError, match="public"):
        trained.push_to_hub(REPO, private=True)
    assert not hub.sent("POST", "commit")


def test_an_untrained_model_is_not_sent(hub, make_model, reference):
    with pytest.raises(ValueError, match="not trained"):
        make_model(reference).push_to_hub(REPO)
    assert not hub.requests


# -- the card ------------------------------------------------------------------------------------------------------------


def test_the_card_describes_the_model(hub, trained):
    trained.push_to_hub(REPO, license="cc-by-4.0")
    header, body = card(hub)
    assert header["library_name"] == "alphastomics"
    assert header["license"] == "cc-by-4.0"
    assert {"alphastomics", "spatial-transcriptomics"} <= set(header["tags"])
    for name, value in {"cells": 900, "slices": 3, "genes": 60, "mode": "expr_to_pos", "random_state": 0}.items():
        assert f"| {name} | {value} |" in body
    assert re.search(r"\| torch \| \d+\.\d+", body)
    assert "expression of 900 cells of the reference without their positions" in body


def test_the_card_states_that_cells_are_included(hub, everything):
    everything.push_to_hub(REPO)
    header, body = card(hub)
    assert "license" not in header
    assert re.search(r"contains the expression of \d+ cells of the reference", body)


def test_the_three_lines_of_the_card_load_it(hub, trained):
    trained.push_to_hub(REPO)
    (code,) = re.findall(r"```python\n(.*?)```", card(hub)[1], re.DOTALL)
    lines = [line for line in code.splitlines() if line and not line.startswith("sampled")]
    values: dict = {}
    exec("\n".join(lines), values)
    assert values["model"].mode == trained.mode


def test_uploads_contain_no_local_names_or_paths(hub, trained, monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "somewhere")
    trained.push_to_hub(REPO)
    words = [str(Path.home()), str(Path.cwd()), str(tmp_path), "somewhere", TOKEN]
    for name, content in sent(hub).items():
        for word in words:
            assert len(word) < 3 or word.encode() not in content, f"{word} in {name}"


def test_a_configuration_with_a_local_path_is_not_uploaded(hub, trained, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(trained, "history_", {"/home/somebody/raw": next(iter(trained.history_.values()))})
    with pytest.raises(ValueError, match=r"config\.json.*/home/somebody"):
        trained.push_to_hub(REPO)
    assert not hub.requests


# -- errors --------------------------------------------------------------------------------------------------------------


def test_a_missing_repository_raises(hub, trained):
    with pytest.raises(FileNotFoundError, match=r"lab/nothing"):
        AlphaSTomics.from_pretrained("lab/nothing")
    trained.push_to_hub(REPO)
    with pytest.raises(FileNotFoundError, match=r"revision.*lab/tissue"):
        AlphaSTomics.from_pretrained(REPO, revision="never")
    for name in ("model", "no such/folder/at all", "/absolutely/nothing"):
        with pytest.raises(FileNotFoundError, match=name):
            AlphaSTomics.from_pretrained(name)
    hub.repositories["lab/other"] = type(hub.repositories[REPO])(False, "models")
    with pytest.raises(FileNotFoundError, match=r"lab/other.*config\.json"):
        AlphaSTomics.from_pretrained("lab/other")


@pytest.mark.parametrize(
    ("status", "said", "message"),
    [
        (401, "Invalid credentials", "token.*lab/tissue.*hf auth login"),
        (403, "Access is restricted", "token.*lab/tissue.*restricted"),
        (500, f"oops {TOKEN}", "lab/tissue.*later"),
    ],
)
def test_hub_errors_give_a_short_message(hub, status, said, message):
    hub.misbehave = lambda method, path: (status, {"X-Error-Message": said}, {"error": said})
    with pytest.raises(OSError, match=message) as caught:
        AlphaSTomics.from_pretrained(REPO)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_no_network_gives_a_short_error(hub, trained, unreachable_hub):
    unreachable_hub()
    with pytest.raises(ConnectionError, match="Hub") as caught:
        AlphaSTomics.from_pretrained(REPO)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConnectionError, match="Hub"):
        trained.push_to_hub(REPO)


def test_without_the_package(trained, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert AlphaSTomics.from_pretrained(folder).is_trained_
    for call in (lambda: AlphaSTomics.from_pretrained(REPO), lambda: trained.push_to_hub(REPO)):
        with pytest.raises(ImportError, match=r'pip install "alphastomics\[hub\]"'):
            call()


def test_a_crafted_repository_raises(hub, trained, tmp_path):
    from huggingface_hub import constants

    trained.push_to_hub(REPO)
    files, cache = hub.repositories[REPO].files, Path(constants.HF_HUB_CACHE)
    files["config.json"] = files["config.json"].replace(b'"d_model": 32', b'"d_model": 1000000')
    with pytest.raises(ValueError, match="size mismatch"):
        AlphaSTomics.from_pretrained(REPO)
    files["../../escaped.txt"] = files["config.json/../../../escaped.txt"] = b"out"
    files["model.safetensors"] = b"\x80\x04cposix\nsystem\n"
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        AlphaSTomics.from_pretrained(REPO)
    assert not list(tmp_path.rglob("escaped*"))
    assert cache.is_relative_to(tmp_path)


LOAD = """
import alphastomics as asx

print(asx.model.AlphaSTomics.from_pretrained("lab/tissue").schema.n_genes)
"""


@pytest.mark.slow
def test_a_new_process_reads_hub_and_token_from_the_environment(hub, trained, tmp_path):
    trained.push_to_hub(REPO)
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["60"]
