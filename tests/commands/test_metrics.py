"""Metrics of a recording: each value against ``summary --json``, and beside a running program."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import routeprof
from routeprof.commands.run import is_first_here
from routeprof.commands.serve_metrics import _taking
from routeprof.report.monitoring import METRICS
from routeprof.report.prometheus import registry
from tests.commands.conftest import Cli
from tests.commands.watching import PATIENCE, Program
from tests.dashboards.made import FACTORS, Writer

Series = dict[tuple[str, ...], float]
LIVE = Path(__file__).with_name("live.py")
LAYER_STATES = ("captured", "silent", "idle", "unsupported", "dense")
RANK_STATES = ("recording", "paused", "stopped", "dead", "not responding")
SECONDS = 90
"""Seconds of the recording, of which the newest minute is the last 60."""


def parsed(text: str) -> Series:
    """Value by name and labels but for the model's, as Prometheus' own parser reads the text."""
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety seconds with layers in every state, which grow more skewed and change their phase."""
    writer = Writer(tmp_path_factory.mktemp("metrics") / "made")
    for second in range(SECONDS):
        phase = "prefill" if second % 3 else "decode"
        writer.write(phase, "code" if second % 2 else None, tokens=8 + second)
    writer.stop(cost_seconds=0.5, busy_seconds=40.0)
    return writer.path


def test_each_value_is_that_of_summary_json(cli: Cli, made: Path):
    def summary(*options: str) -> dict[str, Any]:
        done = cli("summary", "--json", *options, made)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    whole, minute = summary(), summary("--between", f"{SECONDS - 60}-")
    take = _taking(made)
    until(lambda: (snapshot := take()) and snapshot.whole.seconds > SECONDS - 0.5)  # all is read
    found = parsed(generate_latest(registry(take, detailed=True)).decode())
    wanted = expected(summary, whole, minute, made)
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-12)
    assert {name for name, *_ in found} == {metric.exposed for metric in METRICS}


def expected(
    summary: Callable[..., dict[str, Any]],
    whole: dict[str, Any],
    minute: dict[str, Any],
    made: Path,
) -> Series:
    """What must be exposed, of the summary wherever it says it, else of the tables."""
    profile = routeprof.load(made)
    rows, recent = whole["layers"], [row for row in minute["layers"] if row["imbalance_ratio"]]
    values: Series = {}
    for part in whole["phases"]:
        phase = part["phase"]
        own = summary("--phase", phase)["layers"]
        values["tokens_total", phase] = part["tokens"]
        values["steps_total", phase] = part["steps"]
        values["assignments_total", phase] = sum(row["assignments"] or 0 for row in own)
    values["invalid_assignments_total",] = sum(row["invalid"] or 0 for row in rows)
    for factor in (1.0, 1.25):
        share = f"would_overflow_{factor:g}"
        values["overflow_assignments_total", f"{factor:g}"] = sum(
            row[share] * row["assignments"] for row in rows if row[share] is not None
        )
    overflow = profile.overflow().groupby("capacity_factor")["overflow_assignments"].sum()
    assert set(FACTORS) - {1.0, 1.25} == {2.0}
    values["overflow_assignments_total", "2"] = overflow[2.0]
    values["own_seconds_total",] = whole["cost"]["cost_seconds"]
    values["busy_seconds_total",] = whole["cost"]["busy_seconds"]
    values["coverage_ratio",] = whole["coverage"]
    layers = Counter(row["state"] for row in rows) | Counter({"dense": 1})
    values |= {("layers", state): layers[state] for state in LAYER_STATES}
    ranks = Counter(rank["state"] for rank in whole["ranks"])
    values |= {("ranks", state): ranks[state] for state in RANK_STATES}
    values["newest_window_timestamp_seconds",] = profile.totals.windows.start.max() + 1.0

    def of(name: str) -> list[float]:
        return sorted(row[name] for row in recent)

    balanced = of("balancedness")
    assert len(balanced) == 3
    values["balancedness_min",], values["balancedness_p50",] = balanced[0], balanced[1]
    values["balancedness_avg",] = sum(balanced) / 3
    values["imbalance_ratio",] = of("imbalance_ratio")[-1]
    values["step_imbalance_p95",] = of("step_imbalance_p95")[-1]
    values["effective_experts_min",] = of("effective_experts")[0]
    values["cold_experts",] = sum(of("dead_experts"))
    values |= {
        ("layer_imbalance_ratio", str(row["layer"])): row["imbalance_ratio"] for row in recent
    }
    gemm = profile.select(between=profile.since_start((SECONDS - 60.0, 1e9))).gemm()
    values["small_gemm_ratio",] = (gemm["small_gemm_share"] * gemm["cells"]).sum() / gemm[
        "cells"
    ].sum()
    for row in profile.experts().itertuples():
        values["expert_tokens_total", str(row.expert), str(row.layer)] = row.tokens
    return {(f"routeprof:{name}", *labels): value for (name, *labels), value in values.items()}


