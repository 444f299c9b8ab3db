"""CSV reports: the one writer that the CLI, the library and the dashboard share.

The contract is docs/csv.md: UTF-8 without BOM, LF, header row, full precision for integers,
``%.6g`` for floats, an empty cell for no value, rows sorted by their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from routeprof.diagnose import layer_list
from routeprof.report.files import write_text

if TYPE_CHECKING:
    from routeprof.profile import Profile

_TIMES = {"start", "end", "time"}
"""Seconds since the epoch, written as UTC: six digits would not tell one minute from the next."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_csv(frame: pd.DataFrame) -> str:
    """A table as CSV text."""
    safe = frame.copy()
    for name in safe.columns:
        if name in _TIMES:
            safe[name] = safe[name].map(_utc, na_action="ignore")
        elif not pd.api.types.is_numeric_dtype(safe[name].dtype):
            safe[name] = safe[name].map(_safe, na_action="ignore")
    return safe.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _utc(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _safe(value: object) -> object:
    """Text that no spreadsheet takes for a formula, and whose line breaks are the file's."""
    if not isinstance(value, str):
        return value
    text = f"'{value}" if value.startswith(_FORMULA) else value
    return text.replace("\r\n", "\n").replace("\r", "\n")


def findings_table(profile: Profile) -> pd.DataFrame:
    """One row for each finding."""
    rows = [
        {
            "finding": number,
            "code": finding.code,
            "severity": finding.severity,
            "layers": layer_list(finding.layers),
            "evidence": finding.evidence,
            "suggestion": finding.suggestion,
        }
        for number, finding in enumerate(profile.findings())
    ]
    columns = ["finding", "code", "severity", "layers", "evidence", "suggestion"]
    return pd.DataFrame(rows, columns=columns)


TABLES: dict[str, Callable[[Profile], pd.DataFrame]] = {
    "layers": lambda profile: profile.layers(breakdown=True),
    "experts": lambda profile: profile.experts(breakdown=True),
    "overflow": lambda profile: profile.overflow(breakdown=True),
    "windows": lambda profile: profile.windows(),
    "ranks": lambda profile: profile.rank_loads(),
    "steps": lambda profile: profile.steps(),
    "requests": lambda profile: profile.requests(),
    "affinity": lambda profile: profile.affinity(),
    "transitions": lambda profile: profile.transitions(),
    "repetition": lambda profile: profile.repetition(),
    "findings": findings_table,
}
"""Every CSV report by name."""

LEVELS_NEEDED = {
    "steps": "steps",
    "requests": "tokens",
    "affinity": "tokens",
    "transitions": "tokens",
    "repetition": "tokens",
}
"""Reports that need more than level windows."""


def available(profile: Profile) -> list[str]:
    """Names of the reports that this recording can give."""
    return [name for name in TABLES if profile.has(LEVELS_NEEDED.get(name, "windows"))]


def csv_text(profile: Profile, name: str, *, ranks: int | None = None) -> str:
    """One report as text: the bytes of the file, and of the dashboard's download.

    Args:
        ranks: as for ``Profile.rank_loads``; for that report alone.
    """
    return to_csv(profile.rank_loads(ranks) if name == "ranks" else TABLES[name](profile))


def write_csv(profile: Profile, directory: Path, *, ranks: int | None = None) -> list[Path]:
    """Write every report that the recording can give; returns the files."""
    texts = {name: csv_text(profile, name, ranks=ranks) for name in available(profile)}
    return [write_text(directory / f"{name}.csv", text) for name, text in texts.items()]
