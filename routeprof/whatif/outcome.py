"""What a capacity makes of a layer's routing: exact from its steps, bounded from their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, nan

from routeprof.metrics.capacity import capacity
from routeprof.metrics.overflow import RoutedSteps, overflow_assignments, padding_rate
from routeprof.whatif.capacity_rules import CapacityRule

Range = tuple[int, int]
"""The smallest and the largest that a number can be; the same where it is known."""


@dataclass(frozen=True)
class Outcome:
    """Sums over the steps of one layer, or of several.

    Attributes:
        routed: tokens · top_k.
        assignments: those with a valid expert, what the model itself dropped among them.
        steps: in which the layer ran; of several layers, the one that ran most often.
        overflow: assignments above capacity.
        slots: of all experts.
        peak: slots of the largest step, of the layer with most.
    """

    routed: int
    assignments: int
    steps: int
    overflow: Range
    slots: Range
    peak: Range

    @property
    def is_exact(self) -> bool:
        """Whether both rates are known; the peak may still be a range."""
        return all(low == high for low, high in (self.overflow, self.slots))

    @property
    def kept(self) -> Range:
        """Assignments that have a slot."""
        return self.assignments - self.overflow[1], self.assignments - self.overflow[0]

    @property
    def overflow_rate(self) -> tuple[float, float]:
        """Overflow ÷ (tokens · top_k), the least and the most it can be."""
        low, high = self.overflow
        return low / self.routed, high / self.routed

    @property
    def padding_rate(self) -> tuple[float, float]:
        """Empty slots ÷ slots, the least and the most it can be; NaN without slots."""
        if not self.slots[1]:
            return nan, nan
        low = max(self.slots[0] - self.kept[1], 0)
        high = max(self.slots[1] - self.kept[0], 0)
        return (
            float(padding_rate(low, self.slots[0])) if self.slots[0] else 0.0,
            float(padding_rate(high, self.slots[1])),
        )


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of several layers."""

    def sums(ranges: Sequence[Range]) -> Range:
        return sum(low for low, _ in ranges), sum(high for _, high in ranges)

    return Outcome(
        routed=sum(one.routed for one in outcomes),
        assignments=sum(one.assignments for one in outcomes),
        steps=max(one.steps for one in outcomes),
        overflow=sums([one.overflow for one in outcomes]),
        slots=sums([one.slots for one in outcomes]),
        peak=(max(one.peak[0] for one in outcomes), max(one.peak[1] for one in outcomes)),
    )


@dataclass(frozen=True)
class Steps:
    """Every step of a layer: any factor and rule is exact.

    Attributes:
        dropped: assignments that the model itself dropped; nobody knows which expert's they were.
    """

    routed: RoutedSteps
    dropped: int = 0

    @property
    def enough(self) -> Fraction:
        """A factor at which nothing overflows: no expert gets more than all of a step."""
        return Fraction(self.routed.experts)

    def outcome(self, factor: Fraction, rule: CapacityRule) -> Outcome:
        """What a capacity makes of them."""
        steps = self.routed
        slots = capacity(
            steps.tokens,
            steps.top_k,
            steps.experts,
            factor,
            rule=rule.rounding,
            minimum=rule.minimum,
        )
        over = int(overflow_assignments(steps.counts, slots).sum())
        # Whose dropped assignments are, only matters where an expert could have too many.
        dropped = self.dropped if factor < self.enough else 0
        paid, peak = (steps.experts * int(value) for value in (slots.sum(), slots.max(initial=0)))
        return Outcome(
            routed=int(steps.tokens.sum()) * steps.top_k,
            assignments=int(steps.counts.sum()) + self.dropped,
            steps=len(steps.tokens),
            overflow=(over, over + dropped),
            slots=(paid, paid),
            peak=(peak, peak),
        )


