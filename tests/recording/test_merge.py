"""Several ranks, several directories: sums, overlaps, clashes, and what is missing."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.dashboards.live.source import Source
from routeprof.errors import EmptyRecordingError, MismatchError, OverlapError, UsageError
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import RankState
from routeprof.topology import Layer, ModelInfo
from tests.recording.made import by_hand, random_parts, write
from tests.recording.parallel import (
    BOTH,
    LAYERS,
    STAGES,
    A,
    B,
    Rank,
    change,
    codes,
    column,
    days,
    edit,
    grid,
    moe,
    nodes,
    pipeline,
    role,
    tables,
)

# -- layers


def test_clashing_layers_name_both_ranks(tmp_path):
    for rank, experts in enumerate((4, 8)):
        Rank(tmp_path / "r", role(rank, 2), own=(moe(3, experts=experts),)).stop()
    with pytest.raises(MismatchError, match=r"layer 3 .*4 experts.* rank 0 .*8 experts.* rank 1"):
        routeprof.load(tmp_path / "r")


@pytest.mark.parametrize("other", [moe(1, top_k=1), Layer(1, "layers.1", kind="dense")])
def test_clashing_with_recording_json(tmp_path, other):
    Rank(tmp_path / "r", role(0, 2)).stop()
    Rank(tmp_path / "r", role(1, 2), own=(moe(0), other)).stop()
    with pytest.raises(MismatchError, match=r"layer 1 .*recording\.json.* rank 1"):
        routeprof.load(tmp_path / "r")


def test_clashing_recordings_name_both_directories(tmp_path):
    Rank(tmp_path / "a", id="a").steps(A).stop()
    Rank(tmp_path / "b", id="b", layers=(moe(0), moe(1, experts=8))).stop()
    with pytest.raises(MismatchError, match=r"layer 1 .*/a .*/b.*apart"):
        routeprof.load(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_layer_that_one_rank_could_not_hook(tmp_path, order):
    blind = moe(1, unsupported="fused router", experts=0, top_k=0)
    own = {0: (moe(0), blind), 1: LAYERS}
    steps = {0: {0: A[0]}, 1: B}
    for rank in order:
        Rank(tmp_path / "r", role(rank, 2), layers=own[rank], own=own[rank]).steps(
            steps[rank]
        ).stop()
    profile = routeprof.load(tmp_path / "r")
    assert profile.info.layers == LAYERS
    assert profile.states == ("captured", "captured")
    assert profile.counts.tolist() == [BOTH[0], B[1]]


def test_what_only_one_rank_knows_of_a_layer_holds_for_the_sum(tmp_path):
    Rank(tmp_path / "r", role(0, 2)).stop()
    odd = moe(1, drops=True, executed=False, sees_all_tokens=False)
    Rank(tmp_path / "r", role(1, 2), own=(moe(0), odd)).stop()
    assert open_recording(tmp_path / "r").info.layers == (moe(0), odd)


def test_parts_are_held_against_the_layers_of_all_ranks(tmp_path):
    pipeline(tmp_path / "r")
    edit(tmp_path / "r/rank-00001/part-000000.parquet", "layer", [2, 9])
    profile = routeprof.load(tmp_path / "r")
    (line,) = profile.totals.unread
    assert line.startswith("rank-00001/part-000000.parquet has layers")
    assert profile.counts.tolist() == [*BOTH, B[0], B[1]]


def test_rank_json_with_layers_comes_back_as_it_went():
    state = RankState(role(1, 2, pp=1), layers=STAGES[1], passes=("model", "model.draft"))
    assert RankState.from_json(state.to_json()) == state


def test_rank_json_of_an_older_and_of_a_newer_routeprof(tmp_path):
    state = RankState(role(1, 2), layers=LAYERS, passes=("a", "b"), pid=7)
    data = json.loads(state.to_json())
    newer = data | {"unheard": 1, "role": data["role"] | {"cp": 3}}
    newer["layers"] = [layer | {"colour": "red"} for layer in data["layers"]]
    assert RankState.from_json(json.dumps(newer)) == state
    older = {name: value for name, value in data.items() if name not in ("layers", "passes")}
    assert RankState.from_json(json.dumps(older)) == RankState(role(1, 2), pid=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"passes": ["a"]},
        {"passes": 3},
        {"layers": 3},
        {"layers": [3]},
        {"layers": [{"index": "x", "name": "n"}], "passes": [""]},
        {"role": {"rank": "0"}},
        {"role": {"world_size": None}},
    ],
)
def test_rank_json_whose_layers_or_role_are_nonsense_is_damaged(tmp_path, changes):
    Rank(tmp_path / "r").steps(A).stop()
    change(tmp_path / "r", 0, **changes)
    profile = routeprof.load(tmp_path / "r")
    assert "damaged-rank" in codes(profile)
    assert profile.counts.tolist() == list(A.values())


# -- directories of one run


@pytest.mark.parametrize("same", [{"run": "launch-7"}, {"ids": ("z", "z")}])
def test_two_nodes(tmp_path, same):
    paths = nodes(tmp_path, level="tokens", **same)
    for number in range(2):
        rank = Rank(tmp_path / "one", role(number, 2, dp=number), process=number, level="tokens")
        rank.steps(*[(A, B)[number]] * 2).stop()
    together, whole = routeprof.load(*paths), routeprof.load(tmp_path / "one")
    assert together.counts.tolist() == (2 * np.array(BOTH)).tolist()
    assert tables(together) == tables(whole)
    assert together.ranks()["directory"].tolist() == [str(path) for path in paths]
    assert together.ranks()["run"].tolist() == [0, 0]
    assert set(together.step_counts().rank) == {0, 1}
    assert together.files.runs == 1
    assert "ranks-missing" not in codes(together)


def test_stages_on_two_nodes(tmp_path):
    for pp, stage in enumerate(STAGES):
        rank = Rank(tmp_path / f"{pp}", role(pp, 2, pp=pp), layers=stage, id=f"{pp}", run="r")
        rank.steps({2 * pp: A[0], 2 * pp + 1: A[1]}).stop()
    profile = routeprof.load(tmp_path / "0", tmp_path / "1")
    assert profile.counts.tolist() == [*A.values(), *A.values()]
    assert column(profile, "coverage") == [1.0] * 4


def test_the_order_of_directories_and_the_way_they_are_given_do_not_matter(tmp_path):
    one, other = nodes(tmp_path, level="tokens")
    later = Rank(tmp_path / "later", id="w", started=9000.0, level="tokens").steps(A).stop()
    paths = [one, other, later.writer.directory]
    expected = tables(routeprof.load(paths))
    with ThreadPoolExecutor(2) as pool:
        for profile in (
            routeprof.load(*paths),
            routeprof.load([str(path) for path in reversed(paths)]),
            routeprof.load(paths[1], paths[2], paths[0], executor=pool),
            routeprof.load(path=iter(paths)),
        ):
            assert tables(profile) == expected


def test_runs_are_one_by_either_name(tmp_path):
    """The first and the second have a run in common, the second and the third an id."""
    facts = [("a", "r"), ("b", "r"), ("b", ""), ("c", "")]
    for rank, (name, run) in enumerate(facts):
        Rank(tmp_path / f"{rank}", role(rank % 3, 3), id=name, run=run).steps(A).stop()
    profile = routeprof.load([tmp_path / f"{rank}" for rank in range(4)])
    assert profile.ranks()["run"].tolist() == [0, 0, 0, 1]
    assert profile.counts.tolist() == (4 * np.array(list(A.values()))).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_in_any_directories_add_up(tmp_path, seed):
    random = np.random.default_rng(seed)
    rows = []
    for rank in range(5):
        place = tmp_path / f"node{random.integers(3)}"
        parts = random_parts(10 * seed + rank, parts=2, rank=rank)
        write(place, parts, role(rank, 5, dp=rank))
        rows += [row for part in parts for row in part]
    profile, expected = routeprof.load(sorted(tmp_path.iterdir())), by_hand(rows)
    for name in ("tokens", "steps", "invalid", "max_load_sum"):
        total = sum(value for (*_, own), value in expected.items() if own == name)
        assert profile.totals.sums[name].sum() == total
    counts = [sum(one.values()) for (*_, own), one in expected.items() if own == "counts"]
    assert profile.totals.lists["counts"].sum() == sum(counts)


# -- loaded twice


def refused(*paths: Path) -> str:
    with pytest.raises(OverlapError) as caught:
        routeprof.load(*paths)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def test_the_same_directory_twice(tmp_path):
    Rank(tmp_path / "r").steps(A).stop()
    assert "named twice" in refused(tmp_path / "r", tmp_path / "r")
    (tmp_path / "link").symlink_to(tmp_path / "r")
    message = refused(tmp_path / "r", tmp_path / "link")
    assert str(tmp_path / "link") in message
    assert "the same directory named twice" in message


@pytest.mark.parametrize("run", ["", "launch-7"])
def test_a_copy(tmp_path, run):
    Rank(tmp_path / "r", run=run, process=4711).steps(A, B).stop()
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    message = refused(tmp_path / "copy", tmp_path / "r")
    assert f"{tmp_path / 'copy'} and {tmp_path / 'r'}" in message
    assert "process 4711 on node: one is a copy" in message


def test_a_copy_taken_earlier(tmp_path):
    rank = Rank(tmp_path / "r").steps(A)
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    rank.steps(B).stop()
    assert "leave it out" in refused(tmp_path / "r", tmp_path / "copy")


def test_a_copy_of_some_ranks(tmp_path):
    grid(tmp_path / "r")
    (tmp_path / "some").mkdir()
    shutil.copy(tmp_path / "r/recording.json", tmp_path / "some")
    shutil.copytree(tmp_path / "r/rank-00003", tmp_path / "some/rank-00003")
    assert "both hold rank 3" in refused(tmp_path / "r", tmp_path / "some")
    shutil.move(tmp_path / "r/rank-00003", tmp_path / "elsewhere")
    profile = routeprof.load(tmp_path / "r", tmp_path / "some")
    assert profile.ranks()["rank"].tolist() == [0, 1, 2, 3]


def test_a_copy_without_rank_json(tmp_path):
    Rank(tmp_path / "r").steps(A).stop()
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    (tmp_path / "copy/rank-00000/rank.json").unlink()
    assert "leave one out" in refused(tmp_path / "r", tmp_path / "copy")


def test_two_processes_that_took_the_same_rank(tmp_path):
    nodes(tmp_path, run="r")
    Rank(tmp_path / "more", role(1, 2), id="m", run="r", process=99).steps(A).stop()
    message = refused(tmp_path / "node0", tmp_path / "node1", tmp_path / "more")
    assert "both hold rank 1, written by different processes" in message
    assert "number ranks over all nodes" in message


def test_no_directory():
    with pytest.raises(UsageError, match="name at least one"):
        routeprof.load([])


# -- copied parts


def copy_part(directory: Path, kind: str, number: int, to: int) -> None:
    own = directory / "rank-00000" / f"{kind}-{number:06d}.parquet"
    shutil.copy(own, own.with_name(f"{kind}-{to:06d}.parquet"))


def test_a_part_that_was_copied_is_counted_once(tmp_path):
    Rank(tmp_path / "r").steps(A, B).stop()
    copy_part(tmp_path / "r", "part", 0, 2)
    for profile in (routeprof.load(tmp_path / "r"), Source(tmp_path / "r").read().profile):
        assert profile is not None
        assert profile.counts.tolist() == BOTH
        (line,) = profile.totals.unread
        assert line.startswith("rank-00000/part-000002.parquet holds windows that rank-00000/part-")
        assert "damaged-part" in codes(profile)


@pytest.mark.parametrize("kind", ["steps", "tokens"])
def test_detail_that_was_copied_is_read_once(tmp_path, kind):
    Rank(tmp_path / "r", level="tokens").steps(A, B, B).stop()
    whole = routeprof.load(tmp_path / "r")
    copy_part(tmp_path / "r", kind, 1, 3)
    profile = routeprof.load(tmp_path / "r")
    assert tables(profile) == tables(whole)
    lines = profile.step_counts().unread + profile.tokens(0).unread
    assert [f"{kind}-000003.parquet holds the same as" in line for line in lines] == [True]


def test_a_part_of_another_rank(tmp_path):
    for rank, step in enumerate((A, B)):
        Rank(tmp_path / "r", role(rank, 2, dp=rank)).steps(step).stop()
    shutil.copy(
        tmp_path / "r/rank-00001/part-000000.parquet",
        tmp_path / "r/rank-00000/part-000001.parquet",
    )
    profile = routeprof.load(tmp_path / "r")
    assert profile.counts.tolist() == BOTH
    assert "is of rank 1 and lies in another rank's directory" in profile.totals.unread[0]


# -- several runs


def test_two_runs_are_summed(tmp_path):
    paths = days(tmp_path, level="tokens")
    profile = routeprof.load(*paths)
    assert profile.counts.tolist() == [[8, 4, 6, 6], [5, 5, 6, 8]]  # 2 A + B
    assert profile.tags == ("code", "prose")
    assert profile.select(tag="prose").counts.tolist() == list(B.values())
    assert column(profile, "steps") == [3, 3]
    assert profile.coverage == 1.0
    assert profile.seconds == 2.0 + 1.0
    assert profile.files.runs == 2
    assert profile.step_counts().rank.tolist() == [0] * 4 + [100_000] * 2
    assert profile.steps()["tokens"].sum() == 2 * 3 * 4
    assert profile.tokens(0).request.tolist() == [0, 1, 2, 3] * 3
    assert profile.requests()["request"].tolist() == [
        *(f"0/{request}" for request in range(4)),
        *(f"100000/{request}" for request in range(4)),
    ]
    assert sorted(profile.windows()["window"].unique()) == [0, 1, 2]
    assert profile.ranks()["directory"].tolist() == [str(path) for path in paths]
    assert profile.ranks()["run"].tolist() == [0, 1]
    assert profile.ranks()["tokens"].tolist() == [8, 4]
    assert "recordings-differ" not in codes(profile)
    apart = [routeprof.load(path).totals for path in paths]
    for name in ("overflow", "gemm_histogram", "imbalance_histogram"):
        sums = [one.lists[name].sum((0, 1)) for one in (*apart, profile.totals)]
        width = max(map(len, sums))
        first, second, total = (np.pad(one, (0, width - len(one))) for one in sums)
        assert (first + second).tolist() == total.tolist()


def test_ranks_whose_passes_have_other_names(tmp_path):
    paths = days(tmp_path, None, {"module": "language_model"}, level="tokens")
    profile = routeprof.load(*paths)
    assert profile.tokens(0).request.tolist() == [0, 1, 2, 3] * 3
    assert profile.requests()["tokens"].tolist() == [2] * 4 + [1] * 4


def test_a_selection_of_windows_of_two_runs(tmp_path):
    profile = routeprof.load(*days(tmp_path, level="steps"))
    tuesday = profile.select(between=(90_000.0, 90_010.0))
    assert tuesday.counts.tolist() == list(B.values())
    assert set(tuesday.step_counts().rank) == {100_000}


def test_levels_that_differ(tmp_path):
    profile = routeprof.load(*days(tmp_path, {"level": "tokens"}, {"level": "steps"}))
    assert profile.info.level == "steps"
    assert profile.step_counts().tokens.sum() == 2 * 3 * 4
    assert not profile.has("tokens")
    assert "shown is what all have, steps" in codes(profile)["recordings-differ"]


def test_capacity_factors_that_differ(tmp_path):
    other = {"capacity_factors": (3.0, 1.5)}
    profile = routeprof.load(*days(tmp_path, None, other))
    assert profile.info.capacity_factors == (1.5,)
    # At 1.5 an expert has room for 3: A overflows by 1 and 0, B by 2 and 1.
    table = profile.overflow()
    assert table["overflow_assignments"].tolist() == [2 * 1 + 2, 1]
    assert table["padding_rate"].tolist() == pytest.approx([(36 - 24 + 4) / 36, (36 - 24 + 1) / 36])
    assert "that all have (1.5)" in codes(profile)["recordings-differ"]
    assert profile.totals.unread == ()


def test_no_capacity_factor_in_common(tmp_path):
    profile = routeprof.load(*days(tmp_path, None, {"capacity_factors": (3.0,)}))
    assert profile.overflow().empty
    assert profile.counts.sum() == 48
    assert "(none)" in codes(profile)["recordings-differ"]


def test_models_of_different_names(tmp_path):
    named = [{"model": ModelInfo(name)} for name in ("mixtral", "qwen")]
    profile = routeprof.load(*days(tmp_path, *named))
    assert "mixtral, qwen" in codes(profile)["recordings-differ"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_configuration_is_that_of_the_first_that_has_one(tmp_path, first):
    models = [{"model": ModelInfo("m", config=one)} for one in (None, {"n": 1}, {"n": 2})]
    profile = routeprof.load(*days(tmp_path, *models[first : first + 2]))
    assert profile.info.model == ModelInfo("m", config={"n": 1})


def test_runs_with_different_layers(tmp_path):
    Rank(tmp_path / "a", id="a", layers=LAYERS[:1]).steps({0: A[0]}).stop()
    Rank(tmp_path / "b", id="b", layers=LAYERS[1:], started=2000.0).steps({1: B[1]}).stop()
    profile = routeprof.load(tmp_path / "a", tmp_path / "b")
    assert profile.counts.tolist() == [A[0], B[1]]
    assert profile.coverage == 1.0


def test_a_damaged_part_is_named_with_its_directory(tmp_path):
    paths = days(tmp_path)
    for path in paths:
        (path / "rank-00000/part-000000.parquet").write_bytes(b"x")
    (line, _) = routeprof.load(*paths).totals.unread
    assert line.startswith(f"{paths[0]}/rank-00000/part-000000.parquet ")
    (paths[0] / "rank-00000/part-000001.parquet").write_bytes(b"x")
    with pytest.raises(EmptyRecordingError, match=r"monday.*tuesday"):
        routeprof.load(*paths)
