"""Live recordings against SGLang's own recorder in the same engine, and closed forms."""

from __future__ import annotations

import json
import random
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routeprof.plan.config import read_config, shape_of
from tests.sglang.conftest import Engines, Run, check_closed_form, counts, scene
from tests.sglang.models import SHAPES

SINGLES = [scene(60), scene(7, seed=1), scene(33, seed=2)]
"""One request at a time: no two engines can batch them differently."""

MIXED = scene(1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 7, new=12, seed=3)
PHASES = {1: "prefill", 2: "decode", 3: "mixed"}
"""SGLang's forward modes."""


def physical(records: list[dict[str, Any]]) -> torch.Tensor:
    """Assignments of each slot in all passes, [layers, slots]."""
    return sum(record["global_physical_count"].long() for record in records)


# -- every token


FOLLOWS_FIRST = {"prompts": [SINGLES[0]["prompts"][0] + [7, 8, 9]], "new": 8}
"""A prompt that begins as one that was served before."""

ROUNDS = [
    *SINGLES,
    MIXED,
    FOLLOWS_FIRST,
    scene(40, 12, seed=4, want="paused"),
    scene(25, 50, seed=5, want="recording"),
]
RECORDED = (0, 1, 2, 3, 4, 6)


@pytest.fixture(scope="module")
def tokens(engines: Engines) -> Run:
    return engines.run(
        "qwen3", ROUNDS, {"level": "tokens"}, expert_distribution_recorder_mode="per_token"
    )


def test_every_expert(tokens: Run):
    """Also that a pause lets a round go by, and that cached rows are not routed."""
    assert tokens.requests(4)[0]["cached"] >= 60
    check_closed_form(tokens.profile, tokens.shape, tokens.computed(*RECORDED))
    assert counts(tokens.profile) == physical(tokens.records(*RECORDED)).tolist()


def test_the_configuration_is_the_checkpoints(tokens: Run):
    source = tokens.out.parent.parent / "models" / "qwen3" / "config.json"
    recorded = tokens.profile.info.model.config
    assert recorded is not None
    written = json.loads(source.read_text())
    found = {name: recorded.get(name) for name in written}
    rope = found.pop("rope_parameters")
    assert rope is not None
    assert rope.items() >= written.pop("rope_parameters").items()  # SGLang adds an older name
    assert found == written
    assert shape_of(recorded) == shape_of(read_config(str(source))[0])


def test_cached_tokens_are_said(tokens: Run):
    assert tokens.profile.files is not None
    (rank,) = tokens.profile.files.ranks
    assert rank.state is not None
    cached = sum(request["cached"] for request in tokens.requests(*RECORDED))
    assert rank.state.facts == {"prefix_cached_tokens": cached}


@pytest.mark.parametrize("mode", [1, 2])
def test_phases(tokens: Run, mode: int):
    records = [one for one in tokens.records(*RECORDED) if one["forward_mode"] == mode]
    assert counts(tokens.profile, phase=PHASES[mode]) == physical(records).tolist()


def test_every_row(tokens: Run):
    records = tokens.records(*RECORDED)
    positions = [position for one in records for position in one["positions"]]
    for layer in tokens.shape.moe:
        table = tokens.profile.tokens(layer)
        ids = [one["topk_ids_of_layer"][layer, :, : tokens.shape.top_k] for one in records]
        assert table.ids.tolist() == torch.cat(ids).tolist()
        assert table.position.tolist() == positions
        rows = [len(list(rows)) for _, rows in groupby(table.step.tolist())]
        assert rows == [len(one["positions"]) for one in records]


def test_requests_keep_their_numbers(tokens: Run):
    table = tokens.profile.tokens(tokens.shape.moe[0])
    rows: dict[int, list[int]] = {}
    for request, position in zip(table.request.tolist(), table.position.tolist(), strict=True):
        rows.setdefault(request, []).append(position)
    served = tokens.requests(*RECORDED)
    # Those of the pause have numbers, too.
    rounds = [number for number, one in enumerate(ROUNDS) for _ in one["prompts"]]
    numbers = [number for number, one in enumerate(rounds) if one in RECORDED]
    assert sorted(rows) == numbers
    ends = [len(one["prompt"]) + len(one["generated"]) - 1 for one in served]
    expected = [list(range(one["cached"], end)) for one, end in zip(served, ends, strict=True)]
    assert sorted(rows.values()) == sorted(expected)


def test_steps(tokens: Run):
    records, steps = tokens.records(*RECORDED), tokens.profile.step_counts()
    first = steps.layer == tokens.shape.moe[0]
    assert steps.phase[first].tolist() == [PHASES[one["forward_mode"]] for one in records]
    requests = [len(one["extend_seq_lens"] or one["input_ids"]) for one in records]
    assert steps.requests[first].tolist() == requests


