"""Watching ``live.py`` from outside: its process, its own account, and what routeprof recorded."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pyarrow.parquet as pq

INTERRUPTIBLE = ("env", "--default-signal=INT")
"""Before a command: shells start what runs in the background deaf to interrupts."""

PATIENCE = 120.0
Counts = list[list[int]]
"""Assignments [layers, experts] of one pass."""

BUSY = "import sys, time; print('up', flush=True)\nwhile not sys.stdin.closed: time.sleep(0.001)"
"""A program that does nothing for long, and nothing of interest."""


class Program:
    """A program that ends when told to; killed if the test fails before."""

    def __init__(self, folder: Path, command: list[str], mode: str = "generate") -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, str(folder), mode],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> dict[str, Any]:
        """Let it end, and hear what it says of itself."""
        (self.folder / "stop").touch()
        out, error = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, error
        said: dict[str, Any] = json.loads(out)
        return said

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


class Spoken:
    """A process that has said that it is up; killed at the end."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"
        return self.process

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def until(true: Callable[[], bool], program: Program | subprocess.Popen[Any]) -> None:
    """Wait for a condition, while the program lives."""
    process = program.process if isinstance(program, Program) else program
    late = monotonic() + PATIENCE
    while not true():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert monotonic() < late
        os.sched_yield()


def program_log(folder: Path) -> list[Counts]:
    """The program's account of its passes so far."""
    try:
        lines = (folder / "passes.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    passes = [json.loads(line) for line in lines if line.endswith("\n")]
    # The experts of transformers' loop are followed by one for masked assignments.
    return [[layer[:8] for layer in layers] for layers in passes]


def step_counts(recording: Path) -> list[Counts]:
    """The steps that a recording holds, read without routeprof."""
    steps: dict[int, dict[int, list[int]]] = {}
    for part in sorted(recording.glob("rank-*/steps-*.parquet")):
        for row in pq.read_table(part).to_pylist():
            steps.setdefault(row["step"], {})[row["layer"]] = row["counts"]
    assert sorted(steps) == list(range(len(steps)))
    return [[layers[key] for key in sorted(layers)] for _, layers in sorted(steps.items())]


def segments(log: list[Counts], steps: list[Counts]) -> list[tuple[int, int]]:
    """Where in the log the steps are: (first, one past the last) of each unbroken run.

    Each run is matched with the first place after the one before where it fits for longest.
    """
    found, done, place = [], 0, 0
    while done < len(steps):
        lengths = [(_common(log[start:], steps[done:]), -start) for start in range(place, len(log))]
        length, first = max(lengths, default=(0, 0))
        assert length, f"step {done} is in no pass of the program's account"
        found.append((-first, -first + length))
        done, place = done + length, -first + length
    return found


def _common(log: list[Counts], steps: list[Counts]) -> int:
    """How many passes from the first on are the same."""
    same = (a == b for a, b in zip(log, steps, strict=False))
    return next((number for number, equal in enumerate(same) if not equal), len(steps[: len(log)]))
