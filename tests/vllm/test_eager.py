"""Eager engines: every expert of every layer, against what the expert kernels were given."""

from __future__ import annotations

import json

import numpy as np
import pytest

from routeprof.plan.config import read_config, shape_of
from tests.vllm.conftest import Engines, Run, check_closed_form, counts, scene
from tests.vllm.models import SHAPES

LATER = scene(("oracle_dummy_pass", 48), lengths=(70, 9))
"""A second round, behind a pass of the engine's own."""


@pytest.fixture(scope="module", params=SHAPES)
def gated(request: pytest.FixtureRequest, engines: Engines) -> Run:
    """Taps where ids, logits and weights are at hand together."""
    return engines.run(request.param, scene(), LATER, record={}, enforce_eager=True)


@pytest.fixture(scope="module", params=SHAPES)
def ungated(request: pytest.FixtureRequest, engines: Engines) -> Run:
    """Taps at the routers' capture functions, of which there may be others."""
    return engines.run(
        request.param,
        scene(),
        scene(("oracle_dummy_pass", 48), ("oracle_capture_late",), lengths=(70, 9)),
        record={"gate": False, "level": "steps"},
        oracle="tests.vllm.early.EarlyOracle",
        enforce_eager=True,
    )


def check_every_expert(run: Run) -> None:
    check_closed_form(run.profile, run.shape, run.computed)
    assert counts(run.profile) == run.oracle("counts")
    steps = run.profile.totals.sums["steps"].sum(0)[run.profile.captured]
    assert steps.tolist() == [len(run.steps)] * len(run.shape.moe)
    check_configuration(run)


def check_configuration(run: Run) -> None:
    """The recording has all that the checkpoint's config.json says, and plans read the same."""
    recorded, source = run.profile.info.model.config, run.checkpoint / "config.json"
    assert recorded is not None
    written = json.loads(source.read_text())
    assert written == {name: recorded.get(name) for name in written}
    assert shape_of(recorded) == shape_of(read_config(str(source))[0])


def test_every_expert(gated: Run):
    check_every_expert(gated)


def test_every_expert_without_gate(ungated: Run):
    check_every_expert(ungated)
    assert not ungated.profile.totals.sums["gate_rows"].any()


def test_gate(gated: Run):
    profile, totals = gated.profile, gated.profile.totals
    for position, layer in zip(profile.captured, profile.layer_indices, strict=True):
        assert profile.info.layers[position].router == gated.shape.router
        assert totals.sums["gate_rows"][:, position].sum() == gated.computed
        mass = totals.lists["probability_mass"][:, position].sum(0)
        weights = totals.lists["weight_sum"][:, position].sum(0)
        assert mass.sum() == pytest.approx(gated.computed, rel=1e-5)
        np.testing.assert_allclose(mass, gated.oracle("mass")[layer], rtol=1e-4)
        np.testing.assert_allclose(weights, gated.oracle("weights")[layer], rtol=1e-4)


def test_other_capture_functions_see_everything(ungated: Run):
    """One that was there before us, until another takes its place behind us."""
    early, late = ungated.oracle("early"), ungated.oracle("late")
    for layer, all_counts in ungated.oracle("counts").items():
        assert sum(early[layer]) > 0
        assert sum(late[layer]) > 0
        assert np.add(early[layer], late[layer]).tolist() == all_counts


def test_steps_are_the_schedulers(ungated: Run):
    table = ungated.profile.step_counts()
    for layer in ungated.shape.moe:
        mine = table.layer == layer
        assert table.tokens[mine].tolist() == [step["tokens"] for step in ungated.steps]
        assert table.requests[mine].tolist() == [step["requests"] for step in ungated.steps]
        assert table.counts[mine].sum(0).tolist() == ungated.oracle("counts")[layer]


def test_same_answers(engines: Engines):
    recorded, plain = (
        engines.run("mixtral", scene(), record=record, oracle="", enforce_eager=True)
        for record in ({}, None)
    )
    assert recorded.generated == plain.generated
    assert not plain.out.exists()
