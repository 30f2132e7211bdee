"""What arrives at a stand-in of the Hub is the dataset and nothing else, in the end and once."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from alphastomics.data.hub import _transfer, upload
from alphastomics.data.parquet._dataset import DatasetInfo
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main

# huggingface_hub sends files in a way that httpx advises against.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_secretsecretsecret"
REPO = "lab/tissue"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("dataset")
    tissue = synthetic_tissue(n_slices=3, n_cells=(90, 70, 40), n_genes=20, random_state=0)
    tissue.write_h5ad(raw / "all.h5ad")
    options = Stage2Options(train_ratio=0.6, val_ratio=0.2, max_shard_size=60)
    preprocess(raw, out, Stage1Options(cell_type_key="cell_type"), options)
    return out


@pytest.fixture
def folder(made, tmp_path):
    """A dataset that the test may change."""
    shutil.copytree(made, tmp_path / "dataset")
    return tmp_path / "dataset"


def listed(folder):
    return {f"data/{shard.file}" for shard in DatasetInfo.read(folder).shards}


def contents(folder):
    return {name: (folder / name).read_bytes() for name in [*listed(folder), "metadata.json"]}


def run(*tokens):
    return main([str(token) for token in ("upload", *tokens)])


def error_line(capsys):
    """The line that an error leaves on stderr."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert TOKEN not in text
    (line,) = [line for line in text.splitlines() if line.startswith("alphastomics: ")]
    return line


# -- what arrives ---------------------------------------------------------------------------------------------------------


def test_upload_contains_the_dataset_and_a_card(hub, folder):
    (folder / "data" / "notes.parquet").write_bytes(b"unlisted")
    (folder / ".secret").write_text("unlisted")
    (folder / "data" / ".hidden.parquet").write_text("unlisted")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = upload(folder, REPO)
    files = hub.repositories[REPO].files
    assert set(files) == {".gitattributes", "README.md", "metadata.json"} | listed(folder)
    assert {name: files[name] for name in contents(folder)} == contents(folder)
    assert set(done.files) == {"README.md", "metadata.json"} | listed(folder)
    assert done.url == f"{hub.url}/datasets/{REPO}"
    assert not hub.repositories[REPO].private
    assert {each.token for each in hub.requests if not each.path.startswith("/lfs/")} == {TOKEN}
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_command_and_its_flags(hub, folder, capsys):
    tokens = ["--data_dir", folder, "--repo_id", REPO, "--private", "--license", "cc-by-4.0"]
    assert run(*tokens) == 0
    assert hub.repositories[REPO].private
    assert header(hub)["license"] == "cc-by-4.0"
    assert f"{hub.url}/datasets/{REPO}" in capsys.readouterr().err


def test_upload_shows_progress(hub, folder, capsys, monkeypatch):
    bar = _transfer.tqdm
    monkeypatch.setattr(_transfer, "tqdm", lambda *args, **kwargs: bar(*args, **kwargs | {"disable": False}))
    n_files = len(_transfer.upload(folder, REPO).files)
    assert f"Sending: 100%|██████████| {n_files}/{n_files} " in capsys.readouterr().err


def test_a_second_upload_sends_no_files(hub, folder):
    upload(folder, REPO)
    commits = list(hub.repositories[REPO].commits)
    del hub.requests[:]
    assert upload(folder, REPO).files == ()
    assert not hub.sent("PUT", "")
    assert not hub.sent("POST", "commit|preupload|batch")
    assert hub.repositories[REPO].commits == commits


def test_uploads_contain_no_local_names_or_paths(hub, tmp_path, monkeypatch):
    home = tmp_path / "home_of_somebody"
    for name, value in {"HOME": str(home), "LOGNAME": "somebody", "USER": "somebody", "SECRET": "s3cr3t"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "somewhere")
    (home / "raw").mkdir(parents=True)
    raw = home / "raw" / "all.h5ad"
    synthetic_tissue(n_slices=2, n_cells=60, n_genes=10, random_state=0).write_h5ad(raw)
    preprocess(raw.parent, home / "out", Stage1Options(), Stage2Options())
    upload(home / "out", REPO)
    words = ["somebody", "somewhere", "s3cr3t", TOKEN, str(tmp_path), str(Path.cwd()), "all.h5ad"]
    words += [str(int(path.stat().st_mtime)) for path in home.rglob("*.*")]
    for name, content in hub.repositories[REPO].files.items():
        for word in words:
            assert word.encode() not in content, f"{word} in {name}"
        if not name.endswith(".parquet"):
            assert not re.search(r"(?m)(^|[\s\"'=])(/[a-z]+/|[A-Z]:\\)", content.decode())


