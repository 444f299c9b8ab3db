"""Ranges of time as text: what is one, what is none, and that both ways agree."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof import timerange
from routeprof.errors import UsageError
from routeprof.timerange import parse_range, range_text

MILLISECONDS = st.integers(0, 10**10)


def test_the_examples_hold():
    assert doctest.testmod(timerange).failed == 0


@pytest.mark.parametrize(
    ("text", "between"),
    [
        ("10-60", (10.0, 60.0)),
        ("0-2.5", (0.0, 2.5)),
        ("1e3-1e4", (1000.0, 10_000.0)),
        ("10-", (10.0, math.inf)),
        ("0-", (0.0, math.inf)),
    ],
)
def test_ranges(text: str, between: tuple[float, float]):
    assert parse_range(text) == between


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "5", "-5", "--", "5-5", "10-5", "-1-5", "1-2-3", "1--", "10--5", "a-b", "1-b"),
        *("nan-nan", "nan-", "1-nan", "1-inf", "inf-", "inf-inf", "1e999-", "1–2", "1\n-x\ny"),
    ],
)
def test_what_is_no_range_is_said_in_one_line(text: str):
    with pytest.raises(UsageError) as raised:
        parse_range(text)
    assert str(raised.value).startswith(f"{text!r} is no range; write ")
    assert "\n" not in str(raised.value)


@given(low=MILLISECONDS, length=st.one_of(st.none(), st.integers(1, 10**10)))
def test_what_is_written_is_read_again(low: int, length: int | None):
    high = math.inf if length is None else (low + length) / 1000
    assert parse_range(range_text((low / 1000, high))) == (low / 1000, high)
