"""Which layers share which weights, what that saves, and that everything else about a module still works."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from alphastomics.nn import DenoiserConfig
from alphastomics.nn.block import Block
from alphastomics.nn.sharing import LayerStack, layer_index

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["none", "universal", "alternating", "block"]
NORMS = ("norm_1", "norm_2")
every_kind = pytest.mark.parametrize("sharing", KINDS)


class Layer(nn.Module):
    """A residual layer with a submodule and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return x + self.gain * self.linear(x).tanh() + shift


def blocks(sharing: str, n_layers: int = 5, unshared: tuple[str, ...] = NORMS) -> LayerStack:
    def make() -> Block:
        block = Block(DenoiserConfig(n_genes=1, n_dims=2, d_model=16, n_heads=2))
        for norm in (block.norm_1, block.norm_2):
            nn.init.normal_(norm.modulation.weight, std=0.3)
        return block

    return LayerStack(make, n_layers, sharing=sharing, block_size=2, unshared=unshared)


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ("none", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("universal", [0] * 10),
        ("alternating", [0, 1] * 5),
        ("block", [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]),
    ],
)
def test_the_set_of_weights_of_each_depth(sharing, expected):
    assert layer_index(10, sharing, block_size=4) == expected
    stack = LayerStack(Layer, 10, sharing=sharing)
    assert stack.index == expected
    assert len(stack) == 10
    for depth, number in enumerate(expected):
        assert stack[depth].linear is stack[expected.index(number)].linear
        assert stack[depth].gain is stack[expected.index(number)].gain
    assert len({id(layer.linear) for layer in stack}) == len(set(expected))


@pytest.mark.parametrize(
    ("n_layers", "sharing", "ratio"),
    [(12, "none", 1), (12, "universal", 12), (12, "alternating", 6), (12, "block", 4), (10, "block", 10 / 3)],
)
def test_compression_ratios(n_layers, sharing, ratio):
    stack = LayerStack(Layer, n_layers, sharing=sharing, block_size=4)
    assert stack.compression_ratio == ratio
    assert sum(p.numel() for p in stack.parameters()) == round(n_layers / ratio) * 24


@every_kind
def test_all_layers_run_in_order(sharing):
    stack, x = LayerStack(Layer, 10, sharing=sharing, block_size=4).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    ran: list[int] = []
    for depth, layer in enumerate(stack):
        layer.register_forward_hook(lambda *_, depth=depth: ran.append(depth))
    expected = x
    for number in layer_index(10, sharing, block_size=4):
        layer = stack[stack.index.index(number)]
        expected = expected + layer.gain * (expected @ layer.linear.weight.T + layer.linear.bias).tanh() + 0.1
    torch.testing.assert_close(stack(x, shift=0.1), expected)
    assert ran == list(range(10))


@every_kind
def test_blocks_share_attention_and_network_but_not_their_norms(sharing):
    stack = blocks(sharing)
    for depth, number in enumerate(stack.index):
        first = stack[stack.index.index(number)]
        assert stack[depth].attention is first.attention
        assert stack[depth].ffn is first.ffn
    for name in NORMS:
        assert len({id(getattr(block, name)) for block in stack}) == 5
    size = {name: sum(p.numel() for p in part.parameters()) for name, part in stack[0].named_children()}
    own, shared = size["norm_1"] + size["norm_2"], size["attention"] + size["ffn"]
    n_sets = len(set(stack.index))
    assert stack.compression_ratio == 5 * (own + shared) / (5 * own + n_sets * shared)


