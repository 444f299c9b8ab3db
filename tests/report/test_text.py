import json
import math
import re
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from routeprof.recording.schema import RankState
from routeprof.report import summary, text
from routeprof.topology import Layer, ModelInfo
from tests.report.conftest import build, large, moe


def table_of(printed, heading):
    """Cells of the table below a line."""
    lines = printed.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(heading))
    body = lines[start:]
    rule = next(n for n, line in enumerate(body) if line.startswith("──"))
    rows = []
    for line in body[rule + 1 :]:
        if not re.match(r"\S* *.*\d", line) or line.startswith(("…", "not ")):
            break
        rows.append(line.split())
    return rows


def test_layers_have_the_numbers_of_their_counts(profile, counts):
    rows = table_of(text.summary_text(profile, width=160), "layers, the most")
    sums = counts.sum(0)
    assert sorted(int(row[0]) for row in rows) == [0, 1, 2, 3]
    ratios = [float(row[2]) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    for row in rows:
        own, steps = sums[int(row[0])], counts[:, int(row[0])]
        above = [np.maximum(steps - math.ceil(f * 10 * 2 / 8), 0).sum() for f in (1.0, 1.25)]
        shares = own / own.sum()
        alive = shares[shares > 0]
        assert row[1] == f"{own.sum() // 2:,}"
        assert row[2] == f"{own.max() / own.mean():.2f}"
        assert row[4] == (f"{own.max() / own.min():.2f}" if own.min() else "∞")
        assert row[5] == str((own == 0).sum())
        assert row[6] == f"{np.sort(own)[-2:].sum() / own.sum():.1%}"
        assert row[7] == str(own.argmax())
        assert row[8] == f"{-(alive * np.log(alive)).sum() / np.log(8):.2f}"
        assert row[9:11] == [f"{over / own.sum():.1%}" for over in above]
        assert row[11] == "100%"
        # Six steps of the same size: the 95th percentile is the worst one, within half a bin.
        assert float(row[3]) == pytest.approx((steps.max(1) / steps.mean(1)).max(), rel=0.015)


def test_header_names_model_cost_steps_and_tokens(profile):
    printed = text.summary_text(profile)
    for line in (
        "model            tiny (mixtral)",
        "engine           transformers 5.0",
        "steps            6",
        "tokens           60",
        "layers           4 of 4 captured",
        "phases           prefill, decode",
        "tags             code, prose",
        "coverage         100%",
        "own cost         2.5%, 0.25 s of 10.00 s",
    ):
        assert line in printed
    assert printed.startswith("model ")


@pytest.mark.parametrize("kind", ["phase", "tag"])
def test_groups_have_the_median_and_the_worst_layer(profile, counts, kind):
    parts = {
        "phase": {"prefill": counts[:2], "decode": counts[2:]},
        "tag": {"code": counts[:4], "prose": counts[4:]},
    }[kind]
    rows = {row[0]: row[1:] for row in table_of(text.summary_text(profile), f"by {kind}")}
    assert list(rows) == list(parts)
    for name, steps in parts.items():
        ratios = steps.sum(0).max(1) / steps.sum(0).mean(1)
        expected = [len(steps), 10 * len(steps), np.median(ratios), ratios.max(), ratios.argmax()]
        assert rows[name] == [
            *map(str, expected[:2]),
            *(f"{number:.2f}" for number in expected[2:4]),
            str(expected[4]),
        ]


def test_what_was_not_captured_comes_first_and_never_as_zero(partial):
    lines = text.summary_text(partial, all_layers=True).splitlines()
    assert lines[0].startswith("error: 1 layer never ran a hook although the model ran: 2.")
    before = "\n".join(lines[: lines.index(next(x for x in lines if x.startswith("model ")))])
    assert "1 layer cannot be read: 3 (fused router)" in before
    rows = table_of("\n".join(lines), "layers, the most")
    assert [row[0] for row in rows] == ["1"]
    assert "not captured (silent): layer 2" in lines
    assert "not captured (unsupported): layer 3" in lines
    assert any(
        line == "layers           1 of 3 captured, 1 silent, 1 unsupported" for line in lines
    )


def test_nothing_captured_has_dashes_and_no_zeros():
    printed = text.summary_text(build([moe(0)], {}))
    assert printed.startswith("error: no forward pass was recorded")
    for name in ("steps", "tokens", "coverage", "imbalance_ratio", "own cost"):
        assert re.search(rf"^{name} +–$", printed, re.M)
    assert "layers, the most" not in printed


def test_a_layer_that_ran_without_tokens_has_dashes():
    rows = table_of(
        text.summary_text(build([moe(0)], {("decode", None): np.zeros((2, 1, 8), int)}), width=160),
        "layers, the most",
    )
    assert rows == [["0", "0", *["–"] * 10]]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_fits_the_width_and_keeps_the_ratio_that_matters(width):
    printed = text.summary_text(large(), width=width)
    assert max(map(len, printed.splitlines())) <= width
    assert "max/mean" in printed
    assert "… and 46 more; --all shows them" in printed
    assert ("not shown at this width" in printed) == (width < 120)
    assert len(table_of(printed, "layers, the most")) == 12
    assert len(table_of(text.summary_text(large(), all_layers=True), "layers, the most")) == 58


def test_large_numbers_have_separators_and_infinity_a_sign():
    counts = np.zeros((1, 1, 8), int)
    counts[0, 0, :2] = 1_500_000, 500_000
    row = table_of(
        text.summary_text(build([moe(0)], {("decode", None): counts}), width=160),
        "layers, the most",
    )[0]
    assert row[1] == "1,000,000"
    assert row[4] == "∞"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "100%"), (0.99999, "99.99%"), (0.5, "50.00%"), (1.000001, "100.01%"), (np.nan, "–")],
)
def test_coverage_is_whole_only_where_nothing_is_missing(value, shown):
    assert summary.coverage(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (119.96, "120.0 s"), (125, "2 min 05 s"), (3780, "1 h 03 min")],
)
def test_duration(seconds, shown):
    assert summary.duration(seconds) == shown


