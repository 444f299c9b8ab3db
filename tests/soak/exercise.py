"""The work of a soak: one recording that stays, and others that come and go beside it."""

from __future__ import annotations

import copy
import shutil
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import routeprof
from routeprof.capture import control
from routeprof.capture.recorder import Recording
from routeprof.sample_data import load_model
from routeprof.topology import LEVELS
from tests.soak.growth import holdings, only_what_is_new
from tests.soak.traffic import SCENES, Ledger, truth

TAGS = 11
"""Tags of the recording that stays: more than it has room for at once."""
RUNS = 3
WINDOW, LONG_WINDOW = 0.05, 0.5


@dataclass
class Soak:
    """What was found in each cycle.

    Attributes:
        samples: what the process held at the end of each cycle, by name; arrays, because lists
            of numbers would be a growth of Python's blocks themselves.
        costs: time of a run with capture ÷ without: of the recording that stays under its name,
            and of those that come and go under their level.
        wrong: totals that differ from the truth, failures that recordings tell of.
    """

    samples: dict[str, array[float]] = field(default_factory=dict)
    costs: dict[str, array[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    windows: int = 0

    def cost(self, name: str, on: list[float], off: list[float]) -> None:
        self.costs.setdefault(name, array("d")).append(median(on) / median(off))

    def sample(self) -> None:
        for name, value in holdings().items():
            self.samples.setdefault(name, array("d")).append(value)

    def check(self, name: str, directory: Path, ledger: Ledger) -> None:
        """Compare a recording that was stopped with what it must hold."""
        profile = routeprof.load(directory)
        self.windows += len(set(profile.totals.windows.start.tolist()))
        self.wrong += [f"{name}: {line}" for line in ledger.wrong(profile)]
        for state in control.rank_states(directory).values():
            # Full rings and windows that join the next are none: totals stay exact.
            faults = {
                name: count
                for name, count in state.problems.items()
                if name != "late_windows" and not name.startswith("lost_")
            }
            self.wrong += [f"{name}: {fault}: {count}" for fault, count in faults.items()]


def soak(
    folder: Path, go_on: Callable[[int], bool], each: Callable[[int], Any] = lambda number: None
) -> Soak:
    """Work until told to end.

    Args:
        folder: where recordings go; each is removed when it was compared.
        go_on: told how many cycles are done.
        each: called in every cycle; tests plant leaks with it.
    """
    model = load_model()
    stays, alone = copy.deepcopy(model), copy.deepcopy(model)
    found = Soak()
    with torch.inference_mode(), only_what_is_new():
        truths = {kind: truth(model, scene) for kind, scene in SCENES.items()}
        ledger = Ledger(truths)
        with routeprof.record(stays, folder / "stays", level="tokens", window=LONG_WINDOW) as long:
            number = 0
            while go_on(number):
                _stay(found, number, stays, alone, long, ledger)
                _come_and_go(found, number, model, folder / "comes", Ledger(truths))
                each(number)
                found.sample()
                number += 1
        found.check("the recording that stays", long.directory, ledger)
    return found


def _kinds(number: int) -> Iterator[str]:
    kinds = list(SCENES)
    for run in range(RUNS):
        yield kinds[(number + run) % len(kinds)]


def _stay(
    found: Soak, number: int, stays: Any, alone: Any, long: Recording, ledger: Ledger
) -> None:
    """Runs under a tag, one of them paused, in turns with a model that isn't recorded."""
    tag, on, off = f"request {number % TAGS}", [], []
    for kind in _kinds(number):
        off.append(SCENES[kind].run(alone))
        with long.tag(tag):
            on.append(SCENES[kind].run(stays))
        ledger.note(kind, tag)
    long.pause()
    SCENES[kind].run(stays)
    long.start()
    found.cost("the recording that stays", on, off)


def _come_and_go(found: Soak, number: int, model: Any, directory: Path, ledger: Ledger) -> None:
    """Attach at the next level, tag, pause from outside, detach, compare."""
    level, on, off = LEVELS[number % len(LEVELS)], [], []
    for kind in _kinds(number):
        off.append(SCENES[kind].run(model))
    before = threading.enumerate()
    with routeprof.record(model, directory, level=level, window=WINDOW) as recording:
        for kind in _kinds(number):
            with recording.tag(kind):
                on.append(SCENES[kind].run(model))
            ledger.note(kind, kind)
        for want in ("paused", "recording"):
            control.wait_for(directory, control.request(directory, want))
            SCENES[kind].run(model)
        ledger.note(kind, None)
    _joined(before)
    found.cost(f"level {level}", on, off)
    found.check(f"cycle {number}, level {level}", directory, ledger)
    shutil.rmtree(directory)


def _joined(before: list[threading.Thread]) -> None:
    """Wait for the recorder's own threads: one that listens ends after the recording does."""
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith("routeprof"):
            thread.join(30)
