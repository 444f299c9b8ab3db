"""Overflow, padding and memory against the capacity factor, before anything is changed.

From a recording of level steps every figure is exact, for any factor and rule. Level windows has
sums for the factors that were recorded, rounded up: these are exact, all others lie between bounds
(overflow falls with the factor, so its recorded neighbours bound it). Each row says which.

Where several ranks have tokens of their own, a capacity is of each rank's tokens apart, as in
DeepEP's low-latency buffers. What all ranks would overflow that share one capacity cannot be told:
nothing in a recording says which passes of theirs ran together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2, nan
from typing import TYPE_CHECKING, Any

import pandas as pd

from routeprof.errors import UsageError
from routeprof.metrics.capacity import parse_factor
from routeprof.metrics.overflow import accepted_overflow, smallest_common_factor
from routeprof.tables import ALL, groups
from routeprof.whatif.capacity_rules import CapacityRule, capacity_rule
from routeprof.whatif.evidence import evidence, require_tokens, token_ranks
from routeprof.whatif.outcome import Evidence, Outcome, Steps, together
from routeprof.whatif.sizes import ITEM_BYTES

if TYPE_CHECKING:
    from routeprof.profile import Profile

Factor = float | str | Fraction

COLUMNS = (
    "phase tag layer capacity_factor capacity_rule certainty overflow_rate overflow_rate_lower "
    "overflow_rate_upper padding_rate padding_rate_lower padding_rate_upper slots_per_step "
    "buffer_bytes buffer_bytes_lower buffer_bytes_upper happened"
).split()


def curve(
    profile: Profile,
    factors: Sequence[Factor] | None = None,
    rule: str | CapacityRule = "ceil",
    *,
    breakdown: bool = False,
) -> pd.DataFrame:
    """What each capacity factor drops, wastes and needs, for all layers together and for each.

    One row for each factor and layer; ``layer`` is ``all`` or the layer's index. ``certainty`` is
    ``exact`` or ``bounded``; a rate that is only bounded is NaN beside its ``_lower`` and
    ``_upper``. ``slots_per_step`` is the mean over steps, Σ over all layers in row ``all``.
    ``buffer_bytes`` is what the slots of the largest step hold, experts · C · hidden size · bytes
    of the model's type; of the largest layer in row ``all``, as layers use one buffer after
    another. It is NaN where the recording lacks the hidden size. ``happened``: the model itself
    drops what is above its capacity; then the dropped assignments, which no expert counted, are
    between the bounds too.

    Args:
        factors: capacity factors; those that were recorded if None.
        rule: a name in ``capacity_rules.RULES``, or a rule.
        breakdown: rows for each phase and each tag as well as for all of them.

    Raises:
        UsageError: an impossible factor or rule, no tokens, or one rank alone under ``per-rank``.
        LevelRequiredError: the recording has sums without factors.
    """
    rule, wanted = _checked(profile, rule), _factors(profile, factors)
    rows = [
        {"phase": phase, "tag": tag, "capacity_rule": str(rule)} | row
        for phase, tag, numbers in groups(profile, breakdown)
        for row in _rows(profile, evidence(profile, numbers), wanted, rule)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


@dataclass(frozen=True)
class FactorNeeded:
    """The smallest capacity factor whose overflow rate is at most ``target``.

    Attributes:
        layer: its index; None for all layers together.
        lower, upper: it is above the lower and not above the upper; both are the factor where it
            is exact, a multiple of 1/10000.
    """

    target: float
    layer: int | None
    lower: float
    upper: float

    @property
    def certainty(self) -> str:
        """``exact`` or ``bounded``."""
        return "exact" if self.lower == self.upper else "bounded"


def smallest_factor(
    profile: Profile, target: float = 0.001, rule: str | CapacityRule = "ceil"
) -> FactorNeeded:
    """The factor that a target rate needs, for all layers together.

    Args:
        target: overflow rate that is accepted, 0…1.
        rule: as for `curve`.

    Raises:
        UsageError: an impossible target or rule, no tokens, or one rank alone under ``per-rank``.
        LevelRequiredError: the recording has sums without factors.
    """
    rule, layers = _checked(profile, rule), _everything(profile)
    grid = _grid(profile, layers.values())
    return FactorNeeded(target, None, *_needed(list(layers.values()), target, rule, grid))


def smallest_factors(
    profile: Profile, target: float = 0.001, rule: str | CapacityRule = "ceil"
) -> list[FactorNeeded]:
    """Like `smallest_factor`, for each layer alone."""
    rule, layers = _checked(profile, rule), _everything(profile)
    grid = _grid(profile, layers.values())
    return [
        FactorNeeded(target, index, *_needed([own], target, rule, grid))
        for index, own in layers.items()
    ]


def worst(needed: Sequence[FactorNeeded]) -> FactorNeeded:
    """The layer that needs the largest factor."""
    return max(needed, key=lambda one: one.upper)


# -- what was asked


def _checked(profile: Profile, rule: str | CapacityRule) -> CapacityRule:
    rule = capacity_rule(rule) if isinstance(rule, str) else rule
    require_tokens(profile)
    if rule.per_rank and token_ranks(profile) < 2:
        raise UsageError(
            "rule 'per-rank' needs ranks with tokens of their own, this recording has one; record "
            "every rank, or ask for rule 'ceil'"
        )
    return rule


def _everything(profile: Profile) -> dict[int, Evidence]:
    return evidence(profile, list(range(len(profile.totals.keys))))


def _factors(profile: Profile, factors: Sequence[Factor] | None) -> list[Fraction]:
    wanted = [parse_factor(one) for one in profile.info.capacity_factors if factors is None]
    wanted += [parse_factor(one) for one in factors or ()]
    if not wanted:
        raise UsageError("no capacity factor is given: pass some, such as 1.0,1.25,1.5")
    return list(dict.fromkeys(wanted))


# -- rows


def _rows(
    profile: Profile, layers: dict[int, Evidence], factors: list[Fraction], rule: CapacityRule
) -> Iterator[dict[str, Any]]:
    """All layers together at each factor, then each layer at each factor."""
    if not layers:
        return
    outcomes = {
        index: [own.outcome(factor, rule) for factor in factors] for index, own in layers.items()
    }
    drops = {layer.index for layer in profile.info.layers if layer.drops}
    bytes_each = _slot_bytes(profile)
    for factor, at_once in zip(factors, zip(*outcomes.values(), strict=True), strict=True):
        yield _row(ALL, factor, together(at_once), bytes_each, bool(drops & set(layers)))
    for index, own in outcomes.items():
        for factor, outcome in zip(factors, own, strict=True):
            yield _row(index, factor, outcome, bytes_each, index in drops)


def _row(
    layer: int | str, factor: Fraction, outcome: Outcome, bytes_each: float, happened: bool
) -> dict[str, Any]:
    slots = outcome.slots[0] if outcome.slots[0] == outcome.slots[1] else nan
    return {
        "layer": layer,
        "capacity_factor": float(factor),
        "certainty": "exact" if outcome.is_exact else "bounded",
        **_ranged("overflow_rate", *outcome.overflow_rate),
        **_ranged("padding_rate", *outcome.padding_rate),
        "slots_per_step": slots / outcome.steps,
        **_ranged("buffer_bytes", *(peak * bytes_each for peak in outcome.peak)),
        "happened": happened,
    }


def _ranged(name: str, low: float, high: float) -> dict[str, float]:
    return {name: low if low == high else nan, f"{name}_lower": low, f"{name}_upper": high}


def _slot_bytes(profile: Profile) -> float:
    model = profile.info.model
    return (model.hidden_size or nan) * ITEM_BYTES.get(model.dtype, nan)


# -- the smallest factor


def _grid(profile: Profile, layers: Iterable[Evidence]) -> list[Fraction]:
    """Factors to look among: the recorded ones, some between, those at which nothing overflows."""
    recorded = {parse_factor(factor) for factor in profile.info.capacity_factors}
    enough = {one.enough for one in layers}
    octaves = ceil(log2(max(enough))) + 1
    between = {Fraction(ceil(100 * 2 ** (place / 16)), 100) for place in range(16 * octaves)}
    return sorted(recorded | enough | {one for one in between if one < max(enough)})


def _needed(
    layers: Sequence[Evidence], target: float, rule: CapacityRule, grid: Sequence[Fraction]
) -> tuple[float, float]:
    steps = [one.routed for one in layers if isinstance(one, Steps) and not one.dropped]
    if len(steps) == len(layers):
        exact = smallest_common_factor(steps, target, rule.rounding, rule.minimum)
        return exact, exact

    def met(factor: Fraction) -> tuple[bool, bool]:
        """Whether the rate may be met, and whether it is: both bounds fall with the factor."""
        outcome = together([one.outcome(factor, rule) for one in layers])
        accepted = accepted_overflow(target, outcome.routed)
        return outcome.overflow[0] <= accepted, outcome.overflow[1] <= accepted

    enough = bisect_left(grid, True, key=lambda factor: met(factor)[1])
    first = bisect_left(grid, True, hi=enough, key=lambda factor: met(factor)[0])
    lower = grid[first - 1] if first else Fraction(0)
    return float(lower), float(grid[min(enough, len(grid) - 1)])
