"""llama.cpp's importance matrices, in files of gguf's own writer."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.errors import MissingExtraError, UsageError
from routeprof.formats import convert, recognised
from routeprof.formats.imatrix import ODD, RATIO, ROUNDED

gguf = pytest.importorskip("gguf")

EXPERTS, TOP_K, TOKENS = 8, 2, 3 * 512
KINDS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def written(path: Path, counts: Mapping[str, object], kind: str = "imatrix") -> Path:
    """A file as ``IMatrixCollector::save_imatrix`` writes it, with counts by a tensor's name."""
    writer = gguf.GGUFWriter(path, arch="")
    writer.kv_data[0].clear()  # llama-imatrix writes no architecture
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["wiki.train.raw", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name in sorted(counts):
        own = np.asarray(counts[name], dtype=np.float32).reshape(-1, 1)
        writer.add_tensor(f"{name}.weight.in_sum2", np.full((len(own), 4), 0.5, np.float32))
        writer.add_tensor(f"{name}.weight.counts", own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def routed(layers: int, top_k: int = TOP_K, seed: int = 0) -> dict[int, np.ndarray]:
    """Counts of TOKENS tokens in layers 1, 2, …; the last expert gets none."""
    random = np.random.default_rng(seed)
    found = {}
    for layer in range(1, layers + 1):
        ids = random.random((TOKENS, EXPERTS - 1)).argsort(axis=1)[:, :top_k]
        found[layer] = np.bincount(ids.reshape(-1), minlength=EXPERTS)
    return found


def model(counts: Mapping[int, np.ndarray], tokens: int = TOKENS) -> dict[str, object]:
    """Counts of all tensors of a model whose layer 0 is dense."""
    own: dict[str, object] = {"blk.0.ffn_up": tokens, "blk.0.attn_q": tokens, "output": tokens}
    for layer, of_experts in counts.items():
        own[f"blk.{layer}.attn_q"] = tokens
        own[f"blk.{layer}.ffn_gate_inp"] = tokens
        own[f"blk.{layer}.ffn_up_shexp"] = tokens
        own |= {f"blk.{layer}.{kind}": of_experts for kind in KINDS}
    return own


def test_counts_of_experts(tmp_path: Path):
    counts = routed(3)
    profile = routeprof.load(written(tmp_path / "imatrix.gguf", model(counts)))
    assert np.array_equal(profile.counts, np.stack(list(counts.values())))
    assert profile.states == ("dense", "captured", "captured", "captured")
    rows = profile.layers()
    assert rows["top_k"].tolist() == [TOP_K] * 3
    assert rows["tokens"].tolist() == [TOKENS] * 3
    assert rows["dead_experts"].tolist() == [1] * 3
    assert rows["steps"].isna().all()
    assert profile.phases == ("unknown",)
    assert profile.info.notes == (RATIO,)


def test_a_suffix_of_any_kind(tmp_path: Path):
    path = written(tmp_path / "imatrix.at_40", model(routed(1)))
    assert recognised(path) == "imatrix"


def test_fused_matrices(tmp_path: Path):
    counts = routed(1)[1]
    names = {f"blk.1.{kind}": counts for kind in ("ffn_gate_up_exps", "ffn_down_exps")}
    profile = routeprof.load(written(tmp_path / "i.gguf", names))
    assert np.array_equal(profile.counts, counts[None])
    assert profile.layers()["top_k"].isna().all()  # no router was counted


def test_what_experts_saw_must_be_a_multiple(tmp_path: Path):
    profile = routeprof.load(written(tmp_path / "i.gguf", model(routed(2), tokens=TOKENS - 24)))
    assert profile.layers()["top_k"].isna().all()
    assert profile.layers()["tokens"].isna().all()
    assert profile.info.notes == (ODD,)


def test_rounded_counts_are_flagged(tmp_path: Path):
    counts = {1: np.array([2**24 + 1, 7, 0, 0, 0, 0, 0, 0])}
    profile = routeprof.load(written(tmp_path / "i.gguf", model(counts, 2**23 + 4)))
    assert profile.counts[0, 0] == 2**24  # what float32 makes of it
    assert profile.info.notes == (ROUNDED,)
    assert profile.layers()["top_k"].isna().all()


def test_counts_below_are_exact(tmp_path: Path):
    counts = {1: np.array([2**24 - 1, 7, 0, 0, 0, 0, 0, 2])}
    profile = routeprof.load(written(tmp_path / "i.gguf", model(counts, 2**23 + 4)))
    assert np.array_equal(profile.counts, counts[1][None])
    assert profile.info.notes == (RATIO,)
    assert profile.layers()["top_k"].tolist() == [2]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"blk.1.ffn_up_exps": [1, 2, 3], "blk.1.ffn_down_exps": [1, 2, 4]}, "other counts for"),
        ({"blk.1.ffn_up_exps": [512]}, "a single count for all experts"),
        ({"blk.1.ffn_up": [512]}, "has no counts of experts"),
        ({"blk.1.ffn_up_exps": [1, 2.5, 3]}, "fractions"),
        ({"blk.1.ffn_up_exps": [1, -2, 3]}, "no counts"),
        ({"blk.1.ffn_up_exps": [1, np.nan, 3]}, "no counts"),
        ({"blk.1.ffn_up_exps": [1, 2.0**62, 3]}, "no counts"),
    ],
)
def test_bad_counts(tmp_path: Path, names: Mapping[str, object], says: str):
    path = written(tmp_path / "i.gguf", names)
    with pytest.raises(UsageError, match=says):
        routeprof.load(path)


def test_a_model_is_no_imatrix(tmp_path: Path):
    path = written(tmp_path / "model.gguf", model(routed(1)), kind="model")
    with pytest.raises(UsageError, match="no imatrix"):
        routeprof.load(path)


def test_the_older_kind_is_refused(tmp_path: Path):
    (tmp_path / "imatrix.dat").write_bytes(b"\x02\0\0\0" + bytes(64))
    with pytest.raises(UsageError, match=r"older \.dat files have no counts by expert"):
        routeprof.load(tmp_path / "imatrix.dat")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.97])
def test_truncated(tmp_path: Path, share: float):
    path = written(tmp_path / "i.gguf", model(routed(2)))
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 + int(share * (len(whole) - 4))])
    with pytest.raises(UsageError, match="cannot be read"):
        routeprof.load(path)


@pytest.mark.parametrize("offset", [8, 16, 24])
def test_lengths_that_cannot_be(tmp_path: Path, offset: int):
    """Numbers of tensors, of keys, and the length of the first key."""
    path = written(tmp_path / "i.gguf", model(routed(2)))
    data = bytearray(path.read_bytes())
    data[offset : offset + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(UsageError, match="cannot be read"):
        routeprof.load(path)


@pytest.mark.parametrize(("promised", "there"), [(2**40, 8), (10**6, 10**6)])
def test_a_header_to_go_round_in(tmp_path: Path, promised: int, there: int):
    """An array that is longer than the file, and one that nobody would have written."""
    whole = written(tmp_path / "i.gguf", model(routed(1))).read_bytes()
    keys = int.from_bytes(whole[16:24], "little") + 1
    array = struct.pack("<Q1sIIQ", 1, b"a", 9, 0, promised) + bytes(there)
    path = tmp_path / "j.gguf"
    path.write_bytes(whole[:16] + struct.pack("<Q", keys) + array + whole[24:])
    with pytest.raises(UsageError, match="a length that its header tells cannot be"):
        routeprof.load(path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "i.gguf", model(routed(1)))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"routeprof\[gguf\]"):
        convert([path], tmp_path / "run")
