"""Engines in their default mode: compiled, from a cold cache and from a warm one.

A compiled graph does not pass through Python, so there is no witness inside. What must come out is
a closed form, or, with vLLM's routing simulator, a distribution that is known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.vllm.conftest import Engines, Run, check_closed_form, counts, scene
from tests.vllm.models import SHAPES
from tests.vllm.piecewise import OPTIONS

STRATEGY = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
GRAPHS = "Directly load the compiled graph(s)"
AHEAD = "Directly load AOT compilation"
"""What vLLM logs when it takes a graph from its cache."""


@dataclass(frozen=True)
class Restarts:
    """The same engine started again and again over one cache, empty at first.

    Attributes:
        plain: without routeprof, if there was such a start; it comes first.
        cold, warm: the first and the second start with routeprof.
    """

    plain: Run | None
    cold: Run
    warm: Run


def restarts(engines: Engines, model: str, name: str, *, plain: bool, **how: Any) -> Restarts:
    """Start three times, or twice, and let each serve the same requests."""
    cache = engines.fresh_cache(f"cache-{name}")
    assert {path.name for path in cache.iterdir()} <= {"modelinfos"}
    starts = [None, {}, {}] if plain else [{}, {}]
    runs = [engines.run(model, scene(), record=record, cache=cache, **how) for record in starts]
    return Restarts(runs[0] if plain else None, runs[-2], runs[-1])


def check(started: Restarts) -> None:
    """Everything is counted, also where the cache holds graphs of an engine without routeprof."""
    for run in (started.cold, started.warm):
        check_closed_form(run.profile, run.shape, run.computed)
    assert counts(started.warm.profile) == counts(started.cold.profile)
    assert started.warm.generated == started.cold.generated
    if started.plain is not None:
        assert started.plain.generated == started.cold.generated


@pytest.mark.parametrize("model", SHAPES)
def test_default_mode(model: str, engines: Engines):
    check(restarts(engines, model, model, plain=model == "mixtral"))


@pytest.mark.parametrize(
    ("ahead", "loaded"), [("0", GRAPHS), ("1", AHEAD)], ids=["graphs", "ahead"]
)
def test_warm_cache(ahead: str, loaded: str, engines: Engines):
    """As on GPUs: the second start traces nothing, it takes graphs from disk, taps and all."""
    started = restarts(
        engines,
        "mixtral",
        f"piecewise-{ahead}",
        plain=True,
        piecewise=True,
        variables={"VLLM_USE_AOT_COMPILE": ahead},
        compilation_config=OPTIONS,
    )
    check(started)
    assert started.plain is not None
    assert loaded not in started.plain.log
    assert loaded not in started.cold.log
    assert loaded in started.warm.log


# -- routing that is known beforehand


def simulated(engines: Engines, strategy: str) -> Run:
    run = engines.run(
        "qwen3",
        scene(),
        record={"gate": False},
        cache=engines.fresh_cache(f"cache-{strategy}"),
        variables={STRATEGY: strategy},
    )
    check_closed_form(run.profile, run.shape, run.computed)
    return run


def test_routing_by_row(engines: Engines):
    run = simulated(engines, "by_row")
    experts, top_k = run.shape.experts, run.shape.top_k
    choices = [np.arange(step["tokens"] * top_k) % experts for step in run.steps]
    expected = np.bincount(np.concatenate(choices), minlength=experts).tolist()
    assert counts(run.profile) == dict.fromkeys(run.shape.moe, expected)


def test_routing_at_random(engines: Engines):
    run = simulated(engines, "uniform_random")
    experts = run.shape.experts
    share = run.shape.top_k / experts
    for loads in counts(run.profile).values():
        mean = run.computed * share
        # A token chooses k different experts: loads hang together a little.
        squares = (np.square(np.array(loads) - mean) / (mean * (1 - share))).sum()
        assert abs(deviations(squares * (experts - 1) / experts, experts - 1)) < 6


def deviations(chi_square: float, freedom: int) -> float:
    """How many standard deviations a chi-square value is away (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
