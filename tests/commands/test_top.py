"""The live view, in a pipe and in a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import routeprof
from routeprof.report.top import Moment, frame
from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.commands.watching import INTERRUPTIBLE
from tests.dashboards.made import Writer

COLLAPSED = RECORDINGS_DIR / "collapsed"


def printed(width: int, height: int = 60, ranks: int | None = None) -> list[str]:
    whole = routeprof.load(COLLAPSED)
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(frame(Moment(whole, whole, 60.0, "live", "It is."), width, height, ranks))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_it_is_as_wide_as_the_terminal(width: int):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert any(line.split()[:1] == ["3"] for line in lines)  # the worst layer is always there


@pytest.mark.parametrize("height", [16, 24, 40])
def test_it_is_as_high_as_the_terminal(height: int):
    assert len(printed(100, height)) <= height


def test_ranks_are_those_of_the_counts():
    counts = routeprof.load(COLLAPSED).counts
    loads = counts.reshape(len(counts), 4, -1).sum(axis=(0, 2))
    loads = loads / loads.mean()
    shown = [re.match(r"rank (\d) ([\d.]+) (█*)", line) for line in printed(100, ranks=4)]
    rows = [(int(one[1]), float(one[2]), len(one[3])) for one in shown if one]
    order = np.argsort(-loads)
    assert [rank for rank, _, _ in rows] == order.tolist()
    assert [load for _, load, _ in rows] == pytest.approx(loads[order], abs=0.005)
    assert [bar for *_, bar in rows] == np.rint(24 * loads[order] / loads.max()).tolist()


def test_tokens_a_second():
    whole = routeprof.load(COLLAPSED)
    rate = whole.layers()["tokens"].max() / whole.seconds
    assert f"tokens/s {rate:,.0f}" in "\n".join(printed(100))


def test_in_a_pipe_it_prints_once_and_without_colours(cli: Cli):
    done = cli("top", COLLAPSED)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.count("layers, the most imbalanced") == 1
    assert "does not exist" in one_line(cli("top", "nothere"))


@pytest.mark.parametrize("colours", [True, False])
def test_in_a_terminal_it_follows_until_it_is_interrupted(tmp_path: Path, colours: bool):
    writer = Writer(tmp_path / "growing")
    writer.write("decode", None, 16)
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    if not colours:
        environment["NO_COLOR"] = "1"
    near, far = pty.openpty()
    called = [sys.executable, "-m", "routeprof", "top", str(writer.path), "--interval", "0.2"]
    command = [*INTERRUPTIBLE, *called]
    with subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env=environment) as process:
        os.close(far)
        first = read_until(near, r"phases\W+(?:\x1b\[[\d;]*m)*decode")
        writer.write("prefill", None, 64)
        second = read_until(near, "prefill, decode")
        process.send_signal(signal.SIGINT)
        rest = drained(near)
        assert process.wait() == 0
    os.close(near)
    text = first + second + rest
    assert ("\x1b[1;32m" in text) == colours  # bold green: live
    assert "Traceback" not in text


def read_until(terminal: int, pattern: str) -> str:
    """What was printed until it matches; ends with the process."""
    text = ""
    while not re.search(pattern, text):
        ready, _, _ = select.select([terminal], [], [], 120)
        assert ready, f"nothing like {pattern} came: {text[-2000:]}"
        text += os.read(terminal, 65536).decode(errors="replace")
    return text


def drained(terminal: int) -> str:
    text = ""
    while True:
        try:
            more = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            return text
        if not more:
            return text
        text += more.decode(errors="replace")
