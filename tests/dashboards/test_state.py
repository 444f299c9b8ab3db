from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.dashboards.state import (
    ViewState,
    control_value,
    duration,
    parse_query,
    reaching,
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
        ViewState(between=(0.0, 2.5), run="a/b", against="c"),
        ViewState(between=(12345.678, 23456.789)),
        ViewState(between=(2.5, math.inf)),
        ViewState(layer=6, expert=15, ranks=4, placement="striped"),
        ViewState(ranks=4, redundant=0),
        ViewState(ranks=4, redundant=2, nodes=2, gpu="mi300x"),
        ViewState(phase="prefill", batch=8),
        ViewState(ranks=8, gains="yes"),
        ViewState(model="kimi-k2", memory=140, dtype="mxfp4", length=131072, batch=64),
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
        "?between=5",
        "?between=5-5",
        "?between=nan-nan",
        "?between=-1-5",
        "?between=1-inf",
        "?expert=16",
        "?expert=-1",
        "?ranks=0",
        "?ranks=1e3",
        "?ranks=99999999999999999999",
        "?placement=clever",
        "?redundant=-1",
        "?redundant=65",
        "?nodes=0",
        "?nodes=two",
        "?gpu=tpu",
        "?batch=0",
        "?batch=1025",
        "?batch=8,16",
        "?gains=perhaps",
        "?model=../../etc/passwd",
        "?model=/etc/passwd",
        "?memory=0",
        "?memory=80GiB",
        "?dtype=float",
        "?length=0",
        "?length=1e6",
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


def test_placements_are_asked_for_and_taken_back(profile: Profile) -> None:
    state = with_controls(ViewState(), {"redundant": "0"}, profile)
    assert state == ViewState(redundant=0)
    assert state.query() == "?redundant=0"
    assert control_value("redundant", state, profile) == "0"
    assert with_controls(state, {"redundant": "all"}, profile) == ViewState()
    assert control_value("redundant", ViewState(), profile) == "all"


def test_batches_are_asked_for_and_taken_back(profile: Profile) -> None:
    state = with_controls(ViewState(), {"batch": "8"}, profile)
    assert state == ViewState(batch=8)
    assert state.query() == "?batch=8"
    assert state.selection == ViewState()
    assert with_controls(state, {"batch": "all"}, profile) == ViewState()
    assert control_value("batch", ViewState(), profile) == "all"


def test_gains_are_asked_for_and_taken_back(profile: Profile) -> None:
    state = with_controls(ViewState(), {"gains": "yes"}, profile)
    assert state == ViewState(gains="yes")
    assert state.query() == "?gains=yes"
    assert state.selection == ViewState()
    assert with_controls(state, {"gains": "no"}, profile) == ViewState()


def test_a_plan_is_chosen_and_taken_back(profile: Profile) -> None:
    chosen = {"model": "mixtral-8x7b", "memory": "24", "dtype": "int4", "length": "2048"}
    state = with_controls(ViewState(), chosen, profile)
    assert state == ViewState(model="mixtral-8x7b", memory=24, dtype="int4", length=2048)
    assert state.query() == "?model=mixtral-8x7b&memory=24&dtype=int4&length=2048"
    assert with_controls(state, {"model": "all"}, profile).model is None


def test_an_expert_is_one_of_its_layer(profile: Profile) -> None:
    state = parse_query("?expert=3&layer=2", profile)[0]
    assert state == ViewState(layer=2, expert=3)
    assert with_controls(state, {"layer": "6"}, profile) == ViewState(layer=6)


def test_the_scrubber_holds_a_range_also_for_all_of_the_time(profile: Profile) -> None:
    everything = control_value("between", ViewState(), profile)
    assert everything == [0.0, 8.0]
    assert duration(profile) == 8.0
    chosen = with_controls(ViewState(), {"between": [2.0, 4.0]}, profile)
    assert chosen == ViewState(between=(2.0, 4.0))
    assert control_value("between", chosen, profile) == [2.0, 4.0]
    assert with_controls(chosen, {"between": None}, profile) == ViewState()


def test_all_that_a_slider_could_reach_is_no_range_of_a_longer_recording() -> None:
    assert reaching([0, 3.5], 3.5) is None
    assert reaching([0.5, 3.5], 3.5) == [0.5, math.inf]
    assert reaching([0.5, 3], 3.5) == [0.5, 3.0]
    assert reaching([0, 3], 3.5) == [0.0, 3.0]


@pytest.mark.parametrize("between", [(2.0, math.inf), (2.0, 8.0), (2.0, 9.0), (9.0, 12.0)])
def test_a_slider_that_nobody_moved_changes_nothing(
    between: tuple[float, float], profile: Profile
) -> None:
    """Drawn anew it says what it shows, whose end is not the range's."""
    state = ViewState(between=between)
    shown = control_value("between", state, profile)
    assert np.isfinite(shown).all()
    assert with_controls(state, {"between": reaching(shown, duration(profile))}, profile) == state


def test_a_slider_moved_away_from_its_end_gives_the_range_an_end(profile: Profile) -> None:
    state = ViewState(between=(2.0, math.inf))
    moved = with_controls(state, {"between": reaching([2, 5], 8.0)}, profile)
    assert moved == ViewState(between=(2.0, 5.0))
    assert with_controls(moved, {"between": reaching([2, 8], 8.0)}, profile) == state


def test_the_slider_counts_factors_and_rests_at_the_usual_one(profile: Profile) -> None:
    assert usual_factor(profile) == 1.25
    assert control_value("factor", ViewState(), profile) == 1
    assert control_value("factor", ViewState(factor=2.0), profile) == 2
    assert with_controls(ViewState(), {"factor": 1}, profile) == ViewState()
