"""The placement that is put to use: fitted on all steps, of all layers, from today's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from routeprof.errors import UsageError
from routeprof.formats.placements import (
    FORMATS,
    Deployment,
    ExpertMap,
    read_placement,
    write_placement,
)
from routeprof.topology import Layer
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.comparison import compare
from routeprof.whatif.decision import decide
from routeprof.whatif.placement import place
from routeprof.whatif.today import deployment_of
from tests.capture.oracle import random_step
from tests.profile.by_hand import MOE, record

LAYERS = (
    Layer(0, "layers.0", kind="dense"),
    Layer(1, "layers.1.mlp", experts=8, top_k=2, **MOE),
    Layer(2, "layers.2", kind="dense"),
    Layer(3, "layers.3.mlp", experts=8, top_k=2, **MOE),
    Layer(4, "layers.4.mlp", experts=8, top_k=2, **MOE),
    Layer(5, "layers.5", kind="dense"),
)
"""Layer 4 never runs."""

STEPS = 24
CLUSTER = Cluster.even(2, 10)
PLACE = Deployment((1, 3, 4), 8, 2, 6)


@pytest.fixture(scope="module")
def steps():
    random = np.random.default_rng(5)
    made = [random_step(random, (LAYERS[1], LAYERS[3]), 4, 5) for _ in range(STEPS)]
    for number, step in enumerate(made):
        for call in step.calls:  # the hot expert is another one in the second half
            call.ids[random.random(call.ids.shape) < 0.4] = 1 if number < STEPS // 2 else 6
    return made


@pytest.fixture(scope="module")
def profile(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("steps") / "r", steps, level="steps", layers=LAYERS)


@pytest.fixture(scope="module")
def loads(steps):
    """[steps, layers, experts], counted one by one."""
    return np.array(
        [[np.bincount(call.ids.ravel(), minlength=8) for call in step.calls] for step in steps]
    )


def given(seed: int = 0) -> ExpertMap:
    random = np.random.default_rng(seed)
    rows = [random.permutation([*range(8), 0, 1]) for _ in PLACE.layers]
    return ExpertMap(PLACE, np.array(rows))


def test_fitted_on_all_steps(profile, loads):
    made = decide(profile, CLUSTER)
    assert (made.steps, made.moved) == (STEPS, None)
    assert made.placement.deployment == deployment_of(profile, 2) == PLACE
    slots = made.placement.slots[:2].tolist()
    assert slots == place(loads, CLUSTER).slots.tolist()
    assert slots != place(loads[: STEPS // 2], CLUSTER).slots.tolist()


def test_layers_without_tokens_stay_as_they_are(profile):
    made = decide(profile, CLUSTER)
    assert made.unmeasured == (4,)
    assert made.placement.slots[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert decide(profile, CLUSTER, today=given()).placement.slots[2].tolist() == (
        given().slots[2].tolist()
    )


def test_what_is_on_its_gpu_today_stays_in_its_slot(profile):
    made = decide(profile, CLUSTER, today=given())
    moved = 0
    old, new = (map_.by_gpu[:2].reshape(-1, 5).tolist() for map_ in (given(), made.placement))
    for before, after in zip(old, new, strict=True):
        kept = Counter(before) & Counter(after)
        in_place = Counter(b for b, a in zip(before, after, strict=True) if a == b)
        assert in_place == kept
        moved += (Counter(after) - Counter(before)).total()
    assert made.moved == moved > 0


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_no_more_moves_than_allowed(profile, moves: int):
    made = decide(profile, CLUSTER, today=given(), moves=moves)
    for before, after in zip(given().by_gpu[:2], made.placement.by_gpu[:2], strict=True):
        pairs = zip(before.tolist(), after.tolist(), strict=True)
        assert sum((Counter(a) - Counter(b)).total() for b, a in pairs) <= moves
    figures = compare(profile, CLUSTER, today=given(), moves=moves)
    assert figures.before == "given"
    if moves == 0:
        assert figures.fitted.routeprof.tolist() == figures.fitted.before.tolist()


def test_every_file_can_be_todays(profile, loads, tmp_path):
    write_placement(given(), tmp_path)
    sums = loads[: STEPS // 2].sum(0)
    shares = sums / given().replicas[:2]
    by_gpu = np.array([[shares[n][gpu].sum() for gpu in given().by_gpu[n]] for n in range(2)])
    for name in (name for files in FORMATS.values() for name in files):
        if not (tmp_path / name).exists():
            continue
        today = read_placement(tmp_path / name, PLACE)
        made = compare(profile, CLUSTER, effort="low", today=today)
        assert made.fitted.before == pytest.approx(by_gpu.max(1) / by_gpu.mean(1))


def test_todays_placement_of_another_model(profile):
    other = replace(PLACE, layers=(1, 2, 3))
    with pytest.raises(UsageError, match="pass one for this"):
        decide(profile, CLUSTER, today=ExpertMap(other, given().slots))
    with pytest.raises(UsageError, match="has 10 slots, not 12"):
        decide(profile, Cluster.even(2, 12), today=given(), moves=1)
