"""Recordings in an S3 store, served on the loopback interface, and on fsspec's file systems."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.dashboards.live.library import Library
from routeprof.errors import NotARecordingError, UnreachableError, UsageError
from routeprof.recording import stores
from routeprof.recording.places import place
from routeprof.recording.reader import read_part
from routeprof.recording.workers import Workers
from routeprof.report.summary import summary_json
from routeprof.topology import RankRole
from tests.commands.conftest import MIXTRAL, in_a_process
from tests.recording.made import random_parts, write
from tests.recording.s3 import Server, serving

NAME = "runs/mix tral é客"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """Three ranks, one part of which is damaged."""
    directory = tmp_path_factory.mktemp("local") / "made"
    for rank in range(3):
        role = RankRole(rank=rank, world_size=3)
        write(directory, random_parts(rank, rank=rank), role)
    (directory / "rank-00001" / "part-000002.parquet").write_bytes(b"PAR1 nothing PAR1")
    return directory


@pytest.fixture(scope="module")
def address(server: Server, local: Path) -> str:
    return server.upload(local, f"bucket/{NAME}")


@pytest.fixture(autouse=True)
def _environment(server: Server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    stores._s3.cache_clear()
    yield
    stores._s3.cache_clear()


def text_of(profile, directory) -> str:
    """The summary as JSON, without where the recording is."""
    return json.dumps(summary_json(profile, now=1.0), indent=1, ensure_ascii=False).replace(
        str(directory), "HERE"
    )


def test_everything_is_as_of_the_local_copy(address, local):
    there, here = routeprof.load(address), routeprof.load(local)
    assert text_of(there, address) == text_of(here, local)
    assert len(there.totals.unread) == 1
    assert "rank-00001/part-000002.parquet cannot be read" in there.totals.unread[0]
    for name in ("counts", "overflow"):
        assert (there.totals.lists[name] == here.totals.lists[name]).all()
    assert there.windows().equals(here.windows())


def test_workers_read_it_too(address, local):
    with Workers(2) as workers:
        there = routeprof.load(address, executor=workers)
    assert text_of(there, address) == text_of(routeprof.load(local), local)


def test_two_directories_of_a_store_are_added(address, server, local):
    with pytest.raises(routeprof.errors.OverlapError, match="named twice"):
        routeprof.load(address, f"{address}/")
    with pytest.raises(routeprof.errors.OverlapError, match="one is a copy of the other"):
        routeprof.load(address, local)


def test_tokens_are_read_from_a_store(server, tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()
    with routeprof.record(model, tmp_path / "tokens", level="tokens"), torch.no_grad():
        model(torch.randint(0, 64, (2, 10)))
    there = routeprof.load(server.upload(tmp_path / "tokens", "bucket/tokens"))
    here = routeprof.load(tmp_path / "tokens")
    layer = here.layer_indices[0]
    assert (there.tokens(layer).ids == here.tokens(layer).ids).all()
    assert there.steps().equals(here.steps())


def test_lists_of_several_pages_are_read_whole(server, tmp_path):
    rows = [[row] for part in random_parts(3, parts=1, rows=40) for row in part]
    for number, part in enumerate(rows):
        part[0]["window"] = number
    write(tmp_path / "many", rows)
    folder = tmp_path / "many" / "rank-00000"
    for number in range(1200):
        (folder / f"beside-{number:04}").touch()
    address = server.upload(tmp_path / "many", "bucket/many")
    before = len(server.requests())
    there = routeprof.load(address)
    made = server.requests()[before:]
    assert text_of(there, address) == text_of(routeprof.load(tmp_path / "many"), tmp_path / "many")
    assert len(there.files.parts("part")) == 40
    # One listing of two pages, and the few looks by which one finds out that it is a directory;
    # for each part its size, its footer and its columns.
    assert sum("LIST BUCKET" in line for line in made) <= 5
    assert len(made) <= 20 + 3 * 40


def test_a_part_that_is_not_there_any_more_is_named(address, server, local, tmp_path):
    there = server.upload(local, "bucket/vanishing")
    files = routeprof.recording.merge.open_recordings([there])
    (server.folder / "bucket/vanishing/rank-00000/part-000003.parquet").unlink()
    totals = routeprof.recording.fold.fold(files.parts("part"), files.info)
    assert any("rank-00000/part-000003.parquet cannot be read" in line for line in totals.unread)
    assert routeprof.load(there).files.ranks[0].missing() == ["part-000003"]


def test_a_rank_without_its_state_is_judged_as_on_a_disk(server, local):
    there = server.upload(local, "bucket/stateless")
    (server.folder / "bucket/stateless/rank-00002/rank.json").unlink()
    ranks = routeprof.load(there).files.ranks
    assert [rank.state is None for rank in ranks] == [False, False, True]


def test_the_dashboard_finds_recordings_below_an_address(address, local):
    library = Library("s3://bucket/runs")
    assert library.names() == [NAME.removeprefix("runs/")]
    profile = Library(address).open(None).source.exact()
    assert (profile.counts == routeprof.load(local).counts).all()


def test_the_command_line_reads_addresses(address, local, tmp_path):
    there = in_a_process(["summary", "--json", address], tmp_path)
    here = in_a_process(["summary", "--json", str(local)], tmp_path)
    assert there.returncode == here.returncode == 0, there.stderr
    clock = ('"age', '"seconds_since')
    lines = [
        [line for line in done.stdout.splitlines() if not line.strip().startswith(clock)]
        for done in (there, here)
    ]
    shown = json.loads(f'["{address}"]')[0]
    ours = "\n".join(lines[0]).replace(json.dumps(shown)[1:-1], str(local))
    assert ours == "\n".join(lines[1])


@pytest.mark.parametrize("arguments", [["diagnose"], ["status"], ["top", "--once"], ["diff"]])
def test_other_verbs_read_addresses(address, arguments, tmp_path):
    more = [address] if arguments == ["diff"] else []
    done = in_a_process([*arguments, address, *more], tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr


# -- what can be wrong


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "another"}, "the store refuses these credentials; set them"),
        ({"AWS_ACCESS_KEY_ID": "somebody"}, "the store refuses these credentials; set them"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "the store does not answer; check"),
    ],
)
def test_a_store_that_refuses_or_is_not_there(address, settings, said, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    stores._s3.cache_clear()
    with pytest.raises(UnreachableError, match=said) as caught:
        routeprof.load(address)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("named", "error", "said"),
    [
        ("s3://nowhere/run", UnreachableError, "there is no such bucket"),
        ("s3://bucket/nothing", NotARecordingError, "does not exist"),
        ("s3://bucket/runs", NotARecordingError, "has no recording.json"),
        ("s3://", UsageError, "names nothing"),
        ("s3://bucket/a?endpoint=b", UsageError, "endpoint is no option of s3://"),
        ("s3://key:word@bucket/a", UsageError, "has a password in it"),
        ("gopher://a/b", UnreachableError, "no kind of address"),
        ("memory://nothing/here", NotARecordingError, "does not exist"),
    ],
)
def test_addresses_of_nothing(address, named, error, said):
    with pytest.raises(error, match=said) as caught:
        routeprof.load(named)
    assert "\n" not in str(caught.value)
    assert "word" not in str(caught.value).replace("password", "")


def test_the_command_line_says_it_in_one_line(address, tmp_path):
    for named in ("s3://nowhere/run", "gopher://a/b", "s3://"):
        done = in_a_process(["summary", named], tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr


# -- other file systems, and addresses themselves


def test_a_file_system_of_fsspec(local):
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(str(local), "/runs/made", recursive=True)
    there = routeprof.load("memory://runs/made")
    assert text_of(there, "memory://runs/made") == text_of(routeprof.load(local), local)
    assert text_of(routeprof.load(f"file://{local}"), local) == text_of(there, "memory://runs/made")


def test_an_endpoint_in_the_address(address, server, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    there = f"{address}?endpoint_override={server.endpoint}"
    files = routeprof.load(there).files
    assert len(files.ranks) == 3
    part = pickle.loads(pickle.dumps(files.parts("part")[0]))
    assert isinstance(read_part(part, files.info), pa.Table)  # a worker has no other endpoint


def test_a_recording_is_listed_once_whatever_its_ranks(address, server):
    before = len(server.requests())
    routeprof.recording.reader.open_recording(address)
    # One that tells a directory from nothing, and one of everything below it.
    assert sum("LIST BUCKET" in line for line in server.requests()[before:]) == 2


def test_a_part_travels_as_its_address_alone(address):
    part = routeprof.load(address).files.parts("part")[0]
    data = pickle.dumps(part)
    assert b"not-a-secret" not in data
    assert pickle.loads(data) == part
    assert len(data) < 1000
    assert dataclasses.replace(part, path=part.path.absolute()) == part
    assert str(part.path) == f"{address}/rank-00000/part-000000.parquet"


def test_local_paths_stay_paths(tmp_path):
    assert place(tmp_path) is tmp_path or place(tmp_path) == tmp_path
    assert place("runs/a") == Path("runs/a")
    assert place("C://x") == Path("C://x")
    assert place("file:///a/b%20c") == Path("/a/b c")
