"""TensorRT-LLM's statistics, in files of the library that it writes with, against counted ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import routeprof
from routeprof.converted import as_recording
from routeprof.errors import UsageError
from routeprof.formats import convert, recognised
from routeprof.formats.trtllm import IN_PART, SLOTS, SUMMED, TWINS, is_trtllm

EXPERTS, TOP_K, LAYERS = 8, 2, (3, 4, 10)
Ids = dict[tuple[int, int, int], np.ndarray]
"""Experts of tokens [tokens, TOP_K] by rank, iteration and layer."""


def routed(ranks: Iterable[int], iterations: Iterable[int], seed: int = 0, most: int = 9) -> Ids:
    random = np.random.default_rng(seed)
    ids = {}
    for rank in ranks:
        for number in iterations:
            tokens = int(random.integers(1, most))
            for layer in LAYERS:
                rows = random.random((tokens, EXPERTS)).argsort(axis=1)[:, :TOP_K]
                ids[rank, number, layer] = rows.astype(np.int32)
    return ids


def counted(rows: np.ndarray, experts: int = EXPERTS) -> np.ndarray:
    """As ``_maybe_add_info`` does: ids that are no expert's make the array longer."""
    return np.bincount(rows.reshape(-1), minlength=experts)


def written(path: Path, ids: Ids, dtype: type = np.int64, **meta: int) -> Path:
    path.mkdir()
    told = {"num_experts": EXPERTS, "num_experts_per_token": TOP_K} | meta
    (path / "meta_info.json").write_text(json.dumps(told))
    for rank in sorted({key[0] for key in ids}):
        own = {key[1:]: rows for key, rows in ids.items() if key[0] == rank}
        tensors = {f"{n}_{layer}": counted(rows).astype(dtype) for (n, layer), rows in own.items()}
        save_file(tensors, path / f"rank{rank}.safetensors")
    return path


def expected(ids: Ids, ranks: Iterable[int] | None = None) -> np.ndarray:
    total = np.zeros((len(LAYERS), EXPERTS), dtype=np.int64)
    for (rank, _, layer), rows in ids.items():
        if ranks is None or rank in ranks:
            total[LAYERS.index(layer)] += counted(rows)[:EXPERTS]
    return total


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_ranks_are_added_up_by_iteration(tmp_path: Path, dtype: type):
    ids = routed(range(12), range(100, 112))  # 100 and 12, as text, sort the other way
    path = written(tmp_path / "statistic", ids, dtype)
    profile = routeprof.load(path)
    assert profile.layer_indices == list(LAYERS)
    assert np.array_equal(profile.counts, expected(ids))
    steps = profile.step_counts()
    assert len(steps.step) == 12 * len(LAYERS)
    for place, number in enumerate(range(100, 112)):
        for layer in LAYERS:
            due = sum(counted(ids[rank, number, layer]) for rank in range(12))
            row = np.flatnonzero((steps.step == place) & (steps.layer == layer))
            assert np.array_equal(steps.counts[row[0]], due)
    rows = profile.layers().set_index("layer")
    assert rows["tokens"].tolist() == [sum(len(ids[k]) for k in ids if k[2] == n) for n in LAYERS]
    assert profile.phases == ("unknown",)
    assert profile.info.notes == (SLOTS, SUMMED)


