"""``routeprof diff`` as a user has it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.commands.conftest import Cli
from tests.commands.test_bad_input import one_line
from tests.compare.test_difference import made
from tests.diagnose.made import EXPERTS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    names = enumerate(("before", "again", "after"))
    before, again, after = (made(folder / name, n, turned=n == 2) for n, name in names)
    return before, again, after


def test_the_verb(cli: Cli, runs: tuple[Path, Path, Path], tmp_path: Path):
    done = cli("diff", runs[0], runs[2], "--phase", "decode", "--csv", "out/experts.csv", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["significant"] is True
    assert {row["phase"] for row in data["layers"]} == {"decode"}
    table = pd.read_csv(tmp_path / "out" / "experts.csv")
    assert table["significant"].sum() == 1
    assert len(table) == 2 * EXPERTS == len(data["experts"])


def test_the_exit_status(cli: Cli, runs: tuple[Path, Path, Path], tmp_path: Path):
    assert cli("diff", runs[0], runs[2], "--fail").returncode == 1
    assert cli("diff", runs[0], runs[1], "--fail").returncode == 0
    short = made(tmp_path / "short", 4, 2)
    done = cli("diff", runs[0], short, "--fail")
    assert done.returncode == 2
    assert "--fail cannot be judged" in done.stderr


def test_two_parts_of_one_recording(cli: Cli, runs: tuple[Path, Path, Path]):
    done = cli("diff", runs[0], runs[0], "--between", "0-20", "--between-b", "20-40", "--json")
    data = json.loads(done.stdout)
    assert data["groups"][0]["assignments_a"] == data["groups"][0]["assignments_b"] == 10 * 1024
    assert data["significant"] is False


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--alpha", "2"), "pass a level from 0.001 to 0.5"),
        (("--phase", "verify"), "phase 'verify' does not occur"),
        (("--between", "x"), "x"),
    ],
)
def test_refuses(cli: Cli, runs: tuple[Path, Path, Path], arguments: tuple[str, ...], part: str):
    assert part in one_line(cli("diff", runs[0], runs[1], *arguments))
