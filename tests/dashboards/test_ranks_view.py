from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import pytest

import routeprof
from routeprof.dashboards.controls import control
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.source import Source
from routeprof.dashboards.panels.rank_list import rank_list
from routeprof.dashboards.panels.spreads import spread
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Content, Context, Filled
from routeprof.dashboards.views import ranks
from routeprof.errors import UsageError
from routeprof.profile import Profile
from routeprof.rank_loads import usual_ranks
from routeprof.report.csv import csv_text
from routeprof.topology import RankRole
from tests.commands.conftest import recording
from tests.dashboards.made import CAPTURED, EXPERTS, Writer

Make = Callable[..., Context]

__all__ = ["recording"]


def said(filled: Filled) -> str:
    """What stands in for a figure."""
    return str(filled.figure.layout.annotations[0].text).replace("<br>", " ")


def look(path: Path, **state: Any) -> Context:
    """What the view draws from, of one recording."""
    reading = Source(path).read()
    profile = routeprof.load(path)
    return Context(profile, profile, ViewState(**state), "light", reading.activity, time())


def in_order(expert: int, experts: int, ranks: int) -> int:
    """The rank of an expert where neighbours are together; counted out one by one."""
    held = [0] * ranks
    for place in range(experts):  # as a dealer would say how many each gets
        held[place % ranks] += 1
    for rank, size in enumerate(held):
        if expert < size:
            return rank
        expert -= size
    raise AssertionError


def brute(profile: Profile, number: int, placement: str) -> dict[int, list[float]]:
    """Load of each rank by layer, one expert at a time."""
    found: dict[int, list[float]] = {}
    for row in profile.experts().itertuples():
        size = profile.layer(row.layer).experts
        if size < number:
            continue
        own = found.setdefault(row.layer, [0.0] * number)
        where = row.expert % number if placement == "striped" else None
        own[in_order(row.expert, size, number) if where is None else where] += row.tokens
    return found


@pytest.mark.parametrize("placement", ["contiguous", "striped"])
@pytest.mark.parametrize("number", [1, 4, 5, 16])
def test_loads_are_those_of_the_experts_on_each_rank(
    number: int, placement: str, context: Make
) -> None:
    view = context(ranks=number, placement=placement, phase="decode")
    filled = ranks.fill(view).panels["rank_loads"]
    expected = brute(view.profile, number, placement)
    assert set(expected) == set(CAPTURED)
    for layer, own in filled.table.groupby("layer"):
        assert own["rank_load"].tolist() == expected[layer]
        mean = sum(expected[layer]) / number
        np.testing.assert_allclose(own["rank_load_over_mean"], np.array(expected[layer]) / mean)
    trace = filled.figure.data[0]
    assert list(trace.y) == ["6", "5 · idle", "4 · unsupported", "3 · silent", "2", "1"]
    assert np.isnan(trace.z[1:4]).all()  # never zeros for what was not captured
    np.testing.assert_allclose(trace.customdata[0] * sum(expected[6]) / number, expected[6], 1e-5)


@pytest.mark.parametrize("number", [1, 4, 5, 16])
def test_the_report_has_every_placement(number: int, context: Make) -> None:
    profile = context(phase="decode").profile
    table = profile.rank_loads(number)
    assert list(table["placement"].unique()) == ["contiguous", "striped"]
    for (placement, layer), own in table.groupby(["placement", "layer"]):
        loads = brute(profile, number, placement)[layer]
        assert own["rank"].tolist() == list(range(number))
        assert own["assignments"].tolist() == loads
        assert own["experts"].sum() == EXPERTS
        assert own["experts"].max() - own["experts"].min() <= 1
        mean = sum(loads) / number
        np.testing.assert_allclose(own["load_over_mean"], np.array(loads) / mean)
    assert table["assignments"].dtype == np.int64
    assert set(table["layer"]) == set(CAPTURED)
    assert not len(profile.rank_loads(EXPERTS + 1))
    with pytest.raises(UsageError, match="pass 1 or more"):
        profile.rank_loads(0)


def test_the_slowest_rank_of_each_placement(context: Make) -> None:
    view = context(ranks=4)
    filled = ranks.fill(view).panels["rank_waits"]
    assert set(filled.table["placement"]) == {"in order", "striped"}
    for row in filled.table.itertuples():
        name = "contiguous" if row.placement == "in order" else "striped"
        own = brute(view.profile, 4, name)[row.layer]
        assert row.slowest_rank == pytest.approx(max(own) / (sum(own) / 4))
    assert filled.table["straggler_factor"].isna().all()
    assert "Record level steps" in filled.caption
    assert [trace.name for trace in filled.figure.data] == ["in order", "striped"]


