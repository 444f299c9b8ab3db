"""Megatron-core's router traces, line by line as its tracer writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routeprof
from routeprof.errors import UsageError
from routeprof.formats import Told, convert, read, recognised
from routeprof.formats.expert_ids import UNSEEN
from routeprof.formats.megatron import AGAIN, INTENT, STAGES

EXPERTS, TOP_K = 8, 2
Line = dict[str, Any]


def chosen(
    seed: object, tokens: int, top_k: int = TOP_K, experts: int = EXPERTS
) -> list[list[int]]:
    random = np.random.default_rng(abs(hash(seed)))
    return random.random((tokens, experts)).argsort(axis=1)[:, :top_k].tolist()


def line(step: int, layer: int, ids: Sequence[Sequence[int]], rank: int = 0, **more: Any) -> Line:
    return {
        "step": step,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "num_tokens": len(ids),
        "topk": len(ids[0]) if ids else TOP_K,
        **more,
        "top_indices": ids,
    }


def written(folder: Path, lines: Iterable[Line], rank: int = 0) -> Path:
    path = folder / f"router_trace_rank{rank}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def run(rank: int = 0, steps: int = 3, layers: Iterable[int] = (1, 2)) -> list[Line]:
    return [
        line(step, layer, chosen((rank, step, layer), 4 + step), rank)
        for step in range(steps)
        for layer in layers
    ]


def counted(lines: Iterable[Line], layer: int) -> list[int]:
    ids = [
        one for own in lines if own["layer"] == layer for row in own["top_indices"] for one in row
    ]
    return np.bincount(ids, minlength=EXPERTS).tolist()


def test_experts_of_every_token(tmp_path: Path):
    lines = run()
    path = written(tmp_path, lines)
    assert recognised(path) == recognised(tmp_path) == "megatron"
    convert([path], tmp_path / "run", told=Told(experts=EXPERTS))
    profile = routeprof.load(tmp_path / "run")
    assert profile.info.level == "tokens"
    for place, layer in enumerate((1, 2)):
        assert profile.counts[place].tolist() == counted(lines, layer)
        rows = [row for own in lines if own["layer"] == layer for row in own["top_indices"]]
        assert profile.tokens(layer).ids.tolist() == rows
    assert profile.phases == ("unknown",)
    assert profile.layers()["tokens"].tolist() == [4 + 5 + 6] * 2
    assert profile.info.notes == (STAGES,)


def test_counts_are_before_anything_is_dropped(tmp_path: Path):
    profile = routeprof.load(written(tmp_path, run()))
    assert not any(layer.executed for layer in profile.info.layers)
    assert {layer.note for layer in profile.info.layers} == {INTENT}


def test_how_many_experts_there_are(tmp_path: Path):
    """As logits say; else as the user does; else as far as any was chosen, which is said."""
    own = [line(0, 0, [[0, 3], [1, 3]])]
    path = written(tmp_path, own)
    unsaid = read([path], "megatron")
    assert (unsaid.layers[0].experts, UNSEEN in unsaid.notes) == (4, True)
    told = read([path], "megatron", Told(experts=16))
    assert (told.layers[0].experts, UNSEEN in told.notes) == (16, False)
    written(tmp_path, [own[0] | {"logit_shape": [2, 32], "logit_offset": 0, "logit_bytes": 128}])
    said = read([path], "megatron", Told(experts=16))
    assert (said.layers[0].experts, UNSEEN in said.notes) == (32, False)


def test_ids_that_are_no_experts(tmp_path: Path):
    ids = [[0, -1], [EXPERTS, 3]]
    path = written(tmp_path, [line(0, 0, ids, logit_shape=[2, EXPERTS])])
    profile = routeprof.load(path)
    assert profile.counts.tolist() == [[1, 0, 0, 1, 0, 0, 0, 0]]
    assert profile.layers()["invalid"].tolist() == [2]
    assert profile.tokens(0).ids.tolist() == [[0, -1], [-1, 3]]


def test_heads_for_several_tokens_are_layers_of_their_own(tmp_path: Path):
    heads = [line(0, 2, chosen(head, 3), block="mtp", mtp_idx=head) for head in (1, 0)]
    profile = routeprof.load(written(tmp_path, [*run(steps=1), *heads]))
    names = [(layer.index, layer.name) for layer in profile.info.layers]
    assert names == [
        (1, "decoder.layers.1"),
        (2, "decoder.layers.2"),
        (3, "mtp.layers.0, layer 2"),
        (4, "mtp.layers.1, layer 2"),
    ]
    assert profile.tokens(3).ids.tolist() == heads[1]["top_indices"]


def test_ranks_are_ranks(tmp_path: Path):
    lines = {rank: run(rank) for rank in (0, 3)}
    for rank, own in lines.items():
        written(tmp_path, own, rank)
    profile = routeprof.load(tmp_path)
    for place, layer in enumerate((1, 2)):
        due = np.sum([counted(own, layer) for own in lines.values()], axis=0)
        assert profile.counts[place].tolist() == due.tolist()
    assert "ranks without a file: 1, 2" in profile.info.notes
    assert {3, 0} == set(profile.step_counts().rank.tolist())


def test_ranks_with_the_same_tokens_count_once(tmp_path: Path):
    for rank in range(4):
        own = [one | {"rank": rank} for one in run(rank // 2)]
        written(tmp_path, own, rank)
    profile = routeprof.load(tmp_path)
    assert profile.counts[0].sum() == 2 * (4 + 5 + 6) * TOP_K
    assert any(note.startswith("ranks 1, 3 hold the very choices") for note in profile.info.notes)
    assert not [one for one in profile.findings() if "twin" in one.code]


def test_micro_batches_of_a_step(tmp_path: Path):
    lines = [line(7, layer, chosen((batch, layer), 3)) for batch in (0, 1) for layer in (0, 1)]
    profile = routeprof.load(written(tmp_path, lines))
    assert profile.tokens(0).ids.tolist() == lines[0]["top_indices"] + lines[2]["top_indices"]
    assert len(set(profile.step_counts().step.tolist())) == 1
    assert AGAIN in profile.info.notes


def test_a_step_without_tokens(tmp_path: Path):
    profile = routeprof.load(written(tmp_path, [*run(steps=1), line(1, 1, []), line(1, 2, [])]))
    assert profile.layers()["tokens"].tolist() == [4, 4]


BAD = {
    "": "holds no record",
    "[1, 2]\n": "no JSON object",
    '{"step": 0, "stage"': "no JSON",
    json.dumps({"step": 0, "stage": "pre_dispatch", "block": "decoder"}): "no record of Megatron",
    json.dumps(line(0, 10**9, [[0, 1]])): "no record of Megatron",
    json.dumps(line(0, 0, [[0, 1]], rank=10**9)): "no record of Megatron",
    json.dumps(line(0, 0, [[0, 10**9]])): "which cannot be",
    json.dumps(line(0, 0, [[0, 10**30]])): "no record of Megatron",
    json.dumps(line(0, 0, [[0, 1], [2]])): "no record of Megatron",
    json.dumps(line(0, 0, [[0, 1]], num_tokens=2)): "no record of Megatron",
    json.dumps(line(0, 0, [[0.5, 1]])): "no record of Megatron",
    json.dumps(line(0, 0, [[0, 1]], logit_shape=[2, 10**9])): "which cannot be",
    json.dumps(line(0, 0, [[0, 1]], logit_shape=3)): "no record of Megatron",
    json.dumps(line(0, 0, [[0, 1, 2]])) + "\n" + json.dumps(line(0, 0, [[0]])): "different top-k",
    json.dumps(line(0, 0, [[0]])) + "\n" + json.dumps(line(0, 0, [[0]], 1)): "is of ranks 0 and 1",
    "[" * 100_000: "no JSON",
}


@pytest.mark.parametrize(("text", "says"), BAD.items(), ids=range(len(BAD)))
def test_bad_lines(tmp_path: Path, text: str, says: str):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        convert([path], tmp_path / "run", "megatron")
    assert "\n" not in str(caught.value)


def test_twice_the_same_rank(tmp_path: Path):
    written(tmp_path, run(0), 0)
    written(tmp_path, run(0), 1)
    with pytest.raises(UsageError, match="pass each rank once"):
        routeprof.load(tmp_path)


def test_a_line_without_end(tmp_path: Path):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_bytes(b" " * (9 << 20))
    with pytest.raises(UsageError, match="longer than 8 MiB"):
        convert([path], tmp_path / "run", "megatron")
