"""Configurations of a comparison: settings of a model and its training that differ from those that all rows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alphastomics.config import PlanConfig

if TYPE_CHECKING:
    from alphastomics.tl._compare_splits import Split


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row of a comparison: settings that differ from those that all rows share.

    Parameters
    ----------
    model
        Arguments of :class:`~alphastomics.model.AlphaSTomics`.
    plan
        Fields of :class:`~alphastomics.train.PlanConfig`.
    match
        Arguments of another model, in addition to those of `model`. The width of this model is then chosen so that its
        number of parameters is as close to that of the other as the number of heads allows. None keeps the width.

    Examples
    --------
    >>> wide = asx.tl.Configuration(model={"d_model": 256})
    >>> asx.tl.compare(adata, configurations={"default": asx.tl.Configuration(), "wide": wide})
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    match: Mapping[str, Any] | None = None


LINEAR = {"attention": "linear"}


def _experts(**changed: Any) -> dict[str, Any]:
    return {"use_moe": True, **changed}


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
    "linear_high_lr": Configuration(model=LINEAR, plan={"lr": 3 * PlanConfig.lr}),
}
"""The default configurations of :func:`compare`."""


def choose_configurations(chosen: Mapping[str, Configuration] | Sequence[str] | None) -> dict[str, Configuration]:
    """Configurations by name; names are looked up in :data:`CONFIGURATIONS`, all of which are chosen by None."""
    if chosen is None:
        return dict(CONFIGURATIONS)
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    known = chosen if isinstance(chosen, Mapping) else CONFIGURATIONS
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(map(repr, CONFIGURATIONS))
        raise KeyError(f"unknown configuration {', '.join(map(repr, unknown))}; choose configurations=… from {listed}")
    if not names:
        raise ValueError("configurations=… is empty; name at least one, or leave it out for the defaults")
    if reserved := {"chance", "oracle"} & set(names):
        raise ValueError(f"{', '.join(sorted(reserved))} is the name of a baseline; rename it in configurations=…")
    if wrong := [name for name in names if not isinstance(known[name], Configuration)]:
        raise TypeError(f"configurations=… has no Configuration for {wrong[0]!r}; use tl.Configuration(model={{…}})")
    return {name: known[name] for name in names}


def model_arguments(split: Split, common: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """All arguments of the model of a configuration; its width may follow from ``match``."""
    from alphastomics.model import AlphaSTomics
    from alphastomics.nn import count_parameters, matched_width

    arguments = {**common, **configuration.model}
    model = AlphaSTomics(split.reference, **arguments)
    if configuration.match is not None:
        other = AlphaSTomics(split.reference, **{**arguments, **configuration.match})
        width = matched_width(model.module.config, count_parameters(other.module).total)
        model = AlphaSTomics(split.reference, **{**arguments, "d_model": width})
    return dict(model.init_params_["non_kwargs"])
