"""Broken, hostile and foreign checkpoints: one line each that says what to do."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from routeprof.errors import UsageError
from routeprof.plan.audit.checkpoint import tensors_of
from routeprof.plan.weights import audit
from routeprof.sample_data import MODEL_DIR
from tests.plan.checkpoints import gaussian, save, save_sharded

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


def raw(directory: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + data)
    return directory


def entry(**changes: object) -> dict[str, object]:
    return {NAME: {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8], **changes}}


def test_headers_are_read_as_the_library_does():
    ours = tensors_of(MODEL_DIR)
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as theirs:
        assert set(ours) == set(theirs.keys())
        for name, tensor in ours.items():
            part = theirs.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (part.get_dtype(), part.get_shape())
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.start)
                content = stream.read(tensor.nbytes)
            assert content == theirs.get_tensor(name).view(torch.uint8).numpy().tobytes()


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing there": (lambda here: here / "no", "does not exist"),
    "no safetensors": (lambda here: here, r"no \*.safetensors"),
    "empty file": (
        lambda here: ((here / "model.safetensors").write_bytes(b"") and here) or here,
        "cut off",
    ),
    "header length of 2^63": (lambda here: raw(here, {}, length=1 << 63), "cut off"),
    "header longer than the file": (lambda here: raw(here, {}, length=100), "cut off"),
    "no JSON": (lambda here: raw(here, b"{nonsense"), "header .* broken"),
    "no UTF-8": (lambda here: raw(here, b"\xff\xfe{}"), "header .* broken"),
    "deeply nested": (lambda here: raw(here, b"[" * 100_000), "header .* broken"),
    "a list": (lambda here: raw(here, [1]), "header .* broken"),
    "an entry that is none": (lambda here: raw(here, {NAME: 3}), "header .* broken"),
    "unknown type": (lambda here: raw(here, entry(dtype="B7"), b"8" * 8), "header .* broken"),
    "negative shape": (
        lambda here: raw(here, entry(shape=[-2, -2]), b"8" * 8),
        "header .* broken",
    ),
    "shape of text": (lambda here: raw(here, entry(shape="ab"), b"8" * 8), "header .* broken"),
    "offsets the wrong way": (
        lambda here: raw(here, entry(data_offsets=[8, 0]), b"8" * 8),
        "header .* broken",
    ),
    "offsets that are not the shape's": (
        lambda here: raw(here, entry(data_offsets=[0, 6]), b"8" * 8),
        "header .* broken",
    ),
    "a huge tensor": (
        lambda here: raw(here, entry(shape=[1 << 40, 2], data_offsets=[0, 1 << 42])),
        "cut off",
    ),
    "data cut off": (lambda here: raw(here, entry(), b"8" * 7), "cut off"),
    "no experts": (
        lambda here: save({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, here),
        "no expert weights",
    ),
    "dense with shared experts": (
        lambda here: save({"model.layers.0.mlp.shared_experts.up.weight": torch.ones(2, 2)}, here),
        "no expert weights",
    ),
    "an expert is missing": (
        lambda here: save({n: t for n, t in gaussian().items() if ".experts.2." not in n}, here),
        "missing",
    ),
    "experts of different shapes": (
        lambda here: save(gaussian() | {NAME: torch.ones(3, 3).bfloat16()}, here),
        "differ",
    ),
    "broken config": (
        lambda here: ((here / "config.json").write_text("[") and save(gaussian(), here)) or here,
        "config",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(tmp_path: Path, case: str):
    make, says = BROKEN[case]
    with pytest.raises(UsageError, match=says) as caught:
        audit(make(tmp_path))
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)  # and what to do


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ({f"model.layers.0.mlp.experts.{e}.up_proj.weight": "f8" for e in (0, 1)}, "FP8"),
        ({"model.layers.0.mlp.experts.gate_up_proj_blocks": "u8"}, "MXFP4"),
        ({"model.layers.0.mlp.experts.0.up_proj.qweight": "i32"}, "packed I32"),
    ],
)
def test_quantised_checkpoints_point_to_their_source(tmp_path: Path, tensor: dict, kind: str):
    dtypes = {"f8": torch.float8_e4m3fn, "u8": torch.uint8, "i32": torch.int32}
    weights = {name: torch.ones(4, 4).to(dtypes[one]) for name, one in tensor.items()}
    weights |= {name.replace("weight", "scales"): torch.ones(2) for name in tensor if "qw" in name}
    with pytest.raises(UsageError, match=f"are {kind}; audit the checkpoint"):
        audit(save(weights, tmp_path))


def index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def test_a_missing_shard_is_named(tmp_path: Path):
    directory = save_sharded(gaussian(), tmp_path)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UsageError, match="shard model-00002-of-00003"):
        audit(directory)


def test_a_tensor_that_the_index_names_must_be_there(tmp_path: Path):
    directory = save_sharded(gaussian(), tmp_path)
    content = json.loads(index(directory).read_text())
    content["weight_map"]["lost.weight"] = "model-00001-of-00003.safetensors"
    index(directory).write_text(json.dumps(content))
    with pytest.raises(UsageError, match="which the index names"):
        audit(directory)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", "", 3, None, []])
def test_an_index_reaches_no_other_directory(tmp_path: Path, file: object):
    save(gaussian(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "secret.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    index(inner).write_text(json.dumps({"weight_map": {NAME: file}}))
    with pytest.raises(UsageError, match=r"index\.json"):
        audit(inner)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none(tmp_path: Path, text: str):
    index(tmp_path).write_text(text)
    with pytest.raises(UsageError, match="no index of shards"):
        audit(tmp_path)


def test_a_name_in_two_files(tmp_path: Path):
    weights = gaussian(2, 1)
    for name in ("a", "b"):
        save(weights, tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    with pytest.raises(UsageError, match="in two files"):
        audit(tmp_path)


def test_one_file_alone(tmp_path: Path):
    save(gaussian(2, 1), tmp_path)
    assert len(audit(tmp_path / "model.safetensors").matrices) == 3


@pytest.mark.parametrize("sample", [0, -1])
def test_a_sample_that_is_none(tmp_path: Path, sample: int):
    with pytest.raises(UsageError, match="pass 1 or more"):
        audit(save(gaussian(2, 1), tmp_path), sample=sample)