def test_balancedness_as_both_engines_say_it(context: Make) -> None:
    cards = {card.name: card for card in ranks.fill(context(ranks=4)).cards}
    loads = list(brute(context().profile, 4, "contiguous").values())
    means, largest = [sum(own) / 4 for own in loads], [max(own) for own in loads]
    vllm = sum(means) / sum(largest)
    sglang = sum(mean / top for mean, top in zip(means, largest, strict=True)) / len(loads)
    assert cards["vllm_balancedness"].value == f"{vllm:.2f}"
    assert cards["sglang_balancedness"].value == f"{sglang:.2f}"
    assert cards["ep_ranks"].value == "4"


def test_ranks_of_one_layer(context: Make) -> None:
    view = context(ranks=3, layer=2, placement="striped")
    filled = ranks.fill(view).panels["layer_ranks"]
    assert filled.table["rank_load"].tolist() == brute(view.profile, 3, "striped")[2]
    silent = ranks.fill(context(ranks=3, layer=3)).panels["layer_ranks"]
    assert "silent" in said(silent)
    assert not len(silent.table)


def test_more_ranks_than_experts_is_said(context: Make) -> None:
    panels = ranks.fill(context(ranks=EXPERTS + 1)).panels
    for filled in (panels[name] for name in panels if name != "placements"):
        assert "fewer ranks" in said(filled)


def test_layers_of_different_sizes(context: Make) -> None:
    view = context(ranks=12)
    layers = tuple(
        replace(layer, experts=8) if layer.index == 6 else layer
        for layer in view.profile.info.layers
    )
    counts = view.profile.totals.lists["counts"].copy()
    counts[:, 6, 8:] = 0
    totals = replace(view.profile.totals, lists=view.profile.totals.lists | {"counts": counts})
    profile = replace(view.profile, info=replace(view.profile.info, layers=layers), totals=totals)
    smaller = replace(view, whole=profile, profile=profile)
    content = ranks.fill(smaller)
    assert set(content.panels["rank_loads"].table["layer"]) == {1, 2}
    assert "1 layer with fewer experts" in content.panels["rank_loads"].caption
    four = ranks.fill(replace(smaller, state=ViewState(ranks=4))).panels["rank_loads"].table
    for layer, own in four.groupby("layer"):
        assert own["rank_load"].tolist() == brute(profile, 4, "contiguous")[layer]


def test_experts_that_do_no_work_are_on_no_rank(context: Make) -> None:
    view = context(ranks=2)
    layers = tuple(replace(layer, zero_experts=4) for layer in view.profile.info.layers)
    profile = replace(view.profile, info=replace(view.profile.info, layers=layers))
    table = spread(replace(view, whole=profile, profile=profile)).chosen
    own = profile.experts().query("layer == 6")["tokens"].to_numpy()
    assert table[5].tolist() == [own[:6].sum(), own[6:12].sum()]


# -- how many ranks


@pytest.mark.parametrize(
    ("experts", "number"), [(64, 8), (256, 8), (60, 6), (10, 5), (7, 7), (13, 1), (4, 4)]
)
def test_usual_number_of_ranks(context: Make, experts: int, number: int) -> None:
    profile = context().profile
    layers = tuple(
        replace(layer, experts=experts) if layer.kind == "moe" else layer
        for layer in profile.info.layers
    )
    profile = replace(profile, info=replace(profile.info, layers=layers), files=None)
    assert usual_ranks(profile) == (number, False)


def test_recorded_ranks_come_first(tmp_path: Path) -> None:
    path = tmp_path / "parallel"
    for rank in range(4):
        writer = Writer(path, rank, world=4)
        writer.writer.state.role = RankRole(
            rank=rank, world_size=4, tp=rank % 2, ep=rank, dp=rank // 2, owns_tokens=rank % 2 == 0
        )
        writer.writer.state.host = f"node-{rank // 2}"
        for _ in range(rank + 1):
            writer.write()
        writer.stop()
    view = look(path)
    assert usual_ranks(view.whole) == (4, True)
    content = ranks.fill(view)
    assert content.cards[0].note == "4 ranks recorded on 2 nodes"
    table, said = rank_list(view), view.profile.ranks()
    assert table["host"].tolist() == ["node-0", "node-0", "node-1", "node-1"]
    assert table["role"].tolist()[1] == "tp 1 · dp 0 · ep 1 · twin"
    owners = said["owns_tokens"].to_numpy(dtype=bool)
    for name in ("steps", "tokens", "assignments"):
        assert table.loc[owners, name].tolist() == said.loc[owners, name].tolist()
        assert table.loc[~owners, name].isna().all()


# -- placements that were recorded


def note(path: Path, *maps: dict[str, Any]) -> None:
    (path / "rank-00000" / "placements.json").write_text(json.dumps(maps))


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """A recording whose experts sat elsewhere; two of them twice."""
    path = tmp_path / "moved"
    writer = Writer(path, started=1000.0)
    for _ in range(3):
        writer.write()
    writer.stop()
    generator = np.random.default_rng(5)
    rows = [[*generator.permutation(EXPERTS).tolist(), 3, 9] for _ in range(7)]
    return path, rows


