"""Assertions on routing, from pytest and from unittest."""

from __future__ import annotations

import unittest
from pathlib import Path

import numpy as np
import pytest

import routeprof
import routeprof.testing
from routeprof.errors import NotARecordingError, UsageError
from routeprof.testing import assert_balanced
from tests.diagnose.made import EXPERTS, Step, one_hot, record, steady


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("even") / "run", steady(np.ones(EXPERTS)))


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("hot") / "run", steady(one_hot(4)))


def test_public_names():
    assert routeprof.testing.__all__ == ["assert_balanced"]


def test_what_is_even_passes(even: Path):
    assert_balanced(even)
    assert_balanced(routeprof.load(even), max_imbalance=1.1, max_overflow=0.01, gpus=4)


@pytest.mark.parametrize("limit", [3.9, 4.1])
def test_the_limit_is_where_it_fails(hot: Path, limit: float):
    """One expert of 16 has four times the mean."""
    if limit > 4:
        assert_balanced(hot, max_imbalance=limit)
    else:
        with pytest.raises(
            AssertionError, match=r"hot-experts: in layer . expert 0 gets 4.00"
        ) as e:
            assert_balanced(hot, max_imbalance=limit)
        assert "→ compare tags" in str(e.value)


def test_overflow_is_that_of_the_usual_capacity(hot: Path):
    """Of 16 experts one has 4 times the mean; 1.25 − 0.8 of the room of the others is free."""
    share = (4 - 1.25) / EXPERTS
    with pytest.raises(AssertionError, match=rf"1\.25 would drop {share:.0%}"[:-1]):
        assert_balanced(hot, max_imbalance=9, max_overflow=share - 0.01)
    assert_balanced(hot, max_imbalance=9, max_overflow=share + 0.01)


def test_names_of_the_thresholds_are_taken_too(hot: Path, tmp_path: Path):
    assert_balanced(hot, hot_imbalance=4.1)
    assert_balanced(hot, fail_on="error")
    (tmp_path / "limits.toml").write_text("[thresholds]\nhot_imbalance = 4.1\n")
    assert_balanced(hot, config=tmp_path / "limits.toml")
    with pytest.raises(AssertionError):
        assert_balanced(hot, config=tmp_path / "limits.toml", max_imbalance=3)


def test_what_is_not_known_does_not_pass(even: Path, tmp_path: Path):
    with pytest.raises(AssertionError, match="max_rank_imbalance cannot be judged"):
        assert_balanced(even, max_rank_imbalance=2)
    few = record(tmp_path / "few", [Step([[2, 0] * 7 + [1, 1]] * 2)])
    with pytest.raises(AssertionError, match="needs 16 assignments an expert"):
        assert_balanced(few)
    none = record(tmp_path / "none", [Step([None, None])])
    with pytest.raises(AssertionError, match=r"nothing-captured|silent-layers|has no tokens"):
        assert_balanced(none, fail_on="error")


def test_a_silent_layer_does_not_pass(tmp_path: Path):
    steps = [Step([step.counts[0], None]) for step in steady(np.ones(EXPERTS))]
    with pytest.raises(AssertionError, match="silent-layers: 1 layer never ran"):
        assert_balanced(record(tmp_path / "run", steps), max_imbalance=3)


def test_selections(tmp_path: Path):
    steps = steady(np.ones(EXPERTS), tag="even") + steady(one_hot(4), tag="hot")
    run = record(tmp_path / "run", steps)
    assert_balanced(run, tag="even")
    with pytest.raises(AssertionError):
        assert_balanced(run, tag="hot")
    with pytest.raises(UsageError, match="does not occur"):
        assert_balanced(run, tag="other")


def test_wrong_arguments_are_no_assertion(even: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="no threshold 'imbalance'"):
        assert_balanced(even, imbalance=3)
    with pytest.raises(NotARecordingError):
        assert_balanced(tmp_path)


def test_from_unittest(even: Path, hot: Path):
    class Case(unittest.TestCase):
        def test_even(self):
            assert_balanced(even)

        def test_hot(self):
            assert_balanced(hot)

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    ((case, text),) = result.failures
    assert not result.errors
    assert case.id().endswith("test_hot")
    assert "hot-experts" in text
