"""Requests read from recordings that miss something, against loops over the tables of tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.profile import Profile
from routeprof.topology import RankRole
from routeprof.whatif.requests.served import PHASES, served_requests
from tests.capture.oracle import Call, layers_of, random_step
from tests.capture.recordings import recorder_of, serve

LAYERS = layers_of((8, 2), (6, 3), (4, 1))
ROUNDS = 16


def record(directory: Path, *, ring: int, ranks: int = 2) -> Profile:
    """Rounds of a prefill, two decode steps and a mixed one; the tag changes under way.

    In every third round the mixed step comes between the others. The last layer chooses its rows.
    With a small ring some rows of tokens are lost.
    """
    random = np.random.default_rng(7)
    for rank in range(ranks):
        role = RankRole(rank=rank, world_size=ranks, dp=rank)
        recorder, capture = recorder_of(
            directory, LAYERS, level="tokens", role=role, token_ring=ring
        )
        for number in range(4 * ROUNDS):
            phases = ["prefill", "decode", "decode", "mixed"]
            if number // 4 % 3 == 2:
                phases = ["prefill", "decode", "mixed", "decode"]
            phase = phases[number % 4]
            step = random_step(random, LAYERS, 3, 5 if phase == "prefill" else 1, phase=phase)
            step.calls[2] = Call(2, step.calls[2].ids[:2])
            if number % 7 == 1:
                step.calls[1].ids[0, 0] = 99  # no expert
            if number % 12 == 6:
                step.calls.pop(1)  # the middle layer does not run in some decode step
            with recorder.tag(("code", "prose", "json")[number // 2 % 3]):
                serve(capture, step, fresh=phase == "prefill")
        recorder.close()
    return routeprof.load(directory)


@pytest.fixture(scope="module", params=[4096, 60])
def profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return record(tmp_path_factory.mktemp("runs") / "r", ring=request.param)


def by_loops(profile: Profile, phase: str):
    """By layer and (rank, request): positions with their ids, of the phase; and first tags."""
    steps, rows, first = profile.step_counts(), {}, {}
    for layer in profile.layer_indices:
        table, own = profile.tokens(layer), defaultdict(dict)
        facts = {
            (r, s): (p, t)
            for r, s, n, p, t in zip(
                steps.rank, steps.step, steps.layer, steps.phase, steps.tag, strict=True
            )
            if n == layer
        }
        for rank, step, request, position, ids in zip(
            table.rank, table.step, table.request, table.position, table.ids, strict=True
        ):
            if request < 0:
                continue
            ran, tag = facts[rank, step]
            key = (int(rank), int(request))
            if layer == profile.layer_indices[0] and position < first.get(key, (9, ""))[0]:
                first[key] = (position, tag)
            if ran == phase:
                own[key][int(position)] = ids.tolist()
        rows[layer] = own
    return {layer: own for layer, own in rows.items() if own}, first


@pytest.mark.parametrize("phase", PHASES)
def test_whole_requests_are_those_of_the_loops(profile: Profile, phase: str):
    rows, first = by_loops(profile, phase)
    everyone = set().union(*rows.values())
    whole = sorted(
        key
        for key in everyone
        if len({tuple(sorted(own.get(key, {}))) for own in rows.values()}) == 1
        and list(range(min(rows[0][key]), max(rows[0][key]) + 1)) == sorted(rows[0][key])
    )
    made = served_requests(profile, phase)
    assert sorted(made.names) == sorted(f"{rank}/{request}" for rank, request in whole)
    assert made.left_out == len(everyone) - len(whole)
    assert made.blind == (LAYERS[2].index,)
    assert [one.layer.index for one in made.layers] == sorted(rows)
    for place, name in enumerate(made.names):
        rank, request = map(int, name.split("/"))
        key = (rank, request)
        assert made.classes[place] == first[key][1]
        assert made.tokens[place] == len(rows[0][key])
        for one in made.layers:
            mine = one.request == place
            found = dict(zip(one.turn[mine].tolist(), one.ids[mine].tolist(), strict=True))
            positions = sorted(rows[one.layer.index][key].items())
            if phase == "decode":
                assert found == dict(enumerate(ids for _, ids in positions))
            else:
                assert set(found) == {0}
                assert one.ids[mine].tolist() == [ids for _, ids in positions]


def test_something_was_left_out(profile: Profile):
    made = served_requests(profile, "decode")
    assert made.left_out > 0
    assert len(made.names) > 0


def test_prefills_beside_the_decode(profile: Profile):
    made, (rows, _) = served_requests(profile, "decode"), by_loops(profile, "prefill")
    for one in made.layers:
        for place, name in enumerate(made.names):
            rank, request = map(int, name.split("/"))
            ids = rows[one.layer.index].get((rank, request), {}).values()
            counted = Counter(expert for own in ids for expert in own if expert >= 0)
            assert one.prefill[place].tolist() == [counted[e] for e in range(one.layer.experts)]


def test_requests_come_in_the_order_of_arrival(profile: Profile):
    made = served_requests(profile, "decode")
    ranks = [int(name.split("/")[0]) for name in made.names]
    assert ranks == sorted(ranks)  # the second rank ran after the first
    for rank in set(ranks):
        numbers = [int(name.split("/")[1]) for name in made.names if name.startswith(f"{rank}/")]
        assert numbers == sorted(numbers)


def test_a_selection_has_its_own_requests(profile: Profile):
    made = served_requests(profile.select(tag="code"), "prefill")
    assert set(made.classes) == {"code"}
    every = served_requests(profile, "prefill")
    assert {"code"} < set(every.classes) <= {"code", "prose", "json"}
    assert set(made.names) <= set(every.names)


def test_what_cannot_be_is_refused(tmp_path: Path):
    profile = record(tmp_path / "r", ring=4096, ranks=1)
    with pytest.raises(UsageError, match="not one of decode, prefill"):
        served_requests(profile, "mixed")
    with pytest.raises(UsageError, match="'decode' does not occur; there are prefill"):
        served_requests(profile.select(phase="prefill"), "decode")
    with pytest.raises(UsageError, match="no tokens"):
        served_requests(profile.narrowed("verify", None), "decode")
    steps = record_steps(tmp_path / "steps")
    with pytest.raises(LevelRequiredError, match="level='tokens'"):
        served_requests(steps, "prefill")
    alone = record_steps(tmp_path / "blind", level="tokens", blind=True)
    with pytest.raises(UsageError, match="no request has its prefill tokens known"):
        served_requests(alone, "prefill")


def record_steps(directory: Path, *, level: str = "steps", blind: bool = False) -> Profile:
    recorder, capture = recorder_of(directory, LAYERS[:1], level=level)
    step = random_step(np.random.default_rng(0), LAYERS[:1], 3, 5, phase="prefill")
    if blind:
        step.calls[0] = Call(0, step.calls[0].ids[:2])
    serve(capture, step, fresh=True)
    recorder.close()
    return routeprof.load(directory)


def test_stages_of_a_pipeline_see_the_same_requests(tmp_path: Path):
    for rank in range(2):
        role, own = RankRole(rank=rank, world_size=2, pp=rank), LAYERS[rank : rank + 1]
        recorder, capture = recorder_of(
            tmp_path / "r", own, level="tokens", role=role, own_layers=True
        )
        random = np.random.default_rng(rank)
        for phase in ("prefill", "decode", "decode"):
            step = random_step(random, own, 3, 5 if phase == "prefill" else 1, phase=phase)
            serve(capture, step, fresh=phase == "prefill")
        recorder.close()
    made = served_requests(routeprof.load(tmp_path / "r"), "decode")
    assert (made.names, made.left_out) == (("0", "1", "2"), 0)
    assert [one.layer.index for one in made.layers] == [layer.index for layer in LAYERS[:2]]
    assert made.tokens.tolist() == [2, 2, 2]
