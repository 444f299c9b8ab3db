"""Counts in CSV and NPY files, against the numbers that were written into them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import RouteprofError, UsageError
from routeprof.formats import Told, convert

EXPERTS, TOP_K = 8, 2


def routed(seed: int, steps: int, layers: int, tokens: int = 20) -> np.ndarray:
    """Counts of tokens that choose TOP_K of EXPERTS unevenly, int64 [steps, layers, experts]."""
    random = np.random.default_rng(seed)
    shares = np.arange(1, EXPERTS + 1) / np.arange(1, EXPERTS + 1).sum()
    counts = np.zeros((steps, layers, EXPERTS), dtype=np.int64)
    for cell in counts.reshape(-1, EXPERTS):
        for _ in range(tokens):
            cell[random.choice(EXPERTS, TOP_K, replace=False, p=shares)] += 1
    return counts


def written(path: Path, rows: Sequence[Sequence[object]], heading: str) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([heading.split(","), *rows])
    return path


@pytest.fixture
def array(tmp_path: Path) -> tuple[Path, np.ndarray]:
    counts = routed(1, steps=30, layers=4)
    counts[:, 0] = 0
    np.save(tmp_path / "counts.npy", counts)
    return tmp_path / "counts.npy", counts


def test_an_array_of_steps(array: tuple[Path, np.ndarray]):
    path, counts = array
    profile = routeprof.load(path)
    assert profile.layer_indices == [1, 2, 3]
    assert np.array_equal(profile.counts, counts[:, 1:].sum(axis=0))
    assert profile.states == ("dense", "captured", "captured", "captured")
    assert profile.phases == ("unknown",)
    steps = profile.step_counts()
    assert np.array_equal(steps.counts.reshape(30, 3, EXPERTS), counts[:, 1:])
    ratios = counts[:, 2].max(axis=1) * EXPERTS / counts[:, 2].sum(axis=1)
    row = profile.layers().set_index("layer").loc[2]
    assert row["step_imbalance_max"] == pytest.approx(ratios.max())
    assert row["step_imbalance_p50"] == pytest.approx(
        np.quantile(ratios, 0.5, method="inverted_cdf")
    )


def test_what_nobody_said_is_not_known(array: tuple[Path, np.ndarray]):
    profile = routeprof.load(array[0])
    layers, steps = profile.layers(), profile.steps()
    for name in ("top_k", "tokens", "coverage", "gate_entropy"):
        assert layers[name].isna().all(), name
    for name in ("time", "tokens", "requests", "overflow_rate_1.0"):
        assert steps[name].isna().all(), name
    assert not len(profile.overflow())
    assert not len(profile.windows())
    assert np.isnan(profile.seconds)
    codes = {finding.code for finding in profile.findings()}
    assert {"converted", "top-k-unknown"} <= codes
    with pytest.raises(RouteprofError, match="--top-k"):
        profile.overflow([1.3])


def test_what_the_user_says(array: tuple[Path, np.ndarray], tmp_path: Path):
    path, counts = array
    convert([path], tmp_path / "run", told=Told(TOP_K, "decode", "code"))
    profile = routeprof.load(tmp_path / "run")
    assert (profile.phases, profile.tags) == (("decode",), ("code",))
    rows = profile.layers().set_index("layer")
    assert rows["tokens"].tolist() == [30 * 20] * 3
    over = profile.overflow([1.0, 1.3]).set_index(["layer", "capacity_factor"])
    for layer in (1, 2, 3):
        for factor in (1.0, 1.3):
            slots = int(np.ceil(factor * 20 * TOP_K / EXPERTS - 1e-9))
            due = np.maximum(counts[:, layer] - slots, 0).sum()
            assert over.loc[(layer, factor), "overflow_assignments"] == due


@pytest.mark.parametrize("top_k", [0, 3, EXPERTS + 1])
def test_what_the_user_says_must_agree(array: tuple[Path, np.ndarray], tmp_path: Path, top_k: int):
    counts = routed(2, steps=1, layers=1, tokens=19)  # 38 assignments
    np.save(tmp_path / "other.npy", counts)
    with pytest.raises(UsageError, match=r"top_k|--top-k"):
        convert([tmp_path / "other.npy"], tmp_path / "run", told=Told(top_k))


def test_an_array_of_sums_has_no_steps(tmp_path: Path):
    counts = routed(3, steps=1, layers=3)[0]
    np.save(tmp_path / "sums.npy", counts.astype(np.float32))
    profile = routeprof.load(tmp_path / "sums.npy")
    assert np.array_equal(profile.counts, counts)
    rows = profile.layers()
    for name in ("steps", "step_imbalance_p50", "step_imbalance_max", "tokens"):
        assert rows[name].isna().all(), name
    assert rows["assignments"].tolist() == counts.sum(axis=1).tolist()
    assert not profile.has("steps")


def test_a_table_of_sums(tmp_path: Path):
    rows = [(0, 0, 5), (0, 3, 1), (2, 1, 4), (0, 0, 2)]
    profile = routeprof.load(written(tmp_path / "t.csv", rows, "layer,expert,count"))
    assert profile.layer_indices == [0, 2]
    assert profile.counts.tolist() == [[7, 0, 0, 1], [0, 4, 0, 0]]


def test_a_table_with_steps_phases_and_tags(tmp_path: Path):
    counts = routed(4, steps=6, layers=2)
    phases = ["prefill", *["decode"] * 5]
    rows = [
        (layer, expert, step, phases[step], "code" if step % 2 else "", counts[step, layer, expert])
        for step in (3, 1, 0, 2, 5, 4)
        for layer in range(2)
        for expert in range(EXPERTS)
    ]
    path = written(tmp_path / "t.csv", rows, "Layer,Expert,Step,Phase,Tag,Count")
    profile = routeprof.load(path)
    assert profile.phases == ("prefill", "decode")
    decode = profile.select(phase="decode", tag="code")
    assert np.array_equal(decode.counts, counts[[1, 3, 5]].sum(axis=0))
    table = profile.step_counts()
    assert np.array_equal(table.counts.reshape(6, 2, EXPERTS), counts)


def test_our_own_export_reads_back(tmp_path: Path):
    counts = routed(5, steps=1, layers=3)[0]
    np.save(tmp_path / "sums.npy", counts)
    experts = routeprof.load(tmp_path / "sums.npy").experts()
    table = experts[["layer", "expert", "tokens"]].rename(columns={"tokens": "count"})
    table.to_csv(tmp_path / "back.csv", index=False)
    assert np.array_equal(routeprof.load(tmp_path / "back.csv").counts, counts)


def test_several_files_add_up(tmp_path: Path):
    counts = routed(6, steps=2, layers=3)
    for number, one in enumerate(counts):
        np.save(tmp_path / f"{number}.npy", one)
    profile = routeprof.load(tmp_path / "0.npy", tmp_path / "1.npy")
    assert np.array_equal(profile.counts, counts.sum(axis=0))


@pytest.mark.parametrize(
    ("heading", "rows", "says"),
    [
        ("layer,expert,count", [(0, 0, "many")], "line 2 lacks whole numbers"),
        ("layer,expert,count", [(0, 0, 1), (0, -1, 1)], "line 3 has a number below 0"),
        ("layer,expert,count", [(0, 10**9, 1)], "too large to be true"),
        ("layer,expert,count", [(0, 0)], "line 2 lacks"),
        ("layer,expert,count", [], "holds no steps"),
        ("layer,expert,count,phase", [(0, 0, 1, "warmup")], "phase other than prefill"),
        ("a,b,c", [(0, 0, 1)], "neither a recording nor a file"),
    ],
)
def test_bad_tables(tmp_path: Path, heading: str, rows: list[tuple[object]], says: str):
    with pytest.raises(RouteprofError, match=says):
        routeprof.load(written(tmp_path / "t.csv", rows, heading))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros((3, 4)), "counts nothing"),
        (np.ones(4), "has shape"),
        (np.ones((2, 2, 2, 2)), "has shape"),
        (np.full((2, 3), 0.5), "fractions"),
        (np.full((2, 3), np.nan), "no counts"),
        (-np.ones((2, 3)), "no counts"),
        (np.array([["a"]]), "not counts"),
        (np.zeros((0, 3)), "has shape"),
    ],
)
def test_bad_arrays(tmp_path: Path, values: np.ndarray, says: str):
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(UsageError, match=says):
        routeprof.load(tmp_path / "a.npy")


def test_arrays_with_objects_are_not_unpickled(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match="cannot be read"):
        routeprof.load(tmp_path / "a.npy")


@pytest.mark.parametrize("cut", [0, 1, 10, 64, 128, 200])
def test_truncated_arrays(array: tuple[Path, np.ndarray], cut: int):
    path, _ = array
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UsageError, match="cannot be read"):
        routeprof.load(path)


@pytest.mark.parametrize("header", ["{'descr': '<i8', (", "\x00", "  x\n y", "lambda: ("])
def test_damaged_headers(tmp_path: Path, header: str):
    text = header.encode().ljust(60) + b"\n"
    start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(start + text + bytes(64))
    with pytest.raises(UsageError, match="cannot be read") as error:
        routeprof.load(tmp_path / "a.npy")
    assert "\n" not in str(error.value)
