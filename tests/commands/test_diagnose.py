"""``routeprof diagnose`` and ``routeprof check`` as a user has them."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from routeprof.diagnose import DEFAULTS
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.diagnose.made import EXPERTS, Step, halves, moe, one_hot, record, steady

COLLAPSED, HEALTHY = RECORDINGS_DIR / "collapsed", RECORDINGS_DIR / "healthy"


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("even") / "run", steady(np.ones(EXPERTS)))


def test_diagnose_says_what_why_and_what_it_would_bring(cli: Cli):
    done = cli("diagnose", COLLAPSED, "--gpus", 8)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "warning: [model-skew] every tag is skewed" in text
    assert "1.03 with 24 slots instead of 2.37" in text
    assert "not judged" in text
    assert "drift-since needs another recording: pass --since" in text


def test_diagnose_as_json(cli: Cli):
    data = json.loads(cli("diagnose", HEALTHY, "--json").stdout)
    (narrow,) = [one for one in data["findings"] if one["code"] == "narrow-input"]
    assert narrow["layers"] == [0, 1, 2, 3]
    assert narrow["figures"]["tag"] == "chinese"
    assert narrow["figures"]["noise"] is None  # too few windows to say
    assert narrow["gain"].startswith("mixed evenly")
    assert data["thresholds"]["hot_imbalance"] == 3
    assert set(data["unjudged"]) >= {"rank-imbalance", "drift-since"}


def test_diagnose_a_selection(cli: Cli):
    data = json.loads(
        cli("diagnose", HEALTHY, "--tag", "json", "--phase", "decode", "--json").stdout
    )
    assert (data["phase"], data["tag"]) == ("decode", "json")
    codes = [one["code"] for one in data["findings"]]
    assert "hot-experts" in codes
    assert "narrow-input" not in codes


def test_diagnose_what_changed_since(cli: Cli, even: Path, tmp_path: Path):
    now = record(tmp_path / "now", steady(halves(1.7)))
    data = json.loads(cli("diagnose", now, "--since", even, "--json").stdout)
    assert "drift-since" in [one["code"] for one in data["findings"]]
    data = json.loads(cli("diagnose", even, "--since", even, "--json").stdout)
    assert "drift-since" not in [one["code"] for one in data["findings"]]
    assert "drift-since" not in data["unjudged"]


# -- check


def test_check_passes(cli: Cli, even: Path):
    done = cli("check", even, "--max-imbalance", 3, "--max-overflow", 0.01)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("passed")
    data = json.loads(cli("check", even, "--json").stdout)
    assert (data["passed"], data["failed"]) == (True, [])


def test_check_fails_with_a_line_for_each_finding(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(one_hot(2.5)))
    assert cli("check", run, "--max-imbalance", 2.6).returncode == 0
    done = cli("check", run, "--max-imbalance", 2.4, "--max-overflow", 0.01)
    assert (done.returncode, done.stderr) == (1, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("warning: hot-experts: in layer 1 expert 0 gets 2.50 times")
    assert second.startswith("warning: overflow: a capacity factor of 1.25 would drop 7.81%")
    done = cli("check", run, "--max-imbalance", 2.4, "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert (data["passed"], data["failed"]) == (False, ["hot-experts"])


def test_check_by_a_file_that_options_overrule(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(one_hot(2.5)))
    (tmp_path / "routeprof.toml").write_text("[thresholds]\nhot_imbalance = 2.4\n")
    assert cli("check", run, "--config", "routeprof.toml").returncode == 1
    done = cli("check", run, "--config", "routeprof.toml", "--max-imbalance", 3)
    assert done.returncode == 0


def test_check_fails_on_the_severity_that_is_asked_for(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(one_hot(3.5)))
    assert cli("check", run, "--fail-on", "error").returncode == 0
    assert cli("check", run, "--fail-on", "warning").returncode == 1
    done = cli("check", run, "--fail-on", "info", "--max-imbalance", 9)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["info"] * 2


def test_check_fails_where_capture_is_not_complete(cli: Cli, even: Path, tmp_path: Path):
    copy = Path(shutil.copytree(even, tmp_path / "copy"))
    (copy / "rank-00000" / "part-000000.parquet").unlink()
    done = cli("check", copy)
    assert done.returncode == 1
    assert "error: missing-parts" in done.stdout


def test_check_does_not_pass_without_tokens(cli: Cli, tmp_path: Path):
    layers = [moe(0, sees_all_tokens=False), moe(1, sees_all_tokens=False)]
    run = record(tmp_path / "run", [Step([None, None])] * 4, layers=layers)
    assert "no tokens" in one_line(cli("check", run, "--max-imbalance", 3))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--max-imbalance", "0.5"), "pass a number of 1 or more"),
        (("--max-imbalance", "much"), "routeprof check --help"),
        (("--max-overflow", "2"), "from 0 to 1"),
        (("--fail-on", "never"), "'never'"),
        (("--config", "nowhere.toml"), "cannot read nowhere.toml"),
        (("--phase", "prefill"), "phase 'prefill' does not occur"),
        (("--since", "nowhere"), "nowhere does not exist"),
        # What cannot be judged must not pass.
        (("--max-rank-imbalance", "1.2"), "--max-rank-imbalance cannot be judged"),
        (("--max-rank-imbalance", "1.2", "--gpus", "17"), "no layer has experts"),
        (("--gpus", "17"), "--gpus cannot be judged"),
        (("--since", str(COLLAPSED)), "--since cannot be judged"),
    ],
)
def test_check_refuses(cli: Cli, even: Path, arguments: tuple[str, ...], part: str):
    assert part in one_line(cli("check", even, *arguments))


def test_check_does_not_pass_a_few_tokens(cli: Cli, tmp_path: Path):
    """Eight tokens of 16 experts: that none of them got three times the mean says nothing."""
    counts = [2, 0] * 7 + [1, 1]
    run = record(tmp_path / "run", [Step([counts, counts])])
    for options in ((), ("--max-imbalance", 9), ("--fail-on", "error")):
        assert "cannot be judged: needs 16 assignments an expert, which layers 0–1 lack" in (
            one_line(cli("check", run, *options))
        )


def test_check_does_not_pass_a_capacity_that_lies_between(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(one_hot(1.9)), level="windows")
    assert "--capacity-factor cannot be judged" in one_line(
        cli("check", run, "--capacity-factor", 1.6)
    )
    assert cli("check", run, "--capacity-factor", 1.25).returncode == 1
    assert cli("check", run, "--capacity-factor", 2).returncode == 0


def test_check_does_not_pass_overflow_that_a_recording_does_not_know(cli: Cli, tmp_path: Path):
    """The capacity lies between two that were counted, and no option says so."""
    run = record(tmp_path / "run", steady(one_hot(1.9)), level="windows")
    (tmp_path / "limits.toml").write_text("[thresholds]\ncapacity_factor = 1.6\n")
    options = ("--config", "limits.toml")
    done = cli("check", run, *options, "--max-overflow", 0.01)
    assert "--max-overflow cannot be judged" in one_line(done)
    assert cli("check", run, *options).returncode == 0


def test_check_judges_ranks_by_the_limit_that_is_given(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(np.repeat([1.25, 0.9, 0.95, 0.9], 4)))
    assert cli("check", run, "--gpus", 4, "--max-rank-imbalance", 1.3).returncode == 0
    done = cli("check", run, "--gpus", 4, "--max-rank-imbalance", 1.2)
    assert (done.returncode, done.stdout.count("rank-imbalance")) == (1, 1)


@pytest.mark.parametrize(("seconds", "status"), [(3600, 1), (1, 0)])
def test_check_tells_a_killed_process_from_one_that_writes(
    cli: Cli, tmp_path: Path, seconds: int, status: int
):
    run = record(tmp_path / "run", steady(np.ones(EXPERTS)), state="recording")
    path = run / "rank-00000" / "rank.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"updated": time.time() - seconds}))
    done = cli("check", run)
    assert done.returncode == status
    assert ("not-stopped" in done.stdout) == bool(status)


def test_diagnose_takes_the_capacity_that_is_given(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(one_hot(2.5)))
    data = json.loads(cli("diagnose", run, "--capacity-factor", 2, "--json").stdout)
    (one,) = [one for one in data["findings"] if one["code"] == "overflow"]
    over = (2.5 - 2) / EXPERTS  # of the assignments, as the other experts have room
    assert one["figures"]["overflow_rate"] == pytest.approx(over, abs=1 / 512)
    limits = DEFAULTS.changed(capacity_factor=2)
    assert data["thresholds"] == asdict(limits)
    text = cli("diagnose", run, "--capacity-factor", 2).stdout
    assert "  layers 0–1" in [line.rstrip() for line in text.splitlines()]


def test_a_tag_in_a_message_does_not_steer_the_terminal(cli: Cli, tmp_path: Path):
    run = record(tmp_path / "run", steady(np.ones(EXPERTS), tag="\x1b[31mred\nline\u202e"))
    line = one_line(cli("check", run, "--tag", "x"))
    assert "there are �[31mred line�" in line


def test_help_names_the_table_of_the_file(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("diagnose", "check"):
        assert "table thresholds" in " ".join(cli(verb, "--help").stdout.split())


def test_diagnose_refuses_a_gpu_that_is_not_known(cli: Cli, even: Path):
    assert "h9000" in one_line(cli("diagnose", even, "--gpu", "h9000"))


HYBRID = {
    "model_type": "jamba",
    **dict.fromkeys(["vocab_size", "hidden_size", "intermediate_size"], 64),
    **dict.fromkeys(["mamba_expand", "mamba_d_state", "mamba_d_conv"], 4),
    **{"num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"attn_layer_period": 2, "attn_layer_offset": 0},
    **{"expert_layer_period": 1, "expert_layer_offset": 0},
}


def test_diagnose_a_model_that_is_named(cli: Cli, even: Path, tmp_path: Path):
    data = json.loads(cli("diagnose", even, "--json").stdout)
    assert "pass --model" in data["unjudged"]["hybrid"]
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    for source in (tmp_path, tmp_path / "config.json"):
        data = json.loads(cli("diagnose", even, "--model", source, "--json").stdout)
        assert "hybrid" not in data["unjudged"]
        (one,) = [one for one in data["findings"] if one["code"] == "hybrid"]
        assert (one["severity"], one["layers"]) == ("info", [1])
        assert one["figures"]["kv_layers"] == "0"
    done = cli("check", even, "--model", tmp_path, "--fail-on", "info")
    assert "info: hybrid: all 2 layers route, 1 holds keys and values (0)" in done.stdout
    assert cli("check", even, "--model", tmp_path).returncode == 0
    other = cli("check", even, "--model", "jamba-v0.1")
    assert other.returncode == 1
    assert "warning: hybrid: MoE layers 0–1 were recorded, and by jamba-v0.1" in other.stdout


def test_check_does_not_pass_a_model_that_cannot_be_judged(cli: Cli, even: Path, tmp_path: Path):
    assert "--model cannot be judged: MoE layers 0–1 were recorded" in one_line(
        cli("check", even, "--model", "mixtral-8x7b")
    )
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    assert "lacks hidden_size" in one_line(cli("check", even, "--model", tmp_path))
    done = cli("diagnose", even, "--model", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lacks hidden_size" in " ".join(done.stdout.split())


@pytest.mark.parametrize("verb", ["diagnose", "check"])
def test_a_model_that_is_not_there_is_one_line(cli: Cli, even: Path, verb: str):
    assert "no known model" in one_line(cli(verb, even, "--model", "nothing"))
