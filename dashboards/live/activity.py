"""Is the engine alive? Told from the signs of life that each rank leaves in its rank.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from routeprof.dashboards.formats import plural, seconds
from routeprof.recording.reader import RankFiles
from routeprof.recording.schema import RankState

Kind = Literal["waiting", "live", "idle", "paused", "quiet", "stopped"]

IDLE_SECONDS = 10.0
"""A live engine without new tokens for so long is called idle."""


@dataclass(frozen=True)
class Activity:
    """What the engine is doing.

    Attributes:
        kind: ``quiet`` is a process that gave no sign of life: killed, or hanging.
        text: one line that explains it.
    """

    kind: Kind
    text: str


WAITING = Activity("waiting", "No process has written to this recording yet.")


def activity(ranks: Sequence[RankFiles], last_tokens: float | None, now: float) -> Activity:
    """What the ranks of a recording are doing.

    Args:
        last_tokens: end of the newest window, seconds since the epoch.
        now: the time, likewise.
    """
    states = [rank.state for rank in ranks if rank.state is not None]
    if not states:
        return WAITING
    running = [state for state in states if state.state != "stopped"]
    if not running:
        return Activity("stopped", "The recording was stopped and is complete.")
    silent = [state for state in running if is_quiet(state, now)]
    if silent:
        return _quiet(silent, len(states), now)
    if all(state.state == "paused" for state in running):
        return Activity("paused", "Recording is paused: the engine runs, nothing is counted.")
    age = None if last_tokens is None else now - last_tokens
    if age is None or age > IDLE_SECONDS:
        since = "so far" if age is None else f"for {seconds(round(age))}"
        return Activity("idle", f"The engine is there and has routed no tokens {since}.")
    return Activity("live", "The recording is being written.")


def is_quiet(state: RankState, now: float) -> bool:
    """Whether a rank that should be writing has missed several flushes."""
    patience = 5.0 + 3 * state.flush_seconds
    return state.state != "stopped" and now - state.updated > patience


def _quiet(silent: Sequence[RankState], ranks: int, now: float) -> Activity:
    age = seconds(round(now - max(state.updated for state in silent)))
    who = "The process" if ranks == 1 else f"{len(silent)} of {plural(ranks, 'rank')}"
    lost = f"At most the last {silent[0].flush_seconds:g} s are missing, unless the disk is full."
    return Activity("quiet", f"{who} gave no sign of life for {age}: killed, or hanging. {lost}")
