from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from pandas.testing import assert_frame_equal

import routeprof
from routeprof.compare.difference import Difference
from routeprof.compare.difference import compare as difference_of
from routeprof.dashboards.drawing import Places, context_of, draw, version
from routeprof.dashboards.figures.tags import label
from routeprof.dashboards.live import follower, source
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.panels import differences
from routeprof.dashboards.panels.comparison import OPEN_TWO, Pair, pair
from routeprof.dashboards.panels.differences import READING, TOO_MUCH, UNASKED, Work, diff_line
from routeprof.dashboards.view import Against, Content, Context
from routeprof.dashboards.views import compare
from routeprof.profile import Profile
from routeprof.topology import Layer
from tests.dashboards.made import CAPTURED, EXPERTS, HOSTILE, LAYERS, Writer

WINDOWS = 36
"""Enough of each phase and tag to tell noise from change."""


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


@cache
def library_of(*paths: Path) -> Library:
    """Pages of these, with all parts read."""
    library = Library(*paths)
    for name in library.names():
        opened = library.open(f"?run={quote(name)}")
        while opened.source is not None and opened.source.behind:
            opened.source.read()
    return library


def look(*paths: Path, query: str = "", library: Library | None = None) -> Context:
    pages = library or library_of(*paths)
    opened = pages.open(query)
    while opened.source is not None and opened.source.behind:
        opened = pages.open(query)
    context = context_of(pages, opened, compare.VIEW, "light")
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


QUERIES: dict[str, dict[str, Any]] = {
    "": {},
    "?phase=decode": {"phase": "decode"},
    "?tag=untagged&phase=prefill": {"phase": "prefill", "tag": "untagged"},
    "?run=monday&between=4-30&phase=prefill": {"phase": "prefill", "between": (4.0, 30.0)},
}


def said(one: Path, other: Path, **selected: Any) -> Difference:
    """What ``routeprof diff`` says, from the recordings as they are on disk."""
    a, b = routeprof.load(one), routeprof.load(other)
    between = selected.pop("between", None)
    absolute = None if between is None else a.since_start(between)
    return difference_of(a.select(between=absolute, **selected), b.select(**selected))


@pytest.mark.parametrize("query", QUERIES)
def test_the_page_says_what_diff_says(two: tuple[Path, Path], query: str) -> None:
    context = look(*two, query=query)
    assert context.against is not None
    assert (context.name, context.against.name) == ("monday", "tuesday")
    panels, expected = compare.fill(context).panels, said(*two, **QUERIES[query])
    assert expected.judged
    names = "phase tag layer divergence noise_bound p experts_changed".split()
    assert_frame_equal(panels["divergence"].table[names], expected.layers[names])
    for row in expected.layers.drop_duplicates("layer").itertuples():
        same = f"{query}&layer={row.layer}" if query else f"?layer={row.layer}"
        table = compare.fill(look(*two, query=same)).panels["share_changes"].table
        rows = expected.experts.query("layer == @row.layer and phase == @row.phase")
        rows = rows[rows["tag"] == row.tag].set_index("expert").loc[table["expert"]]
        for name, scale in {
            "share_a": 1,
            "share_b": 1,
            "share_change": 100,
            "noise_bound": 100,
        }.items():
            assert table[name].to_numpy() == pytest.approx(scale * rows[name].to_numpy())
        assert table["p"].to_list() == rows["p"].to_list()
        assert (table["change"] == "changed").to_list() == rows["significant"].to_list()


@pytest.mark.parametrize("query", ["?phase=decode&tag=untagged", "?tag=untagged&phase=prefill"])
def test_divergence_and_imbalance_of_every_layer(two: tuple[Path, Path], query: str) -> None:
    """As the definitions have them, of one phase and tag."""
    context = look(*two, query=query)
    assert context.against is not None
    panels = compare.fill(context).panels
    table = panels["divergence"].table.set_index("layer")
    imbalance = panels["imbalances"].table.set_index("layer")
    assert tuple(sorted(table.index)) == CAPTURED
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
    content = compare.fill(look(*two))
    table = content.panels["divergence"].table
    changed = table.groupby("layer")["change"].unique().map(list).to_dict()
    assert changed == {1: ["within the noise"], 2: ["within the noise"], 6: ["changed"]}
    cards = {card.name: card for card in content.cards}
    assert cards["layers_changed"].value == "4 of 12"  # each in 2 phases with 2 tags
    assert cards["layers_changed"].note == "in 4 phases and tags, level 0.05 for all together"
    assert cards["divergence_largest"].note.startswith("layer 6, ")
    assert cards["tokens_a"].value == f"{WINDOWS * 4 * 64:,}"
    assert cards["tokens_b"].note == "tuesday"
    traces = content.panels["divergence"].figure.data
    assert [trace.name for trace in traces] == ["changed", "within the noise", "noise bound"]
    assert [list(trace.x) for trace in traces[:2]] == [[6], [1, 2]]
    assert HOSTILE not in content.panels["divergence"].figure.to_json()


