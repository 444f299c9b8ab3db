from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from routeprof.dashboards.drawing import Places, context_of, draw, version
from routeprof.dashboards.live import follower, source
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.panels import noise
from routeprof.dashboards.panels.comparison import OPEN_TWO, Pair, pair
from routeprof.dashboards.panels.noise import Samples, bound, samples
from routeprof.dashboards.view import Against, Context
from routeprof.dashboards.views import compare
from routeprof.profile import Profile
from routeprof.topology import Layer
from tests.dashboards.made import CAPTURED, EXPERTS, HOSTILE, LAYERS, Writer

WINDOWS = 12


class Turned(Writer):
    """Layer 6 sends to its last experts what others send to its first."""

    def _counted(self, layer: Layer, tokens: int) -> dict[str, Any]:
        row = super()._counted(layer, tokens)
        return row | {"counts": row["counts"][::-1]} if layer.index == 6 else row


def record(kind: type[Writer], path: Path, seed: int, windows: int = WINDOWS, **info: Any) -> Path:
    writer = kind(path, id=path.name, **info)
    writer.random = np.random.default_rng(seed)
    for number in range(windows):
        writer.write(("prefill", "decode")[number % 2], HOSTILE if number % 3 else None)
    writer.stop()
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two recordings that differ in layer 6 alone."""
    folder = tmp_path_factory.mktemp("two")
    return record(Writer, folder / "monday", 1), record(Turned, folder / "tuesday", 2, WINDOWS + 2)


def look(*paths: Path, query: str = "") -> Context:
    library = Library(*paths)
    context = context_of(library, library.open(query), compare.VIEW, "light")
    assert context is not None
    return context


def both_of(context: Context) -> Pair:
    both = pair(context)
    assert isinstance(both, Pair)
    return both


def js(one: list[int], other: list[int]) -> float:
    """Jensen–Shannon divergence as the definition has it, expert by expert."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        p, q = a / sum(one), b / sum(other)
        m = (p + q) / 2
        total += p / 2 * math.log2(p / m) if p else 0.0
        total += q / 2 * math.log2(q / m) if q else 0.0
    return total


def counts(profile: Profile, layer: int) -> list[int]:
    table = profile.experts()
    return [int(value) for value in table.loc[table["layer"] == layer, "tokens"]]


@pytest.mark.parametrize("query", ["", "?phase=decode", "?tag=untagged&phase=prefill"])
def test_divergence_and_imbalance_of_every_layer(two: tuple[Path, Path], query: str) -> None:
    context = look(*two, query=query)
    assert context.against is not None
    assert (context.name, context.against.name) == ("monday", "tuesday")
    panels = compare.fill(context).panels
    table = panels["divergence"].table.set_index("layer")
    imbalance = panels["imbalances"].table.set_index("layer")
    assert tuple(table.index) == CAPTURED
    for layer in CAPTURED:
        own, others = counts(context.profile, layer), counts(context.against.profile, layer)
        assert table.loc[layer, "divergence"] == pytest.approx(js(own, others))
        assert imbalance.loc[layer, "imbalance_a"] == max(own) / (sum(own) / EXPERTS)
        assert imbalance.loc[layer, "imbalance_b"] == max(others) / (sum(others) / EXPERTS)
    shown = panels["divergence"].figure.to_dict()
    assert {item["text"] for item in shown["layout"]["annotations"]} == {
        "silent",
        "unsupported",
        "idle",
    }


def test_only_what_changed_is_above_the_noise(two: tuple[Path, Path]) -> None:
    context = look(*two)
    content = compare.fill(context)
    table = content.panels["divergence"].table.set_index("layer")
    assert (table["divergence"] > table["noise_bound"]).to_dict() == {1: False, 2: False, 6: True}
    cards = {card.name: card for card in content.cards}
    assert cards["layers_changed"].value == "1 of 3"
    assert cards["divergence_largest"].note.startswith("layer 6 · noise bound")
    assert cards["tokens_a"].value == f"{WINDOWS * 4 * 64:,}"
    assert cards["tokens_b"].note == "tuesday"
    names = [trace.name for trace in content.panels["divergence"].figure.data]
    assert names == ["above the noise", "within the noise", "noise bound"]


def test_the_noise_is_that_of_resampled_windows(two: tuple[Path, Path]) -> None:
    """An own bootstrap, with the windows as they are on disk."""
    context = look(*two)
    found = compare.fill(context).panels["divergence"].table.set_index("layer")["noise_bound"]
    generator = np.random.default_rng(11)
    windows = [on_disk(path, 2) for path in two]
    bounds = []
    for own in windows:
        drawn = []
        for _ in range(2000):
            one = own[generator.integers(0, len(own), len(windows[0]))].sum(0)
            other = own[generator.integers(0, len(own), len(windows[1]))].sum(0)
            drawn.append(js(one.tolist(), other.tolist()))
        bounds.append(sorted(drawn)[int(0.95 * len(drawn))])
    assert found[2] == pytest.approx(max(bounds), rel=0.25)


