from __future__ import annotations

from pathlib import Path

import pytest

import routeprof
from routeprof.dashboards.state import (
    ViewState,
    control_value,
    parse_query,
    usual_factor,
    with_controls,
)
from routeprof.profile import Profile
from tests.dashboards.made import HOSTILE, LONG


@pytest.fixture(scope="module")
def profile(recorded: Path) -> Profile:
    return routeprof.load(recorded)


@pytest.mark.parametrize(
    "state",
    [
        ViewState(),
        ViewState(phase="decode", tag="code", layer=2),
        ViewState(tag=HOSTILE, measure="mass", order="load"),
        ViewState(tag=LONG, factor=2.0),
        ViewState(tag="untagged"),
    ],
)
def test_a_state_survives_the_address(state: ViewState, profile: Profile) -> None:
    assert parse_query(state.query(), profile) == (state, [])


@pytest.mark.parametrize(
    "query",
    [
        "?phase=nonsense",
        "?layer=999",
        "?layer=0",  # a dense layer
        "?layer=../../etc/passwd",
        "?tag=%2e%2e%2f",
        "?factor=1.3",
        "?measure=load;drop",
        "?file=/etc/passwd",
        "?phase=%00%ff",
        "?" + "x" * 300 + "=1",
    ],
)
def test_what_does_not_exist_is_ignored_with_a_line(query: str, profile: Profile) -> None:
    state, ignored = parse_query(query, profile)
    assert state == ViewState()
    assert len(ignored) == 1
    assert len(ignored[0]) < 600


def test_a_huge_address_is_ignored(profile: Profile) -> None:
    assert parse_query("?tag=" + "a" * 10_000, profile)[1] == [
        "The address is too long and was ignored."
    ]


def test_no_recording_yet_means_no_choice() -> None:
    state, ignored = parse_query("?layer=3&order=load", None)
    assert state == ViewState(order="load")
    assert len(ignored) == 1


def test_controls_change_the_state(profile: Profile) -> None:
    state = with_controls(ViewState(), {"phase": "decode", "layer": "6", "factor": 2}, profile)
    assert state == ViewState(phase="decode", layer=6, factor=2.0)
    assert with_controls(state, {"phase": "all", "layer": "nonsense"}, profile).phase is None


def test_the_slider_counts_factors_and_rests_at_the_usual_one(profile: Profile) -> None:
    assert usual_factor(profile) == 1.25
    assert control_value("factor", ViewState(), profile) == 1
    assert control_value("factor", ViewState(factor=2.0), profile) == 2
    assert with_controls(ViewState(), {"factor": 1}, profile) == ViewState()
