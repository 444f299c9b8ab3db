"""What benchmarks find: figures, the machine they are of, the last ones kept, and what changed."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "pyarrow", "pandas", "transformers")
FLOOR = 0.02
"""A change below 2 % is never called one."""
UNKNOWN = 0.10
"""Noise of a time or ratio that was measured once; half of it where there are two or three."""

Better = Literal["higher", "lower", ""]


@dataclass(frozen=True)
class Figure:
    """One cell of a table.

    Attributes:
        table, row, column: where it stands.
        middle: the median, or the only value; None where only a range was kept.
        low, high: quartiles of several runs, or their range where they are few.
        unit: empty for a ratio, which can be compared between machines.
        digits: decimals to show.
        better: in which direction; empty for a figure that only says what others are of.
        target: what was promised, in that direction.
        exact: not a matter of time: any change is a change.
        runs: how many; 0 where nobody noted it.
    """

    table: str
    row: str
    column: str
    middle: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    digits: int = 3
    better: Better = ""
    target: float | None = None
    exact: bool = False
    runs: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.table, self.row, self.column

    def __str__(self) -> str:
        """As a table shows it."""
        if self.middle is None:
            return f"{self._shown(self.low)} to {self._shown(self.high)}"
        if self.low is None or self.low == self.high:
            return self._shown(self.middle)
        spread = f"{self._shown(self.low)} to {self._shown(self.high)}"
        return f"{self._shown(self.middle)} ({spread})"

    def _shown(self, value: float | None) -> str:
        return "–" if value is None else f"{value:,.{self.digits}f}"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where nothing was promised."""
        if self.target is None or self.middle is None:
            return None
        return self.middle >= self.target if self.better == "higher" else self.middle <= self.target

    @property
    def span(self) -> tuple[float, float]:
        """What the same measurement may well give again."""
        low, high = self.low, self.high
        if low is None or high is None:
            assert self.middle is not None
            noise = 0.0 if self.exact else UNKNOWN
            low, high = self.middle * (1 - noise), self.middle * (1 + noise)
        elif 0 < self.runs < 4 and not self.exact:
            low, high = low * (1 - UNKNOWN / 2), high * (1 + UNKNOWN / 2)
        return low, high


def figure(
    table: str, row: str, column: str, values: float | Sequence[float], **options: object
) -> Figure:
    """The median of some runs, with quartiles, or with the range of fewer than four."""
    if not isinstance(values, Sequence):
        return Figure(table, row, column, float(values), **options)  # type: ignore[arg-type]
    if len(values) == 1:
        return Figure(table, row, column, values[0], runs=1, **options)  # type: ignore[arg-type]
    low, high = min(values), max(values)
    if len(values) > 3:
        low, _, high = statistics.quantiles(values, n=4)
    options["runs"] = len(values)
    return Figure(table, row, column, statistics.median(values), low, high, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Machine:
    """What a measurement is of; no names of hosts or paths.

    Attributes:
        load: load average before the run; None where nobody looked.
    """

    processor: str
    cores: int | None
    memory_gib: float | None
    versions: dict[str, str] = field(default_factory=dict)
    load: float | None = None

    @classmethod
    def here(cls) -> Machine:
        versions = {"Python": platform.python_version()}
        for name in PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
        load = round(os.getloadavg()[0], 1)
        cores = len(os.sched_getaffinity(0))
        return cls(_processor(), cores, round(memory, 1), versions, load)

    @property
    def busy(self) -> bool:
        """Other work ran that may have taken from a core."""
        return self.load is not None and self.cores is not None and self.load > self.cores / 4

    def __str__(self) -> str:
        size = "" if self.memory_gib is None else f", {self.memory_gib:.0f} GiB"
        cores = "" if self.cores is None else f"{self.cores} × "
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{cores}{self.processor}{size}; {versions}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, 'unknown processor')} ({platform.machine()})"


@dataclass(frozen=True)
class Result:
    """The figures of a suite.

    Attributes:
        date: of the measurement, in ISO 8601.
        method: what was run and how often.
        remark: what else one must know, such as that the machine was busy.
    """

    suite: str
    date: str
    method: str
    machine: Machine
    figures: tuple[Figure, ...]
    remark: str = ""

    def save(self, folder: Path = RESULTS) -> Path:
        """Write it, in place of the last one."""
        path = folder / f"{self.suite}.json"
        data = asdict(self) | {"figures": [_sparse(one) for one in self.figures]}
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, suite: str, folder: Path = RESULTS) -> Result | None:
        """The last one kept, if there is one."""
        path = folder / f"{suite}.json"
        if not path.is_file():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        figures = tuple(Figure(**one) for one in data.pop("figures"))
        return cls(**data | {"machine": Machine(**data["machine"]), "figures": figures})


def _sparse(one: Figure) -> dict[str, object]:
    """Without what is as by default, and with no more digits than mean something."""
    plain = Figure(*one.key, None)
    values = {
        name: float(f"{value:.5g}") if isinstance(value, float) and not one.exact else value
        for name, value in asdict(one).items()
    }
    return {
        name: value
        for name, value in values.items()
        if name == "middle" or value != getattr(plain, name) or name in ("table", "row", "column")
    }


# -- what changed

Verdict = Literal["better", "worse", "changed", "", "new", "gone", "other machine"]


@dataclass(frozen=True)
class Change:
    """A figure now and as it was kept.

    Attributes:
        ratio: now ÷ before; None where there is nothing to divide.
        verdict: empty within the noise.
    """

    now: Figure | None
    before: Figure | None
    ratio: float | None
    verdict: Verdict

    def __str__(self) -> str:
        one = self.now or self.before
        assert one is not None
        before = "–" if self.before is None else str(self.before)
        now = "–" if self.now is None else f"{self.now}"
        times = "" if self.ratio is None else f"× {self.ratio:.3f}"
        name = ": ".join(part for part in one.key if part)
        return f"{name[:74]:74} {before:>26} → {now:>26} {one.unit:5} {times:>8}  {self.verdict}"


def changes(before: Result | None, now: Result) -> Iterator[Change]:
    """Each figure against the kept one of the same place.

    A figure has left the noise when its span and the kept one's don't meet, and the medians differ
    by more than FLOOR. Times of different processors are not judged.
    """
    kept = {one.key: one for one in before.figures} if before else {}
    same = before is not None and before.machine.processor == now.machine.processor
    for one in now.figures:
        yield _change(one, kept.pop(one.key, None), same)
    for gone in kept.values():
        yield Change(None, gone, None, "gone")


def _change(now: Figure, before: Figure | None, same: bool) -> Change:
    if before is None:
        return Change(now, None, None, "new")
    ratio = now.middle / before.middle if now.middle and before.middle else None
    if now.unit and not now.exact and not same:
        return Change(now, before, ratio, "other machine")
    (low, high), (low_before, high_before) = now.span, before.span
    apart = low > high_before or high < low_before
    if now.exact:
        apart = str(now) != str(before)  # kept figures may have no more digits than are shown
    if not apart or (ratio is not None and abs(ratio - 1) < FLOOR and not now.exact):
        return Change(now, before, ratio, "")
    if not now.better:
        return Change(now, before, ratio, "changed")
    up = low > high_before
    return Change(now, before, ratio, "better" if up == (now.better == "higher") else "worse")


def may_replace(before: Result | None, now: Result) -> bool:
    """Not where a quiet machine's figures would make room for a busy one's."""
    return before is None or before.machine.busy or not now.machine.busy
