"""The default configurations of ``tl.compare``: their sizes, and choosing among them."""

from __future__ import annotations

import pytest

from alphastomics.model import AlphaSTomics
from alphastomics.nn import Experts, ParameterCount, count_parameters
from alphastomics.tl import Configuration
from alphastomics.tl._compare_configurations import CONFIGURATIONS, choose_configurations, model_arguments
from alphastomics.tl._compare_splits import Split
from alphastomics.train import PlanConfig

# Linear attention with one expert per cell is not a default; `gated_moe_4_top_1` has these experts on gated attention.
ABLATED = Configuration(model={"attention": "linear", "use_moe": True, "num_experts": 4, "moe_top_k": 1})


@pytest.fixture(scope="module")
def counts(_tissue):
    """Parameters of every default configuration, and of `ABLATED`, at the default size."""
    reference = _tissue.copy()
    AlphaSTomics.setup_anndata(reference)
    split = Split(reference=reference, query=reference, held_out=(), schema=AlphaSTomics(reference).schema)
    made = {name: model_arguments(split, {}, c) for name, c in (CONFIGURATIONS | {"ablated": ABLATED}).items()}
    return {name: count_parameters(AlphaSTomics(reference, **arguments).module) for name, arguments in made.items()}


def test_sizes_agree_except_for_full_experts_and_their_match(counts):
    gated = counts["gated"].total
    others = set(CONFIGURATIONS) - {"gated_moe_full", "gated_matched"}
    assert all(counts[name].total == pytest.approx(gated, rel=0.05) for name in others)
    assert counts["gated_moe_full"].total > 1.4 * gated
    assert counts["gated_matched"].total == pytest.approx(counts["gated_moe_full"].total, rel=0.03)


def test_counts_follow_from_the_architecture(counts):
    d, layers, heads, d_head = 128, 4, 4, 32
    gated = counts["gated"]
    norms = 2 * d_head
    assert gated.total == gated.active
    assert gated.total - counts["linear"].total == layers * (d * heads + norms)
    assert gated.total - counts["gated_no_qk_norm"].total == layers * norms
    assert counts["gated_elementwise"].total - gated.total == layers * (d * heads * d_head - d * heads)
    # Four experts share the hidden layer; each has an output bias of its own, and there is a router and its noise.
    assert counts["gated_moe"].total - gated.total == layers * (3 * d + 2 * 4 * d)
    hidden = 4 * d // 4
    expert = 2 * d * hidden + hidden + d
    assert counts["gated_moe"].total - counts["gated_moe"].active == layers * 2 * expert
    assert counts["gated_moe_4_top_1"].total - counts["gated_moe_4_top_1"].active == layers * 3 * expert
    assert counts["linear_moe"].total - counts["linear"].total == counts["gated_moe"].total - gated.total


def test_experts_of_the_ablation(counts):
    """Linear, gated, linear with 1 of 4 experts and gated with 2 of 8 experts: the ablation of the earlier guide."""
    idle = {name: count.total - count.active for name, count in counts.items()}
    d, hidden, layers = 128, 512, 4
    one_of_4, one_of_8 = (2 * d * hidden // n + hidden // n + d for n in (4, 8))
    assert (idle["linear"], idle["gated"]) == (0, 0)
    assert (idle["ablated"], idle["gated_moe_8_top_2"]) == (layers * 3 * one_of_4, layers * 6 * one_of_8)
    routers = {n: layers * ((n - 1) * d + 2 * n * d) for n in (4, 8)}  # further biases, the router and its noise
    assert counts["ablated"].total - counts["linear"].total == routers[4]
    assert counts["gated_moe_8_top_2"].total - counts["gated"].total == routers[8]


def test_gated_is_the_default_with_a_gate_for_each_head(tissue):
    AlphaSTomics.setup_anndata(tissue)
    config = AlphaSTomics(tissue).module.config
    found = (config.attention, config.gate_type, config.use_qk_norm, config.use_moe)
    assert found == ("full", "headwise", True, False)
    assert CONFIGURATIONS["gated"] == Configuration()


# -- parameters of the earlier documents -------------------------------------------------------------------------------

# Dense networks of two layers with linear and with gated attention, and one feed-forward network of these.
LINEAR, GATED, N_LAYERS, DENSE = 707_508, 444_988, 2, 65_920


def of_experts(width: str) -> ParameterCount:
    return count_parameters(Experts(128, 256, num_experts=4, top_k=2, width=width))


def with_experts(dense: int, width: str) -> ParameterCount:
    """Parameters of an earlier dense network with the feed-forward networks replaced by experts."""
    experts = of_experts(width)
    total = dense + N_LAYERS * (experts.total - DENSE)
    return ParameterCount(total, total - N_LAYERS * (experts.total - experts.active))


def per_cent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1)


def test_shares_of_the_readme_match_split_experts():
    experts, linear, gated = of_experts("split"), with_experts(LINEAR, "split"), with_experts(GATED, "split")
    assert per_cent(experts.active, experts.total) == 50.8
    assert per_cent(linear.active, linear.total) == 90.7
    assert [round(n / 1000) for n in (*linear, *gated)] == [710, 644, 448, 382]
    changes = [linear.total - LINEAR, linear.active - LINEAR, gated.total - LINEAR, gated.active - LINEAR]
    assert [per_cent(change, LINEAR) for change in changes] == [0.4, -9.0, -36.7, -46.1]


def test_counts_of_the_demos_match_full_experts():
    linear, gated = with_experts(LINEAR, "full"), with_experts(GATED, "full")
    assert linear == (1_105_076, 841_396)
    assert gated == (842_556, 578_876)
    assert per_cent(linear.active, linear.total) == 76.1
    assert [per_cent(n - LINEAR, LINEAR) for n in (linear.total, *gated)] == [56.2, 19.1, -18.2]


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_linear_high_lr_differs_from_linear_in_the_learning_rate():
    slow, quick = CONFIGURATIONS["linear"], CONFIGURATIONS["linear_high_lr"]
    assert slow.model == quick.model
    assert set(quick.plan) == {"lr"}
    assert quick.plan["lr"] == 3 * PlanConfig().lr


def test_configurations_by_name_or_as_a_mapping():
    assert list(choose_configurations(None)) == list(CONFIGURATIONS)
    assert list(choose_configurations(["gated", "linear"])) == ["gated", "linear"]
    assert choose_configurations("gated") == {"gated": Configuration()}
    own = {"wide": Configuration(model={"d_model": 256})}
    assert choose_configurations(own) == own


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (["gates"], KeyError, "gates.*configurations="),
        ([], ValueError, "configurations"),
        ({"oracle": Configuration()}, ValueError, "oracle.*configurations="),
    ],
)
def test_invalid_configurations_raise(chosen, error, message):
    with pytest.raises(error, match=message):
        choose_configurations(chosen)
