"""What a watcher tells, and how often, by a clock that the tests turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import routeprof
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.news import News, found_now
from routeprof.diagnose.question import Question
from tests.diagnose.made import EXPERTS, Step, one_hot, record, steady


class Turned:
    """A clock, and what is told by it."""

    def __init__(self, period: float = 300) -> None:
        self.now = 1000.0
        self.news = News(period, lambda: self.now)

    def __call__(self, *codes: str, after: float = 0) -> list[str]:
        self.now += after
        return [one.code for one in self.news.of(finding(code) for code in codes)]


def finding(code: str, severity: str = "warning", phase: str = "all", said: str = "") -> Finding:
    return Finding(code, severity, said, "do", phase=phase)  # type: ignore[arg-type]


def test_a_finding_is_told_once_while_it_lasts():
    told = Turned()
    assert told("a") == ["a"]
    assert told("a", after=10_000) == []
    assert told("a", "b") == ["b"]


def test_what_comes_back_is_told_again_but_not_too_soon():
    told = Turned()
    assert told("a") == ["a"]
    assert told(after=10) == []
    assert told("a", after=10) == []  # too soon
    assert told("a", after=279.9) == []
    assert told("a", after=0.2) == ["a"]  # it is still there
    assert told(after=300) == []
    assert told("a") == ["a"]


def test_what_is_gone_before_it_may_be_told_is_not_told():
    told = Turned()
    told("a")
    told(after=10)
    assert told("a", after=10) == []
    assert told(after=300) == []


def test_codes_do_not_hold_each_other_up():
    told = Turned()
    told("a")
    assert told("b", after=1) == ["b"]


def test_without_a_period_all_that_is_new_is_told():
    told = Turned(period=0)
    assert [told("a"), told(), told("a"), told("a")] == [["a"], [], ["a"], []]


def test_other_figures_are_no_news_but_another_severity_is():
    told = Turned()
    assert told.news.of([finding("a", said="3.1")])
    assert not told.news.of([finding("a", said="3.2")])
    assert not told.news.of([finding("a", severity="error")])  # too soon
    told.now += 300
    assert told.news.of([finding("a", severity="error")])


def test_two_of_one_code_at_once_are_told_one_after_the_other():
    told = Turned()
    both = [finding("a", phase="decode"), finding("a", phase="prefill")]
    assert [one.phase for one in told.news.of(both)] == ["decode"]
    told.now += 300
    assert [one.phase for one in told.news.of(both)] == ["prefill"]


def test_the_gravest_come_first():
    news = News(300, lambda: 0.0)
    found = [finding("c", "info"), finding("b"), finding("a", "error")]
    assert [one.code for one in news.of(found)] == ["a", "b", "c"]


def test_what_nobody_took_is_told_again_when_it_may():
    told = Turned()
    told("a")
    told.news.failed(finding("a", said="other figures"))
    assert told("a", after=10) == []
    assert told("a", after=290) == ["a"]


@given(st.lists(st.tuples(st.floats(0, 400), st.sets(st.sampled_from("abc"))), max_size=40))
def test_each_code_at_most_once_a_period_and_only_what_is_there(
    looks: list[tuple[float, set[str]]],
):
    told, times = Turned(), {}
    for after, present in looks:
        for code in told(*present, after=after):
            assert code in present
            assert told.now - times.get(code, -1e9) >= 300 - 1e-9
            times[code] = told.now
        assert present <= times.keys()  # the first time is never too soon


def test_it_judges_the_newest_stretch_and_the_whole_capture(tmp_path: Path):
    """Skew that is over is no finding; a layer that was silent all along is."""
    steps = [Step([step.counts[0], None]) for step in steady(one_hot(9))]
    steps += [Step([step.counts[0], None]) for step in steady(np.ones(EXPERTS))]
    whole = routeprof.load(record(tmp_path / "run", steps, windows=2))
    start = float(whole.totals.windows.start.min())
    early = whole.select(between=(start, start + 1.5))
    late = whole.select(between=(start + 1.5, start + 9))
    codes = [
        [one.code for one in found_now(whole, Question(part)) if one.severity != "info"]
        for part in (early, late)
    ]
    assert codes == [["silent-layers", "hot-experts"], ["silent-layers"]]


def test_an_engine_that_does_nothing_now_is_no_alert(tmp_path: Path):
    whole = routeprof.load(record(tmp_path / "run", steady(np.ones(EXPERTS))))
    nothing = whole.select(between=(0, 1))
    assert not nothing.totals.lists["counts"].sum()
    found = found_now(whole, Question(nothing))
    assert [one.code for one in found if one.severity != "info"] == []


@pytest.mark.parametrize("age", [1, 3600])
def test_a_killed_process_is_told_once(tmp_path: Path, age: float):
    whole = routeprof.load(record(tmp_path / "run", steady(np.ones(EXPERTS)), state="recording"))
    assert whole.files is not None
    state = whole.files.ranks[0].state
    assert state is not None
    found = found_now(whole, Question(whole, now=state.updated + age))
    assert [one.code for one in found].count("not-stopped") == (age > 30)
