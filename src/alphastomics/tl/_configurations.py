"""What is compared: named changes to a model and to its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row of a comparison: what differs from the model and the training that all rows share.

    Parameters
    ----------
    model
        Arguments of :class:`~alphastomics.model.AlphaSTomics`.
    plan
        Fields of :class:`~alphastomics.train.PlanConfig`.
    match
        Arguments, on top of those of `model`, of another model: the width of this one is chosen so that both have the
        same total number of parameters, as nearly as the heads allow. None leaves the width as it is.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    match: Mapping[str, Any] | None = None


LINEAR = {"attention": "linear"}
HIGH_LR = 3e-3  # three times the default


def _experts(num_experts: int = 4, moe_top_k: int = 2, expert_width: str = "split") -> dict[str, Any]:
    return {"use_moe": True, "num_experts": num_experts, "moe_top_k": moe_top_k, "expert_width": expert_width}


CONFIGURATIONS: dict[str, Configuration] = {
    "linear": Configuration(model=LINEAR),
    "gated": Configuration(),
    "linear_moe": Configuration(model=LINEAR | _experts()),
    "gated_moe": Configuration(model=_experts()),
    "gated_elementwise": Configuration(model={"gate_type": "elementwise"}),
    "gated_no_qk_norm": Configuration(model={"use_qk_norm": False}),
    "gated_moe_4_top_1": Configuration(model=_experts(moe_top_k=1)),
    "gated_moe_8_top_2": Configuration(model=_experts(num_experts=8)),
    "gated_moe_full": Configuration(model=_experts(expert_width="full")),
    "gated_matched": Configuration(match=_experts(expert_width="full")),
    "linear_high_lr": Configuration(model=LINEAR, plan={"lr": HIGH_LR}),
}
"""The configurations that :func:`alphastomics.tl.compare` compares unless told otherwise."""


def choose_configurations(chosen: Mapping[str, Configuration] | Sequence[str] | None) -> dict[str, Configuration]:
    """Settle what is compared: a mapping as it is, names among :data:`CONFIGURATIONS`, or all of these.

    Raises
    ------
    KeyError
        If a name is unknown.
    ValueError
        If there is none, or one has the name of a baseline.
    """
    if isinstance(chosen, str):
        chosen = [chosen]
    if chosen is None:
        return dict(CONFIGURATIONS)
    if isinstance(chosen, Mapping):
        found = dict(chosen)
    else:
        unknown = [name for name in chosen if name not in CONFIGURATIONS]
        if unknown:
            listed = ", ".join(map(repr, CONFIGURATIONS))
            raise KeyError(
                f"{', '.join(map(repr, unknown))} is no configuration; choose configurations=… from {listed}"
            )
        found = {name: CONFIGURATIONS[name] for name in chosen}
    if not found:
        raise ValueError("configurations=… is empty; name at least one, or leave it out")
    if reserved := {"chance", "oracle"} & set(found):
        raise ValueError(f"{', '.join(sorted(reserved))} is the name of a baseline; call the configuration otherwise")
    return found
