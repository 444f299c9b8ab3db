"""Record for a long time and look for what grows: ``python -m tests.soak``, ``make soak``.

One recording stays from the first cycle to the last; in every cycle another is attached to a second
model, at each level in turn, and detached. Both are tagged, paused and write windows all the time.
At the end all totals must be exact, and nothing may have grown. Exit code 1 says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

import torch

from tests.bench.__main__ import keep
from tests.bench.kept import RESULTS, Figure, Machine, Result, figure
from tests.bench.page import PAGE, page
from tests.soak.exercise import soak
from tests.soak.growth import WARM_UP, Trend, trends

DEARER = 1.1
"""A late step may cost so many times an early one, each measured against one without capture."""
ENOUGH = 10
"""Cycles of a level, early and late, below which nothing is said of its cost."""


@dataclass(frozen=True)
class Cost:
    """Time of a run with capture ÷ without, in the first and the last third after the warm-up."""

    name: str
    cycles: int
    early: Figure
    late: Figure

    @classmethod
    def of(cls, name: str, ratios: Sequence[float]) -> Cost:
        kept = list(ratios[int(len(ratios) * WARM_UP) :])
        third = max(1, len(kept) // 3)
        parts = {"early": kept[:third], "late": kept[-third:]}
        return cls(name, third, *(figure("cost", name, when, own) for when, own in parts.items()))

    @property
    def ratio(self) -> float:
        return (self.late.middle or 0.0) / (self.early.middle or 1.0)

    @property
    def dearer(self) -> bool:
        """Beyond the limit, and beyond the noise: the middle halves don't meet."""
        if self.cycles < ENOUGH:
            return False
        return self.ratio > DEARER and self.late.span[0] > self.early.span[1]


def report(cycles: int, windows: int, grown: Sequence[Trend], costs: Sequence[Cost]) -> bool:
    """Print what was found; whether all is well."""
    print(f"\n{cycles} cycles, {windows} windows; the first quarter is warm-up\n")
    print(f"{'':24}{'first':>12}{'last':>12}{'growth':>12}{'limit':>12}")
    for trend in grown:
        numbers = (trend.first, trend.last, trend.growth, trend.limit)
        verdict = "  GROWS" if trend.grows else ""
        print(f"{trend.name:24}" + "".join(f"{number:12,.2f}" for number in numbers) + verdict)
    print(f"\n{'time of a run ÷ without capture':32}{'early':>24}{'late':>24}{'late ÷ early':>14}")
    for cost in costs:
        verdict = "  DEARER" if cost.dearer else ""
        spreads = f"{cost.early!s:>24}{cost.late!s:>24}"
        print(f"{cost.name:32}{spreads}{cost.ratio:14.3f}{verdict}")
    return not any(trend.grows for trend in grown) and not any(cost.dearer for cost in costs)


def figures(grown: Sequence[Trend], costs: Sequence[Cost]) -> Iterator[Figure]:
    """The same for the page of benchmarks."""
    for trend in grown:
        digits = 2 if "MiB" in trend.name else 0
        for column in ("first", "last", "growth", "limit"):
            value = float(getattr(trend, column))
            yield figure("growth", trend.name, column, value, unit="held", digits=digits)
    for cost in costs:
        yield from (cost.early, cost.late)
        yield figure("cost", cost.name, "late ÷ early", cost.ratio, better="lower", target=DEARER)


def main() -> None:
    """Work for as long as asked, and judge."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cycles", type=int, help="so many cycles, however long they take")
    parser.add_argument("--samples", type=Path, help="write all samples there, as JSON")
    parser.add_argument("--keep", action="store_true", help="take it up in docs/benchmarks.md")
    parser.add_argument("--trace", action="store_true", help="say which lines hold more; slow")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine, shots = Machine.here(), list[tracemalloc.Snapshot]()
    end, said = monotonic() + 60 * arguments.minutes, monotonic()

    def go_on(number: int) -> bool:
        nonlocal said
        if monotonic() - said > 60:
            said = monotonic()
            print(f"{number} cycles, {(end - said) / 60:.0f} minutes to go", flush=True)
        more = number < arguments.cycles if arguments.cycles else monotonic() < end
        if arguments.trace and not more:
            shots.append(tracemalloc.take_snapshot())
        return more

    def each(number: int) -> None:
        if arguments.trace and number == 10:
            shots.append(tracemalloc.take_snapshot())

    if arguments.trace:
        tracemalloc.start(5)
    with tempfile.TemporaryDirectory(prefix="routeprof-soak-") as folder:
        found = soak(Path(folder), go_on, each)
    if arguments.samples:
        series = {"samples": found.samples, "costs": found.costs}
        arguments.samples.write_text(json.dumps(series, default=list))
    if len(shots) > 1:
        print(*shots[1].compare_to(shots[0], "lineno")[:20], sep="\n")
    grown = trends(found.samples)
    costs = [Cost.of(name, ratios) for name, ratios in found.costs.items()]
    cycles = len(next(iter(found.samples.values())))
    well = report(cycles, found.windows, grown, costs)
    print("\nall totals are exact" if not found.wrong else "\n".join(["", *found.wrong[:20]]))
    if arguments.keep and not found.wrong:
        method = f"{arguments.minutes:.0f} minutes: {cycles:,} cycles, {found.windows:,} windows."
        date = datetime.now(UTC).date().isoformat()
        keep(Result("soak", date, method, machine, tuple(figures(grown, costs))), RESULTS)
        PAGE.write_text(page(), encoding="utf-8")
    if found.wrong or not well:
        sys.exit(1)


if __name__ == "__main__":
    main()
