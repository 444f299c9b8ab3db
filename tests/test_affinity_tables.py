"""affinity.csv, transitions.csv and repetition.csv against loops over every token's ids."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import routeprof
from routeprof import affinity_tables
from routeprof.errors import LevelRequiredError
from routeprof.profile import Profile
from routeprof.report.csv import available, csv_text
from routeprof.token_parts import TokenTable
from tests.capture.oracle import layers_of, random_step
from tests.capture.recordings import recorder_of, serve

LAYERS = layers_of((8, 2), (12, 4), (4, 1), (5, 3))
"""The last one's hooks never run."""

NAMES = ("affinity", "transitions", "repetition")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Prompts of three requests and their decode steps; some ids repeat or are out of range."""
    directory, random = tmp_path_factory.mktemp("runs") / "r", np.random.default_rng(5)
    recorder, capture = recorder_of(directory, LAYERS, level="tokens")
    for number in range(30):
        prompt = number % 10 == 0
        phase = "prefill" if prompt else "decode"
        step = random_step(random, LAYERS[:3], 3, 6 if prompt else 1, phase=phase)
        step.calls[1].ids[0, 0] = 99
        serve(capture, step, fresh=prompt)
    recorder.close()
    return routeprof.load(directory)


@pytest.fixture(params=[None, "prefill", "decode"])
def profile(request: pytest.FixtureRequest, whole: Profile) -> Profile:
    return whole.select(phase=request.param)


def chosen(profile: Profile, layer: int) -> list[tuple[int, int, list[int]]]:
    """Request, position and ids of every token, in the order of the requests."""
    table = profile.tokens(layer)
    rows = zip(table.request.tolist(), table.position.tolist(), table.ids.tolist(), strict=True)
    return sorted(rows, key=lambda row: row[:2])


def pairs_of(rows: list[tuple[int, int, list[int]]]) -> tuple[Counter, Counter]:
    """Tokens of each expert, and of each ordered pair of different experts."""
    alone: Counter[int] = Counter()
    together: Counter[tuple[int, int]] = Counter()
    for *_, ids in rows:
        own = {number for number in ids if number >= 0}
        alone.update(own)
        together.update(itertools.permutations(sorted(own), 2))
    return alone, together


def test_pairs_are_those_of_a_loop(profile: Profile):
    table = profile.affinity()
    assert sorted(table["layer"].unique()) == [0, 10]  # one choice makes no pair
    for layer in LAYERS[:2]:
        rows = chosen(profile, layer.index)
        alone, together = pairs_of(rows)
        own = table[table["layer"] == layer.index].set_index(["expert", "partner"])
        assert own["together"].to_dict() == together
        for (one, other), row in own.iterrows():
            expected = alone[one] * alone[other] / len(rows)
            assert row["together_expected"] == pytest.approx(expected)
            assert row["lift"] == pytest.approx(together[one, other] / expected)
    randoms = table.groupby("layer")["lift_random"].unique()
    # Of 8 experts' 28 pairs each is one, an expert has a quarter of the tokens, and so on.
    assert randoms[0] == pytest.approx([(1 / 28) / (1 / 4) ** 2])
    assert randoms[10] == pytest.approx([(6 / 66) / (1 / 3) ** 2])


def test_of_many_partners_the_most_frequent(whole: Profile, monkeypatch: pytest.MonkeyPatch):
    every = whole.affinity()
    monkeypatch.setattr(affinity_tables, "MOST_PARTNERS", 3)
    few = whole.affinity()
    assert few[["layer", "expert", "partner"]].to_numpy().tolist() == sorted(
        [layer, expert, partner]
        for (layer, expert), own in every.groupby(["layer", "expert"])
        for partner in own.sort_values(["together", "partner"], ascending=[False, True])[
            "partner"
        ].head(3)
    )


def moves_of(profile: Profile, one: int, other: int) -> tuple[list[set[int]], list[set[int]]]:
    """Valid ids of the same tokens in two layers, of those that have some in both."""
    here, there = (
        {row[:2]: {number for number in row[2] if number >= 0} for row in chosen(profile, layer)}
        for layer in (one, other)
    )
    both = [place for place in here if here[place] and there.get(place)]
    return [here[place] for place in both], [there[place] for place in both]


def test_transitions_are_those_of_a_loop(profile: Profile):
    table = profile.transitions()
    pairs = table[["layer", "next_layer"]].drop_duplicates().to_numpy().tolist()
    assert pairs == [[0, 10], [10, 20]]
    for layer, following in itertools.pairwise(LAYERS[:3]):
        here, there = moves_of(profile, layer.index, following.index)
        together = Counter(
            pair
            for ids, later in zip(here, there, strict=True)
            for pair in itertools.product(ids, later)
        )
        before, after = (Counter(itertools.chain(*ids)) for ids in (here, there))
        own = table[table["layer"] == layer.index].set_index(["expert", "next_expert"])
        assert own["together"].to_dict() == together
        for (one, other), row in own.iterrows():
            share = together[one, other] / before[one]
            assert row["next_share"] == pytest.approx(share)
            expected = before[one] * after[other] / len(here)
            assert row["together_expected"] == pytest.approx(expected)
            assert row["lift"] == pytest.approx(share / (after[other] / len(here)))
        random = following.top_k / following.experts
        assert own["next_share_random"].unique() == pytest.approx([random])
    # A token takes one expert of the last of them, whichever it took before.
    sums = table[table["layer"] == 10].groupby("expert")["next_share"].sum()
    assert sums.to_numpy() == pytest.approx(1)


def test_of_many_successors_the_most_frequent(whole: Profile, monkeypatch: pytest.MonkeyPatch):
    every = whole.transitions()
    monkeypatch.setattr(affinity_tables, "MOST_PARTNERS", 3)
    kept = [
        own.sort_values(["together", "next_expert"], ascending=[False, True]).head(3)
        for _, own in every.groupby(["layer", "expert"])
    ]
    expected = pd.concat(kept).sort_values(["layer", "expert", "next_expert"], ignore_index=True)
    assert len(expected) < len(every)
    pd.testing.assert_frame_equal(whole.transitions(), expected)


def test_the_next_layer_is_the_next_one_that_ran_in_the_same_steps(tmp_path: Path):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="tokens")
    random, ids = np.random.default_rng(8), []
    for number in range(6):
        step = random_step(random, LAYERS[:3], 2, 3, phase="prefill")
        first, _, last = step.calls
        step.calls[:] = [first, last] if number % 2 else [first]
        serve(capture, step, fresh=True)
        if number % 2:
            ids += zip(first.ids.tolist(), last.ids.tolist(), strict=True)
    recorder.close()
    table = routeprof.load(tmp_path / "r").transitions()
    assert set(table["layer"]) == {0}
    assert set(table["next_layer"]) == {20}  # layer 10 is silent, and has no row
    expected = Counter((one, later[0]) for own, later in ids for one in set(own))
    assert table.set_index(["expert", "next_expert"])["together"].to_dict() == expected


def test_a_layer_whose_tokens_were_lost_is_passed_over(
    whole: Profile, monkeypatch: pytest.MonkeyPatch
):
    known, nothing = Profile.tokens, np.zeros(0, dtype=np.int64)
    empty = TokenTable(nothing, nothing, nothing, nothing, np.zeros((0, 4), dtype=np.int64))
    monkeypatch.setattr(
        Profile, "tokens", lambda own, layer: empty if layer == 10 else known(own, layer)
    )
    table = whole.transitions()
    assert table[["layer", "next_layer"]].drop_duplicates().to_numpy().tolist() == [[0, 20]]


def test_repetition_is_that_of_a_loop(profile: Profile):
    table = profile.repetition().set_index("layer")
    assert table.index.tolist() == [0, 10, 20]
    for layer in LAYERS[:3]:
        steps = [
            (before[2], after[2])
            for before, after in itertools.pairwise(chosen(profile, layer.index))
            if before[0] == after[0]
        ]
        first = [one[0] == two[0] for one, two in steps if min(one[0], two[0]) >= 0]
        either = [bool((set(one) & set(two)) - {-1}) for one, two in steps]
        row = table.loc[layer.index]
        assert row["repetition_first"] == pytest.approx(np.mean(first))
        assert row["repetition_any"] == pytest.approx(np.mean(either))
        assert row["repetition_first_random"] == 1 / layer.experts
    # Of 8 experts 15 of 28 pairs have neither of two; of 12 experts 70 of 495 sets of four.
    expected = [13 / 28, 425 / 495, 1 / 4]
    assert table["repetition_any_random"].tolist() == pytest.approx(expected)


def test_they_are_reports_of_level_tokens_only(whole: Profile, tmp_path: Path):
    assert set(NAMES) <= set(available(whole))
    assert csv_text(whole, "affinity").splitlines()[0] == (
        "layer,expert,partner,together,together_expected,lift,lift_random"
    )
    assert csv_text(whole, "transitions").splitlines()[0] == (
        "layer,expert,next_layer,next_expert,together,together_expected,lift,next_share,"
        "next_share_random"
    )
    assert csv_text(whole, "repetition").splitlines()[0] == (
        "layer,repetition_first,repetition_first_random,repetition_any,repetition_any_random"
    )
    recorder, capture = recorder_of(tmp_path / "steps", LAYERS, level="steps")
    serve(capture, random_step(np.random.default_rng(0), LAYERS))
    recorder.close()
    steps = routeprof.load(tmp_path / "steps")
    assert not set(NAMES) & set(available(steps))
    for question in (steps.affinity, steps.transitions, steps.repetition):
        with pytest.raises(LevelRequiredError, match="level tokens"):
            question()


def test_a_recording_without_passes_has_no_rows(tmp_path: Path):
    recorder, _ = recorder_of(tmp_path / "r", LAYERS, level="tokens")
    recorder.close()
    empty = routeprof.load(tmp_path / "r")
    for name in NAMES:
        assert csv_text(empty, name).splitlines() == csv_text(empty, name).splitlines()[:1]
