"""The affinity view against loops over every token."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from routeprof.affinity_tables import pairs
from routeprof.dashboards.panels import token_rows
from routeprof.dashboards.view import Context, Filled
from routeprof.dashboards.views import affinity
from routeprof.token_parts import TokenTable, side_by_side
from routeprof.topology import Layer
from tests.dashboards.tokens import EXPERTS, LAYERS, TOP_K, context_of, record_tokens

Make = Callable[..., Context]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_tokens(tmp_path_factory.mktemp("runs") / "tokens", "code", "prose")


def said(filled: Filled) -> str:
    return filled.figure.layout.annotations[0].text.replace("<br>", " ")


def chosen(view: Context, layer: int) -> list[tuple[int, int, int, list[int]]]:
    """Request, position, step and ids of every token that is selected."""
    steps = view.whole.step_counts()
    kinds = {
        (step, rank): (phase, tag)
        for step, rank, phase, tag in zip(
            steps.step, steps.rank, steps.phase, steps.tag, strict=True
        )
    }
    table, state = view.whole.tokens(layer), view.state
    found = []
    for place in range(len(table.step)):
        phase, tag = kinds[table.step[place], table.rank[place]]
        if state.phase in (None, phase) and state.tag in (None, tag):
            request, position = int(table.request[place]), int(table.position[place])
            found.append((request, position, int(table.step[place]), table.ids[place].tolist()))
    return found


SELECTIONS = [{}, {"tag": "prose"}, {"phase": "prefill"}, {"phase": "decode", "tag": "code"}]


@pytest.mark.parametrize("state", SELECTIONS)
def test_lift_is_that_of_a_loop(tokens: Path, state: dict[str, str]) -> None:
    view = context_of(tokens, layer=1, **state)
    filled = affinity.fill(view).panels["lift"]
    rows = [set(ids) for *_, ids in chosen(view, 1)]
    shown = filled.figure.data[0].customdata
    for one in range(EXPERTS):
        for other in range(EXPERTS):
            both = sum({one, other} <= row for row in rows)
            alone = [sum(number in row for row in rows) for number in (one, other)]
            lift = both * len(rows) / (alone[0] * alone[1]) if all(alone) else np.nan
            expected = np.nan if one == other else lift
            assert shown[one, other] == pytest.approx(expected, nan_ok=True, rel=1e-6)
    random = EXPERTS * (TOP_K - 1) / (TOP_K * (EXPERTS - 1))
    with np.errstate(divide="ignore"):
        doublings = np.log2(shown / random)
    drawn = filled.figure.data[0]
    np.testing.assert_allclose(
        drawn.z, np.clip(doublings, drawn.zmin, drawn.zmax), rtol=1e-5, atol=1e-6
    )
    assert drawn.zmin == -drawn.zmax
    assert len(filled.table) == np.isfinite(shown[np.triu_indices(EXPERTS, 1)]).sum()


def test_the_middle_of_the_scale_is_what_random_routing_gives() -> None:
    random = np.random.default_rng(0)
    ids = np.argsort(random.random((20_000, 16)), axis=1)[:, :4]
    found = pairs(ids, Layer(0, "layer", experts=16, top_k=4))
    assert np.nanmean(found.lifts) == pytest.approx(found.random, rel=0.01)


@pytest.mark.parametrize("state", SELECTIONS)
def test_the_next_layer_is_that_of_a_loop(tokens: Path, state: dict[str, str]) -> None:
    view = context_of(tokens, layer=0, **state)
    filled = affinity.fill(view).panels["next"]
    here = {row[:3]: set(row[3]) for row in chosen(view, 0)}
    there = {row[:3]: set(row[3]) for row in chosen(view, 1)}
    assert here.keys() == there.keys()
    moves = Counter(
        (one, other) for place, own in here.items() for one in own for other in there[place]
    )
    alone = Counter(number for own in here.values() for number in own)
    shown = filled.figure.data[0].customdata
    for one in range(EXPERTS):
        for other in range(EXPERTS):
            expected = moves[one, other] / alone[one] if alone[one] else np.nan
            assert shown[one, other] == pytest.approx(expected, nan_ok=True, rel=1e-6)
    table = filled.table.set_index(["expert", "next_expert"])["next_share"]
    assert set(table.index) == set(moves)
    assert table.groupby("expert").sum().to_numpy() == pytest.approx(TOP_K)
    last = affinity.fill(context_of(tokens, layer=2, **state)).panels["next"]
    assert said(last) == "Layer 2 is the last one with tokens."


@pytest.mark.parametrize("state", SELECTIONS)
def test_repetition_is_that_of_a_loop(tokens: Path, state: dict[str, str]) -> None:
    view = context_of(tokens, layer=1, **state)
    content = affinity.fill(view)
    table = content.panels["repetition"].table.set_index("layer")
    assert table.index.tolist() == list(LAYERS)
    for layer in LAYERS:
        rows = sorted(row for row in chosen(view, layer))
        pairs_of = [
            (before[3], after[3])
            for before, after in itertools.pairwise(rows)
            if before[0] == after[0]
        ]
        first = np.mean([one[0] == two[0] for one, two in pairs_of])
        either = np.mean([bool(set(one) & set(two)) for one, two in pairs_of])
        assert table.loc[layer, "repetition_first"] == pytest.approx(first)
        assert table.loc[layer, "repetition_any"] == pytest.approx(either)
    assert (table["repetition_first_random"] == 1 / EXPERTS).all()
    # Of the 28 pairs of 8 experts, 15 have neither of two given ones.
    assert table["repetition_any_random"].to_numpy() == pytest.approx(13 / 28)
    cards = {card.name: card for card in content.cards}
    assert cards["repetition_first"].note == "random: 12.5 %"


def test_the_strongest_pair_is_the_one_at_the_top(tokens: Path) -> None:
    content = affinity.fill(context_of(tokens, layer=1))
    table = content.panels["lift"].table
    assert table["lift"].is_monotonic_decreasing
    best = table[table["together_expected"] >= 5].iloc[0]
    card = next(card for card in content.cards if card.name == "strongest_pair")
    assert card.value == f"{int(best['expert'])} + {int(best['partner'])}"
    assert f"{best['lift']:.2f}" in card.note


def test_of_very_many_tokens_some_layers_are_drawn(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_rows, "MOST_IDS", 1)
    filled = affinity.fill(context_of(tokens, layer=1)).panels["repetition"]
    assert filled.table["layer"].tolist() == [0, 1, 2]  # the two ends, and the chosen one
    filled = affinity.fill(context_of(tokens, layer=0)).panels["repetition"]
    assert filled.table["layer"].tolist() == [0, 2]
    assert "2 of 3 layers" in filled.caption


def table(steps: list[int], requests: list[int], ids: list[int]) -> TokenTable:
    """A table of rank 0 with one choice a token; positions count within each request."""
    positions = [requests[:place].count(request) for place, request in enumerate(requests)]
    arrays = (np.array(values) for values in (steps, [0] * len(steps), requests, positions))
    return TokenTable(*arrays, np.array(ids)[:, None])


def test_only_rows_of_the_same_tokens_are_compared() -> None:
    here = table([1, 1, 2, 3, 3], [7, 7, 7, 7, 8], [0, 1, 2, 3, 4])
    # Step 2 is missing, step 3 has another row, step 4 is new.
    there = table([1, 1, 3, 4], [7, 7, 7, 7], [5, 6, 7, 8])
    one, other = side_by_side(here, there)
    assert one.ids[:, 0].tolist() == [0, 1]
    assert other.ids[:, 0].tolist() == [5, 6]
    # As many rows in step 1, but of another request.
    one, other = side_by_side(here, table([1, 1], [7, 9], [5, 6]))
    assert (one.ids[:, 0].tolist(), other.ids[:, 0].tolist()) == ([0], [5])


@pytest.mark.parametrize("state", SELECTIONS)
def test_its_numbers_are_those_of_the_reports(tokens: Path, state: dict[str, str]) -> None:
    view = context_of(tokens, layer=1, **state)
    panels = affinity.fill(view).panels
    pd.testing.assert_frame_equal(panels["repetition"].table, view.profile.repetition())
    report = view.profile.affinity().query("layer == 1 and expert < partner")
    drawn = panels["lift"].table.query("together > 0")
    columns = ["expert", "partner", "together", "together_expected", "lift"]
    pd.testing.assert_frame_equal(
        drawn[columns].sort_values(["expert", "partner"], ignore_index=True),
        report[columns].reset_index(drop=True),
    )
    report = view.profile.transitions().query("layer == 1")
    columns = ["expert", "next_expert", "next_share"]
    pd.testing.assert_frame_equal(
        panels["next"].table[columns].sort_values(columns[:2], ignore_index=True),
        report[columns].reset_index(drop=True),
    )
    assert set(affinity.VIEW.reports) == {"affinity", "transitions", "repetition"}


def test_it_needs_level_tokens(context: Make) -> None:
    for state in ({}, {"layer": 3}, {"layer": 6, "phase": "decode"}):
        content = affinity.fill(context(**state))
        for filled in content.panels.values():
            assert said(filled).startswith("This needs a recording of level tokens")
        assert not content.cards


def test_a_recording_of_no_passes(tmp_path: Path) -> None:
    content = affinity.fill(context_of(record_tokens(tmp_path / "empty"), layer=1))
    assert {said(filled) for filled in content.panels.values()} == {
        "No tokens of this selection reached the layer."
    }
