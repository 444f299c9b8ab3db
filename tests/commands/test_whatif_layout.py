"""whatif layout as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import routeprof
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.whatif.hardware import hardware
from routeprof.whatif.layout import layouts
from routeprof.whatif.layout_sums import Setting
from routeprof.whatif.layouts import predict
from routeprof.whatif.sizes import sizes_of
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.dashboards.tokens import record_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_tokens(tmp_path_factory.mktemp("layouts") / "run", "a", "b")


def test_json_has_every_layout(cli: Cli, tokens: Path):
    done = cli("whatif", "layout", tokens, "--gpus", 8, "--nodes", 2, "--tag", "a", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    profile = routeprof.load(tokens).select(tag="a")
    made = predict(profile, layouts(8, 8, 2), Setting(sizes_of(profile), hardware("h100")))
    assert len(data["layouts"]) == len(made.rows) == 16
    for row, expected in zip(data["layouts"], made.rows, strict=True):
        assert (row["tp"], row["ep"]) == (expected.layout.tp, expected.layout.ep)
        assert row["total_ms"] == expected.total_ms
        assert row["dispatch_between"] == expected.dispatch_between
    assert data["steps"] == made.steps
    assert "note" not in data
    assert data["hardware"]["inside"] == 450e9


def test_rates_and_sizes_can_be_told(cli: Cli, tokens: Path):
    told = "--tflops 10 --memory 100 --link 5 --network 1 --latency 7 --expert-width 24".split()
    sizes = "--weight-bytes 1 --dispatch-bytes 1 --combine-bytes 2".split()
    done = cli("whatif", "layout", tokens, "--gpus", 2, *told, *sizes, "--json")
    data = json.loads(done.stdout)
    rates = {name: data["hardware"][name] for name in ("flops", "memory", "inside", "between")}
    assert rates == {"flops": 1e13, "memory": 1e11, "inside": 5e9, "between": 1e9}
    assert data["hardware"]["latency"] == pytest.approx(7e-6)
    assert data["sizes"] == {"hidden": 32, "width": 24, "weight": 1, "dispatch": 1, "combine": 2}
    slow = next(row for row in data["layouts"] if row["dp"] == 2 and row["ep"] == 2)
    assert slow["combine_inside"] == 2 * slow["dispatch_inside"]


def test_the_table_names_the_quickest_first(cli: Cli, tokens: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    done = cli("whatif", "layout", tokens, "--gpus", 4, "--top", 2, "--placement", "eplb")
    assert (done.returncode, done.stderr) == (0, "")
    assert "experts placed by EPLB" in done.stdout
    assert "placements were fitted on the" in done.stdout
    assert "… and 7 more; --top 9 shows them" in done.stdout
    assert "between" not in done.stdout  # there is one
    two = cli("whatif", "layout", tokens, "--gpus", 4, "--nodes", 2)
    assert "between" in two.stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = cli("whatif", "layout", tokens, "--gpus", 4)
    assert "not shown at this width: " in narrow.stdout
    assert "…" not in narrow.stdout


def test_steps_alone(cli: Cli, recording: Path):
    done = cli("whatif", "layout", recording, "--gpus", 4)
    assert done.returncode == 0
    assert "needs level tokens: record with level='tokens'" in done.stdout
    data = json.loads(cli("whatif", "layout", recording, "--gpus", 4, "--json").stdout)
    assert data["layouts"][-1]["dispatch_ms"] is None
    assert "level tokens" in data["note"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus 0", "pass 1 or more"),
        ("--gpus 8 --nodes 3", "pass a number of nodes that divides"),
        ("--gpus 8 --gpu abacus", "not one of a100"),
        ("--gpus 8 --link 0", "pass numbers above 0"),
        ("--gpus 8 --latency -1", "pass numbers above 0"),
        ("--gpus 8 --placement best", "not one of contiguous"),
        ("--gpus 8 --redundant 4", "pass 0, or placement eplb or routeprof"),
        ("--gpus 8 --placement eplb --redundant -1", "pass 0, or placement"),
        ("--gpus 8 --expert-width 0", "width of 1 or more"),
        ("--gpus 8 --weight-bytes 0", "up to 16 bytes"),
        ("--gpus 8 --top 0", "pass 1 or more"),
        ("--gpus 8 --tag other", "tag"),
    ],
)
def test_one_line_for_what_cannot_be(cli: Cli, tokens: Path, words: str, says: str):
    assert says in one_line(cli("whatif", "layout", tokens, *words.split()))


def test_the_level_that_is_needed(cli: Cli):
    line = one_line(cli("whatif", "layout", RECORDINGS_DIR / "healthy", "--gpus", 4))
    assert "level='steps'" in line
