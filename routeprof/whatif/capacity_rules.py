"""The rules by which frameworks turn a capacity factor into slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

from routeprof.errors import UsageError
from routeprof.metrics.capacity import Rule


@dataclass(frozen=True)
class CapacityRule:
    """Slots of an expert in a step: max(minimum, rounding(f · T · k ÷ E)).

    Attributes:
        name: how it is asked for.
        rounding: ``ceil`` or ``floor``.
        minimum: the least capacity.
        per_rank: insist that each rank's tokens have slots of their own.
    """

    name: str
    rounding: Rule = "ceil"
    minimum: int = 0
    per_rank: bool = False

    def __str__(self) -> str:
        return f"{self.name}, at least {self.minimum}" if self.minimum else self.name


RULES = {
    rule.name: rule
    for rule in (
        CapacityRule("ceil"),
        CapacityRule("floor", rounding="floor"),
        CapacityRule("deepspeed", minimum=4),
        CapacityRule("per-rank", per_rank=True),
    )
}
"""``ceil``: GShard, Switch, ST-MoE, Megatron. ``deepspeed``: its ``min_capacity``, 4 unless told
otherwise. ``per-rank``: DeepEP's low-latency buffers, in which every rank has slots of its own."""


def capacity_rule(name: str, minimum: int | None = None) -> CapacityRule:
    """A rule by its name in ``RULES``, with another least capacity if one is given.

    Raises:
        UsageError: no such rule, or a negative minimum.
    """
    if name not in RULES:
        raise UsageError(f"rule {name!r} is not one of {', '.join(RULES)}")
    if minimum is None:
        return RULES[name]
    if minimum < 0:
        raise UsageError(f"the least capacity is {minimum}: pass 0 or more")
    return replace(RULES[name], minimum=minimum)
