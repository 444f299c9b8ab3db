"""Disks that are full for a while: one made up, and a real one in a process of its own.

``python -m tests.capture.full_disk HOW DIRECTORY`` prints a JSON line with what was recorded.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.capture.recordings import LAYERS, flush, loads, recorder_of, serve, some


class FullDisk:
    """A writer that fails as a full disk does while ``full`` is set."""

    def __init__(self, recorder):
        self.full, self.attempts = False, threading.Semaphore(0)
        for name in ("write", "write_state"):
            setattr(recorder.writer, name, self._or_full(getattr(recorder.writer, name)))

    def _or_full(self, write):
        def wrapped(*args, **kwargs):
            if self.full:
                self.attempts.release()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args, **kwargs)

        return wrapped


def fill_the_disk(how: str, directory: Path) -> None:
    """Record on a disk that is full for a while; print the loads."""
    random, steps = np.random.default_rng(41), []
    recorder, capture = recorder_of(directory / "recording", LAYERS, level="steps")

    def work() -> None:
        for _ in range(60):
            steps.append(some(random))
            serve(capture, steps[-1])

    work()
    flush(recorder)
    make_room = _use_up(how, directory)
    failures = 0
    for _ in range(3):
        work()
        try:
            flush(recorder)
        except OSError:
            failures += 1
    recorder.switch(True)
    make_room()
    work()
    flush(recorder)
    recorder.close()
    sums = [load.tolist() for load in loads(LAYERS, steps)]
    print(json.dumps({"failures": failures, "steps": len(steps), "loads": sums}))


def _use_up(how: str, directory: Path):
    if how == "limit":
        import resource

        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, unlimited[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler.unlink


if __name__ == "__main__":
    fill_the_disk(sys.argv[1], Path(sys.argv[2]))
