"""summary, report and help as a user sees them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import routeprof
from routeprof.report.csv import csv_text
from tests.commands.conftest import Cli


def test_summary_prints_the_layers(cli: Cli, recording: Path):
    done = cli("summary", recording)
    assert done.returncode == 0, done.stderr
    assert "mixtral" in done.stdout
    assert "coverage" in done.stdout
    assert done.stderr == ""


def test_summary_json_holds_the_numbers_of_the_profile(cli: Cli, recording: Path):
    data = json.loads(cli("summary", recording, "--json").stdout)
    table = routeprof.load(recording).layers()
    assert [layer["imbalance_ratio"] for layer in data["layers"]] == pytest.approx(
        table["imbalance_ratio"].tolist()
    )
    assert data["coverage"] == 1.0


def test_a_phase_narrows_the_summary(cli: Cli, recording: Path):
    data = json.loads(cli("summary", recording, "--json", "--phase", "decode").stdout)
    assert {layer["tokens"] for layer in data["layers"]} == {2 * 4}


def test_a_range_of_time(cli: Cli, recording: Path):
    profile = routeprof.load(recording)
    everything = json.loads(cli("summary", recording, "--json", "--between", "0-3600").stdout)
    nothing = json.loads(cli("summary", recording, "--json", "--between", "3600-7200").stdout)
    ratios = [layer["imbalance_ratio"] for layer in everything["layers"]]
    assert ratios == profile.layers()["imbalance_ratio"].tolist()
    assert [layer["imbalance_ratio"] for layer in nothing["layers"]] == [None] * len(ratios)


def test_a_range_of_time_without_an_end(cli: Cli, recording: Path):
    whole = json.loads(cli("summary", recording, "--json").stdout)
    data = json.loads(cli("summary", recording, "--json", "--between", "0-").stdout)
    assert data["between"][1] is None
    assert data["layers"] == whole["layers"]
    done = cli("summary", recording, "--between", "0.5-")
    assert done.returncode == 0, done.stderr
    assert re.search(r"selected +from \S+ on", done.stdout)


def test_report_writes_csv_page_and_figures(cli: Cli, recording: Path, tmp_path: Path):
    done = cli("report", recording, "-o", "out", "--svg")
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.split()]
    assert all((tmp_path / file).stat().st_size for file in files)
    assert {file.suffix for file in files} == {".csv", ".html", ".svg"}
    layers = (tmp_path / "out" / "layers.csv").read_bytes()
    assert layers == csv_text(routeprof.load(recording), "layers").encode()


def test_report_csv_only(cli: Cli, recording: Path, tmp_path: Path):
    done = cli("report", recording, "-o", "out", "--csv-only")
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".csv"}


@pytest.mark.parametrize("verb", ["demo", "run", "summary", "report", "dashboard"])
def test_every_verb_has_help_with_an_example(cli: Cli, verb: str):
    done = cli(verb, "--help")
    assert done.returncode == 0
    assert f"Example: routeprof {verb}" in done.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "sys.argv = ['routeprof', '--help']\n"
        "from routeprof.commands import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'dash', 'plotly', 'matplotlib'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_a_missing_extra_names_the_install_line(recording: Path, tmp_path: Path):
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "without = lambda name, *rest: None if name == 'dash' else real(name, *rest)\n"
        "importlib.util.find_spec = without\n"
        f"sys.argv = ['routeprof', 'dashboard', {str(recording)!r}]\n"
        "from routeprof.commands import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "routeprof: dash is not installed; run: pip install 'routeprof[dashboard]'"
    )