def test_what_a_converted_file_does_not_say_is_not_exposed(tmp_path: Path):
    """Its sums of assignments alone: no tokens, steps, times, or seconds of hooks."""
    (tmp_path / "counts.csv").write_text("layer,expert,count\n3,0,5\n3,1,7\n8,0,3\n8,1,9\n")
    take = _taking(tmp_path / "counts.csv")
    assert parsed(generate_latest(registry(take, detailed=True)).decode()) == {
        ("routeprof:assignments_total", "unknown"): 24,
        **{("routeprof:layers", state): 2 * (state == "captured") for state in LAYER_STATES},
        **{("routeprof:ranks", state): state == "stopped" for state in RANK_STATES},
        ("routeprof:expert_tokens_total", "0", "3"): 5,
        ("routeprof:expert_tokens_total", "1", "3"): 7,
        ("routeprof:expert_tokens_total", "0", "8"): 3,
        ("routeprof:expert_tokens_total", "1", "8"): 9,
    }


def test_before_there_is_a_recording_there_are_no_samples(tmp_path: Path):
    assert generate_latest(registry(_taking(tmp_path / "later"), detailed=True)) == b""


# -- beside a program


def started(folder: Path, *command: object, options: tuple[str, ...] = ()) -> list[str]:
    words = [sys.executable, "-m", "routeprof", "run", "-o", str(folder / "out")]
    return [*words, "--metrics-port", "0", *options, "--", *map(str, command)]


def address(program: Program) -> str:
    assert program.process.stderr is not None
    found = re.fullmatch(r"routeprof: metrics at (\S+)\n", program.process.stderr.readline())
    assert found is not None
    return found[1]


def scraped(url: str) -> Series:
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return parsed(answer.read().decode())


def until(check: Callable[[], Any]) -> Any:
    deadline = monotonic() + PATIENCE
    while not (found := check()):
        assert monotonic() < deadline, "it did not come true in time"
        sleep(0.05)
    return found


def is_gone(url: str) -> bool:
    """Whether nobody listens there any more."""
    try:
        urllib.request.urlopen(url).close()
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    except OSError:
        pass  # it ended while it was asked
    return False


def test_metrics_while_the_program_runs_and_no_longer(tmp_path: Path):
    with Program(
        tmp_path, started(tmp_path, sys.executable, LIVE, options=("--window", "0.2"))
    ) as program:
        url = address(program)
        tokens = ("routeprof:tokens_total", "decode")
        first = until(lambda: scraped(url).get(tokens))
        until(lambda: scraped(url)[tokens] > first)
        last = scraped(url)
        said = program.end()
    assert said["modules"]
    until(lambda: is_gone(url))
    # The program's own account of assignments; the server saw no more, and no others.
    passes = [json.loads(line) for line in (tmp_path / "passes.jsonl").read_text().splitlines()]
    profile = routeprof.load(tmp_path / "out")
    layers = profile.layers()
    assert layers["assignments"].sum() == sum(sum(map(sum, one)) for one in passes)
    for phase, tokens in profile.layers(breakdown=True).groupby("phase")["tokens"].max().items():
        if phase != "all":
            assert 0 < last["routeprof:tokens_total", str(phase)] <= tokens
    assert last["routeprof:coverage_ratio",] == 1
    assert last["routeprof:layers", "captured"] == len(layers) == 3


def test_the_server_ends_with_a_program_that_is_killed(tmp_path: Path):
    with Program(
        tmp_path, started(tmp_path, sys.executable, LIVE, options=("--window", "0.2"))
    ) as program:
        url = address(program)
        os.kill(program.process.pid, signal.SIGKILL)
    until(lambda: is_gone(url))


CHILDREN = """
import os, sys
print("up", flush=True)
sys.stdin.read()
try:
    print(os.wait())
except ChildProcessError:
    print("no children")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_server_is_no_child_and_gets_no_signals_of_the_terminal(tmp_path: Path):
    command = started(tmp_path, sys.executable, "-c", CHILDREN)
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        (server,) = with_words("serve-metrics", str(tmp_path / "out"))
        assert os.getsid(server) not in (os.getsid(program.pid), os.getsid(0))
        assert parent(server) != program.pid
        said, _ = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
        program.communicate()
    assert said == "no children\n"


def with_words(*words: str) -> list[int]:
    """Processes with these words in their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text().split("\0")
        except OSError:  # it has ended
            continue
        if set(words) <= set(line) and "run" not in line:
            found.append(int(process.name))
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])


def test_a_port_in_use_is_said_before_the_program_starts(cli: Cli, tmp_path: Path):
    code = "import pathlib; pathlib.Path('started').touch()"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli(
            "run", "-o", "out", "--metrics-port", port, "--", sys.executable, "-c", code
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"routeprof: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "choose another --metrics-port\n"
    )
    assert not (tmp_path / "started").exists()


def test_ranks_of_a_launch_have_one_server(cli: Cli, tmp_path: Path):
    # One write each: two ranks share the pipe.
    (tmp_path / "ranks.py").write_text(
        "import os; os.write(1, os.environ['LOCAL_RANK'].encode() + b'\\n')"
    )
    program = Path(sysconfig.get_path("scripts")) / "torchrun"
    command = [program, "--standalone", "--nproc-per-node", "2", "ranks.py"]
    done = cli("run", "-o", "out", "--metrics-port", "0", "--", *command)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "1"]
    assert done.stderr.count("metrics at") == 1


def test_of_commands_that_a_launcher_started_the_first_on_a_node_serves(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with socket.create_server(("127.0.0.1", 0)) as first:  # which holds the port
        port = first.getsockname()[1]
        command = [sys.executable, "-c", "print(1)"]
        done = cli("run", "-o", "out", "--metrics-port", port, "--", *command)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "metrics at" not in done.stderr
    assert not is_first_here()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_first_here()
    monkeypatch.delenv("LOCAL_RANK")
    assert is_first_here()
