"""routeprof audit as a user sees it."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from routeprof.plan.weights import SCHEMES, audit
from routeprof.sample_data import MODEL_DIR, RECORDINGS_DIR
from tests.commands.conftest import Cli
from tests.commands.manual import DOCS, examples, same
from tests.commands.test_bad_input import one_line
from tests.plan.checkpoints import gaussian, save

SAMPLE = RECORDINGS_DIR / "healthy"


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = gaussian(8)
    weights["model.layers.1.mlp.experts.5.up_proj.weight"] *= 1e5
    return save(weights, tmp_path_factory.mktemp("models") / "outlier")


def test_json_has_every_expert_and_the_plan(cli: Cli):
    done = cli("audit", MODEL_DIR, "--recording", SAMPLE, "--cold", "fp8", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    exact = audit(MODEL_DIR)
    assert data["sample"] == 1
    assert data["findings"] == []
    rows = data["experts"]
    assert len(rows) == 4 * 3 * 16
    for row in rows:
        (matrix,) = [
            one for one in exact.matrices if (one.index, one.name) == (row["layer"], row["matrix"])
        ]
        assert row["abs_max"] == matrix.largest[row["expert"]]
        for scheme in SCHEMES:
            value = row[f"error_{scheme.replace('-', '_')}"]
            assert value == pytest.approx(matrix.of(scheme)[row["expert"]])
    plan = data["precision_plan"]
    assert plan["saved_bytes"] == plan["source_bytes"] - plan["bytes"] > 0
    assert {row["precision"] for row in plan["experts"]} == {"source", "fp8"}
    assert len(plan["layers"]) == 4


def test_a_planted_outlier_is_named_first(cli: Cli, outlier: Path):
    done = cli("audit", outlier)
    assert done.returncode == 0, done.stderr
    lines = " ".join(done.stdout.split())
    assert "outlier: model.layers.1.mlp up_proj expert 5: absolute maximum" in lines
    assert "→ quantise with a scale for each expert, or keep these in 16 bits" in lines
    assert "vanishing: model.layers.1.mlp up_proj experts " in lines
    assert "no expert's range" not in lines
    (first, second) = json.loads(cli("audit", outlier, "--json").stdout)["findings"]
    assert (first["kind"], first["experts"], first["cure"]) == ("outlier", [5], "fp8-expert")
    assert (second["kind"], len(second["experts"])) == ("vanishing", 7)


def test_csv_files(cli: Cli, tmp_path: Path):
    done = cli("audit", MODEL_DIR, "--recording", SAMPLE, "-o", "out")
    assert done.returncode == 0, done.stderr
    tables = {}
    for name in ("experts", "precision"):
        assert f"wrote out/{name}.csv" in done.stdout
        with (tmp_path / "out" / f"{name}.csv").open(newline="") as stream:
            tables[name] = list(csv.DictReader(stream))
    assert len(tables["experts"]) == 4 * 3 * 16
    assert len(tables["precision"]) == 4 * 16
    # Every column is explained.
    page = (DOCS / "audit.md").read_text()
    for name in {*tables["precision"][0], *tables["experts"][0]}:
        figure = re.sub(r"_(fp8|int8|int4)_.*", "", name)
        assert f"`{figure}`" in page or f"`{figure}_…`" in page, name


def test_what_is_not_known_is_null_and_not_zero(cli: Cli, tmp_path: Path):
    weights = gaussian(3, 1)
    weights["model.layers.0.mlp.experts.1.up_proj.weight"][0, 0] = float("nan")
    done = cli("audit", save(weights, tmp_path / "model"), "--json", "-o", "out")
    data = json.loads(done.stdout)
    row = data["experts"][-2]
    assert (row["expert"], row["not_finite"]) == (1, 1)
    assert row["abs_max"] is row["rms"] is row["error_fp8_block"] is None
    assert data["findings"][0]["kind"] == "not-finite"
    assert done.stderr.splitlines() == ["wrote out/experts.csv"]
    with (tmp_path / "out" / "experts.csv").open(newline="") as stream:
        assert list(csv.DictReader(stream))[-2]["abs_max"] == ""


def test_a_large_matrix_is_sampled_and_says_so(cli: Cli, tmp_path: Path):
    model = save(gaussian(2, 1, (512, 2048)), tmp_path / "model")
    assert "one in 16 groups" in cli("audit", model).stdout
    assert "groups" not in cli("audit", model, "--sample", 1).stdout


def test_help_has_an_example(cli: Cli):
    done = cli("audit", "--help")
    assert done.returncode == 0
    assert "Example: routeprof audit" in done.stdout


LATE = ("raise it", "pass a recording of this model")
"""What is known only once the weights are read."""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nowhere", "nowhere does not exist"),
        (".", "no *.safetensors in ."),
        ("SRC --hot-share 0.5", "pass --recording"),
        ("SRC --budget 1GiB", "pass --recording"),
        ("SRC --phase decode", "pass --recording"),
        ("SRC --recording nowhere", "nowhere does not exist"),
        ("SRC --recording REC --hot bf32", "hot 'bf32'"),
        ("SRC --recording REC --cold 4bit", "cold '4bit'"),
        ("SRC --recording REC --budget much", "budget 'much'"),
        ("SRC --recording REC --budget 1MB", "raise it"),
        ("SRC --recording REC --budget 1GB --hot-share 0.5", "pass one of them"),
        ("SRC --recording REC --tag nope", "there are"),
        ("SRC --sample 0", "sample is 0"),
        ("SRC --threads 0", "threads is 0"),
        ("SRC --max-ratio 1", "max-ratio is 1"),
        ("SRC --max-ratio nan", "max-ratio is nan"),
        ("OTHER --recording REC", "pass a recording of this model"),
    ],
)
def test_bad_input_gets_one_line(
    cli: Cli,
    outlier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    says: str,
):
    if says not in LATE:
        # Nobody waits for torch to be told.
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "torch.py").write_text("raise RuntimeError('imported')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    paths = {"SRC": str(MODEL_DIR), "REC": str(SAMPLE), "OTHER": str(outlier)}
    words = [paths.get(word, word) for word in shlex.split(arguments)]
    assert says in one_line(cli("audit", *words))


def test_the_bar_is_on_stderr_and_only_on_a_terminal(outlier: Path):
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-m", "routeprof", "audit", str(outlier), "--json"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        assert running.stdout is not None
        printed = running.stdout.read()
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert running.returncode == 0
    size = json.loads(printed)["bytes"] / 1024**2
    assert "weights" in shown
    assert f"{size:.1f}/{size:.1f} MiB" in shown


def test_a_truncated_model_gets_one_line(cli: Cli, tmp_path: Path):
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    assert "cut off" in one_line(cli("audit", "model"))
    file.write_bytes(file.read_bytes()[:100])
    assert "cut off" in one_line(cli("audit", "model"))


def test_the_manual_shows_what_is_printed(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = examples([DOCS / "audit.md"])
    assert shown
    for command, output in shown:
        words = command.replace("sample_data/recordings/healthy", str(SAMPLE))
        done = cli(*shlex.split(words.replace("sample_data/model", str(MODEL_DIR))))
        assert done.returncode == 0, done.stderr
        assert same(done.stdout, output)
