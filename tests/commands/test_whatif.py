"""whatif capacity and whatif placement as a user sees them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.report.whatif_placement import placement_json, remark_on
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.whatif.capacity import curve
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.comparison import Comparison, RankBalance, compare
from tests.commands.conftest import Cli
from tests.commands.manual import DOCS, examples, same
from tests.commands.test_bad_input import one_line
from tests.recording.made import LISTS, random_parts, write

SAMPLE = RECORDINGS_DIR / "healthy"
FIGURES = {"before", "eplb", "routeprof", "lower_bound"}


def said(cli: Cli, *arguments: object) -> dict:
    done = cli("whatif", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


# -- capacity


def test_capacity_json_has_a_row_for_each_factor(cli: Cli, recording: Path):
    data = said(cli, "capacity", recording, "--factors", "1.0,1.1,1.5,2.6")
    table = curve(routeprof.load(recording), [1.0, 1.1, 1.5, 2.6])
    of_all = table[table["layer"] == "all"]
    assert [row["capacity_factor"] for row in data["rows"]] == [1.0, 1.1, 1.5, 2.6]
    for name in ("overflow_rate", "padding_rate"):
        assert [row[name] for row in data["rows"]] == of_all[name].tolist()
    assert {row["certainty"] for row in data["rows"]} == {"exact"}
    assert "layers" not in data
    assert set(data["recommendation"]) == {"latency", "quality"}


def test_capacity_of_each_layer(cli: Cli, recording: Path):
    data = said(cli, "capacity", recording, "--factors", "1,1.5", "--layers", "--phase", "decode")
    table = curve(routeprof.load(recording).select(phase="decode"), [1, 1.5])
    of_layers = table[table["layer"] != "all"]
    assert [row["layer"] for row in data["layers"]] == [0, 0, 1, 1, 2, 2]
    rates = [row["overflow_rate"] for row in data["layers"]]
    assert rates == of_layers["overflow_rate"].tolist()
    done = cli("whatif", "capacity", recording, "--factors", "1,1.5", "--layers")
    assert len(re.findall(r"exact$", done.stdout, re.MULTILINE)) == 2 * (1 + 3)


def test_capacity_rules_and_the_least_capacity(cli: Cli, recording: Path):
    rates = {}
    for rule in (["ceil"], ["floor"], ["deepspeed"], ["floor", "--min-capacity", "2"]):
        data = said(cli, "capacity", recording, "--factors", "1.0", "--rule", *rule)
        rates[data["rule"], data["min_capacity"]] = data["rows"][0]["overflow_rate"]
    assert list(rates) == [("ceil", 0), ("floor", 0), ("deepspeed", 4), ("floor", 2)]
    assert rates["deepspeed", 4] < rates["ceil", 0] < rates["floor", 0]
    assert rates["floor", 2] < rates["floor", 0]


def test_capacity_from_windows_says_what_is_bounded(cli: Cli):
    data = said(cli, "capacity", SAMPLE, "--factors", "1.0,1.3")
    exact, bounded = data["rows"]
    assert (exact["certainty"], bounded["certainty"]) == ("exact", "bounded")
    assert bounded["overflow_rate"] is None
    assert bounded["overflow_rate_lower"] < bounded["overflow_rate_upper"]
    done = cli("whatif", "capacity", SAMPLE, "--factors", "1.0,1.3")
    assert "level='steps'" in done.stdout
    assert "level='steps'" not in cli("whatif", "capacity", SAMPLE, "--factors", "1.0").stdout


# -- placement


def test_placement_json_judges_on_steps_that_were_not_fitted(cli: Cli, recording: Path):
    data = said(cli, "placement", recording, "--gpus", 2, "--slots", 10)
    made = compare(routeprof.load(recording), Cluster.even(2, 10))
    assert set(data["fitted"]) == set(data["held_out"]) == FIGURES
    assert data["fitted"] == made.fitted.means()
    assert data["held_out"] == made.held_out.means()
    assert (data["fitted_steps"], data["held_out_steps"]) == made.steps == (3, 2)
    assert data["before_is"] == "contiguous"


def test_placement_from_sums_has_fitted_alone_and_says_why(cli: Cli):
    data = said(cli, "placement", SAMPLE, "--gpus", 4, "--slots", 20, "--layers")
    assert set(data["fitted"]) == FIGURES
    assert "held_out" not in data
    assert "level='steps'" in data["note"]
    assert [row["layer"] for row in data["layers"]] == [0, 1, 2, 3]
    done = cli("whatif", "placement", SAMPLE, "--gpus", 4, "--slots", 20)
    assert "held_out: needs level steps" in done.stdout


def test_placement_of_each_layer(cli: Cli, recording: Path):
    arguments = ("--gpus", 2, "--slots", 8, "--nodes", 2, "--effort", "low", "--layers")
    done = cli("whatif", "placement", recording, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("fitted, 3 steps", done.stdout)) == 1 + 3
    assert len(re.findall("held out, 2 steps", done.stdout)) == 1 + 3


def balance(**figures: float) -> RankBalance:
    values = {"before": 1.2, "eplb": 1.1, "routeprof": 1.1, "lower_bound": 1.0} | figures
    return RankBalance(**{name: np.array([value]) for name, value in values.items()})


@pytest.mark.parametrize(("routeprof_later", "warned"), [(1.1, False), (1.2, False), (1.3, True)])
def test_placement_that_would_be_worse_later_is_warned_of(routeprof_later: float, warned: bool):
    later = balance(routeprof=routeprof_later)
    made = Comparison((0,), "contiguous", (4, 4), balance(), later, speeds=False)
    assert ("worse than what is there today" in remark_on(made, "steps")) == warned
    data = placement_json(made, {}, level="steps", layers=False)
    assert ("note" in data) == warned


# -- help, bad input, the manual


@pytest.mark.parametrize("verb", ["capacity", "placement", "layout", "batching"])
def test_help_has_an_example(cli: Cli, verb: str):
    done = cli("whatif", verb, "--help")
    assert done.returncode == 0
    assert f"Example: routeprof whatif {verb}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("capacity SRC --factors 0", "capacity factor '0'"),
        ("capacity SRC --factors 1.0,-2", "capacity factor '-2'"),
        ("capacity SRC --factors 1.0,x", "capacity factor 'x'"),
        ("capacity SRC --factors=", "capacity factor ''"),
        ("capacity SRC --rule round", "is not one of ceil, floor, deepspeed, per-rank"),
        ("capacity SRC --rule per-rank", "record every rank"),
        ("capacity SRC --min-capacity=-1", "pass 0 or more"),
        ("capacity SRC --target 2", "from 0 to 1"),
        ("capacity SRC --phase verify", "there are prefill, decode"),
        ("capacity SRC --tag nope", "there are chinese, code"),
        ("capacity SRC --between 1000-2000", "no tokens"),
        ("capacity nowhere", "nowhere does not exist"),
        ("placement SRC --gpus 32 --slots 16", "--slots 32 or more"),
        ("placement SRC --gpus 3 --slots 16", "a multiple of 3 slots"),
        ("placement SRC --gpus 4 --slots 12", "12 slots for 16 experts"),
        ("placement SRC --gpus 0 --slots 16", "gpus is 0"),
        ("placement SRC --gpus 4 --slots 0", "slots is 0"),
        ("placement SRC --gpus 4 --slots 16 --nodes 3", "divides the GPUs"),
        ("placement SRC --gpus 4 --slots 16 --effort most", "low, normal, high"),
        ("placement SRC --gpus 4 --slots 16 --phase verify", "there are prefill, decode"),
        ("placement SRC --gpus 4 --slots 16 --tag nope", "there are chinese, code"),
        ("placement SRC --gpus 4 --slots 16 --between 1000-2000", "no tokens"),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, arguments: str, says: str):
    words = [str(SAMPLE) if word == "SRC" else word for word in shlex.split(arguments)]
    assert says in one_line(cli("whatif", *words))


def test_sums_without_factors_name_the_level(cli: Cli, tmp_path: Path):
    (rows,) = random_parts(0, parts=1)
    bare = [{**row, **{name: [] for name in LISTS[3:]}} for row in rows]
    write(tmp_path / "sums", [bare], capacity_factors=())
    line = one_line(cli("whatif", "capacity", "sums", "--factors", "1.0"))
    assert "level='steps'" in line


def test_the_manual_shows_what_is_printed(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """Not the placements, marked as text: the solver may become better."""
    monkeypatch.setenv("COLUMNS", "120")
    shown = examples(sorted((DOCS / "whatif").glob("*.md")))
    assert shown
    for command, output in shown:
        words = shlex.split(command.replace("sample_data/recordings/healthy", str(SAMPLE)))
        done = cli(*words)
        assert done.returncode == 0, done.stderr
        assert same(done.stdout, output)