def test_of_a_layer_the_phase_and_tag_that_changed_most_is_drawn(two: tuple[Path, Path]) -> None:
    both = both_of(look(*two))
    rows = both.difference.layers
    for row in both.leading.itertuples():
        own = rows[rows["layer"] == row.layer]
        assert row.divergence == own["divergence"].max()
    shown = compare.divergence(both).figure.data[0]
    most = both.leading.iloc[-1]
    expected = f"{most['experts_changed']} experts, {most['phase']}, {most['tag']}"
    assert shown.hovertext[0] == label(expected, 80)


def test_a_range_of_time_is_of_the_first(two: tuple[Path, Path]) -> None:
    context = look(*two, query="?run=monday&between=0-12")
    assert context.against is not None
    both = both_of(context)
    assert both.counts[0].sum() * 3 == both_of(look(*two)).counts[0].sum()
    assert "B: all of its time" in compare.fill(context).panels["divergence"].caption
    assert diff_line(context) == "routeprof diff A B --between 0-12 --between-b 0-"


def unknown(content: Content, why: str) -> None:
    """Nothing is called changed, nor unchanged, and the page says why."""
    filled = content.panels["divergence"]
    assert filled.table["noise_bound"].isna().all()
    assert set(filled.table["change"]) == {"noise not known"}
    assert why in filled.caption
    assert [trace.name for trace in filled.figure.data] == ["noise not known"]
    assert content.cards[0].value == "–"
    assert "not known" in content.cards[0].note
    shares = content.panels["share_changes"]
    assert "Noise is not known." in shares.caption
    assert set(shares.table["change"]) == {"noise not known"}


def test_the_noise_of_few_windows_is_not_known(two: tuple[Path, Path], tmp_path: Path) -> None:
    short = record(Writer, tmp_path / "short", 3, windows=2)
    unknown(compare.fill(look(two[0], short)), "Noise is not known from so few steps or windows")


def test_a_phase_that_cannot_be_judged_is_not_called_unchanged(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "other"]
    for seed, path in enumerate(paths):
        writer = Writer(path, id=path.name)
        writer.random = np.random.default_rng(seed)
        for number in range(WINDOWS):
            writer.write("decode" if number else "prefill")
        writer.stop()
    content = compare.fill(look(*paths))
    table = content.panels["divergence"].table.set_index("phase")["change"]
    assert set(table["prefill"]) == {"noise not known"}
    assert set(table["decode"]) == {"within the noise"}
    assert content.cards[0].value == "0 of 3"
    assert content.cards[0].note.endswith("3 not known")
    assert "prefill: Noise is not known" in content.panels["divergence"].caption


def test_noise_that_takes_long_is_found_where_it_is_asked_for(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library_of.cache_clear()  # with what was found before
    monkeypatch.setattr(differences, "AT_ONCE", Work(shares=1, counts=1, parts=1))
    unknown(compare.fill(look(*two)), UNASKED)
    asked = compare.fill(look(*two, query="?noise=yes"))
    assert asked.cards[0].value == "4 of 12"
    library_of.cache_clear()
    monkeypatch.setattr(differences, "MOST", Work(shares=1, counts=1, parts=1))
    unknown(compare.fill(look(*two, query="?noise=yes")), TOO_MUCH)
    library_of.cache_clear()


def test_noise_is_not_judged_before_all_is_read(two: tuple[Path, Path]) -> None:
    unknown(compare.fill(replace(look(*two), exact=None, version="")), READING)


def test_shares_that_changed_most_come_first(two: tuple[Path, Path]) -> None:
    query = "?phase=decode&tag=untagged"
    context = look(*two, query=f"{query}&layer=1")
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
    # Unless told, the layer that changed most; coloured is what is significant.
    filled = compare.fill(look(*two)).panels["share_changes"]
    assert "Layer 6" in filled.caption
    bars, lines = filled.figure.data
    grey = [colour == bars.marker.color[-1] for colour in bars.marker.color]
    assert grey == (filled.table["change"] != "changed").to_list()
    bounds = filled.table["noise_bound"].to_numpy()
    assert np.nanmax(lines.y) == pytest.approx(bounds.max(), rel=1e-4)
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
    whole = look(other).whole
    against = Against("other", whole, whole)
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
    assert content.cards[0].value == "0 of 12"


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

    while library.open(query).reading.message:
        pass
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
    steps = [int(each.profile.totals.sums["steps"].sum()) for each in (part, alone)]
    assert steps[0] == WINDOWS // 4 * steps[1]
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
