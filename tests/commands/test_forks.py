"""What stands in for ``python -m routeprof`` in other tests says and does the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.conftest import Cli, in_a_process
from tests.commands.forks import forks

CALLS = [
    "summary RECORDING",
    "report RECORDING -o OUT",
    "diagnose RECORDING",
    "check RECORDING",
    "whatif placement RECORDING --gpus 2 --slots 10",
    "plan nowhere",
    "audit nowhere",
    "summary --help",
    "summary --nosuch",
    "whatif",
    "",
]


@pytest.mark.parametrize("call", CALLS)
def test_a_fork_is_a_process(call: str, recording: Path, tmp_path: Path):
    seen = []
    for run in (in_a_process, forks().run):
        folder = tmp_path / run.__qualname__
        folder.mkdir()
        words = [str(recording) if word == "RECORDING" else word for word in call.split()]
        done = run(words, folder)
        files = {path.relative_to(folder) for path in folder.rglob("*")}
        seen.append((done.returncode, done.stdout, done.stderr, files))
    assert seen[0] == seen[1]
    assert seen[0][0] in (0, 1, 2)


def test_a_changed_environment_is_seen(cli: Cli, recording: Path, monkeypatch: pytest.MonkeyPatch):
    cli("summary", recording)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = cli("summary", recording).stdout
    assert max(map(len, narrow.splitlines())) <= 40
