"""Traces of llama.cpp: mbolt's stream, moe-trace's lines; and what MoE-CAP's lines lack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import NotARecordingError, UsageError
from routeprof.formats import Told, convert, recognised
from routeprof.formats.expert_ids import UNSEEN
from routeprof.formats.mbolt import CUT, PHASES

EXPERTS, TOP_K, LAYERS = 16, 4, (1, 2, 3)
Pass = dict[int, np.ndarray]


def passes(tokens: Sequence[int], seed: int = 0) -> list[Pass]:
    """Ids of a pass for each number of tokens; the last layer has one of a prefill's tokens."""
    random = np.random.default_rng(seed)
    found = []
    for count in tokens:
        widths = {layer: 1 if layer == LAYERS[-1] else count for layer in LAYERS}
        found.append(
            {
                layer: random.random((width, EXPERTS)).argsort(axis=1)[:, :TOP_K]
                for layer, width in widths.items()
            }
        )
    return found


def stream(of: Sequence[Pass], experts: int = EXPERTS) -> bytes:
    numbers = [0x544C424D, 1, experts]
    for own in of:
        for layer, ids in own.items():
            numbers += [layer, ids.shape[1], len(ids), *ids.reshape(-1).tolist()]
    return np.array(numbers, dtype="<i4").tobytes()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "route.bin"


def test_passes_of_mbolt(trace: Path):
    of = passes([5, 1, 1, 7, 1])
    trace.write_bytes(stream(of))
    assert recognised(trace) == "mbolt"
    profile = routeprof.load(trace)
    assert profile.info.level == "tokens"
    for place, layer in enumerate(LAYERS):
        ids = np.concatenate([own[layer] for own in of])
        assert np.array_equal(profile.tokens(layer).ids, ids)
        assert np.array_equal(profile.counts[place], np.bincount(ids.ravel(), minlength=EXPERTS))
    assert profile.phases == ("prefill", "decode")
    assert profile.select(phase="decode").layers()["tokens"].tolist() == [3, 3, 3]
    assert profile.select(phase="prefill").layers()["tokens"].tolist() == [12, 12, 2]
    assert profile.info.notes == (PHASES,)


def test_the_last_layer_sees_fewer_tokens(trace: Path):
    trace.write_bytes(stream(passes([5, 1])))
    profile = routeprof.load(trace)
    assert [layer.sees_all_tokens for layer in profile.info.layers] == [True, True, False]
    pairs = profile.transitions()
    assert pairs[pairs["layer"] == 2]["together"].sum() == TOP_K**2  # of the decoded token only


def test_several_tokens_in_every_layer_have_no_phase(trace: Path):
    of = passes([3])
    of[0][3] = of[0][2]
    trace.write_bytes(stream(of))
    assert routeprof.load(trace).phases == ("unknown",)


def test_a_model_with_one_layer(trace: Path):
    of = [{7: ids} for own in passes([1, 1, 2]) for layer, ids in own.items() if layer == 1]
    trace.write_bytes(stream(of))
    profile = routeprof.load(trace)
    assert profile.step_counts().tokens.tolist() == [1, 1, 2]
    assert profile.layer_indices == [7]


def test_warm_up_with_all_experts_is_left_out(trace: Path):
    every = np.tile(np.arange(EXPERTS), (2, 1))
    of = passes([4, 1])
    trace.write_bytes(stream([dict.fromkeys(LAYERS, every), *of]))
    profile = routeprof.load(trace)
    assert profile.layers()["top_k"].tolist() == [TOP_K] * 3
    assert profile.layers()["tokens"].tolist() == [5, 5, 2]
    assert any(note.endswith("left out: 1") for note in profile.info.notes)


def test_ids_that_are_no_experts(trace: Path):
    ids = np.array([[0, EXPERTS, -1, 3]])
    trace.write_bytes(stream([dict.fromkeys(LAYERS, ids)]))
    profile = routeprof.load(trace)
    assert profile.counts.shape == (3, EXPERTS)
    assert profile.layers()["invalid"].tolist() == [2] * 3


@pytest.mark.parametrize("cut", [1, 4, 8, 27])
def test_a_last_record_that_is_cut_off(trace: Path, cut: int):
    of = passes([3, 1])
    trace.write_bytes(stream(of)[:-cut])
    profile = routeprof.load(trace)
    assert profile.layers()["tokens"].tolist() == [4, 4, 1]
    assert CUT in profile.info.notes