def on_disk(path: Path, layer: int, **kept: str) -> np.ndarray[Any, Any]:
    """Assignments of every window of a layer, [windows, experts]."""
    parts = sorted(path.glob("rank-*/part-*.parquet"))
    table = pd.concat([pq.read_table(part).to_pandas() for part in parts])
    table = table[table["layer"] == layer]
    for name, value in kept.items():
        table = table[table[name] == value]
    return np.stack(table["counts"].to_list())


def test_pieces_are_the_windows_of_the_selection(two: tuple[Path, Path]) -> None:
    context = look(*two, query="?phase=decode")
    assert context.against is not None
    one, other = samples(
        (context.profile, context.spans), (context.against.profile, context.against.spans)
    )
    for piece, path in ((one, two[0]), (other, two[1])):
        assert piece.unit == "stretches of time"
        expected = on_disk(path, 6, phase="decode")
        assert sorted(piece.counts[6].tolist()) == sorted(expected.tolist())
        assert not len(piece.counts[3])  # silent: no pieces, and no zeros


def test_a_range_of_time_is_of_the_first(two: tuple[Path, Path]) -> None:
    context = look(*two, query="?run=monday&between=0-4")
    assert context.against is not None
    both = both_of(context)
    assert [piece.number for piece in both.pieces] == [4, WINDOWS + 2]
    assert both.counts[0].sum() * 3 == both_of(look(*two)).counts[0].sum()
    assert "B: all of its time" in compare.fill(context).panels["divergence"].caption


def test_the_noise_of_one_window_is_not_known(two: tuple[Path, Path], tmp_path: Path) -> None:
    short = record(Writer, tmp_path / "short", 3, windows=1)
    content = compare.fill(look(two[0], short))
    filled = content.panels["divergence"]
    assert filled.table["noise_bound"].isna().all()
    assert "cannot be told from 12 and 1 stretches" in filled.caption
    assert [trace.name for trace in filled.figure.data] == ["noise not known"]
    assert content.cards[0].value == "–"
    assert "not known" in content.cards[0].note


def test_shares_that_changed_most_come_first(two: tuple[Path, Path]) -> None:
    context = look(*two, query="?layer=1")
    assert context.against is not None
    table = compare.fill(context).panels["share_changes"].table
    frames = [
        item.experts().query("layer == 1")[["expert", "share"]]
        for item in (context.profile, context.against.profile)
    ]
    joined = frames[0].merge(frames[1], on="expert").set_index("expert")
    for row in table.itertuples():
        assert row.share_a == joined.loc[row.expert, "share_x"]
        assert row.share_change == pytest.approx(
            100 * (joined.loc[row.expert, "share_y"] - joined.loc[row.expert, "share_x"])
        )
    assert table["share_change"].abs().is_monotonic_decreasing
    assert len(table) == EXPERTS
    # Unless told, the layer that differs most.
    assert "Layer 6" in compare.fill(look(*two)).panels["share_changes"].caption
    silent = compare.fill(look(*two, query="?layer=3")).panels["share_changes"]
    assert "no tokens" in silent.figure.layout.annotations[0].text


# -- what cannot be compared


def reason(context: Context) -> str:
    content = compare.fill(context)
    texts = {
        filled.figure.layout.annotations[0].text.replace("<br>", " ")
        for filled in content.panels.values()
    }
    assert set(content.panels) == {panel.name for panel in compare.VIEW.panels}
    assert len(texts) == 1
    assert not any(len(filled.table) for filled in content.panels.values())
    return texts.pop()


def test_one_recording_says_how_to_open_two(two: tuple[Path, Path]) -> None:
    assert reason(look(two[0])) == OPEN_TWO
    assert "no recording of that name" in reason(look(*two, query="?against=..%2Fsecret"))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (LAYERS[:-1], "only one of the two has MoE layer 6"),
        ((*LAYERS[:-1], replace(LAYERS[-1], top_k=4)), "Layer 6 has 2 experts per token in A"),
        ((*LAYERS[:-1], replace(LAYERS[-1], experts=32)), "16 experts in A and 32 in B"),
    ],
)
def test_other_models_are_not_compared(
    two: tuple[Path, Path], tmp_path: Path, layers: tuple[Layer, ...], text: str
) -> None:
    other = tmp_path / "other"
    Writer(other, id="other", layers=layers, passes=("",) * len(layers))
    against = Against("other", look(other).whole)
    assert text in reason(replace(look(two[0]), against=against))