def test_metadata_with_a_local_path_are_not_uploaded(hub, folder):
    path = folder / "metadata.json"
    values = json.loads(path.read_text())
    values["parameters"]["input"] = f"{Path.home()}/raw"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"metadata\.json.*folder"):
        upload(folder, REPO)
    assert not hub.requests


# -- the card -------------------------------------------------------------------------------------------------------------


def header(hub):
    text = hub.repositories[REPO].files["README.md"].decode()
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_describes_the_dataset(hub, folder):
    upload(folder, REPO)
    values = header(hub)
    assert "license" not in values
    assert "spatial-transcriptomics" in values["tags"]
    assert values["size_categories"] == ["n<1K"]
    body = hub.repositories[REPO].files["README.md"].decode().split("---\n", 2)[2]
    assert "200 cells" in body
    assert "20 genes" in body
    assert "3 slices" in body
    assert re.search(r"\| train \| 120 \| 3 \| \d \|", body)
    for name in pq.read_schema(folder / "data" / "test.parquet").names:
        assert re.search(rf"\| `{name}` \| \w", body)
    assert "| train_ratio | 0.6 |" in body
    assert "| seed | 0 |" in body


def test_datasets_finds_the_splits_by_the_card(hub, folder, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    upload(folder, REPO)
    copy = tmp_path / "copy"
    for name, content in hub.repositories[REPO].files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    del hub.requests[:]
    found = datasets.load_dataset(str(copy), streaming=True)
    rows = {split: sum(1 for _ in cells) for split, cells in found.items()}
    assert rows == {"train": 120, "validation": 40, "test": 40}
    assert not hub.requests


def test_an_edited_card_is_kept(hub, folder):
    upload(folder, REPO)
    repository = hub.repositories[REPO]
    repository.files["README.md"] = b"by hand"
    assert upload(folder, REPO).files == ()
    assert repository.files["README.md"] == b"by hand"
    assert upload(folder, REPO, overwrite=True).files == ("README.md",)
    assert b"configs" in repository.files["README.md"]


# -- interruptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 50])
@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupted_upload_is_resumed(hub, folder, monkeypatch, after, at_once):
    monkeypatch.setattr(_transfer, "FILES_PER_COMMIT", at_once)
    whole = []

    def drop(method, path):
        if method == "PUT" and path not in whole:
            if len(whole) == after:
                return "drop"
            whole.append(path)
        return None

    hub.misbehave = drop
    with pytest.raises(ConnectionError, match="resumes"):
        upload(folder, REPO)
    assert "metadata.json" not in hub.repositories[REPO].files
    assert "README.md" not in hub.repositories[REPO].files
    hub.misbehave = lambda method, path: None
    arrived = {f"/lfs/{oid}" for oid in hub.objects}
    assert len(arrived) >= after
    del hub.requests[:]
    upload(folder, REPO)
    again = {each.path for each in hub.sent("PUT", "/lfs/")}
    assert not arrived & again
    assert len(arrived | again) == len(listed(folder))
    files = hub.repositories[REPO].files
    assert {name: files[name] for name in contents(folder)} == contents(folder)
    assert upload(folder, REPO).files == ()


def test_files_come_before_metadata(hub, folder, monkeypatch):
    monkeypatch.setattr(_transfer, "FILES_PER_COMMIT", 2)
    seen = []

    def watch(method, path):
        if "/commit/" in path:
            seen.append(set(hub.repositories[REPO].files))
        return None

    hub.misbehave = watch
    upload(folder, REPO)
    assert len(seen) == -(-len(listed(folder)) // 2) > 1
    assert not any({"metadata.json", "README.md"} & files for files in seen)


def test_transient_errors_are_retried(hub, folder):
    left = {"/lfs/": 2}

    def stumble(method, path):
        if method == "PUT" and left["/lfs/"]:
            left["/lfs/"] -= 1
            return 503, {}, {"error": "busy"}
        return None

    hub.misbehave = stumble
    upload(folder, REPO)
    assert "metadata.json" in hub.repositories[REPO].files


# -- what is there already ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 50])
def test_another_dataset_is_replaced_on_request_alone(hub, folder, made, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(_transfer, "FILES_PER_COMMIT", at_once)
    other = tmp_path / "other"
    shutil.copytree(made / "_intermediate_slices", other / "_intermediate_slices")
    from alphastomics.data.preprocess import stage2

    stage2([other / "_intermediate_slices"], other, Stage2Options(split="slice", max_shard_size=30, seed=1))
    upload(other, REPO)
    before = dict(hub.repositories[REPO].files)
    hub.repositories[REPO].files["notes.txt"] = b"by hand"
    with pytest.raises(ValueError, match="another dataset"):
        upload(folder, REPO)
    assert hub.repositories[REPO].files == before | {"notes.txt": b"by hand"}
    upload(folder, REPO, overwrite=True)
    files = hub.repositories[REPO].files
    assert set(files) == {".gitattributes", "notes.txt", "README.md", "metadata.json"} | listed(folder)
    assert {name: files[name] for name in contents(folder)} == contents(folder)


@pytest.mark.parametrize("name", ["data/train-00000.parquet", "data/test-00000.parquet"])
def test_files_of_another_dataset_are_replaced_only_with_overwrite(hub, folder, name):
    """A repository that holds files of these names, the second of which this dataset lacks, and no metadata.json."""
    upload(folder, REPO)
    hub.repositories[REPO].files = {name: b"by hand"}
    with pytest.raises(ValueError, match=rf"lab/tissue.*{name}"):
        upload(folder, REPO)
    assert hub.repositories[REPO].files == {name: b"by hand"}
    upload(folder, REPO, overwrite=True)
    assert set(hub.repositories[REPO].files) == {"README.md", "metadata.json"} | listed(folder)


def test_a_private_dataset_is_not_sent_to_a_public_repository(hub, folder, capsys):
    upload(folder, REPO)
    hub.repositories[REPO].files = {}
    assert run("--data-dir", folder, "--repo-id", REPO, "--private") == 1
    assert "public" in error_line(capsys)
    assert hub.repositories[REPO].files == {}


# -- errors ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_an_error_before_the_upload(hub, folder, capsys):
    path = folder / "data" / "test.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert re.search(r"test\.parquet.*damaged", error_line(capsys))
    path.unlink()
    assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert "test.parquet" in error_line(capsys)
    (folder / "metadata.json").unlink()
    assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert "metadata.json" in error_line(capsys)
    assert not hub.requests


def test_without_a_token(hub, folder, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert re.search("hf auth login.*HF_TOKEN", error_line(capsys))
    assert not hub.requests


def test_an_invalid_name_of_a_repository(hub, folder, capsys):
    assert run("--data-dir", folder, "--repo-id", "no such/name/at all") == 1
    assert "organization/name" in error_line(capsys)
    assert not hub.requests


@pytest.mark.parametrize(
    ("where", "status", "answer", "message"),
    [
        ("repos/create", 401, "Invalid credentials in Authorization header", "token.*hf auth login"),
        ("repos/create", 403, "You don't have the rights", "token.*lab/tissue.*You don't have the rights"),
        ("preupload", 403, "Private storage limit reached", "space.*lab/tissue.*limit reached"),
        ("preupload", 404, "Repository not found", "lab/tissue.*name"),
        ("/lfs/", 500, f"oops {TOKEN}", "lab/tissue.*resumes"),
        ("/commit/", 429, "too many commits", "lab/tissue.*too many commits.*resumes"),
        ("/commit/", 400, "bad license", "lab/tissue.*bad license"),
        ("/commit/", 502, "<html>\nBad\nGateway</html>", "lab/tissue.*502"),
    ],
)
def test_hub_errors_give_a_short_message(hub, folder, capsys, where, status, answer, message):
    headers = {"X-Error-Message": " ".join(answer.split())}
    hub.misbehave = lambda method, path: (status, headers, {"error": answer}) if where in path else None
    assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert re.search(message, error_line(capsys))
    assert not hub.repositories or "metadata.json" not in hub.repositories[REPO].files


def test_no_network_gives_a_short_error(hub, folder, capsys, monkeypatch):
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert re.search("Hub.*resumes", error_line(capsys))


def test_without_the_package(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run("--data-dir", folder, "--repo-id", REPO) == 1
    assert 'pip install "alphastomics[hub]"' in error_line(capsys)


def test_a_new_process_reads_hub_and_token_from_the_environment(hub, folder, tmp_path):
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "alphastomics", "upload", "--data-dir", folder, "--repo-id", REPO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(hub.repositories[REPO].files) > listed(folder)
    assert TOKEN not in done.stderr + done.stdout