@dataclass(frozen=True)
class Sums:
    """Sums over the steps of a layer: exact for the factors that were recorded, rounded up.

    For others neighbours say how much it is at the least and at the most, as overflow falls and
    slots grow with the factor.

    Attributes:
        steps: in which it ran.
        cells: (expert, step) pairs with tokens.
        dropped: as in `Steps`.
        overflow, slots: by recorded factor.
        largest: tokens of the largest step.
        enough: a factor at which nothing overflows: the largest max ÷ mean load of any step.
        spread: tokens by the max ÷ mean load of their step, which is at most the number before
            them; empty where that was not recorded.
    """

    experts: int
    top_k: int
    steps: int
    tokens: int
    assignments: int
    cells: int
    dropped: int
    overflow: Mapping[Fraction, int]
    slots: Mapping[Fraction, int]
    largest: Range
    enough: Fraction
    spread: tuple[tuple[float, int], ...] = ()

    def outcome(self, factor: Fraction, rule: CapacityRule) -> Outcome:
        """What a capacity makes of them, at the least and at the most."""
        overflow, slots = self._rounded_up(factor)
        if rule.rounding == "floor":
            overflow, slots = self._rounded_down(factor, overflow, slots)
        if rule.minimum:
            overflow, slots = self._at_least(rule.minimum, overflow, slots)
        dropped = self.dropped if factor < self.enough else 0
        return Outcome(
            routed=self.tokens * self.top_k,
            assignments=self.assignments + self.dropped,
            steps=self.steps,
            overflow=(max(overflow[0], self.assignments - slots[1]), overflow[1] + dropped),
            slots=slots,
            peak=self._peak(factor, rule),
        )

    def _rounded_up(self, factor: Fraction) -> tuple[Range, Range]:
        if factor in self.overflow:
            return (self.overflow[factor],) * 2, (self.slots[factor],) * 2
        lower = max((one for one in self.overflow if one < factor), default=None)
        upper = min((one for one in self.overflow if one > factor), default=None)
        # Each step's capacity is at least f · T · k / E, and less than 1 above it.
        ideal = factor * self.tokens * self.top_k
        least, most = ceil(ideal), floor(ideal + self.experts * self.steps)
        fewest, overflow = 0, self.assignments
        if lower is not None:
            least, overflow = max(least, self.slots[lower]), self.overflow[lower]
        if upper is not None:
            most, fewest = min(most, self.slots[upper]), self.overflow[upper]
        overflow = 0 if factor >= self.enough else min(overflow, self._by_imbalance(factor))
        return (min(fewest, overflow), overflow), (least, most)

    def _by_imbalance(self, factor: Fraction) -> int:
        """The most that can overflow where no expert of a step has more than r times the mean.

        A capacity of f times the mean keeps at least f / r of what each expert gets.
        """
        if not self.spread:
            return self.assignments
        lost = sum(tokens * (1 - float(factor) / r) for r, tokens in self.spread if r > factor)
        return min(floor(lost * self.top_k * (1 + 1e-9) + 1e-9), self.assignments)

    def _rounded_down(self, factor: Fraction, overflow: Range, slots: Range) -> tuple[Range, Range]:
        """A slot less at the most, for each expert and step."""
        ideal = factor * self.tokens * self.top_k
        one_each = self.experts * self.steps
        most = self.assignments if factor < self.enough else 0
        return (
            (overflow[0], min(overflow[1] + self.cells, most)),
            (
                max(slots[0] - one_each, ceil(ideal - one_each), 0),
                min(slots[1], floor(ideal)),
            ),
        )

    def _at_least(self, minimum: int, overflow: Range, slots: Range) -> tuple[Range, Range]:
        """As if every expert with tokens, or none of them, had the minimum as well."""
        paid = self.experts * self.steps * minimum
        return (
            (max(overflow[0] - self.cells * minimum, 0), overflow[1]),
            (max(slots[0], paid), slots[1] + paid),
        )

    def _peak(self, factor: Fraction, rule: CapacityRule) -> Range:
        low, high = capacity(
            self.largest,
            self.top_k,
            self.experts,
            factor,
            rule=rule.rounding,
            minimum=rule.minimum,
        ).tolist()
        return self.experts * low, self.experts * high


Evidence = Steps | Sums