def test_names_cannot_steer_the_terminal_or_rich(counts):
    hostile = "[bold red]\x1b[31mX\u202e[/]"
    layers = [moe(n, note=hostile) for n in range(4)]
    model = ModelInfo(name=hostile)
    printed = text.summary_text(
        build(layers, {("decode", hostile): counts}, model=model), width=200
    )
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert printed.count("[bold red]�[31mX�[/]") >= 3


def test_colour_only_on_a_terminal_and_without_no_color(profile, monkeypatch):
    def printed(**settings):
        out = StringIO()
        text.print_summary(profile, Console(file=out, width=100, **settings))
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in printed(force_terminal=False)
    assert "\x1b[36m" in printed(force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in printed(force_terminal=True, color_system="standard")


def test_layers_that_drop_are_named(counts):
    layers = [moe(0), moe(1, drops=True), moe(2), moe(3)]
    printed = text.summary_text(build(layers, {("decode", None): counts}, invalid={1: 4}))
    assert "layers 1 really drop" in printed


def test_a_killed_process_is_told_by_the_time(counts):
    state = RankState(state="recording", updated=1000.0, flush_seconds=5.0)
    profile = build([moe(n) for n in range(4)], {("decode", None): counts}, state=state)
    assert "was not stopped" not in text.summary_text(profile)
    assert "was not stopped" in text.summary_text(profile, now=2000.0)


def test_what_is_selected_is_said(profile):
    part = replace(profile.select(phase="decode"), between=(0.0, 86400.0))
    line = "phase decode, from 1970-01-01T00:00:00+00:00 to 1970-01-02T00:00:00+00:00"
    assert f"selected         {line}" in text.summary_text(part)
    part = replace(profile, between=(0.0, math.inf))
    assert "selected         from 1970-01-01T00:00:00+00:00 on" in text.summary_text(part)


def test_missing_parts_come_first(counts):
    state = RankState(state="stopped", parts={"part": 3})
    profile = build([moe(n) for n in range(4)], {("decode", None): counts}, state=state)
    assert text.summary_text(profile).startswith("error: rank 0: 3 part files are missing")


def test_damaged_parts_come_first(profile):
    lines = ("rank-00000/part-000001.parquet cannot be read: it ends too early",)
    damaged = replace(profile, totals=replace(profile.totals, unread=lines))
    assert text.summary_text(damaged).startswith(f"error: {lines[0]}")


# -- JSON


def test_json_survives_a_strict_round_trip(partial):
    data = summary.summary_json(partial)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    names = "model engine device level phase tag between coverage seconds steps tokens cost layers"
    assert list(data) == [*names.split(), "phases", "tags", "ranks", "findings"]
    assert [layer["state"] for layer in data["layers"]] == ["captured", "silent", "unsupported"]
    for layer in data["layers"][1:]:
        assert all(
            layer[name] is None
            for name in ("tokens", "assignments", "imbalance_ratio", "dead_experts")
        )
    assert [finding["code"] for finding in data["findings"]][:2] == [
        "silent-layers",
        "unsupported-layers",
    ]
    assert data["cost"] == {"cost_seconds": None, "busy_seconds": None}
    assert data["tags"] == []


def test_json_has_the_numbers_in_full(profile, counts):
    data = summary.summary_json(profile)
    for place, layer in enumerate(data["layers"]):
        own = counts.sum(0)[place]
        assert layer["assignments"] == own.sum()
        assert layer["imbalance_ratio"] == pytest.approx(own.max() / own.mean(), rel=1e-12)
        over = np.maximum(counts[:, place] - 3, 0).sum()
        assert layer["would_overflow_1"] == pytest.approx(over / own.sum(), rel=1e-12)
    assert data["steps"] == 6
    assert data["tokens"] == 60
    assert data["coverage"] == 1.0
    assert data["cost"] == {"cost_seconds": 0.25, "busy_seconds": 10.0}
    assert [row["phase"] for row in data["phases"]] == ["prefill", "decode"]


def test_json_of_a_selection_says_so(profile):
    data = summary.summary_json(profile.select(phase="decode", tag="code"))
    assert (data["phase"], data["tag"], data["steps"]) == ("decode", "code", 2)
    assert data["phases"][0]["steps"] == 2


def test_infinity_is_null_beside_its_dead_experts():
    counts = np.array([[[3, 1, 0, 0]]])
    profile = build([moe(0, experts=4)], {("decode", None): counts})
    layer = summary.summary_json(profile)["layers"][0]
    assert (layer["hot_cold_ratio"], layer["dead_experts"]) == (None, 2)
    assert layer["hot_cold_ratio_alive"] == 3.0


def test_dense_layers_are_left_out():
    layers = [Layer(0, "dense", "dense"), moe(1)]
    counts = np.zeros((1, 2, 8), int)
    counts[0, 1] = 4
    data = summary.summary_json(build(layers, {("decode", None): counts}))
    assert [layer["layer"] for layer in data["layers"]] == [1]


def test_a_model_without_moe_layers_has_a_summary():
    profile = build([Layer(0, "mlp", "dense")], {("decode", None): np.zeros((1, 1, 8), int)})
    assert summary.summary_json(profile)["layers"] == []
    assert "0 of 0 captured" in text.summary_text(profile)
