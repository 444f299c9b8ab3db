"""Counters in Chrome's trace format: imbalance and tokens by step, beside a GPU trace.

The format is the Trace Event Format's JSON object; Perfetto and chrome://tracing read it, and
torch.profiler writes it. Its times are microseconds; torch's count from ``baseTimeNanoseconds``,
ours from the epoch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from routeprof.errors import LevelRequiredError, UsageError
from routeprof.formats.opening import reason_of
from routeprof.profile import Profile

PROCESS = 1_000_000
"""Process number of rank 0's counters, beyond those that systems give out."""


def write_trace(profile: Profile, path: Path) -> None:
    """Write the counters alone."""
    _save(path, {"displayTimeUnit": "ms", "traceEvents": list(events(profile))})


def write_beside(profile: Profile, trace: Path, path: Path) -> None:
    """Write a copy of a trace with the counters in it, on its own clock.

    Raises:
        UsageError: the trace is none, or one whose clock does not tell the time of day.
    """
    found = _load(trace)
    base = found.get("baseTimeNanoseconds")
    if not isinstance(base, int | float):
        raise UsageError(
            f"{trace} does not say when its clock began (baseTimeNanoseconds): pass a trace of "
            "torch.profiler"
        )
    added = list(events(profile, base / 1e3))
    _save(path, found | {"traceEvents": [*found["traceEvents"], *added]})


def events(profile: Profile, base: float = 0.0) -> Iterator[dict[str, Any]]:
    """Counters of every step (level steps), else of every window.

    Args:
        base: microseconds since the epoch at which the trace's clock was 0.

    Raises:
        LevelRequiredError: nobody knows when steps or windows ran.
    """
    entries = _entries(profile)
    entries = entries[np.isfinite(entries["time"])]
    if not len(entries):
        raise LevelRequiredError(
            "when steps ran is not known: a trace needs a recording with times"
        )
    for rank in sorted(entries["rank"].unique().tolist()):
        told = {"name": f"routeprof, rank {rank}"}
        yield {"ph": "M", "name": "process_name", "pid": PROCESS + rank, "args": told}
    known = all(layer.top_k is not None for layer in profile.info.layers)
    most = entries.groupby(["rank", "time"])["tokens"].transform("max")
    # Layers of a step end together: of each moment the worst one, the first if several are.
    worst = entries.assign(tokens=most).sort_values(["ratio", "layer"], ascending=[False, True])
    worst = worst.drop_duplicates(["rank", "time"]).sort_values(["rank", "time"])
    for row in worst.to_dict("records"):
        where = {"ph": "C", "pid": PROCESS + row["rank"], "ts": row["time"] * 1e6 - base}
        if np.isfinite(row["ratio"]):
            yield where | {"name": "imbalance", "args": {"worst layer": row["ratio"]}}
            yield where | {"name": "worst layer", "args": {"layer": row["layer"]}}
        if known:
            yield where | {"name": "tokens", "args": {row["phase"]: row["tokens"]}}


def _entries(profile: Profile) -> pd.DataFrame:
    """One row for each layer of a step, else of a window: time, rank, phase, tokens, imbalance."""
    if profile.has("steps") and profile.files is not None:
        steps = profile.step_counts()
        largest, total = steps.counts.max(axis=1, initial=0), steps.counts.sum(axis=1)
        frame = pd.DataFrame(
            {
                "time": steps.time,
                "rank": steps.rank,
                "phase": steps.phase,
                "layer": steps.layer,
                "tokens": steps.tokens,
            }
        )
    else:
        windows = profile.totals.windows
        largest, total = windows.max_count, windows.assignments
        phases = np.array([phase for phase, _ in profile.totals.keys], dtype=object)
        frame = pd.DataFrame(
            {
                "time": windows.end,
                "rank": windows.rank,
                "phase": phases[windows.key],
                "layer": np.array([layer.index for layer in profile.info.layers])[windows.layer],
                "tokens": windows.tokens,
            }
        )
    experts = frame["layer"].map({layer.index: layer.experts for layer in profile.info.layers})
    with np.errstate(invalid="ignore", divide="ignore"):
        return frame.assign(ratio=largest * experts.to_numpy() / total)


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        reason = reason_of(error)
        raise UsageError(f"{path} cannot be read ({reason}): pass a trace in JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise UsageError(f"{path} has no traceEvents: pass a trace in JSON")
    return found


def _save(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