def test_gate(tokens: Run):
    profile, rows = tokens.profile, tokens.computed(*RECORDED)
    totals = profile.totals
    for position in profile.captured:
        assert totals.sums["gate_rows"][:, position].sum() == rows
        mass = totals.lists["probability_mass"][:, position].sum(0)
        weights = totals.lists["weight_sum"][:, position].sum(0)
        assert mass.sum() == pytest.approx(rows, rel=1e-4)
        # Qwen3 normalises the weights of the chosen experts.
        assert weights.sum() == pytest.approx(rows, rel=1e-2)
        assert 0 < totals.sums["entropy_sum"][:, position].sum() / rows < np.log(16)


# -- with and without


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Run:
    return engines.run("qwen3", SINGLES)


@pytest.fixture(scope="module")
def alone(engines: Engines) -> Run:
    """Recorded by the command, and by nobody else."""
    command = [str(Path(sys.executable).with_name("routeprof")), "run", "-o", "OUT", "--"]
    return engines.run("qwen3", SINGLES, prefix=command)


def test_dormant(plain: Run):
    assert not plain.out.exists()
    assert "routeprof" not in plain.log


def test_own_recorder_off(tokens: Run, alone: Run):
    check_closed_form(alone.profile, alone.shape, alone.computed())
    assert counts(alone.profile) == physical(tokens.records(0, 1, 2)).tolist()


def test_same_answers(tokens: Run, plain: Run, alone: Run):
    assert alone.generated == plain.generated
    assert tokens.generated[:3] == plain.generated


# -- prompts in pieces, beside others' answers; experts that are moved and replicated


def slots(experts: int, redundant: int, layers: int = 3) -> list[list[int]]:
    """A placement: the logical expert of each slot, by layer."""
    source = random.Random(experts)
    rows = []
    for _ in range(layers):
        row = [*range(experts), *source.choices(range(experts), k=redundant)]
        source.shuffle(row)
        rows.append(row)
    return rows


def placed(engines: Engines, model: str, *rounds: Any, redundant: int, **engine: Any) -> Run:
    location = {"physical_to_logical_map": slots(SHAPES[model].experts, redundant)}
    return engines.run(
        model,
        rounds,
        {"gate": redundant == 0},
        ep_num_redundant_experts=redundant,
        init_expert_location=json.dumps(location),
        ep_dispatch_algorithm="dynamic",
        **engine,
    )


@pytest.fixture(scope="module")
def chunked(engines: Engines) -> Run:
    return placed(
        engines,
        "qwen3",
        MIXED,
        scene(150, 90, 200, 70, new=30, seed=6),
        redundant=5,
        expert_distribution_recorder_mode="stat",
        chunked_prefill_size=32,
        enable_mixed_chunk=True,
    )


@pytest.fixture(scope="module")
def grouped(engines: Engines) -> Run:
    return placed(engines, "glm", MIXED, redundant=0, expert_distribution_recorder_mode="per_pass")


def test_chunked_and_mixed(chunked: Run):
    check_closed_form(chunked.profile, chunked.shape, chunked.computed())
    assert sum(counts(chunked.profile, phase="mixed")[0]) > 0
    stat = sum(chunked.dump(one)["logical_count"].long().sum(0) for one in (0, 1))
    assert counts(chunked.profile) == stat.tolist()


def test_shared_experts_and_grouped_routing(grouped: Run):
    check_closed_form(grouped.profile, grouped.shape, grouped.computed())
    in_slots = physical(grouped.records(0))
    places = torch.tensor(slots(grouped.shape.experts, 0))
    assert grouped.dump(0)["last_physical_to_logical_map"].tolist() == places.tolist()
    logical = torch.zeros_like(in_slots).scatter_add_(1, places, in_slots)
    assert counts(grouped.profile) == logical[1:].tolist()
    assert counts(grouped.profile) != in_slots[1:].tolist()


@pytest.mark.parametrize(("run", "redundant"), [("chunked", 5), ("grouped", 0)])
def test_placement_is_noted(request: pytest.FixtureRequest, run: str, redundant: int):
    recorded = request.getfixturevalue(run)
    (noted,) = json.loads((recorded.out / "rank-00000" / "placements.json").read_text())
    assert noted["physical_to_logical"] == slots(recorded.shape.experts, redundant)
    assert noted["ep_size"] == 1


# -- several ranks


def test_tensor_parallel_twins(engines: Engines):
    run = engines.run("mixtral", [*SINGLES, MIXED], {}, tp_size=2)
    check_closed_form(run.profile, run.shape, run.computed())
    assert run.profile.files is not None
    roles = [rank.state.role for rank in run.profile.files.ranks if rank.state is not None]
    assert [(role.tp, role.owns_tokens) for role in roles] == [(0, True), (1, False)]


def test_pipeline_stages(engines: Engines):
    """Each stage has layers of its own, and all of the tokens."""
    run = engines.run("qwen3", [*SINGLES, MIXED], {}, pp_size=2)
    check_closed_form(run.profile, run.shape, run.computed())
    assert run.profile.files is not None
    roles = [rank.state.role for rank in run.profile.files.ranks if rank.state is not None]
    assert [(role.pp, role.owns_tokens) for role in roles] == [(0, True), (1, True)]