def test_recorded_placements_with_replicas(moved: tuple[Path, list[list[int]]]) -> None:
    path, rows = moved
    note(
        path,
        {"time": 990.0, "ep_size": 6, "physical_to_logical": [list(range(EXPERTS))] * 7},
        {"time": 1001.5, "ep_size": 6, "physical_to_logical": rows},
        {"time": 2000.0, "ep_size": 9, "physical_to_logical": [list(range(EXPERTS))] * 7},
    )
    view = look(path, placement="recorded")
    assert usual_ranks(view.whole) == (6, True)
    filled = ranks.fill(view).panels["rank_loads"]
    tokens = {(row.layer, row.expert): row.tokens for row in view.profile.experts().itertuples()}
    for layer, own in filled.table.groupby("layer"):
        expected = [0.0] * 6
        for slot, expert in enumerate(rows[layer]):  # 18 slots, 3 on each rank
            expected[slot // 3] += tokens[layer, expert] / rows[layer].count(expert)
        np.testing.assert_allclose(own["rank_load"], expected)
    report = view.profile.rank_loads()
    report = report[report["placement"] == "recorded"]
    assert report["experts"].tolist() == [3] * len(report)
    np.testing.assert_allclose(report["assignments"], filled.table["rank_load"])
    assert csv_text(view.profile, "ranks").count("\nrecorded,") == len(report)
    assert "moved 1 time meanwhile" in filled.caption
    assert "supposition" not in filled.caption
    assert set(ranks.fill(view).panels["rank_waits"].table["placement"]) == {
        "in order",
        "striped",
        "as recorded",
    }
    assert (
        "dealt to 3"
        in ranks.fill(look(path, placement="recorded", ranks=3)).panels["rank_loads"].caption
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[]",
        "[1]",
        '[{"time": 1}]',
        '[{"time": 1, "ep_size": 2, "physical_to_logical": [[0, 1], [0]]}]',
        '[{"time": 1, "ep_size": 0, "physical_to_logical": [[0, 1]]}]',
        '[{"time": 1, "ep_size": 2, "physical_to_logical": "<b>"}]',
        "[" * 100_000,
    ],
)
def test_a_damaged_map_is_no_map(moved: tuple[Path, list[list[int]]], text: str) -> None:
    path, _ = moved
    (path / "rank-00000" / "placements.json").write_text(text)
    view = look(path, placement="recorded")
    filled = ranks.fill(view).panels["rank_loads"]
    assert "does not say where" in said(filled)


def test_a_map_of_another_model_is_no_zeros(moved: tuple[Path, list[list[int]]]) -> None:
    path, _ = moved
    note(path, {"time": 1.0, "ep_size": 2, "physical_to_logical": [[0, 1, 2, -7]] * 2})
    panels = ranks.fill(look(path, placement="recorded")).panels
    assert set(panels["rank_waits"].table["placement"]) == {"in order", "striped"}
    assert len(panels["rank_waits"].figure.data) == 2
    for name in ("rank_loads", "layer_ranks"):
        assert not len(panels[name].table)
        assert "does not fit" in said(panels[name])


def test_the_choice_as_recorded_is_there_where_it_means_something(
    moved: tuple[Path, list[list[int]]],
) -> None:
    path, rows = moved
    assert labels(path) == ["In order", "Striped"]
    note(path, {"time": 1.0, "ep_size": 2, "physical_to_logical": rows})
    assert labels(path) == ["In order", "Striped", "As recorded"]


def labels(path: Path) -> list[str]:
    opened = Library(path).open("")
    return [item["label"] for item in control("placement", opened, []).data]


# -- steps


@pytest.mark.parametrize("phase", [None, "decode"])
def test_straggler_factor_over_steps(recording: Path, phase: str | None) -> None:
    view = look(recording, ranks=4)
    view = replace(view, profile=view.whole.narrowed(phase, None))
    filled = ranks.fill(view).panels["rank_waits"]
    table = view.profile.step_counts()
    assert len(table.counts) == (15 if phase is None else 12)
    for row in filled.table.itertuples():
        slowest = mean = 0.0
        for layer, counts in zip(table.layer, table.counts, strict=True):
            if layer != row.layer:
                continue
            loads = [0] * 4
            for expert, tokens in enumerate(counts):
                rank = expert // 2 if row.placement == "in order" else expert % 4
                loads[rank] += int(tokens)
            slowest, mean = slowest + max(loads), mean + sum(loads) / 4
        assert row.straggler_factor == pytest.approx(slowest / mean)
        assert row.straggler_factor >= row.slowest_rank
    whiskers = filled.figure.data[0].error_y.array
    first = filled.table[filled.table["placement"] == "in order"]
    np.testing.assert_allclose(
        whiskers, first["straggler_factor"] - first["slowest_rank"], atol=1e-6
    )


def test_ranks_and_their_nodes_stay_below(context: Make) -> None:
    content: Content = ranks.fill(context())
    assert "Recorded ranks" in json.dumps(
        content.body[0], default=lambda item: item.to_plotly_json()
    )
