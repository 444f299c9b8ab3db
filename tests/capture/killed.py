"""Children that are killed while they record; run as a program of its own, to fork safely.

``python -m tests.capture.killed DIRECTORY [NUMBER]`` prints one JSON line for each child: where it
recorded, the moment at which it died, and how its steps stood. NUMBER of them die at random.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep, time

import numpy as np

from routeprof.recording import writer as writer_module
from routeprof.topology import LEVELS
from tests.capture.oracle import layers_of, random_step
from tests.capture.recordings import flush, recorder_of, serve

LAYERS = layers_of((8, 2), (6, 3))
WINDOW = 0.05


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def steps(seed: int):
    """The same steps in the child and in whoever checks them."""
    random = np.random.default_rng(seed)
    while True:
        yield random_step(random, LAYERS, 2, 2)


# -- moments inside a flush


def before_the_part(recorder) -> None:
    writer_module.pq.ParquetWriter.write_table = lambda *args, **kwargs: die()


def half_a_part(recorder) -> None:
    def half(path):
        path.write_bytes(path.read_bytes()[:100])
        die()

    writer_module.seal = half


def before_the_rename(recorder) -> None:
    Path.replace = lambda self, target: die()


def after_the_rename(recorder) -> None:
    replace = Path.replace
    Path.replace = lambda self, target: (replace(self, target), die())


def half_a_state(recorder) -> None:
    def half(self, text, **options):
        self.write_bytes(text.encode()[: len(text) // 2])
        die()

    Path.write_text = half


def after_the_state(recorder) -> None:
    write_state = recorder.writer.write_state
    recorder.writer.write_state = lambda **changes: (write_state(**changes), die())


MOMENTS: dict[str, tuple[Callable, int]] = {
    "before_the_part": (before_the_part, 3),
    "half_a_part": (half_a_part, 3),
    "before_the_rename": (before_the_rename, 3),
    "after_the_rename": (after_the_rename, 4),
    "half_a_state": (half_a_state, 4),
    "after_the_state": (after_the_state, 4),
}
"""What kills the child in its fourth flush, and how many flushes must be there."""

STEPS_A_FLUSH = 5


def in_a_flush(directory: Path, moment: str) -> None:
    recorder, capture = recorder_of(directory, LAYERS, level="steps")
    source = steps(0)
    for number in range(4):
        for _ in range(STEPS_A_FLUSH):
            serve(capture, next(source))
        if number == 3:
            MOMENTS[moment][0](recorder)
        flush(recorder)


# -- at any time


def at_any_time(directory: Path, log: mmap.mmap, seed: int, level: str = "steps") -> None:
    """Record until killed, with the drain thread at work; the log holds each step's end."""
    rings = {"ring": 65536, "token_ring": 262144}
    _, capture = recorder_of(directory, LAYERS, level=level, window=WINDOW, **rings)
    for number, step in enumerate(steps(seed)):
        serve(capture, step)
        struct.pack_into("d", log, 8 * (number + 1), time())
        struct.pack_into("q", log, 0, number + 1)


def killed_after(parts: int, directory: Path, log: mmap.mmap, seed: int) -> float:
    """Kill a child when it has written so many parts; returns the time of its death."""
    child = os.fork()
    if not child:
        at_any_time(directory, log, seed)
    wanted = directory / "rank-00000" / f"part-{parts - 1:06d}.parquet"
    while not wanted.exists():
        os.sched_yield()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return time()


def killed_at_random(directory: Path, log: mmap.mmap, seed: int, level: str) -> float:
    """Kill a child at any moment; returns when it died.

    One in four while it begins, the others within ten windows after the first one.
    """
    child = os.fork()
    if not child:
        at_any_time(directory, log, seed, level)
    first = directory / "rank-00000" / "part-000000.parquet"
    while seed % 4 and not first.exists():
        os.sched_yield()
    sleep(float(np.random.default_rng(seed).uniform(0, 10 * WINDOW)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return time()


def ends_in(log: mmap.mmap) -> tuple[float, ...]:
    """When each step ended, as the child noted after it."""
    return struct.unpack_from(f"{struct.unpack_from('q', log, 0)[0]}d", log, 8)


def at_random(base: Path, number: int) -> None:
    for seed in range(100, 100 + number):
        log, level = mmap.mmap(-1, 8 << 20), LEVELS[seed % len(LEVELS)]
        directory = base / f"random {seed}"
        died = killed_at_random(directory, log, seed, level)
        said = {"directory": str(directory), "random": seed, "level": level, "died": died}
        print(json.dumps(said | {"ends": ends_in(log)}))
        log.close()


def main(base: Path, number: int) -> None:
    for moment, (_, flushes) in MOMENTS.items():
        child = os.fork()
        if not child:
            in_a_flush(base / moment, moment)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        print(json.dumps({"directory": str(base / moment), "flushes": flushes}))
    for seed, parts in enumerate((1, 2, 3, 5, 8)):
        log, directory = mmap.mmap(-1, 8 << 20), base / f"after {parts} parts"
        died = killed_after(parts, directory, log, seed)
        said = {"directory": str(directory), "seed": seed, "died": died, "ends": ends_in(log)}
        print(json.dumps(said))
    at_random(base, number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