@every_kind
def test_a_stack_of_blocks_is_the_loop_over_its_blocks_and_all_parameters_learn(sharing):
    stack, x, timestep = blocks(sharing), torch.randn(2, 7, 16), torch.randn(2, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    y = stack(x, timestep, None, mask)
    expected = x
    for block in stack:
        expected = block(expected, timestep, None, mask)
    assert torch.equal(y, expected)
    (y * mask[..., None]).square().sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


@given(seed=st.integers(0, 100), sharing=st.sampled_from(KINDS))
def test_the_gradient_of_shared_weights_is_the_sum_over_their_depths(seed, sharing):
    torch.manual_seed(seed)
    stack = LayerStack(Layer, 5, sharing=sharing, block_size=2).double()
    apart = [Layer().double() for _ in range(5)]
    for layer, twin in zip(stack, apart, strict=True):
        twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, dtype=torch.float64)
    y = x
    for twin in apart:
        y = twin(y)
    y.square().sum().backward()
    stack(x).square().sum().backward()
    for number in set(stack.index):
        depths = [depth for depth in range(5) if stack.index[depth] == number]
        expected = sum(apart[depth].linear.weight.grad for depth in depths)
        torch.testing.assert_close(stack[depths[0]].linear.weight.grad, expected)


@every_kind
def test_each_tensor_is_saved_once_and_loads_again(sharing, tmp_path: Path):
    stack = nn.ModuleDict({"blocks": blocks(sharing)})
    state = stack.state_dict()
    parameters = dict(stack.named_parameters())
    assert set(state) == set(parameters)
    save_file(state, tmp_path / "weights.safetensors")
    other = nn.ModuleDict({"blocks": blocks(sharing)})
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    x, timestep = torch.randn(2, 7, 16), torch.randn(2, 16)
    assert torch.equal(other["blocks"](x, timestep), stack["blocks"](x, timestep))
    root = blocks(sharing)
    root.load_state_dict(stack["blocks"].state_dict())
    assert torch.equal(root(x, timestep), stack["blocks"](x, timestep))


def test_without_sharing_names_match_a_list_of_modules():
    stack = blocks("none")
    assert list(stack.state_dict()) == list(nn.ModuleList(stack).state_dict())


def test_missing_or_foreign_weights_raise():
    state = blocks("universal").state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        blocks("none").load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        blocks("universal").load_state_dict(blocks("none").state_dict())
    del state["0.attention.out.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.attention\.out\.weight"):
        blocks("universal").load_state_dict(state)


@every_kind
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "double"])
def test_copies_share_as_the_original_does(sharing, how):
    stack = blocks(sharing)
    if how == "double":
        twin = copy.deepcopy(stack).double()
    elif how == "deepcopy":
        twin = copy.deepcopy(stack)
    else:
        twin = pickle.loads(pickle.dumps(stack))
    assert twin.compression_ratio == stack.compression_ratio
    assert set(twin.state_dict()) == set(stack.state_dict())
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in stack.state_dict().items())
    stack.load_state_dict(twin.state_dict())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in stack.state_dict().items())


def test_a_part_of_a_part_can_be_kept():
    stack = blocks("universal", unshared=(*NORMS, "attention.gate"))
    first, other = stack[0].attention, stack[3].attention
    assert first.gate is not other.gate
    assert first.gate.weight is not other.gate.weight
    assert first.kv is other.kv
    assert stack[0].ffn is stack[3].ffn
    copy = blocks("universal", unshared=(*NORMS, "attention.gate"))
    copy.load_state_dict(stack.state_dict())
    assert torch.equal(copy[3].attention.gate.weight, other.gate.weight)


def test_layers_are_numbered_from_either_end():
    stack = LayerStack(Layer, 3)
    assert stack[-1] is stack[2]
    with pytest.raises(IndexError):
        stack[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_layers": 0}, "n_layers=0"),
        ({"n_layers": 2, "block_size": 0}, "block_size=0"),
        ({"n_layers": 2, "sharing": "some"}, "sharing='some'"),
        ({"n_layers": 2, "unshared": ("norm_3",)}, "norm_3"),
        ({"n_layers": 2, "unshared": ("linear.scale",)}, "linear.scale"),
        ({"n_layers": 2, "unshared": ("attention.axes",)}, "attention.axes"),
    ],
)
def test_invalid_options_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerStack(Layer, **arguments)
