from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routeprof
from routeprof.dashboards import formats
from routeprof.dashboards.controls import MOST_GPUS, control
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.panels import memory_plan
from routeprof.dashboards.preview import context_for
from routeprof.dashboards.state import MODELS, ViewState
from routeprof.dashboards.view import Content, Context
from routeprof.dashboards.views import plan as view_of_plan
from routeprof.plan.hotness import measured
from routeprof.plan.known import known_config
from routeprof.plan.memory import GIB, Plan, Setting
from routeprof.plan.memory import plan as planned
from routeprof.plan.model import load_model, model_of
from routeprof.plan.precision import precision
from routeprof.profile import Profile
from tests.commands.conftest import Cli, cli
from tests.dashboards.made import HOSTILE
from tests.dashboards.synthetic import Shape, write

Make = Callable[..., Context]

__all__ = ["cli"]

PARTS = {
    "attention_gib": "attention",
    "state_weights_gib": "state",
    "shared_gib": "shared_experts",
    "routed_gib": "routed_experts",
    "embeddings_gib": "embeddings",
    "other_gib": "other",
}


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A made-up recording of a model of OLMoE's shape: 16 layers of 64 experts, 8 of a token."""
    path = tmp_path_factory.mktemp("plan") / "run"
    write(path, Shape(layers=16, experts=64, windows=8))
    return called(routeprof.load(path), model_type="olmoe", hidden_size=2048, expert_width=1024)


def called(profile: Profile, **facts: Any) -> Profile:
    """The same with other facts of the model."""
    model = replace(profile.info.model, **facts)
    return replace(profile, info=replace(profile.info, model=model))


def context_of(profile: Profile, **state: Any) -> Context:
    chosen = ViewState(**state)
    view = context_for(profile, chosen, now=0.0)
    return replace(view, profile=profile.narrowed(chosen.phase, chosen.tag))


def fill(profile: Profile, **state: Any) -> Content:
    return view_of_plan.fill(context_of(profile, **state))


