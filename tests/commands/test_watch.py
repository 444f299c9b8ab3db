"""``routeprof watch``: from a recording that is being written to a command and a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from routeprof.sample_data import RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.commands.watching import INTERRUPTIBLE
from tests.dashboards.made import Writer
from tests.report.test_alerts import serving

COLLAPSED = RECORDINGS_DIR / "collapsed"


def test_a_finished_recording_is_judged_once(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "got"
    append = f"{sys.executable} -c \"import sys; open('{file}', 'a').write(sys.stdin.read())\""
    with serving() as server:
        monkeypatch.setenv("ROUTEPROF_WEBHOOK", server.url)
        done = cli("watch", COLLAPSED, "--on-finding", append, "--json")
        bodies = [body.decode() for *_, body in server.got]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == bodies == [file.read_text()]
    data = json.loads(done.stdout)
    assert (data["code"], data["severity"]) == ("model-skew", "warning")
    assert data["recordings"] == [str(COLLAPSED)]


def test_a_receiver_that_fails_is_one_line(cli: Cli):
    done = cli("watch", COLLAPSED, "--on-finding", "false")
    assert done.returncode == 0
    assert done.stderr.startswith("routeprof: alert model-skew: ")
    assert done.stderr.splitlines()[0].endswith(": exit status 1")
    assert len(done.stderr.splitlines()) == len(done.stdout.splitlines()) == 1
    assert " warning: model-skew: every tag is skewed" in done.stdout


def test_it_follows_until_it_is_interrupted(tmp_path: Path):
    writer = Writer(tmp_path / "growing")
    writer.write("decode", None, 64)
    command = [sys.executable, "-m", "routeprof", "watch", str(writer.path), "--interval", "0.2"]
    with subprocess.Popen(
        [*INTERRUPTIBLE, *command, "--alert-level", "error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "error: silent-layers" in process.stdout.readline()
        assert "error: unsupported-layers" in process.stdout.readline()
        writer.writer.write_state(problems={"hook_failures": 2})
        assert "error: hook-failures: 2 calls" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert process.stdout.read() == process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("nowhere",), "nowhere does not exist"),
        ((COLLAPSED, "--on-finding", "no-such-program"), "names no program"),
        ((COLLAPSED, "--webhook", "ftp://host/"), "needs an http:// or https:// URL"),
        ((COLLAPSED, "--alert-level", "grave"), "is not one of error, warning, info"),
    ],
)
def test_wrong_arguments_are_one_line(cli: Cli, words: tuple[object, ...], part: str):
    assert part in one_line(cli("watch", *words))
