"""fold as a user sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

import routeprof
from routeprof.commands import extras, reading
from routeprof.errors import MissingExtraError
from tests.commands.conftest import Cli, in_a_process


def test_fold_says_what_it_added_up(cli: Cli, recording: Path, tmp_path: Path):
    done = cli("fold", recording, "--level", "steps", "--json", "-o", "fold.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "fold.json").read_text()) == found
    profile = routeprof.load(recording)
    assert found["assignments"] == profile.counts.sum() == 3 * 2 * (2 * 10 + 2 * 4)
    assert found["parts_read"] == found["parts"] == len(profile.files.parts("part"))
    assert found["rows"] == len(profile.windows())
    assert [layer["recounted"] for layer in found["layers"]] == profile.counts.sum(1).tolist()
    assert (found["equal"], found["gaps"], found["unread"]) == (True, [], [])
    assert found["seconds"] > 0


def test_processes_fold_the_same(recording: Path, tmp_path: Path):
    words = ["fold", str(recording), str(recording), "--json"]
    assert in_a_process(words, tmp_path).returncode == 2  # one is a copy
    one, other = (
        json.loads(in_a_process(["fold", str(recording), "--json", *more], tmp_path).stdout)
        for more in ([], ["--workers", "2"])
    )
    for name in ("seconds", "assignments_per_second"):
        del one[name], other[name]
    assert one == other


def test_steps_that_are_not_what_the_windows_say(cli: Cli, recording: Path, tmp_path: Path):
    copy = shutil.copytree(recording, tmp_path / "copy")
    part = next(copy.glob("rank-*/steps-*.parquet"))
    table = pq.read_table(part)
    counts = table["counts"].to_pylist()
    counts[0][3] += 5
    place = table.schema.get_field_index("counts")
    column = pa.array(counts, type=table.schema.field("counts").type)
    pq.write_table(table.set_column(place, "counts", column), part)
    layer = table["layer"][0].as_py()
    done = cli("fold", copy, "--level", "steps")
    assert done.returncode == 1, done.stderr
    assert "in 1 of 3 layers, and nothing is missing" in " ".join(done.stdout.split())
    assert f"layer {layer}: windows 56, steps 61; experts differ by 5 in all" in done.stdout
    rank = next(copy.glob("rank-*/rank.json"))
    rank.write_text(rank.read_text().replace('"stopped"', '"recording"'))
    done = cli("fold", copy, "--level", "steps")
    assert done.returncode == 0, done.stderr
    assert "rank 0 was not stopped (state recording)" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--level", "tokens"], "this needs a recording of level tokens, this one has steps"),
        (["--level", "windo"], "level 'windo' is not one of windows, steps, tokens"),
        (["-o", "."], "cannot write ."),
        (["--workers", "0"], "invalid value for '--workers'"),
    ],
)
def test_wrong_use_is_one_line(cli: Cli, recording: Path, words: list[str], said: str):
    done = cli("fold", recording, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr.lower() if "--workers" in words else said in done.stderr


def test_dask_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with (
        pytest.raises(MissingExtraError, match=r"pip install 'routeprof\[cluster\]'"),
        reading.readers(1, "tcp://127.0.0.1:8786"),
    ):
        raise typer.Abort