def text_of(parts: Any) -> str:
    return json.dumps(parts, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


def said(content: Content) -> str:
    """What stands in for the figure."""
    filled = content.panels["memory"]
    assert not filled.figure.data
    assert not content.cards
    (line,) = filled.figure.layout.annotations
    return str(line.text).replace("<br>", " ")


def command(content: Content) -> list[str]:
    """The command line below the figure, as a shell takes it apart."""
    return shlex.split(content.body[-1].children[-1].children.children)


def expected(name: str, gpus: int, nodes: int = 1, profile: Any = None, **options: Any) -> Plan:
    """The plan as the command makes it."""
    made = {"memory": 80, "length": 8192, "batch": 1, "dtype": "bf16"} | options
    setting = Setting(
        memory=made["memory"] * GIB,
        length=made["length"],
        batch=made["batch"],
        precision=precision(made["dtype"]),
    )
    model = load_model(name)
    loads = measured(profile, model) if profile else None
    return planned(model, setting, gpus=gpus, nodes=nodes, measured=loads)


# -- figures


@pytest.mark.parametrize(
    ("name", "gpus", "nodes", "options"),
    [
        ("mixtral-8x7b", 4, 1, {}),
        ("deepseek-v3", 16, 2, {"memory": 140, "dtype": "fp8", "batch": 32}),
        ("jamba-v0.1", 2, 1, {"batch": 4, "length": 1000}),
        ("qwen3-next-80b-a3b", 8, 1, {"dtype": "int4", "memory": 24}),
        ("llama-3.1-405b", 8, 1, {}),
    ],
)
def test_figure_table_and_cards_are_the_plan(
    context: Make, name: str, gpus: int, nodes: int, options: dict[str, Any]
) -> None:
    view = context(model=name, ranks=gpus, nodes=nodes, **options)
    made, content = expected(name, gpus, nodes, **options), view_of_plan.fill(view)
    table = content.panels["memory"].table
    assert len(table) == len(made.splits)
    assert table["fits"].tolist() == ["yes" if row.fits else "no" for row in made.splits]
    assert table["sequences"].tolist() == [row.sequences for row in made.splits]
    wide = [max(row.layout.tp, row.layout.etp) > gpus // nodes for row in made.splits]
    assert table["spans_nodes"].tolist() == ["yes" if one else "no" for one in wide]
    assert ("layout_experts" in table) == bool(made.model.moes)
    if made.model.moes:
        names = table["layout_attention"] + ", " + table["layout_experts"]
        assert names.tolist() == [str(row.layout) for row in made.splits]
    check_bytes(table, made)
    check_bars(content.panels["memory"].figure, made)
    check_cards(content, made)


def check_bytes(table: Any, made: Plan) -> None:
    for column, part in PARTS.items():
        sizes = [row.weights[part] for row in made.splits]  # type: ignore[index]
        assert (column in table) == any(sizes)
        if column in table:
            np.testing.assert_allclose(table[column] * GIB, sizes)
    for column, name in (
        ("weights_gib", "weights_bytes"),
        ("kv_gib", "kv"),
        ("held_back_gib", "held_back"),
        ("cache_room_gib", "free"),
        ("activations_gib", "activations"),
    ):
        np.testing.assert_allclose(table[column] * GIB, [getattr(row, name) for row in made.splits])


def check_bars(figure: Any, made: Plan) -> None:
    """All parts of a layout that fits fill the GPU; those of another reach past the line."""
    shown = made.splits[:10]
    assert len(figure.data[0].y) == len(shown)
    free = [bar for bar in figure.data if bar.name == "free"]
    ends = np.nansum([bar.x for bar in figure.data], axis=0)
    for end, row in zip(ends, shown, strict=True):
        used = row.weights_bytes + row.cache_bytes + row.held_back
        np.testing.assert_allclose(end * GIB, max(used, made.setting.memory), rtol=1e-5)
    assert len(free) == 1
    (line,) = figure.layout.shapes
    assert line.x0 == line.x1 == made.setting.memory / GIB
    assert figure.layout.yaxis.autorange == "reversed"  # the first on top


def check_cards(content: Content, made: Plan) -> None:
    values = {card.name: card.value for card in content.cards}
    fitting = [row for row in made.splits if row.fits]
    assert values["plan_fits"] == f"{len(fitting)} of {len(made.splits)}"
    if fitting:
        assert values["most_sequences"] == f"{max(row.sequences or 0 for row in fitting):,}"
        assert values["weights_best"] == formats.size(made.splits[0].weights_bytes)
    else:
        assert (values["most_sequences"], values["weights_best"]) == ("0", "–")


def test_known_figures_come_out(context: Make) -> None:
    values = {
        name: {card.name: card for card in view_of_plan.fill(context(model=name)).cards}
        for name in ("mixtral-8x7b", "deepseek-v3")
    }
    mixtral, deepseek = values.values()
    assert mixtral["parameters"].value == "46.70 B"
    assert mixtral["plan_fits"].tone == ""
    assert deepseek["parameters"].value.startswith("671.")
    assert deepseek["parameters"].note.startswith("37.")
    assert deepseek["plan_fits"].value.startswith("0 of ")  # 1.34 TB in BF16 on 8 x 80 GB
    assert deepseek["plan_fits"].tone == "bad"


# -- the recorded model


def test_the_recorded_model_is_planned_with_its_loads(olmoe: Profile) -> None:
    content = fill(olmoe)
    made = expected("olmoe-1b-7b", 8, profile=olmoe)
    table = content.panels["memory"].table
    np.testing.assert_allclose(
        table["buffers_gib"] * GIB, [row.dispatch + row.combine for row in made.splits]
    )
    even = expected("olmoe-1b-7b", 8)
    assert {row.dispatch + row.combine for row in made.splits} != {
        row.dispatch + row.combine for row in even.splits
    }
    shown = text_of(list(content.body))
    assert "The plan is of olmoe-1b-7b, as the recorded model" in shown
    assert "Experts as recorded: the fullest of 8 ranks" in shown
    first = made.measured.hottest()[0] if made.measured else None
    assert first is not None
    assert f'"children": "{first.over_mean:.2f}"' in shown
    assert "--recording RECORDING" in shown


@pytest.mark.parametrize("phase", [None, "decode"])
def test_the_command_that_is_shown_prints_the_same(
    olmoe: Profile, cli: Cli, tmp_path: Path, phase: str | None
) -> None:
    path = tmp_path / "run"
    write(path, Shape(layers=16, experts=64, windows=8))
    content = fill(olmoe, ranks=4, memory=24, dtype="fp8", batch=8, length=500, phase=phase)
    program, *words = command(content)
    assert program == "routeprof"
    done = cli(*(path if word == "RECORDING" else word for word in words), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["loads"] == "measured"
    table = content.panels["memory"].table
    assert table["sequences"].tolist() == [row["max_sequences"] for row in said["splits"]]
    for column, name in (("weights_gib", "weights_bytes"), ("held_back_gib", "held_back_bytes")):
        np.testing.assert_allclose(
            table[column] * GIB, [row[name] for row in said["splits"]], atol=1
        )
    buffers = [row["dispatch_bytes"] + row["combine_bytes"] for row in said["splits"]]
    np.testing.assert_allclose(table["buffers_gib"] * GIB, buffers, atol=2)


@pytest.mark.parametrize(
    "facts",
    [
        {"model_type": "mixtral"},
        {"hidden_size": 1024},
        {"hidden_size": None},
        {"expert_width": 512},
        {"model_type": ""},
        {"name": "allenai/OLMoE-1B-7B-0125-Instruct", "hidden_size": 64},
    ],
)
def test_another_shape_is_not_the_known_model_whatever_its_name(
    olmoe: Profile, facts: dict[str, Any]
) -> None:
    content = fill(called(olmoe, **facts))
    assert "not one of the known ones" in said(content)
    assert command(content)[2] == "CONFIG_JSON"
    assert "--recording" not in command(content)


def test_a_layer_less_is_another_model(olmoe: Profile) -> None:
    info = replace(olmoe.info, layers=olmoe.info.layers[:-1])
    assert "not one of the known ones" in said(fill(replace(olmoe, info=info)))


def test_loads_of_another_model_are_not_used(olmoe: Profile) -> None:
    content = fill(olmoe, model="qwen3-30b-a3b")
    shown = text_of(list(content.body))
    assert "which is not what was recorded here" in shown
    assert "taken to be loaded evenly, as the recording is of another model" in shown
    assert "--recording" not in command(content)
    assert "Hottest experts" not in shown


def test_what_was_not_counted_is_taken_to_be_even_and_said(olmoe: Profile) -> None:
    """A layer without counts has no measured balance."""
    lists = dict(olmoe.totals.lists)
    lists["counts"] = lists["counts"].copy()
    lists["counts"][:, 3] = 0
    partial = replace(olmoe, totals=replace(olmoe.totals, lists=lists))
    content = fill(partial)
    shown = text_of(list(content.body))
    assert "not every MoE layer was counted" in shown
    assert "--recording" not in command(content)
    lists["counts"][:] = 0
    assert "not every MoE layer was counted" in text_of(list(fill(partial).body))


def test_what_is_not_known_is_a_dash_and_not_drawn(
    olmoe: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a family whose cache nobody has described."""
    unknown = replace(load_model("olmoe-1b-7b"), kept=None)
    monkeypatch.setattr(memory_plan, "known_model", lambda _: unknown)
    content = fill(olmoe)
    filled = content.panels["memory"]
    names = [bar.name for bar in filled.figure.data]
    assert "KV cache" not in names
    assert "free" not in names
    assert "left for the cache" in names
    assert filled.table[["kv_gib", "sequences"]].isna().all(axis=None)
    assert set(filled.table["fits"]) == {"–"}
    values = {card.name: card.value for card in content.cards}
    assert values["plan_fits"] == values["most_sequences"] == values["weights_best"] == "–"
    assert {card.tone for card in content.cards} == {""}
    assert "not known" in filled.caption
    assert "nan" not in text_of([list(content.body), filled.caption])


# -- the recording's own configuration


def configured(olmoe: Profile, **changes: Any) -> Profile:
    """The same with a configuration of its own, by which it is no known model."""
    config = {**(known_config("olmoe-1b-7b") or {}), "vocab_size": 1234, **changes}
    return called(olmoe, name="tuned", config=config)


def test_the_recordings_own_configuration_is_planned_first(olmoe: Profile) -> None:
    content = fill(configured(olmoe))
    model = replace(model_of(configured(olmoe).info.model.config or {}), name="tuned")
    assert model.vocab == 1234
    made = planned(model, Setting(memory=80 * GIB), gpus=8, measured=measured(olmoe, model))
    check_bytes(content.panels["memory"].table, made)
    check_cards(content, made)
    shown = text_of(list(content.body))
    assert "The plan is of tuned, by the configuration that its recording has." in shown
    assert "Experts as recorded: the fullest of 8 ranks" in shown


def test_a_model_that_is_chosen_counts_before_the_recordings_own(olmoe: Profile) -> None:
    content = fill(configured(olmoe), model="mixtral-8x7b")
    assert "The plan is of mixtral-8x7b, which is not what was recorded" in text_of(
        list(content.body)
    )
    assert command(content)[:3] == ["routeprof", "plan", "mixtral-8x7b"]


def test_the_command_of_the_recordings_own_prints_the_same(
    olmoe: Profile, cli: Cli, tmp_path: Path
) -> None:
    path, config = tmp_path / "run", configured(olmoe).info.model.config
    write(path, Shape(layers=16, experts=64, windows=8))
    info = json.loads((path / "recording.json").read_text())
    info["model"]["config"] = config
    (path / "recording.json").write_text(json.dumps(info))
    content = fill(configured(olmoe), ranks=4, memory=24, dtype="fp8", batch=8, length=500)
    program, verb, *words = command(content)
    assert (program, verb, words[0]) == ("routeprof", "plan", "--gpus")
    done = cli(verb, *(path if word == "RECORDING" else word for word in words), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["loads"] == "measured"
    table = content.panels["memory"].table
    assert table["sequences"].tolist() == [row["max_sequences"] for row in said["splits"]]
    sizes = [row["weights_bytes"] for row in said["splits"]]
    np.testing.assert_allclose(table["weights_gib"] * GIB, sizes, atol=1)


@pytest.mark.parametrize("changes", [{"num_experts": 32}, {"num_experts_per_tok": 4}], ids=str)
def test_recorded_loads_are_not_those_of_other_layers(
    olmoe: Profile, changes: dict[str, int]
) -> None:
    content = fill(configured(olmoe, **changes))
    shown = text_of(list(content.body))
    assert "the recorded MoE layers are not those of the recording's own configuration" in shown
    assert command(content)[2] == "CONFIG_JSON"
    assert "--recording" not in command(content)


def test_a_family_that_must_be_built_is_left_to_the_command(olmoe: Profile) -> None:
    other = called(olmoe, model_type="x", config={"model_type": "lfm2_moe"})
    content = fill(other)
    assert "of 'lfm2_moe', which a page does not build: use the command below" in said(content)
    assert command(content)[:3] == ["routeprof", "plan", "--gpus"]
    assert "--recording RECORDING" in " ".join(command(content))
    known = fill(called(olmoe, config={"model_type": "lfm2_moe"}))
    assert "The plan is of olmoe-1b-7b, as the recorded model" in text_of(list(known.body))


@pytest.mark.parametrize("config", [{}, {"model_type": "olmoe"}, {"model_type": 3}], ids=str)
def test_a_configuration_that_says_too_little_is_one_line(
    olmoe: Profile, config: dict[str, Any]
) -> None:
    line = said(fill(called(olmoe, config=config)))
    assert line.startswith("The recording's configuration lacks")
    assert "\n" not in line


# -- what cannot be


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"ranks": 6, "nodes": 4}, "6 GPUs on 4 nodes"),
        ({"ranks": MOST_GPUS + 1}, f"{MOST_GPUS} GPUs at most"),
    ],
)
def test_what_cannot_be_is_one_line(context: Make, state: dict[str, Any], line: str) -> None:
    content = view_of_plan.fill(context(model="mixtral-8x7b", **state))
    assert line in said(content)
    assert command(content)[:3] == ["routeprof", "plan", "mixtral-8x7b"]


def test_layouts_that_cannot_run_say_why(context: Make) -> None:
    content = view_of_plan.fill(context(model="mixtral-8x7b", ranks=3))
    filled = content.panels["memory"]
    cannot = filled.table["obstacle"].notna()
    assert cannot.any()
    assert not cannot.all()
    assert "do not divide by TP 3" in text_of(list(content.body))
    marked = ["cannot run" in name for name in filled.figure.data[0].y]
    assert marked == cannot.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_can_be_planned(context: Make, name: str) -> None:
    content = view_of_plan.fill(context(model=name, ranks=8, dtype="int4"))
    assert content.panels["memory"].figure.data
    assert command(content)[2] == name


def test_it_is_planned_once_for_a_selection(
    olmoe: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: Any, **options: Any) -> Plan:
        calls.append(options)
        return planned(*arguments, **options)

    monkeypatch.setattr(memory_plan, "plan", counted)
    view = replace(context_of(olmoe, ranks=4), version="1", answers=Memo(8))
    view_of_plan.fill(view)
    view_of_plan.fill(replace(view, scheme="dark", state=replace(view.state, layer=1)))
    assert len(calls) == 1
    for change in ({"memory": 24}, {"dtype": "fp8"}, {"length": 10}, {"batch": 2}, {"ranks": 2}):
        view_of_plan.fill(replace(view, state=replace(view.state, **change)))
    assert len(calls) == 6


def test_hostile_tags_are_one_word(olmoe: Profile) -> None:
    content = view_of_plan.fill(replace(context_of(olmoe), state=ViewState(tag=HOSTILE)))
    assert "dangerouslySetInnerHTML" not in text_of(list(content.body))


def test_controls_offer_what_there_is(recorded: Path) -> None:
    query = "?model=kimi-k2&ranks=12&memory=100&length=5000&batch=3&dtype=mxfp4"
    opened = Library(recorded).open(query)
    assert not opened.ignored
    names = view_of_plan.VIEW.controls
    made: dict[str, Any] = {name: control(name, opened, [], names) for name in names}
    values = {name: [item["value"] for item in made[name].data] for name in names}
    assert values["memory"] == "24 40 48 80 96 100 140 180 192 256 288".split()
    assert "5000" in values["length"]
    assert values["batch"][:4] == "all 2 3 4".split()
    assert made["batch"].label == "Sequences at once"
    assert made["ranks"].label == "GPUs"
    assert values["model"] == ["all", *MODELS]
    assert {made[name].value for name in names} == {*"kimi-k2 12 1 100 5000 3 mxfp4".split()}
