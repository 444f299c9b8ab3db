"""Thirty cycles of what ``make soak`` does for half an hour, and leaks that it must find."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import routeprof
from routeprof.sample_data import load_model
from tests.bench.kept import Machine, Result
from tests.bench.page import TEXTS, filled
from tests.soak.__main__ import Cost, figures, report
from tests.soak.exercise import Soak, soak
from tests.soak.growth import holdings, only_what_is_new, slope, trends
from tests.soak.traffic import SCENES, Ledger, truth

CYCLES = 20
PLANTED = 20
"""Samples with a leak planted between them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return soak(tmp_path_factory.mktemp("soak"), lambda number: number < CYCLES)


def test_all_totals_are_exact(found: Soak):
    assert found.wrong == []
    assert found.windows > 2 * CYCLES
    assert all(len(values) == CYCLES for values in found.samples.values())


def test_nothing_grows(found: Soak):
    assert [trend for trend in trends(found.samples) if trend.grows] == []


def test_steps_of_every_kind_of_recording_are_timed(found: Soak):
    kinds = ["level steps", "level tokens", "level windows", "the recording that stays"]
    assert sorted(found.costs) == kinds


# -- leaks


@pytest.fixture
def leaks() -> Iterator[dict[str, Callable[[], object]]]:
    kept: list[object] = []
    files: list[int] = []
    end = threading.Event()

    def thread() -> None:
        threading.Thread(target=end.wait).start()

    yield {
        # A cycle of the soak runs a hundred passes or more: an object or two for each.
        "Python blocks": lambda: kept.extend(object() for _ in range(150)),
        "resident memory, MiB": lambda: kept.append(bytearray(os.urandom(4 << 20))),
        "tensors, MiB": lambda: kept.append(torch.ones(1024)),
        "file handles": lambda: files.append(os.open(os.devnull, os.O_RDONLY)),
        "threads": thread,
        "Python threads": thread,
    }
    end.set()
    for descriptor in files:
        os.close(descriptor)


@pytest.mark.parametrize(
    "name",
    [
        "Python blocks",
        "resident memory, MiB",
        "tensors, MiB",
        "file handles",
        "threads",
        "Python threads",
    ],
)
def test_a_leak_is_found(name: str, leaks: dict[str, Callable[[], object]]):
    series: dict[str, list[float]] = {}
    with only_what_is_new():
        for _ in range(PLANTED):
            leaks[name]()
            for kind, value in holdings().items():
                series.setdefault(kind, []).append(value)
    assert name in {trend.name for trend in trends(series) if trend.grows}


def test_wrong_totals_are_found(tmp_path: Path):
    model = load_model()
    with torch.inference_mode():
        ledger = Ledger({"code": truth(model, SCENES["code"])})
        with routeprof.record(model, tmp_path / "r") as recording, recording.tag("a"):
            SCENES["code"].run(model)
    profile = routeprof.load(tmp_path / "r")
    ledger.note("code", "a")
    assert ledger.wrong(profile) == []
    ledger.note("code", "a")
    assert len(ledger.wrong(profile)) == 2  # prefill and decode
    assert "instead of" in ledger.wrong(profile)[0]


# -- the line through the samples


def test_slope_of_a_line_with_outliers():
    values = 5 + 0.25 * np.arange(1000)
    values[::5] += np.random.default_rng(0).normal(0, 1000, 200)
    assert slope(values.tolist()) == pytest.approx(0.25, abs=0.01)


def test_noise_is_no_growth():
    noise = 500 + np.random.default_rng(1).normal(0, 4, 300)
    assert not trends({"resident memory, MiB": noise.tolist()})[0].grows
    rising = noise + np.linspace(0, 60, 300)
    assert trends({"resident memory, MiB": rising.tolist()})[0].grows


# -- the cost of a step


def test_a_step_that_becomes_dearer():
    random = np.random.default_rng(2)
    steady = 1.3 + random.normal(0, 0.2, 300)
    assert not Cost.of("level steps", steady.tolist()).dearer
    rising = Cost.of("level steps", (steady * np.linspace(1, 2, 300)).tolist())
    assert rising.dearer
    assert rising.ratio > 1.3
    assert not report(300, 1, [], [rising])
    assert report(300, 1, [], [Cost.of("level steps", steady.tolist())])


def test_the_page_has_a_text_for_the_figures(found: Soak):
    costs = [Cost.of(name, ratios) for name, ratios in found.costs.items()]
    every = tuple(figures(trends(found.samples), costs))
    result = Result("soak", "2026-01-02", "Made up.", Machine("made up", 2, 8.0), every)
    text = filled((TEXTS / "soak.md").read_text(encoding="utf-8"), result)
    assert "| file handles |" in text
    assert "| level tokens |" in text
