"""What a token costs on disk, against its ids in the narrowest words that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

import routeprof
from routeprof.recording.schema import TOKEN_SCHEMA, RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.sample_data import encode, load_model, load_prompts
from routeprof.topology import Layer

LAYERS = 8


def blocks(experts: int, top_k: int, tokens: int, steps: int) -> Iterator[NDArray[Any]]:
    """Uniformly random distinct ids, [tokens · top_k] for each step and layer."""
    random = np.random.default_rng(3)
    width = np.uint8 if experts <= 256 else np.uint16
    for _ in range(steps * LAYERS):
        order = random.random((tokens, experts)).argsort(axis=1)
        yield order[:, :top_k].astype(width).reshape(-1)


@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize(("experts", "top_k"), [(256, 8), (128, 8), (64, 6), (512, 10)])
def test_random_ids_take_no_more_than_they_must(
    tmp_path: Path, experts: int, top_k: int, tokens: int
) -> None:
    steps = 4096 // tokens
    ids = list(blocks(experts, top_k, tokens, steps))
    layers = tuple(Layer(index, f"layer {index}", "moe", experts, top_k) for index in range(LAYERS))
    info = RecordingInfo("random", layers, ("",) * LAYERS, level="tokens")
    writer = RecordingWriter(tmp_path / "random", info, RankState())
    columns = {
        "step": np.repeat(np.arange(steps), LAYERS).tolist(),
        "rank": [0] * len(ids),
        "layer": list(range(LAYERS)) * steps,
        "tokens": [tokens] * len(ids),
        "phase": ["decode"] * len(ids),
        "ids": [block.tobytes() for block in ids],
    }
    writer.write("tokens", TOKEN_SCHEMA, columns)
    (part,) = (tmp_path / "random").glob("rank-*/tokens-*.parquet")
    raw = sum(block.nbytes for block in ids)
    entropy = np.log2(experts) / (8 * ids[0].itemsize)
    assert entropy < part.stat().st_size / raw <= 1.02
    read = pq.read_table(part, columns=["layer", "ids"]).to_pylist()
    by_layer = [ids[layer::LAYERS] for layer in range(LAYERS)]
    for layer, own in enumerate(by_layer):
        assert [row["ids"] for row in read if row["layer"] == layer] == [b.tobytes() for b in own]


def test_the_sample_models_ids_take_less_than_raw(tmp_path: Path) -> None:
    """The ids, and the request and position of each token besides."""
    model, prompts = load_model(), load_prompts("mixed")
    with routeprof.record(model, tmp_path / "run", level="tokens", window=3600.0):
        for first in range(0, len(prompts), 16):
            batch = encode(prompts[first : first + 16], length=128)
            with torch.no_grad():
                model.generate(**batch, max_new_tokens=16, pad_token_id=0)
    profile = routeprof.load(tmp_path / "run")
    raw = int(profile.counts.sum())  # one byte an assignment
    sizes = {
        kind: sum(part.path.stat().st_size for part in profile.files.parts(kind))
        for kind in ("tokens", "rows")
    }
    assert sizes["tokens"] + sizes["rows"] <= 0.75 * raw
    (part,) = profile.files.parts("tokens")
    assert sum(map(len, pq.read_table(part.path)["ids"].to_pylist())) == raw