def test_the_imbalance_is_that_of_their_report(tmp_path: Path):
    """(max − mean) / mean of a rank's load, averaged over iterations, contiguous experts."""
    ids = routed(range(4), range(6), most=40)
    profile = routeprof.load(written(tmp_path / "statistic", ids))
    steps = profile.step_counts()
    loads = steps.counts[steps.layer == 4].reshape(6, 4, EXPERTS // 4).sum(axis=2)
    ours = (loads.max(axis=1) / loads.mean(axis=1) - 1).mean()
    theirs = []
    for number in range(6):
        total = sum(counted(ids[rank, number, 4]) for rank in range(4)).reshape(4, -1).sum(axis=1)
        theirs.append(total.max() / total.mean() - 1)
    assert ours == pytest.approx(np.mean(theirs))


def test_ranks_with_the_same_tokens_count_once(tmp_path: Path):
    one = routed([0], range(3))
    ids = {(rank, *key[1:]): rows for key, rows in one.items() for rank in range(4)}
    profile = routeprof.load(written(tmp_path / "statistic", ids))
    assert np.array_equal(profile.counts, expected(one))
    assert TWINS in profile.info.notes


def test_missing_ranks_iterations_and_records_are_said(tmp_path: Path):
    ids = routed([0, 2], [1, 2, 5])
    del ids[2, 5, 10]
    profile = routeprof.load(written(tmp_path / "statistic", ids, ep_size=5))
    assert np.array_equal(profile.counts, expected(ids))
    notes = " ".join(profile.info.notes)
    assert "ranks without a file, whose tokens are not counted: 1, 3, 4" in notes
    assert "2 iterations between others are missing" in notes
    assert "1 of 18 records" in notes


def test_ids_beyond_the_experts_are_invalid_not_experts(tmp_path: Path):
    ids = routed([0], [1])
    ids[0, 1, 4] = np.full_like(ids[0, 1, 4], EXPERTS)  # how all-to-all marks padding
    profile = routeprof.load(written(tmp_path / "statistic", ids))
    rows = profile.layers().set_index("layer")
    assert profile.counts.shape == (3, EXPERTS)
    assert np.array_equal(profile.counts, expected(ids))
    assert rows.loc[4, "invalid"] == ids[0, 1, 4].size
    assert rows.loc[4, "assignments"] == 0


@pytest.mark.parametrize("name", ["token_selected_experts_rank{}", "rank{}_raw"])
def test_tokens_of_the_variants(tmp_path: Path, name: str):
    ids = routed([0, 1], [7, 8])
    ids[1, 8, 3][0, 0] = EXPERTS
    path = written(tmp_path / "statistic", ids)
    for rank in (0, 1):
        own = {f"{n}_{layer}": rows for (r, n, layer), rows in ids.items() if r == rank}
        save_file(own, path / f"{name.format(rank)}.safetensors")
    save_file(
        {"7_3": np.zeros((EXPERTS, EXPERTS), np.int32)}, path / "cooccurrence_rank0.safetensors"
    )
    profile = routeprof.load(path)
    assert profile.info.level == "tokens"
    assert np.array_equal(profile.counts, expected(ids))
    for layer in LAYERS:
        order = [(rank, number, layer) for rank in (0, 1) for number in (7, 8)]
        due = np.concatenate([ids[key] for key in order])
        assert np.array_equal(profile.tokens(layer).ids, np.where(due < EXPERTS, due, -1))


def test_tokens_that_were_overwritten_are_not_taken_for_all(tmp_path: Path):
    """``rank{r}_raw`` keeps the last chunk of an iteration only, the counts have all of them."""
    ids = routed([0], [7], most=12)
    path = written(tmp_path / "statistic", ids)
    last = {f"{n}_{layer}": rows[-1:].copy() for (_, n, layer), rows in ids.items()}
    save_file(last, path / "rank0_raw.safetensors")
    profile = routeprof.load(path)
    assert profile.info.level == "steps"
    assert IN_PART in profile.info.notes
    assert np.array_equal(profile.counts, expected(ids))


def damaged(path: Path, name: str) -> Path:
    """One of the ways in which a directory is not what it seems."""
    file = path / "rank0.safetensors"
    if name == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif name == "empty":
        file.write_bytes(b"")
    elif name == "header":
        file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    elif name == "wide":
        (path / "meta_info.json").write_text(
            '{"num_experts": 1000000000, "num_experts_per_token": 2}'
        )
    elif name == "other":
        (path / "meta_info.json").write_text('{"num_experts": 4, "num_experts_per_token": 2}')
        save_file({"1_3": np.ones(2, np.int64)}, file)
    elif name == "odd":
        save_file({"1_3": np.ones(EXPERTS + 1, np.int64)}, file)
    elif name == "weights":
        save_file({"model.weight": np.ones((2, 2), np.float32)}, file)
    elif name == "twice":
        save_file({"1_3": np.ones(8, np.int64), "01_3": np.ones(8, np.int64)}, file)
    elif name == "negative":
        save_file({"1_3": np.array([-2, 4, *[0] * 6])}, file)
    elif name == "nothing":
        save_file({}, file)
    else:
        (path / "meta_info.json").unlink()
    return path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("truncated", "is damaged or no safetensors file"),
        ("empty", "is damaged or no safetensors file"),
        ("header", "a header of"),
        ("wide", "numbers that cannot be"),
        ("other", "counts other than 4 experts"),
        ("odd", "which 2 for each token do not make"),
        ("weights", "other kinds than counts"),
        ("twice", "twice"),
        ("negative", "no counts"),
        ("nothing", "holds no counts"),
        ("meta", "meta_info.json is missing, which rank 0 writes"),
    ],
)
def test_bad_directories(tmp_path: Path, name: str, says: str):
    path = damaged(written(tmp_path / "statistic", routed([0], [1])), name)
    with pytest.raises(UsageError, match=says) as caught:
        convert([path], tmp_path / "run", "trtllm")
    assert "\n" not in str(caught.value)


def test_what_is_recognised(tmp_path: Path):
    path = written(tmp_path / "statistic", routed([0], [1]))
    assert recognised(path) == "trtllm"
    assert as_recording(path) != path
    for other in (tmp_path, path / "meta_info.json", path / "rank0.safetensors", tmp_path / "none"):
        assert not is_trtllm(other)
