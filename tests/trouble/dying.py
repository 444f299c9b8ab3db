"""A rank that is killed while it records.

``python -m tests.trouble.dying DIRECTORY RUN RANK`` writes the parts of ``lives``, and dies.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from routeprof.capture import control
from routeprof.recording.schema import RankState
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import RankRole
from tests.recording.made import info_of, random_parts, write_part

WORLD = 2


def rows_of(name: str, rank: int) -> list[list[dict]]:
    """What the rank records in the directory of this name."""
    return random_parts(sum(name.encode()) + rank, parts=3, rank=rank)


def writer_of(directory: Path, run: str, rank: int) -> RecordingWriter:
    """As a recorder begins."""
    host, namespace = control.here()
    state = RankState(
        RankRole(rank, WORLD), os.getpid(), host, pid_namespace=namespace, flush_seconds=1.0
    )
    return RecordingWriter(directory, info_of(id=f"of {directory.name}", run=run), state)


def main(directory: Path, run: str, rank: int) -> None:
    writer = writer_of(directory, run, rank)
    for rows in rows_of(directory.name, rank):
        write_part(writer, rows)
    writer.write_state()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
