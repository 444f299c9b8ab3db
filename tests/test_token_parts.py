"""Tokens of a layer against loops over what pyarrow alone reads from the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import routeprof
from routeprof.dashboards.views import affinity
from routeprof.profile import Profile
from routeprof.recording.places import parquet_file
from routeprof.token_parts import last_places
from routeprof.topology import RankRole
from tests.capture.oracle import Call, layers_of, random_step
from tests.capture.recordings import flush, recorder_of, serve
from tests.dashboards.tokens import context_of
from tests.recording.id_lists import as_list

LAYERS = layers_of((8, 2), (6, 3), (4, 1))
KEYS = [("prefill", "code"), ("decode", "code"), ("decode", None), ("mixed", "prose")]
NAMES = ("step", "rank", "request", "position", "ids")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, several parts each; rings too small for some rows, ids out of range, padding."""
    directory, random = tmp_path_factory.mktemp("runs") / "r", np.random.default_rng(7)
    for rank in range(2):
        role = RankRole(rank=rank, world_size=2, dp=rank)
        recorder, capture = recorder_of(directory, LAYERS, level="tokens", role=role, token_ring=60)
        for number in range(24):
            phase, tag = KEYS[number % 4]
            length = 5 if phase == "prefill" else 1
            step = random_step(random, LAYERS, 3, length, phase=phase)
            if number % 5 == 0:
                step.valid = (random.random(step.rows) < 0.8).astype(int)
            if number % 6 == 0:
                step.calls[0].ids[0, 0] = 99
            if number % 7 == 0:
                step.calls.pop()  # the last layer does not run
            if number % 8 == 1:  # the middle layer chooses its rows
                step.calls[1] = Call(1, step.calls[1].ids[:2])
            if tag:
                with recorder.tag(tag):
                    serve(capture, step, fresh=phase == "prefill" and step.valid is None)
            else:
                serve(capture, step)
            if number % 9 == 8:
                flush(recorder)
        recorder.close()
    return directory


@pytest.fixture
def profile(recording: Path) -> Profile:
    return routeprof.load(recording)


def rows_of(directory: Path, kind: str) -> list[dict]:
    files = sorted(directory.glob(f"rank-*/{kind}-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def by_loops(directory: Path, layer: int, ran: Callable[[int, int], bool]) -> list[tuple]:
    """``NAMES`` of each token of a layer, of the (rank, step) that ran."""
    top_k, experts = next((own.top_k, own.experts) for own in LAYERS if own.index == layer)
    passes = {(row["rank"], row["step"]): row for row in rows_of(directory, "rows")}
    found = []
    runs = [row for row in rows_of(directory, "tokens") if row["layer"] == layer]
    for run in sorted(runs, key=lambda row: (row["rank"], row["step"])):
        if not ran(run["rank"], run["step"]):
            continue
        own = passes.get((run["rank"], run["step"]))
        listed = as_list(run["ids"], run["tokens"] * top_k, experts)
        known = own is not None and len(own["request"]) == run["tokens"]
        for place in range(run["tokens"]):
            ids = listed[place * top_k : (place + 1) * top_k]
            where = (own["request"][place], own["position"][place]) if known else (-1, -1)
            ids = [-1 if number is None else number for number in ids]
            found.append((run["step"], run["rank"], *where, ids))
    return found


def same(profile: Profile, layer: int, expected: list[tuple]) -> None:
    table = profile.tokens(layer)
    arrays = [getattr(table, name) for name in NAMES]
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}
    assert list(zip(*(array.tolist() for array in arrays), strict=True)) == expected


@pytest.mark.parametrize("layer", [layer.index for layer in LAYERS])
def test_tokens_are_those_of_the_files(recording: Path, profile: Profile, layer: int):
    expected = by_loops(recording, layer, lambda rank, step: True)
    same(profile, layer, expected)
    requests = {request for _, _, request, _, _ in expected}
    assert len(requests) > 2
    assert (-1 in requests) == (layer == 10)
    assert profile.files.ranks[0].state.problems["lost_token_rows"] > 0


SELECTIONS = [
    {"phase": "prefill"},
    {"tag": "code"},
    {"tag": "untagged"},
    {"phase": "decode", "tag": "code"},
]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_tokens_of_a_selection(recording: Path, profile: Profile, selection: dict, timed: bool):
    ends = np.unique(profile.windows()["end"])
    between = (ends[0], ends[-2]) if timed else (0.0, np.inf)
    selected = profile.select(**selection, between=between if timed else None)
    wanted = {
        (row["rank"], row["step"])
        for row in rows_of(recording, "steps")
        if selection.get("phase", row["phase"]) == row["phase"]
        and selection.get("tag", row["tag"] or "untagged") == (row["tag"] or "untagged")
        and between[0] < row["time"] <= between[1]
    }
    for layer in LAYERS:
        expected = by_loops(recording, layer.index, lambda rank, step: (rank, step) in wanted)
        assert expected
        same(selected, layer.index, expected)


def test_requests_of_a_selection(recording: Path, profile: Profile):
    selected = profile.select(phase="decode", tag="code")
    counts: dict[str, Counter[int]] = {}
    for layer in LAYERS:
        table = selected.tokens(layer.index)
        for rank, request in zip(table.rank, table.request, strict=True):
            if request >= 0:
                counts.setdefault(f"{rank}/{request}", Counter())[layer.index] += 1
    table = selected.requests().set_index("request")
    assert set(table.index) == set(counts)
    assert table["tokens"].sum() < profile.requests()["tokens"].sum()
    for name, row in table.iterrows():
        assert row["tokens"] == row["decode_tokens"] == max(counts[name].values())
        assert row["prefill_tokens"] == row["other_tokens"] == 0


# -- reading


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened, by its rank and name."""
    times: Counter[str] = Counter()
    real = parquet_file

    def counting(path: Path, **options: object) -> pq.ParquetFile:
        times[f"{path.parent.name}/{path.name}"] += 1
        return real(path, **options)

    monkeypatch.setattr("routeprof.recording.reader.parquet_file", counting)
    return times


def test_a_part_is_opened_once_for_all_layers_and_tables(recording: Path, opened: Counter[str]):
    profile = routeprof.load(recording)
    for layer in LAYERS:
        profile.tokens(layer.index)
    profile.requests(), profile.affinity(), profile.repetition()
    parts = {file.parent.name + "/" + file.name for file in recording.glob("rank-*/*.parquet")}
    assert len(parts) > 8
    assert opened == dict.fromkeys(parts, 1)


def test_a_view_opens_a_part_once(recording: Path, opened: Counter[str]):
    view = context_of(recording, layer=10, phase="decode")
    opened.clear()
    affinity.fill(view)
    detail = {file for file in opened if "/tokens-" in file or "/rows-" in file}
    assert len(detail) > 4
    assert {opened[file] for file in detail} == {1}


def test_last_places():
    keys = np.array([5, 3, 5, 9])
    assert last_places(keys, np.array([5, 3, 4, 9, 10, 0])).tolist() == [2, 1, -1, 3, -1, -1]
    assert last_places(keys[:0], np.array([5, 3])).tolist() == [-1, -1]