def test_a_selection_that_one_lacks(two: tuple[Path, Path], tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    Writer(plain).write("prefill")
    context = look(two[0], plain, query="?run=monday&phase=decode")
    assert reason(context) == "B has no tokens in this selection."


def test_equal_recordings(two: tuple[Path, Path], tmp_path: Path) -> None:
    twin = record(Writer, tmp_path / "twin", 1)
    content = compare.fill(look(two[0], twin))
    assert "same shares" in content.panels["share_changes"].figure.layout.annotations[0].text
    assert content.cards[0].value == "0 of 3"


def test_pages_look_again_until_the_other_one_is_read(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "READ_SECONDS", 0.0)
    monkeypatch.setattr(follower, "BATCH", 2)
    library = Library(*two)
    while library.open("?run=monday").reading.message:
        pass
    versions, tokens = [], []
    for _ in range(WINDOWS + 4):
        opened = library.open("?run=monday")
        versions.append(version(library, opened, compare.VIEW))
        context = context_of(library, opened, compare.VIEW, "light")
        assert context is not None
        content = compare.fill(context)
        tokens.append({card.name: card.value for card in content.cards}.get("tokens_b"))
    assert len(set(tokens)) > 2
    assert len(set(versions)) == len(set(tokens))  # and then they stay
    assert not content.lead


def test_pages_follow_the_other_one_while_it_grows(two: tuple[Path, Path], tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    writer = Writer(grown)
    writer.write()
    library = Library(two[0], grown)
    query = f"?run={two[0].name}&against=grown"

    def seen() -> tuple[str, str | None]:
        opened = library.open(query)
        newest = version(library, opened, compare.VIEW)
        context = context_of(library, opened, compare.VIEW, "light")
        assert context is not None
        cards = {card.name: card.value for card in compare.fill(context).cards}
        return newest, cards["tokens_b"]

    before = seen()
    assert seen() == before
    writer.write()
    for name in library.names():
        library.source(name)._due = 0.0
    after = seen()
    assert after[0] != before[0]
    assert after[1] != before[1]


# -- which two


def test_a_sum_is_not_compared_with_its_part(two: tuple[Path, Path]) -> None:
    first = look(*two)
    assert first.whole.info.id == "monday"
    turned = look(*two, query="?against=monday")
    assert (turned.name, turned.against and turned.against.name) == ("tuesday", "monday")
    chosen = look(*two, query="?run=tuesday")
    assert (chosen.name, chosen.against and chosen.against.name) == ("tuesday", "monday")


def test_the_time_of_a_sum_is_not_that_of_its_parts(two: tuple[Path, Path]) -> None:
    part, alone = look(*two, query="?between=0-4"), look(*two, query="?run=monday&between=0-4")
    assert part.profile.totals.sums["steps"].sum() == 3 * alone.profile.totals.sums["steps"].sum()
    for context, shown in ((part, False), (alone, True)):
        assert (
            bool(draw(compare.VIEW, context, compare.fill(context), Places([], [], []), [])[-3])
            == shown
        )


def test_a_directory_of_recordings(two: tuple[Path, Path]) -> None:
    context = look(two[0].parent, query="?run=tuesday&phase=prefill")
    assert context.against is not None
    assert context.against.name == "monday"
    assert set(context.against.profile.phases) == {"prefill"}


def test_hostile_names_stay_out_of_figures(tmp_path: Path) -> None:
    one = record(Writer, tmp_path / "<b>one", 1)
    other = record(Writer, tmp_path / "<i>other", 2)
    content = compare.fill(look(one, other))
    for filled in content.panels.values():
        assert "b>one" not in filled.figure.to_json()
        assert "i>other" not in filled.figure.to_json()


def test_the_bound_is_that_of_the_noisier() -> None:
    steady = Samples("steps", {1: np.array([[5, 5]] * 10)})
    noisy = Samples("steps", {1: np.array([[9, 1], [1, 9]] * 5)})
    assert bound(steady, steady, 1) == 0.0
    assert bound(steady, noisy, 1) == bound(noisy, steady, 1) > 0.01
    for few in (Samples("steps", {1: np.array([[5, 5]])}), Samples("steps", {})):
        assert math.isnan(bound(noisy, few, 1))


def test_many_stretches_are_put_together(two: tuple[Path, Path], monkeypatch: Any) -> None:
    monkeypatch.setattr(noise, "MOST", 4)
    context = look(*two)
    piece, _ = samples((context.profile, context.spans), (context.profile, context.spans))
    windows = on_disk(two[0], 1)
    assert piece.counts[1].tolist() == windows.reshape(4, WINDOWS // 4, EXPERTS).sum(1).tolist()
