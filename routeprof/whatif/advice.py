"""Which capacity factor to take: for serving that is bound by latency, and for scoring.

Two rules, stated so that they can be disputed:

* **latency**: the smallest factor at which all layers together overflow no more than the target, in
  decode where the recording has it. Every step computes all slots, filled or not: what is beyond
  this factor costs time in each step and saves next to nothing.
* **quality**: the smallest factor at which no step of any layer overflows, in prefill where the
  recording has it. Scoring is one prefill, and an assignment that is lost makes a score depend on
  what else was in the batch.

From bounds it is the smallest factor of which that is sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from routeprof.tables import ALL
from routeprof.whatif.capacity import FactorNeeded, curve, smallest_factor, smallest_factors, worst
from routeprof.whatif.capacity_rules import CapacityRule

if TYPE_CHECKING:
    from routeprof.profile import Profile

Goal = Literal["latency", "quality"]


@dataclass(frozen=True)
class Recommendation:
    """A capacity factor for a goal.

    Attributes:
        phase: what it was computed on, ``all`` or a phase.
        needed: the target, and between which factors the smallest is that meets it.
        factor: the one to take, ``needed.upper``.
        overflow_rate, padding_rate: the most they can be at that factor, all layers together.
    """

    goal: Goal
    phase: str
    needed: FactorNeeded
    overflow_rate: float
    padding_rate: float

    @property
    def factor(self) -> float:
        return self.needed.upper


def recommend(
    profile: Profile, target: float = 0.001, rule: str | CapacityRule = "ceil"
) -> list[Recommendation]:
    """A factor for ``latency`` and one for ``quality``; the rules are in the module's docstring.

    Args:
        target: overflow rate that is accepted for latency, 0…1.
        rule: as for `curve`.

    Raises:
        UsageError, LevelRequiredError: as `smallest_factors`.
    """
    decode, prefill = (_in_phase(profile, phase) for phase in ("decode", "prefill"))
    return [
        _described("latency", decode, smallest_factor(decode, target, rule), rule),
        _described("quality", prefill, worst(smallest_factors(prefill, 0.0, rule)), rule),
    ]


def _in_phase(profile: Profile, phase: str) -> Profile:
    """That phase where it has assignments, else what is selected."""
    if profile.phase is not None:
        return profile  # whose steps, once read, need not be read again
    narrowed = profile.narrowed(phase, None)
    return narrowed if narrowed.totals.lists["counts"].sum() else profile


def _described(
    goal: Goal, profile: Profile, needed: FactorNeeded, rule: str | CapacityRule
) -> Recommendation:
    row = curve(profile, [needed.upper], rule).iloc[0]
    return Recommendation(
        goal,
        profile.phase or ALL,
        needed,
        float(row["overflow_rate_upper"]),
        float(row["padding_rate_upper"]),
    )
