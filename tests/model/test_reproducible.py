"""One seed decides everything, whatever the generators of the process are at, and a training leaves these alone."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alphastomics.data import Augmentation
from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics
from alphastomics.train.distributed.devices import WORKSPACE

ALL = {"mode": "any", "dropout": 0.3, "use_moe": True, "enable_masking": True}
HARD = {"max_epochs": 2, "augmentation": Augmentation(gene_dropout=0.5, thinning=0.5, gene_noise=0.2, composition=2.0)}


NETWORKS = {
    "full": {"mode": "any", "use_moe": True, "enable_masking": True},
    "linear": {"attention": "linear", "residual": "hyper", "layer_sharing": "universal"},
    "geometric": {"attention": "geometric", "pair_features": "factorized"},
    "neighbor": {"attention": "neighbor", "pair_features": "factorized", "n_neighbors": 3},
    "hybrid": {"attention": "neighbor", "sparse_pairs": "hybrid", "n_neighbors": 3},
    "axial": {"attention": "axial", "bottleneck": 4},
}


class RacingSums(TorchDispatchMode):
    """Notes sums at places that repeat, which threads of a processor make in the order in which they come."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "index_put" in function.__name__:
            names = ("self", "indices", "values", "accumulate")
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("accumulate"):
                count = torch.zeros(given["self"].shape)
                count.index_put_(tuple(given["indices"]), torch.ones(given["values"].shape), accumulate=True)
                if count.max() > 1:
                    self.shapes.append(tuple(count.shape))
        return function(*args, **kwargs)


def disturb(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def state():
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


def outputs(model, adata):
    """Bytes of all outputs of a model."""
    yield model.get_latent_representation(use_positions=True)
    yield model.sample(n_samples=2, reduce="medoid", random_state=3).obsm["spatial_reconstructed"]
    yield model.sample(mode="pos_to_expr", n_steps=2, n_samples=2, reduce="mean", random_state=3).X.toarray()
    drawn = model.sample(mode="joint", n_steps=2, n_cells=30, random_state=3)
    yield drawn.X.toarray()
    yield drawn.obsm["spatial"]


def everything(adata, disturbance, seed, train):
    """Bytes of the weights and of all outputs, after checking that no global generator was used."""
    disturb(disturbance)
    before, adata = state(), adata.copy()
    AlphaSTomics.setup_anndata(adata)
    model = AlphaSTomics(adata, d_model=16, n_layers=2, n_heads=2, random_state=seed, **ALL)
    train(model, **HARD)
    found = {name: tensor.numpy().tobytes() for name, tensor in model.module.state_dict().items()}
    found |= {str(i): np.ascontiguousarray(each).tobytes() for i, each in enumerate(outputs(model, adata))}
    assert state() == before
    return found


def test_non_deterministic_sums_are_detected():
    x, twice = torch.randn(5, 2, requires_grad=True), torch.tensor([0, 1, 1])
    with RacingSums() as sums:
        x[torch.tensor([3, 1])].sum().backward()
        assert sums.shapes == []
        x[twice].sum().backward()
        assert sums.shapes == [(5, 2)]


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(network, id=name, marks=[] if name == "full" else pytest.mark.slow)
        for name, network in NETWORKS.items()
    ],
)
def test_no_gradient_is_summed_in_the_order_of_threads(train_briefly, network):
    """``x[i]`` has such a gradient on processors; ``index_select``, ``gather`` and ``embedding`` have none."""
    tissue = synthetic_tissue(n_slices=2, n_cells=60, n_genes=15)
    tissue.obs["order"] = np.arange(len(tissue))
    AlphaSTomics.setup_anndata(tissue, sequence_key="order" if "sparse_pairs" in network else None)
    model = AlphaSTomics(tissue, d_model=16, n_layers=3, n_heads=2, **network)
    with RacingSums() as sums:
        train_briefly(model, max_steps=3)
    assert sums.shapes == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_of_everything_and_another_others(train_briefly):
    tissue = synthetic_tissue(n_slices=2, n_cells=60, n_genes=15)
    first = everything(tissue, 1, 7, train_briefly)
    second = everything(tissue, 2, 7, train_briefly)
    assert [name for name in first if first[name] != second[name]] == []
    third = everything(tissue, 1, 8, train_briefly)
    assert all(first[str(i)] != third[str(i)] for i in range(5))


def digest_of_everything():
    """For a process of its own."""

    def train(model, **arguments):
        model.train(accelerator="cpu", precision="32-true", context_size=64, enable_progress_bar=False, **arguments)

    found = everything(synthetic_tissue(n_slices=2, n_cells=60, n_genes=15), int(sys.argv[1]), 5, train)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(found[name])
    return digest.hexdigest()


@pytest.mark.slow
def test_processes_agree_whatever_their_hashes_are():
    """Python hashes text otherwise in every process: an order of names that hangs on it would show."""
    digests = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, __file__, seed], capture_output=True, text=True, check=True, timeout=300, env=environment
        )
        digests.add(run.stdout.split()[-1])
    assert len(digests) == 1


# -- deterministic algorithms ------------------------------------------------------------------------------------------


class Seen(pl.Callback):
    """What algorithms a training may use."""

    def on_train_batch_start(self, trainer, *_):
        self.enabled = torch.are_deterministic_algorithms_enabled()
        self.warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self.workspace = os.environ.get(WORKSPACE)


class Dead(pl.Callback):
    def on_train_batch_end(self, *_):
        raise OSError("dead")


@pytest.fixture(params=[True, False])
def benchmark(request, monkeypatch):
    """Whether cuDNN may look for the fastest algorithm, before and after."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", request.param)
    return request.param


@pytest.fixture
def algorithms(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    return lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(WORKSPACE),
    )


@pytest.mark.parametrize(
    ("deterministic", "seen"),
    [(True, (True, False, ":4096:8")), ("warn", (True, True, ":4096:8")), (None, (False, False, None))],
)
def test_only_deterministic_algorithms_are_used_on_request_and_no_longer(
    small, make_model, train_briefly, algorithms, benchmark, deterministic, seen
):
    watch = Seen()
    model = train_briefly(make_model(small, use_moe=True, dropout=0.3), deterministic=deterministic, callbacks=[watch])
    assert (watch.enabled, watch.warn_only, watch.workspace) == seen
    assert algorithms() == (False, benchmark, None)
    assert model.trainings_[0]["arguments"].get("deterministic") == deterministic


def test_algorithm_settings_are_restored_after_an_error(small, make_model, train_briefly, algorithms, benchmark):
    with pytest.raises(OSError, match="dead"):
        train_briefly(make_model(small), deterministic=True, callbacks=[Dead()])
    assert algorithms() == (False, benchmark, None)


def test_user_settings_of_pytorch_are_kept(small, make_model, train_briefly):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train_briefly(make_model(small), deterministic=False)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_bytes_with_deterministic_algorithms(small, make_model, train_briefly, weights_of):
    """With dropout, masks and the noise of a router; and without a trace in the generator of the GPU."""
    state = torch.cuda.get_rng_state()
    found = [
        weights_of(
            train_briefly(make_model(small, **ALL), max_epochs=3, accelerator="gpu", devices=1, deterministic=True)
        )
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert torch.equal(torch.cuda.get_rng_state(), state)


if __name__ == "__main__":
    sys.stdout.write(digest_of_everything())
