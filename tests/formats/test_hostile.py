"""Damaged and hostile files of other tools: one line, soon, whatever their bytes are.

Valid files of each kind are cut, overwritten and put together anew; what comes of them must be
numbers or one line, never another exception.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.errors import RouteprofError
from routeprof.formats import convert, read

Make = Callable[[Path], Path]


def _mbolt(folder: Path) -> Path:
    numbers = [0x544C424D, 1, 8]
    for tokens in (3, 1, 1):
        for layer in range(3):
            numbers += [layer, 2, tokens, *np.arange(2 * tokens) % 8]
    path = folder / "route.bin"
    path.write_bytes(np.array(numbers, dtype="<i4").tobytes())
    return path


def _megatron(folder: Path) -> Path:
    facts = {"stage": "pre_dispatch", "block": "decoder", "rank": 0, "num_tokens": 2, "topk": 2}
    lines = [
        json.dumps({"step": step, **facts, "layer": layer, "top_indices": [[0, 1], [step, 5]]})
        for step in range(3)
        for layer in range(2)
    ]
    path = folder / "router_trace_rank0.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def _moecap(folder: Path) -> Path:
    path = folder / "expert_distribution_record.jsonl"
    path.write_text('{"forward_mode": "decode", "latency": 0.1, "expert_activation": 4.5}\n' * 3)
    return path


def _moe_trace(folder: Path) -> Path:
    path = folder / "moe_trace.csv"
    path.write_text("layer,expert\n" + "3,1\n2,5\n" * 10)
    return path


def _trtllm(folder: Path) -> Path:
    from safetensors.numpy import save_file

    (folder / "meta_info.json").write_text('{"num_experts": 4, "num_experts_per_token": 2}')
    own = {f"{number}_{layer}": np.array([2, 1, 1, 0]) for number in (8, 9) for layer in (0, 1)}
    save_file(own, folder / "rank0.safetensors")
    return folder / "rank0.safetensors"


def _imatrix(folder: Path) -> Path:
    from tests.formats.test_imatrix import model, routed, written

    return written(folder / "imatrix.gguf", model(routed(1)))


MAKERS: dict[str, Make] = {
    "mbolt": _mbolt,
    "megatron": _megatron,
    "moe-cap": _moecap,
    "moe-trace": _moe_trace,
    "trtllm": _trtllm,
    "imatrix": _imatrix,
}


def outcome(path: Path, name: str) -> str:
    """How a file is read: its counts, or the line that refuses it."""
    try:
        source = read([path.parent if name == "trtllm" else path], name)
        counts = [int(own.sum()) for step in source.steps for own in step.counts.values()]
        ids = [int(own.size) for step in source.steps for own in step.ids.values()]
    except RouteprofError as error:
        line = str(error)
    else:
        line = f"{counts} {ids}"
    assert "\n" not in line
    return line


@pytest.fixture(scope="module", params=MAKERS)
def valid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, bytes]:
    """A format's name, a valid file, and its bytes."""
    name = request.param
    if name == "imatrix":
        pytest.importorskip("gguf")
    path = MAKERS[name](tmp_path_factory.mktemp("valid"))
    return name, path, path.read_bytes()


_SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@_SETTINGS
@given(data=st.data())
def test_damage(valid: tuple[str, Path, bytes], data: st.DataObject):
    """Bytes of a valid file are replaced, and it is cut."""
    name, path, whole = valid
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"9" * 8]),
            )
        )
        damaged[at : at + len(new)] = new
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    outcome(path, name)


@_SETTINGS
@given(tail=st.binary(max_size=200), kept=st.integers(0, 64))
def test_a_beginning_and_anything(valid: tuple[str, Path, bytes], tail: bytes, kept: int):
    name, path, whole = valid
    path.write_bytes(whole[:kept] + tail)
    outcome(path, name)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@_SETTINGS
@given(data=st.data())
def test_json_of_another_kind(tmp_path: Path, data: st.DataObject):
    """A key of a valid line gets any value at all, or goes."""
    for name, make in (("megatron", _megatron), ("moe-cap", _moecap)):
        path = make(tmp_path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        one = data.draw(st.sampled_from(lines))
        key = data.draw(st.sampled_from([*one, "logit_shape", "mtp_idx"]))
        if data.draw(st.booleans()):
            one.pop(key, None)
        else:
            one[key] = data.draw(_VALUES)
        path.write_text("\n".join(map(json.dumps, lines)))
        outcome(path, name)


@_SETTINGS
@given(data=st.data())
def test_headers_of_another_kind(tmp_path: Path, data: st.DataObject):
    """A safetensors header whose entries are anything at all."""
    path = _trtllm(tmp_path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    one = data.draw(st.sampled_from([header, *header.values()]))
    one[data.draw(st.sampled_from([*one, "7_1"]))] = data.draw(
        _VALUES | st.lists(st.sampled_from([0, 1, 4, 2**31, 2**62, 2**70]), max_size=3)
    )
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    outcome(path, "trtllm")


def _promises(folder: Path) -> list[tuple[str, Path]]:
    """Small files that promise a lot."""
    from safetensors.numpy import save_file

    found = []
    for number, experts in enumerate((2**12, 2**31 - 1)):
        stream = np.array([0x544C424D, 1, experts, 0, 1, 1, 0], dtype="<i4")
        path = folder / f"{number}.bin"
        path.write_bytes(stream.tobytes())
        found.append(("mbolt", path))
    line = {"step": 0, "stage": "p", "block": "decoder", "layer": 0, "rank": 0, "num_tokens": 1}
    for number, top in enumerate((10**9, 2**62)):
        path = folder / f"{number}.jsonl"
        path.write_text(json.dumps(line | {"topk": 1, "top_indices": [[top]]}))
        found.append(("megatron", path))
    path = folder / "a.csv"
    path.write_text("1000000,1\n1,1000000\n")
    found.append(("moe-trace", path))
    save_file({"0_0": np.ones(2, np.int64)}, folder / "rank0.safetensors")
    data = (folder / "rank0.safetensors").read_bytes()
    wide = data[8:].replace(b"[2]", b"[2" + b",1" * 1000 + b"]")
    (folder / "rank0.safetensors").write_bytes((len(wide) - 16).to_bytes(8, "little") + wide)
    (folder / "meta_info.json").write_text('{"num_experts": 2, "num_experts_per_token": 1}')
    found.append(("trtllm", folder / "rank0.safetensors"))
    return found


def test_small_files_that_promise_a_lot(tmp_path: Path):
    for name, path in _promises(tmp_path):
        tracemalloc.start()
        outcome(path, name)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 << 20, (name, path, peak)


def test_windows_end_where_their_counts_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A line of a hundred bytes is a row of as many counts as there are experts."""
    monkeypatch.setattr("routeprof.formats.recorded.MOST_COUNTS", 2 * 6)
    path = _megatron(tmp_path)  # three steps of two layers with six experts
    profile = routeprof.load(convert([path], tmp_path / "run"))
    assert len(list((tmp_path / "run").glob("rank-*/part-*.parquet"))) == 3
    assert profile.counts.sum(axis=1).tolist() == [12, 12]
    assert profile.step_counts().step.tolist() == [0, 0, 1, 1, 2, 2]
