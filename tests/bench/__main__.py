"""Run benchmarks, say what changed, keep the results: ``make bench ARGS='capture fold'``.

Results of the last run are in ``tests/bench/results``; the page ``docs/benchmarks.md`` is made of
them. Figures of a busy machine don't replace those of a quiet one unless told to (``--replace``).
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from tests.bench.kept import RESULTS, Machine, Result, changes, may_replace
from tests.bench.page import PAGE, page

SUITES = {
    "capture": "what capture costs a model, eagerly and compiled, by layer call, and bytes on disk",
    "fold": "assignments added up a second, against numpy.bincount and pandas",
    "memory": "largest memory of loading, folding, reporting and auditing",
    "placement": "placements by ours and by EPLB, fitted and held out",
    "audit": "expert weights audited, against reading the file (4 GiB in TMPDIR)",
    "dashboard": "the page on a big recording, and for many at once (Chromium)",
}
"""Modules here with a function ``results(arguments)``: name, method and figures of each result."""


def run(suite: str, arguments: list[str], folder: Path, *, replace: bool) -> None:
    """Measure, print what changed, and keep it."""
    module, machine = import_module(f"tests.bench.{suite}"), Machine.here()
    date = datetime.now(UTC).date().isoformat()
    for name, method, figures in module.results(arguments):
        remark = f"Load average before the run: {machine.load}." if machine.busy else ""
        keep(Result(name, date, method, machine, tuple(figures), remark), folder, replace=replace)


def keep(now: Result, folder: Path, *, replace: bool = False) -> None:
    """Print what changed against the kept result, and take its place where that is allowed."""
    before = Result.load(now.suite, folder)
    print(f"\n{now.suite}: {now.machine}")
    print(f"kept: {before.date}, {before.machine}" if before else "nothing kept yet")
    for change in changes(before, now):
        print(change)
    if replace or may_replace(before, now):
        now.save(folder)
    else:
        print(
            f"the machine is busy (load {now.machine.load}), and the kept figures are of a quiet "
            "one: they stay; --replace replaces them all the same"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__,
        epilog="; ".join(f"{name}: {text}" for name, text in SUITES.items()),
    )
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], metavar="suite")
    parser.add_argument("--replace", action="store_true", help="keep the new figures in any case")
    chosen, more = parser.parse_known_args()
    if more and len(chosen.suites) != 1:
        parser.error(f"{' '.join(more)}: name the one suite that this is for")
    for suite in chosen.suites or SUITES:
        run(suite, more, RESULTS, replace=chosen.replace)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
