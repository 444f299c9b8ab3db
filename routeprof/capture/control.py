"""Start, pause, stop and watch a recording from another process, through a file beside it.

Whoever wants something writes ``control.json`` into the recording; every rank looks at it several
times a second, obeys, and says so in its ``rank.json``. Files also reach ranks in containers and,
over a shared file system, on other nodes.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Literal, get_args

from routeprof.errors import NotARecordingError
from routeprof.recording.schema import INFO_FILE, RANK_FILE, RankState
from routeprof.recording.writer import write_whole

CONTROL_FILE = "control.json"
POLL_SECONDS = 0.2
"""How often a rank looks for a request."""

HEARTBEAT_SECONDS, SILENT_SECONDS = 5.0, 15.0
"""A rank writes at least so often; it does not respond when it has been silent for so long."""

Want = Literal["recording", "paused", "stopped"]


@dataclass(frozen=True)
class Request:
    """What ``control.json`` says: the state that all ranks are to be in.

    Attributes:
        number: larger than that of any request before.
        time: seconds since the epoch.
    """

    number: int
    want: Want
    time: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Parse ``control.json``; raises ValueError, TypeError or KeyError where it is damaged."""
        data = json.loads(text)
        if data["want"] not in get_args(Want):
            raise ValueError(f"{data['want']!r} is no state")
        return cls(int(data["number"]), data["want"], float(data["time"]))


class Listener:
    """The rank's half: tells of each request once.

    Args:
        directory: the recording.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / CONTROL_FILE
        self._text = ""

    def poll(self) -> Request | None:
        """The request, if it is a new one.

        Raises:
            OSError, ValueError, TypeError, KeyError: it cannot be read; told once, too.
        """
        # Opening, where looking at the times would do: it is what makes NFS look again.
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        if text == self._text:
            return None
        self._text = text
        return Request.from_json(text)


# -- the other half


def request(directory: Path, want: Want) -> int:
    """Ask all ranks of a recording to be in a state; the newest request is the one that counts.

    Returns:
        The request's number.

    Raises:
        NotARecordingError: there is no recording in the directory, or it cannot be written to.
    """
    numbers = [state.control for state in rank_states(directory).values()]
    # There may be none, or a damaged one, which is replaced.
    with suppress(OSError, ValueError, TypeError, KeyError):
        numbers.append(Request.from_json((directory / CONTROL_FILE).read_text("utf-8")).number)
    number = max(numbers, default=0) + 1
    try:
        write_whole(
            directory / CONTROL_FILE, json.dumps(asdict(Request(number, want, time())), indent=1)
        )
    except OSError as error:
        raise NotARecordingError(
            f"cannot write to {directory} ({error.strerror}); run this as the user who records"
        ) from error
    return number


def wait_for(directory: Path, number: int, timeout: float = 5.0) -> dict[int, RankState]:
    """Wait until all ranks that live have obeyed a request, or one newer.

    Args:
        number: what ``request`` returned.
        timeout: seconds to wait at most.

    Returns:
        The states of the ranks; ``answered`` tells which have obeyed.
    """
    deadline = monotonic() + timeout
    while True:
        states = rank_states(directory)
        due = [state for state in states.values() if not answered(state, number)]
        if not any(is_alive(state) for state in due) or monotonic() > deadline:
            return states
        sleep(0.02)


def answered(state: RankState, number: int) -> bool:
    """Whether a rank has obeyed a request, or has nothing left to obey."""
    return state.control >= number or state.state == "stopped"


def rank_states(directory: Path) -> dict[int, RankState]:
    """What each rank last said of itself, by its number; damaged states are left out.

    Raises:
        NotARecordingError: there is no recording in the directory.
    """
    if not (directory / INFO_FILE).is_file():
        raise NotARecordingError(
            f"{directory} has no {INFO_FILE}; name the directory of a recording that has begun"
        )
    states = {}
    for path in sorted(directory.glob(f"rank-?????/{RANK_FILE}")):
        try:
            states[int(path.parent.name[5:])] = RankState.from_json(path.read_text("utf-8"))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return states


def health(state: RankState, now: float) -> str:
    """The state of a rank, or that it is ``dead`` or ``not responding``.

    Args:
        now: seconds since the epoch.
    """
    if state.state == "stopped":
        return "stopped"
    if not is_alive(state):
        return "dead"
    return "not responding" if now - state.updated > SILENT_SECONDS else state.state


def is_alive(state: RankState) -> bool:
    """Whether the rank's process exists; True where that cannot be told from here."""
    if (state.host, state.pid_namespace) != here():
        return True
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    with suppress(OSError):  # it may have ended without its parent's having noticed
        return Path(f"/proc/{state.pid}/stat").read_text("utf-8").rpartition(") ")[2][:1] != "Z"
    return True


def here() -> tuple[str, str]:
    """Host and PID namespace of this process: process ids mean something only within both."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return platform.node(), namespace


def silent(states: Mapping[int, RankState], number: int) -> list[str]:
    """One line for each rank that has not obeyed a request."""
    lines = []
    for rank, state in states.items():
        if not answered(state, number):
            why = "it gave no answer" if is_alive(state) else "its process is gone"
            where = f"pid {state.pid} on {state.host}"
            lines.append(f"rank {rank} ({where}) is not responding: {why}")
    return lines
