"""Checkpoint files: when they are written, what they hold, and which raise."""

from __future__ import annotations

import errno
import os

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

import alphastomics.train.checkpoint as module
from alphastomics.model import AlphaSTomics
from alphastomics.train.checkpoint import KEY


def test_checkpoints_are_written_at_the_given_interval(train, path):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            seen.append(torch.load(path, weights_only=True)["global_step"] if path.exists() else 0)

    steps = {"context_size": 25, "batch_size": 25, "max_epochs": 1}  # eight
    train(checkpoint=path, checkpoint_every=3, callbacks=[Look()], **steps)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]
    assert torch.load(path, weights_only=True)["global_step"] == 8
    with pytest.raises(ValueError, match="checkpoint_every"):
        train(checkpoint=path, checkpoint_every=0)


def test_the_folder_of_a_checkpoint_is_made(train, path, step_of):
    path = path.parent / "runs" / "first" / path.name
    train(checkpoint=path)
    assert step_of(path) == 1


def test_a_finished_checkpoint_is_the_model(train, path, small, make_model, tmp_path):
    model = train(make_model(small, mode="any"), checkpoint=path)
    assert list(tmp_path.iterdir()) == [path]
    model.save(tmp_path / "model")
    of_folder, of_file = (AlphaSTomics.load(p, adata=False) for p in (tmp_path / "model", path))
    cells = small.copy()
    for mode in ("expr_to_pos", "pos_to_expr"):
        arguments = {} if mode == "expr_to_pos" else {"n_steps": 2}
        one, other = (loaded.sample(cells, mode=mode, **arguments) for loaded in (of_folder, of_file))
        key = "spatial_reconstructed" if mode == "expr_to_pos" else "spatial"
        np.testing.assert_array_equal(one.obsm[key], other.obsm[key])
        np.testing.assert_array_equal(one.X.toarray(), other.X.toarray())
    assert of_file.history["train_loss"].equals(model.history["train_loss"])
    # And it is trained on, with data.
    more = AlphaSTomics.load(path, adata=small.copy())
    train(more)
    assert more.history["train_loss"].index.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state[KEY].pop("tensors"), "resume=…"),
        (lambda state: state.pop(KEY), "checkpoint of AlphaSTomics"),
        (lambda state: state[KEY].update(format_version=9), "version 9"),
        (lambda state: state[KEY].update(config="{"), "model"),
        (lambda state: state[KEY].update(config="[]"), "model"),
        (lambda state: state[KEY].pop("config"), "model"),
        (lambda state: state[KEY].update(tensors=3), "complete model"),
        (lambda state: state[KEY]["tensors"].popitem(), "complete model"),
    ],
    ids=["unfinished", "foreign", "newer", "cut", "list", "silent", "number", "incomplete"],
)
def test_an_invalid_checkpoint_raises(finished, change, message):
    state = torch.load(finished, weights_only=True)
    change(state)
    torch.save(state, finished)
    with pytest.raises(ValueError, match=rf"last\.ckpt.*{message}"):
        AlphaSTomics.load(finished, adata=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 16}, "d_model=32.*d_model=16"),
        ({"random_state": 3}, "random_state=0.*random_state=3"),
        ({"mode": "any"}, "mode='expr_to_pos'.*mode='any'"),
    ],
)
def test_another_model_is_not_resumed(train, finished, small, make_model, changes, message):
    model = make_model(small, **changes)
    with pytest.raises(ValueError, match=message):
        train(model, resume=finished, max_epochs=2)
    assert not model.is_trained


def test_other_cells_are_not_trained_on_and_no_epochs_taken_back(train, path, reference, make_model, tmp_path):
    train(checkpoint=path, max_epochs=2)
    with pytest.raises(ValueError, match="cells"):
        train(make_model(reference), resume=path, max_epochs=2)
    with pytest.raises(ValueError, match="epoch 2.*max_epochs=1"):
        train(resume=path, max_epochs=1)
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        train(resume=tmp_path / "none.ckpt")


def test_a_failed_write_keeps_the_earlier_checkpoint(train, path, tmp_path, monkeypatch, often):
    train(checkpoint=path, max_epochs=2)
    before = path.read_bytes()

    def full(state, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write", full)
    monkeypatch.setattr("alphastomics.model._checkpoint.finalize", lambda *_: None)
    said = r"last\.ckpt.*No space left on device.*resume='last'"
    with pytest.raises(OSError, match=said):
        train(checkpoint=path, max_epochs=2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
