"""Placements compared: figures rank by rank, what is fitted on, and what is held out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import routeprof
from routeprof.errors import UsageError
from routeprof.topology import Layer
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.comparison import compare
from routeprof.whatif.eplb import rebalance_experts
from tests.capture.oracle import random_step
from tests.profile.by_hand import MOE, record

LAYERS = (
    Layer(1, "layers.1.mlp", experts=8, top_k=2, **MOE),
    Layer(2, "layers.2.mlp", experts=6, top_k=3, **MOE),
    Layer(3, "layers.3.mlp", experts=8, top_k=2, **MOE),
)
STEPS = 30


@pytest.fixture(scope="module")
def steps():
    random = np.random.default_rng(3)
    made = [random_step(random, LAYERS, 4, 3) for _ in range(STEPS)]
    for number, step in enumerate(made):
        for call in step.calls:  # the hot expert is another one in the second half
            hot = random.random(call.ids.shape) < 0.4
            call.ids[hot] = 1 if number < STEPS // 2 else 4
    return made


@pytest.fixture(scope="module")
def detailed(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("steps") / "r", steps, level="steps", layers=LAYERS)


@pytest.fixture(scope="module")
def windows(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("windows") / "r", steps, layers=LAYERS)


def loads(steps):
    return [
        np.sum([np.bincount(s.calls[n].ids.ravel(), minlength=layer.experts) for s in steps], 0)
        for n, layer in enumerate(LAYERS)
    ]


def worst_over_mean(load, slots, gpus):
    """Rank by rank in plain Python."""
    room = len(slots) // gpus
    ranks = [0.0] * gpus
    for slot, expert in enumerate(slots):
        ranks[slot // room] += load[expert] / list(slots).count(expert)
    return max(ranks) / (sum(ranks) / gpus)


def test_figures_equal_ranks_added_up_one_by_one(detailed, steps):
    made = compare(detailed, Cluster.even(2, 8))
    assert made.layers == (1, 2, 3)
    assert (made.before, made.steps) == ("contiguous", (15, 15))
    first, later = loads(steps[:15]), loads(steps[15:])
    for part, judged in ((made.fitted, first), (made.held_out, later)):
        for place, layer in enumerate(LAYERS):
            eplb = rebalance_experts(first[place][np.newaxis], 8, 1, 1, 2)[0][0]
            before = worst_over_mean(judged[place], range(layer.experts), 2)
            assert part.before[place] == pytest.approx(before)
            assert part.eplb[place] == pytest.approx(worst_over_mean(judged[place], eplb, 2))
            assert part.lower_bound[place] <= part.routeprof[place] + 1e-9
        assert part.means()["before"] == pytest.approx(part.before.mean())


def test_the_second_half_is_not_fitted_on(detailed, steps):
    made = compare(detailed, Cluster.even(2, 8))
    # Fitted on all, expert 4 would count as hot too, and EPLB's slots would be others.
    everything = loads(steps)
    others = [rebalance_experts(load[np.newaxis], 8, 1, 1, 2)[0][0].tolist() for load in everything]
    later = loads(steps[15:])
    figures = [worst_over_mean(*pair, 2) for pair in zip(later, others, strict=True)]
    assert made.held_out.eplb.tolist() != pytest.approx(figures)
    assert made.held_out.eplb.mean() > made.fitted.eplb.mean()


def test_sums_alone_hold_nothing_out(windows, steps):
    made = compare(windows, Cluster.even(2, 8))
    assert (made.steps, made.held_out) == ((0, 0), None)
    for place, load in enumerate(loads(steps)):
        eplb = rebalance_experts(load[np.newaxis], 8, 1, 1, 2)[0][0]
        assert made.fitted.eplb[place] == pytest.approx(worst_over_mean(load, eplb, 2))


def test_more_steps_than_fit_are_added_up(detailed, steps, monkeypatch):
    whole = compare(detailed, Cluster.even(2, 8), effort="low")
    monkeypatch.setattr("routeprof.whatif.loads.MOST_STEPS", 6)
    folded = compare(detailed, Cluster.even(2, 8), effort="low")
    assert folded.steps == whole.steps
    assert folded.fitted.before.tolist() == whole.fitted.before.tolist()
    assert folded.held_out.eplb.tolist() == whole.held_out.eplb.tolist()


def test_a_recorded_placement_for_as_many_ranks_is_todays(tmp_path, steps):
    alone = [replace(step, calls=step.calls[:1]) for step in steps]
    profile = record(tmp_path / "r", alone, layers=LAYERS[:1])
    rows = [[0] * 8, [7, 0, 1, 2, 3, 4, 5, 6]]
    note = [{"time": 0.0, "ep_size": 4, "physical_to_logical": rows}]
    path = profile.files.ranks[0].directory / "rank-00000" / "placements.json"
    path.write_text(json.dumps(note))
    profile = routeprof.load(tmp_path / "r")
    load = loads(steps)[0]
    made = compare(profile, Cluster.even(4, 8))
    assert made.before == "recorded"
    assert made.fitted.before[0] == pytest.approx(worst_over_mean(load, rows[1], 4))
    other = compare(profile, Cluster.even(2, 8))
    assert other.before == "contiguous"
    note[0]["physical_to_logical"] = [[0, 1, 2, 3]] * 2  # of another model
    path.write_text(json.dumps(note))
    assert compare(routeprof.load(tmp_path / "r"), Cluster.even(4, 8)).before == "contiguous"


def test_speeds_divide_the_loads_of_ranks(windows, steps):
    speed = (1.0, 0.5, 1.0, 2.0)
    made = compare(windows, Cluster((4,) * 4, speed), effort="low")
    assert made.speeds
    for place, load in enumerate(loads(steps)):
        eplb = rebalance_experts(load[np.newaxis], 16, 1, 1, 4)[0][0].tolist()
        times = [0.0] * 4
        for slot, expert in enumerate(eplb):
            times[slot // 4] += load[expert] / eplb.count(expert) / speed[slot // 4]
        assert made.fitted.eplb[place] == pytest.approx(max(times) / (load.sum() / sum(speed)))
        assert made.fitted.lower_bound[place] <= made.fitted.routeprof[place] + 1e-9
        assert made.fitted.routeprof[place] < made.fitted.eplb[place]
    assert not compare(windows, Cluster((4,) * 4, (2.0,) * 4), effort="low").speeds


def test_fewer_experts_than_gpus_have_no_placement_today(windows):
    made = compare(windows, Cluster.even(8, 16))
    assert np.isnan(made.fitted.before[1])  # 6 experts
    assert not np.isnan(made.fitted.before[[0, 2]]).any()
    assert made.fitted.means()["before"] == pytest.approx(made.fitted.before[[0, 2]].mean())


def test_what_cannot_be_is_refused(windows):
    with pytest.raises(UsageError, match="as many slots on each GPU"):
        compare(windows, Cluster((4, 6), (1.0, 1.0)))
    with pytest.raises(UsageError, match="6 slots for 8 experts"):
        compare(windows, Cluster.even(2, 6))
    with pytest.raises(UsageError, match="no tokens"):
        compare(windows.narrowed("verify", None), Cluster.even(2, 8))