def numbers(*values: int) -> bytes:
    return b"MBLT" + np.array(values, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"MBLT", "ends within its header"),
        (numbers(1, 16), "holds no record"),
        (numbers(2, 16, 0, 1, 1, 3), "no trace of mbolt, version 1"),
        (numbers(1, 10**9, 0, 1, 1, 3), "1,000,000,000 experts, which cannot be"),
        (numbers(1, 0, 0, 1, 1, 3), "which cannot be"),
        (numbers(1, 16, 0, 17, 1, 3), "no record of mbolt at byte 12"),
        (numbers(1, 16, -1, 1, 1, 3), "no record of mbolt at byte 12"),
        (numbers(1, 16, 0, 1, -5, 3), "no record of mbolt at byte 12"),
        (numbers(1, 16, 0, 1, 2**31 - 1, 3), "no record of mbolt at byte 12"),
        (numbers(1, 16, 0, 1, 2**20, 3), "holds no record"),
        (numbers(1, 16, 0, 1, 1, 3, 0, 2, 1, 3, 4), "with 1 and with 2 experts in layer 0"),
    ],
)
def test_bad_streams(trace: Path, data: bytes, says: str):
    trace.write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        routeprof.load(trace)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("heading", ["", "layer,expert\n", "layer, expert\r\n"])
def test_lines_of_moe_trace(tmp_path: Path, heading: str):
    random = np.random.default_rng(1)
    rows = np.stack([random.integers(2, 5, 500), random.integers(0, 9, 500)], axis=1)
    path = tmp_path / "moe_trace.csv"
    path.write_text(heading + "".join(f"{layer},{expert}\n" for layer, expert in rows))
    profile = routeprof.load(path)
    assert profile.info.source == "moe-trace"
    assert profile.layer_indices == [2, 3, 4]
    for place, layer in enumerate((2, 3, 4)):
        due = np.bincount(rows[rows[:, 0] == layer, 1], minlength=9)
        assert np.array_equal(profile.counts[place], due)
    assert profile.layers()[["tokens", "top_k", "steps"]].isna().all(axis=None)
    assert profile.info.notes == (UNSEEN,)


def test_moe_trace_with_what_the_user_says(tmp_path: Path):
    path = tmp_path / "moe_trace.csv"
    path.write_text("0,1\n0,2\n0,1\n0,3\n")
    convert([path], tmp_path / "run", told=Told(top_k=2, experts=6))
    profile = routeprof.load(tmp_path / "run")
    assert profile.counts.tolist() == [[0, 2, 1, 1, 0, 0]]
    assert profile.layers()["tokens"].tolist() == [2]
    assert profile.info.notes == ()
    with pytest.raises(UsageError, match="expert 3"):
        convert([path], tmp_path / "other", told=Told(experts=3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layer,expert\n", "holds no record"),
        ("0,1\n0\n", "no layer,expert"),
        ("0,1\n0,-2\n", "below 0"),
        ("0,1\n0,x\n", "no layer,expert"),
        ("0,1\n0,1.5\n", "no layer,expert"),
        ("0,1\n0,\n", "no layer,expert"),
        ("0,1000000000\n", "too large to be true"),
        ("0,10000000000000000000000\n", "no layer,expert"),
        ("1000000000,0\n", "too large to be true"),
    ],
)
def test_bad_moe_traces(tmp_path: Path, text: str, says: str):
    path = tmp_path / "moe_trace.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        routeprof.load(path)
    assert "\n" not in str(caught.value)


def moecap(path: Path, *modes: tuple[str, float]) -> Path:
    """Lines as ``moe_cap/systems/sglang.py`` writes them."""
    lines = [
        {
            "forward_pass_id": number,
            "batch_size": 16,
            "latency": 0.023,
            "seq_lens_sum": 128,
            "forward_mode": mode,
            "expert_activation": activation,
        }
        for number, (mode, activation) in enumerate(modes)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_moe_cap_has_no_counts(tmp_path: Path):
    """Nothing can be made of averages; what they are is said."""
    path = moecap(
        tmp_path / "expert_distribution_record.jsonl",
        ("prefill", 26.5),
        ("decode", 4),
        ("decode", 5.0),
    )
    assert recognised(path) == "moe-cap"
    with pytest.raises(UsageError) as caught:
        routeprof.load(path)
    for part in ("no counts of experts", "prefill: passes 1", "26.5", "decode: passes 2", "4.5"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_moe_cap_of_another_kind(tmp_path: Path):
    path = moecap(tmp_path / "r.jsonl", ("prefill", 26.5), ("idle", 1.0))
    with pytest.raises(UsageError, match="line 2 is no record of MoE-CAP"):
        routeprof.load(path)


def test_an_unknown_file(tmp_path: Path):
    (tmp_path / "x.bin").write_bytes(b"MBL")
    with pytest.raises(NotARecordingError):
        routeprof.load(tmp_path / "x.bin")
