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
from pathlib import Path
from time import monotonic

import numpy as np
import torch

from tests.soak.exercise import Soak, soak
from tests.soak.growth import WARM_UP, trends

DEARER = 1.1
"""A late step may cost so many times an early one, each measured against one without capture."""


def costs(found: Soak) -> list[tuple[str, float, float, float]]:
    """For each kind of recording: early and late cost ratio, and late ÷ early."""
    rows = []
    for name, ratios in found.costs.items():
        kept = ratios[int(len(ratios) * WARM_UP) :]
        third = max(1, len(kept) // 3)
        early, late = float(np.median(kept[:third])), float(np.median(kept[-third:]))
        rows.append((name, early, late, late / early))
    return rows


def report(found: Soak) -> bool:
    """Print what was found; whether all is well."""
    well = not found.wrong
    cycles = len(next(iter(found.samples.values())))
    print(f"\n{cycles} cycles, {found.windows} windows; the first quarter is warm-up\n")
    print(f"{'':24}{'first':>10}{'last':>10}{'growth':>10}{'limit':>10}")
    for trend in trends(found.samples):
        numbers = (trend.first, trend.last, trend.growth, trend.limit)
        verdict = "  GROWS" if trend.grows else ""
        print(f"{trend.name:24}" + "".join(f"{number:10.2f}" for number in numbers) + verdict)
        well &= not trend.grows
    print(f"\n{'time of a run ÷ without capture':34}{'early':>8}{'late':>8}{'late ÷ early':>14}")
    for name, early, late, ratio in costs(found):
        verdict = "  DEARER" if ratio > DEARER else ""
        print(f"{name:34}{early:8.3f}{late:8.3f}{ratio:14.3f}{verdict}")
        well &= ratio <= DEARER
    print("\n".join(["", *found.wrong[:20]]) if found.wrong else "\nall totals are exact")
    return well


def main() -> None:
    """Work for as long as asked, and judge."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--cycles", type=int, help="so many cycles, however long they take")
    parser.add_argument("--samples", type=Path, help="write all samples there, as JSON")
    parser.add_argument("--trace", action="store_true", help="say which lines hold more; slow")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end, said = monotonic() + 60 * arguments.minutes, monotonic()

    def go_on(number: int) -> bool:
        nonlocal said
        if monotonic() - said > 60:
            said = monotonic()
            print(f"{number} cycles, {(end - said) / 60:.0f} minutes to go", flush=True)
        return number < arguments.cycles if arguments.cycles else monotonic() < end

    first: list[tracemalloc.Snapshot] = []

    def each(number: int) -> None:
        if arguments.trace and number == 10:
            first.append(tracemalloc.take_snapshot())

    if arguments.trace:
        tracemalloc.start(5)
    with tempfile.TemporaryDirectory(prefix="routeprof-soak-") as folder:
        found = soak(Path(folder), go_on, each)
    if arguments.samples:
        series = {"samples": found.samples, "costs": found.costs}
        arguments.samples.write_text(json.dumps(series, default=list))
    if first:
        for line in tracemalloc.take_snapshot().compare_to(first[0], "lineno")[:20]:
            print(line)
    if not report(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
