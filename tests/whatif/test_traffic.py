"""Where tokens travel, against loops over single tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.whatif.layout import Layout, layouts
from routeprof.whatif.traffic import (
    dispatch,
    dispatch_flows,
    executed_slots,
    flows,
    homes,
    reached,
    slot_loads,
    traffic_matrix,
)

LAYOUTS = [
    Layout(tp, dp, ep, tp * dp // ep, nodes)
    for tp, dp, ep, nodes in (
        (1, 2, 2, 1),
        (2, 2, 4, 2),
        (1, 4, 2, 2),
        (4, 2, 4, 4),
        (1, 6, 3, 2),
        (2, 3, 1, 3),
    )
]


@dataclass(frozen=True)
class Case:
    layout: Layout
    ids: np.ndarray
    step: np.ndarray
    request: np.ndarray
    slots: np.ndarray
    steps: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(LAYOUTS))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    experts = layout.ep * draw(st.integers(1, 3))
    ids = random.integers(-1, experts + 1, (tokens, draw(st.integers(1, 3))))  # some invalid
    extra = random.integers(0, experts, layout.ep * draw(st.integers(0, 2)))
    slots = random.permutation(np.concatenate((np.arange(experts), extra)))
    step = random.integers(0, steps, tokens)
    request = random.integers(-1, 5, tokens)
    return Case(layout, ids, step, request, slots, steps)


@given(cases())
def test_replicas_take_turns(case: Case):
    turn: dict[tuple[int, int], int] = {}
    expected = np.full(case.ids.shape, -1)
    for token, chosen in enumerate(case.ids.tolist()):
        for choice, expert in enumerate(chosen):
            replicas = np.flatnonzero(case.slots == expert)
            if len(replicas):
                key = (int(case.step[token]), expert)
                expected[token, choice] = replicas[turn.get(key, 0) % len(replicas)]
                turn[key] = turn.get(key, 0) + 1
    slot = executed_slots(case.ids, case.step, case.slots)
    assert np.array_equal(slot, expected)
    loads = np.zeros((case.steps, len(case.slots)), dtype=int)
    for token, served in enumerate(expected.tolist()):
        for one in served:
            if one >= 0:
                loads[case.step[token], one] += 1
    assert np.array_equal(slot_loads(slot, case.step, len(case.slots), case.steps), loads)


def by_hand(case: Case, rank: np.ndarray, home: np.ndarray, relay: bool) -> list[tuple[int, ...]]:
    """Every (step, source, target)."""
    layout, sends = case.layout, []
    per_node = layout.gpus // layout.nodes
    for token, ranks in enumerate(rank.tolist()):
        start, step = int(home[token]), int(case.step[token])
        targets = {
            one * layout.etp + part for one in ranks if one >= 0 for part in range(layout.etp)
        }
        for node in range(layout.nodes):
            here = {gpu for gpu in targets if gpu // per_node == node}
            source = start
            if relay and here and node != start // per_node:
                source = node * per_node + start % per_node
                sends.append((step, start, source))
            sends += [(step, source, gpu) for gpu in here if gpu != source]
    return sorted(sends)


@given(cases(), st.booleans())
def test_each_token_goes_once_to_each_gpu(case: Case, relay: bool):
    layout = case.layout
    slot = executed_slots(case.ids, case.step, case.slots)
    rank = np.where(slot >= 0, slot // (len(case.slots) // layout.ep), -1)
    home = homes(layout, case.step, case.request)
    sends = dispatch(layout, rank, home, case.step, relay=relay)
    expected = by_hand(case, rank, home, relay)
    found = zip(*(own.tolist() for own in (sends.step, sends.source, sends.target)), strict=True)
    assert sorted(found) == expected

    matrix = np.zeros((layout.gpus, layout.gpus), dtype=int)
    names = ("sent_inside", "sent_between", "received_inside", "received_between")
    moved = {name: np.zeros((case.steps, layout.gpus), dtype=int) for name in names}
    for step, source, target in expected:
        matrix[source, target] += 1
        way = "inside" if source // layout.per_node == target // layout.per_node else "between"
        moved[f"sent_{way}"][step, source] += 1
        moved[f"received_{way}"][step, target] += 1
    assert np.array_equal(traffic_matrix(layout, sends), matrix)
    for name, counted in moved.items():
        assert np.array_equal(getattr(flows(layout, sends, case.steps), name), counted)


@given(cases())
def test_in_parts_it_is_the_same(case: Case):
    layout = case.layout
    rank = np.where(case.ids >= layout.ep, -1, case.ids)
    home = homes(layout, case.step, case.request)
    sends = dispatch(layout, rank, home, case.step)
    whole = flows(layout, sends, case.steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("routeprof.whatif.traffic.MOST_SENDS", 3)
        parts = dispatch_flows(layout, rank, home, case.step, case.steps, relay=False)
    for name, counted in vars(whole).items():
        assert np.array_equal(getattr(parts, name), counted)


@given(cases())
def test_tokens_are_dealt_to_gpus(case: Case):
    layout = case.layout
    rows: dict[int, int] = {}
    dealt: dict[tuple[int, int], int] = {}
    found = homes(layout, case.step, case.request).tolist()
    tokens = zip(found, case.step.tolist(), case.request.tolist(), strict=True)
    for home, step, request in tokens:
        replica = (request if request >= 0 else rows.get(step, 0)) % layout.dp
        number = dealt.get((step, replica), 0)
        assert home == replica * layout.tp + number % layout.tp
        rows[step] = rows.get(step, 0) + 1
        dealt[step, replica] = number + 1


@given(cases())
def test_ranks_are_reached_once(case: Case):
    row, rank = reached(case.ids)
    pairs = list(zip(row.tolist(), rank.tolist(), strict=True))
    expected = {
        (token, one) for token, ids in enumerate(case.ids.tolist()) for one in ids if one >= 0
    }
    assert len(pairs) == len(expected)
    assert set(pairs) == expected


def test_no_tokens_send_nothing():
    layout = Layout(1, 2, 2, 1)
    nothing = np.zeros(0, dtype=int)
    sends = dispatch(layout, np.zeros((0, 2), dtype=int), nothing, nothing)
    assert len(sends.step) == 0
    moved = dispatch_flows(layout, np.zeros((0, 2), dtype=int), nothing, nothing, 3, relay=False)
    assert moved.sent_inside.tolist() == [[0, 0]] * 3


def test_a_random_top_k_reaches_as_many_ranks_as_chance_has_it():
    """With one expert on each of n ranks and k of them chosen, k; with two on each, by hand."""
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((20_000, 8)), axis=1)[:, :2]
    assert len(reached(ids)[0]) == 40_000
    row, _ = reached(ids // 2)
    # The second choice is the neighbour of the first in 1 of 7 cases.
    assert len(row) / 20_000 == pytest.approx(2 - 1 / 7, abs=0.01)


def test_shapes_that_do_not_fit():
    layout = Layout(1, 2, 2, 1)
    with pytest.raises(UsageError, match="step has shape"):
        executed_slots([[0], [1]], [0], [0, 1])
    with pytest.raises(UsageError, match="request has shape"):
        homes(layout, [0, 1], [0])
    with pytest.raises(UsageError, match="not in TP 1 x DP 2"):
        dispatch(layout, [[2]], [0], [0])
    with pytest.raises(UsageError, match="pass products that agree"):
        Layout(2, 2, 3, 1)
    with pytest.raises(UsageError, match="number of nodes that divides"):
        Layout(2, 2, 2, 2, nodes=3)


def test_every_split_is_there_once():
    found = list(layouts(12, 16, nodes=2))
    splits = {(one.tp, one.dp, one.ep, one.etp) for one in found}
    expected = {
        (tp, 12 // tp, ep, 12 // ep)
        for tp in range(1, 13)
        for ep in range(1, 13)
        if 12 % tp == 0 and 12 % ep == 0
    }
    assert splits == expected
    assert len(found) == len(expected)
    assert {one.ep for one in layouts(12, 3)} == {1, 2, 3}  # no rank without an expert
