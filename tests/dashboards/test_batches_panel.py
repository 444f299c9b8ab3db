from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeprof.dashboards.controls import control
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.panels import batches
from routeprof.dashboards.view import Context, Filled
from routeprof.dashboards.views import prompts
from routeprof.report.whatif_batching import POLICIES, VERDICTS
from routeprof.whatif.batching import Batching, PolicyFigures, compare_batching
from tests.commands.conftest import Cli, cli
from tests.dashboards.made import HOSTILE, Writer
from tests.dashboards.tokens import context_of, record_tokens

Make = Callable[..., Context]

__all__ = ["cli"]

RANKS = 8
FIGURES = {"straggler": "straggler_factor", "imbalance": "imbalance_ratio"}
OTHERS = {
    "batch_requests": "requests",
    "batches": "batches",
    "batch_steps": "steps",
    "gemm_mean_tokens": "tokens_per_expert_mean",
    "gemm_median_tokens": "tokens_per_expert_median",
    "small_gemm_share": "small_gemm_share",
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 requests, tag after tag: enough for intervals."""
    directory = tmp_path_factory.mktemp("batches") / "many"
    return record_tokens(directory, "code", "prose", HOSTILE, rows=16, tokens=8)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("batches") / "few"
    return record_tokens(directory, "code", "prose", rows=8, tokens=8)


def panel(view: Context) -> Filled:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return prompts.fill(view).panels["batching"]


def said(filled: Filled) -> str:
    """What stands in for the figure."""
    assert not filled.figure.data
    (line,) = filled.figure.layout.annotations
    return str(line.text).replace("<br>", " ")


def body(view: Context) -> str:
    parts = list(prompts.fill(view).body)
    return json.dumps(parts, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


def command(view: Context) -> list[str]:
    """The command line below the figure, as a shell takes it apart."""
    (told,) = prompts.fill(view).body
    return shlex.split(told.children[-1].children.children)


def made(view: Context, size: int, phase: str) -> Batching:
    profile = view.whole.select(tag=view.state.tag)
    return compare_batching(profile, [size], ranks=RANKS, phase=phase)


# -- figures


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ({"batch": 4}, "decode"),
        ({"batch": 8, "phase": "decode"}, "decode"),
        ({"batch": 4, "phase": "prefill"}, "prefill"),
        ({"batch": 4, "tag": HOSTILE}, "decode"),
        ({"batch": 4, "tag": "code", "phase": "decode"}, "decode"),  # which its prefill tells
    ],
)
def test_figure_and_table_are_the_comparison(many: Path, state: dict[str, Any], phase: str) -> None:
    view = context_of(many, **state)
    filled, expected = panel(view), made(view, state["batch"], phase)
    rows = filled.table.set_index("policy")
    assert rows.index.tolist() == ["FIFO", "random", "load-aware"]
    for one in expected.policies:
        row = rows.loc[POLICIES[one.policy]]
        for column, name in OTHERS.items():
            assert row[column] == getattr(one, name)
        check_gains(row, one)
    drawn = {trace.name: trace for trace in filled.figure.data}
    assert list(drawn) == ["straggler factor", "imbalance ratio"]
    others = expected.policies[1:]
    for trace, name in zip(drawn.values(), FIGURES.values(), strict=True):
        check_points(trace, [one.gains[name] for one in others if one.gains])
    assert filled.figure.layout.shapes[0].y0 == filled.figure.layout.shapes[0].y1 == 1.0


def check_gains(row: Any, one: PolicyFigures) -> None:
    for short, name in FIGURES.items():
        assert row[f"batch_{short}"] == getattr(one, name)
        gained = row[[f"{short}_gain", f"{short}_gain_low", f"{short}_gain_high"]]
        if one.gains is None:
            assert gained.isna().all()
            assert not isinstance(row[f"{short}_verdict"], str)
            continue
        gain = one.gains[name]
        np.testing.assert_array_equal(
            gained.to_numpy(dtype=float), [gain.value, gain.lower, gain.upper]
        )
        assert row[f"{short}_verdict"] == VERDICTS[gain.verdict]


def check_points(trace: Any, gains: list[Any]) -> None:
    np.testing.assert_allclose(trace.y, [gain.value for gain in gains], rtol=1e-6)
    assert list(trace.text) == [f"{gain.value:.2f}" for gain in gains]
    if np.isnan(gains[0].lower):
        assert trace.error_y.array is None
        return
    ends = trace.y - trace.error_y.arrayminus, trace.y + trace.error_y.array
    np.testing.assert_allclose(ends[0], [gain.lower for gain in gains], rtol=1e-5)
    np.testing.assert_allclose(ends[1], [gain.upper for gain in gains], rtol=1e-5)


@pytest.mark.parametrize("phase", [None, "prefill"])
def test_the_command_that_is_shown_prints_the_same(many: Path, cli: Cli, phase: str | None) -> None:
    view = context_of(many, batch=8, phase=phase)
    program, *words = command(view)
    assert program == "routeprof"
    done = cli(*(many if word == "RECORDING" else word for word in words), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    table = panel(view).table
    assert table["batch_straggler"].tolist() == [row["straggler_factor"] for row in rows]
    assert table["imbalance_gain_low"].tolist()[1:] == [
        row["gains"]["imbalance_ratio"]["lower"] for row in rows[1:]
    ]


def test_the_caption_says_what_is_supposed(many: Path) -> None:
    caption = panel(context_of(many, batch=4)).caption
    assert "Supposed: decode, all tags; 48 requests in full batches of 4" in caption
    assert "all waiting at once; experts in order on 8 ranks" in caption
    assert "knows the requests' tags. Held out: it is fitted on half of each tag" in caption
    prefill = panel(context_of(many, batch=16, phase="prefill", tag="code")).caption
    assert "Supposed: prefill, tag code; 16 requests in full batches of 16" in prefill
    assert "No load-aware ones" in prefill
    assert "lengths of their prefills" in panel(context_of(many, batch=4, phase="prefill")).caption
    one_tag = panel(context_of(many, batch=4, tag="code")).caption
    assert "how each request's own prefill was routed" in one_tag
    assert "Held out" not in one_tag


def test_the_words_are_those_of_the_intervals(many: Path) -> None:
    view = context_of(many, batch=4)
    _, random, aware = made(view, 4, "decode").policies
    for label, name in (
        ("Straggler factor", FIGURES["straggler"]),
        ("Imbalance ratio", "imbalance_ratio"),
    ):
        words = [VERDICTS[one.gains[name].verdict] for one in (random, aware) if one.gains]
        assert f"{label}: random {words[0]}, load-aware {words[1]}." in panel(view).caption


def test_of_few_requests_no_interval_is_drawn_or_told(few: Path) -> None:
    filled = panel(context_of(few, batch=4))
    assert "Too few requests to say: an interval takes 20." in filled.caption
    assert "95 %" not in filled.caption
    assert all(trace.error_y.array is None for trace in filled.figure.data)
    assert filled.table[["straggler_gain_low", "imbalance_gain_high"]].isna().all(axis=None)
    assert "nan" not in json.dumps([list(trace.hovertext) for trace in filled.figure.data])
    low, high = filled.figure.layout.yaxis.range
    assert low < 0.9 < 1.1 < high


def test_one_batch_to_fill_gains_nothing(few: Path) -> None:
    filled = panel(context_of(few, batch=8))
    assert "one batch to fill" in said(filled)
    assert filled.table["batch_straggler"].notna().all()
    assert filled.table["straggler_gain"].isna().all()
    assert "Supposed: decode" in filled.caption


def test_requests_that_fill_no_batch_are_told(few: Path) -> None:
    caption = panel(context_of(few, batch=3)).caption
    assert "12 of 16 requests in full batches of 3" in caption


# -- what cannot be computed


def test_nothing_is_composed_unless_asked_for(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "served_requests", None)  # whose call would raise
    view = context_of(many)
    assert "Made where it is asked for" in said(panel(view))
    assert not prompts.fill(view).body


def test_sums_have_no_requests(context: Make) -> None:
    view = context(batch=4)
    assert "This needs a recording of level tokens" in said(panel(view))
    assert not prompts.fill(view).body


def test_more_than_there_are_is_one_line(few: Path) -> None:
    view = context_of(few, batch=16)
    line = said(panel(view))
    assert line.startswith("Batch size 16 is more than the 8 requests in each half")
    assert not prompts.fill(view).body


def test_a_recording_without_decode_says_so(few: Path, tmp_path: Path) -> None:
    view = context_of(few, batch=4)
    prefill = view.whole.select(phase="prefill")
    line = said(panel(replace(view, whole=prefill, profile=prefill)))
    assert line == "Phase 'decode' does not occur; there are prefill."


def test_a_selection_of_nothing_is_one_line(few: Path) -> None:
    view = context_of(few, batch=4)
    nothing = replace(view, profile=view.profile.narrowed("decode", "of nothing"))
    assert "no tokens" in said(panel(nothing))


@pytest.mark.parametrize("bound", ["MOST_TOKENS", "MOST_FITS"])
def test_too_much_is_left_to_the_command(
    few: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(batches, bound, 10)
    view = context_of(few, batch=4, phase="prefill", tag="code")
    assert "more tokens or requests than a page" in said(panel(view))
    assert command(view)[3:] == shlex.split(
        "RECORDING --batch-sizes 4 --ranks 8 --phase prefill --tag code"
    )


def test_without_tags_there_is_the_panel_too(tmp_path: Path) -> None:
    view = context_of(record_tokens(tmp_path / "run", None, rows=4, tokens=8), batch=2)
    filled = panel(view)
    assert filled.table["policy"].tolist() == ["FIFO", "random", "load-aware"]
    assert command(view)[3] == "RECORDING"
    assert "own prefill" in filled.caption


def test_an_empty_recording_says_so(writer: Writer) -> None:
    assert "level tokens" in said(panel(context_of(writer.path, batch=4)))


def test_batches_of_another_phase_are_of_decode(few: Path) -> None:
    view = context_of(few, batch=4)
    other = replace(view, state=replace(view.state, phase="mixed"))
    assert "Supposed: decode" in panel(other).caption
    assert command(other)[-2:] == ["--phase", "decode"]


def test_hostile_tags_are_one_word_and_no_markup(many: Path) -> None:
    view = context_of(many, batch=4, tag=HOSTILE)
    assert command(view)[-2:] == ["--tag", HOSTILE]
    assert "<img" not in panel(view).figure.to_json()


# -- asked for once


def test_it_is_computed_once_for_a_version_and_a_selection(
    few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    true = batches.compare_requests

    def spy(requests: Any, sizes: Any, **options: Any) -> Batching:
        asked.extend(sizes)
        return true(requests, sizes, **options)

    monkeypatch.setattr(batches, "compare_requests", spy)
    view = replace(context_of(few, batch=4), version="1", answers=Memo(8))
    prompts.fill(view)
    prompts.fill(replace(view, scheme="dark", state=replace(view.state, layer=1)))
    assert asked == [4]
    prompts.fill(replace(view, state=replace(view.state, batch=2)))
    prompts.fill(replace(view, version="2"))
    assert asked == [4, 2, 4]


def test_the_control_offers_sizes(few: Path) -> None:
    opened = Library(few).open("?batch=12")
    assert not opened.ignored
    offered: Any = control("batch", opened, [], prompts.VIEW.controls)
    assert [item["value"] for item in offered.data] == "all 4 8 12 16 32".split()
    assert offered.data[0]["label"] == "Not computed"
    assert offered.value == "12"
