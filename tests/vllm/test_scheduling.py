"""What a scheduler does to requests, at level tokens: chunks, cached prefixes, preemption."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.vllm.conftest import Engines, Run, check_closed_form, counts, prompts, scene

LONG = prompts(300, seed=1)
CHUNK, BLOCK = 64, 32


@pytest.fixture(scope="module")
def calm(engines: Engines) -> Run:
    """Chunked prompts, and a long prompt three times, of which two find it cached."""
    return engines.run(
        "mixtral",
        scene(lengths=(170, 5, 90, 1), new=12),
        scene(new=8, prompts=LONG),
        scene(new=8, prompts=LONG * 2),
        record={"level": "tokens"},
        enforce_eager=True,
        max_num_batched_tokens=CHUNK,
        block_size=BLOCK,
    )


@pytest.fixture(scope="module")
def crowded(engines: Engines) -> Run:
    """More answers than the cache can hold."""
    return engines.run(
        "qwen3",
        scene(lengths=(60,) * 8, new=120),
        record={"level": "tokens", "gate": False},
        enforce_eager=True,
        max_num_batched_tokens=CHUNK,
        block_size=BLOCK,
        num_gpu_blocks_override=20,
    )


def check_rows(run: Run) -> None:
    """Every row is the token of its request and position that the model was given."""
    sequences = [request["prompt"] + request["generated"] for request in run.requests]
    given = [token for step in run.steps for token in step["token_ids"]]
    positions = [position for step in run.steps for position in step["positions"]]
    for layer, assigned in counts(run.profile).items():
        table = run.profile.tokens(layer)
        assert table.position.tolist() == positions
        rows = zip(table.request, table.position, strict=True)
        assert [sequences[request][position] for request, position in rows] == given
        assert np.bincount(table.ids.ravel(), minlength=len(assigned)).tolist() == assigned


def positions_of(run: Run) -> list[list[int]]:
    """For each request, the positions of its rows in the order in which they ran."""
    table = run.profile.tokens(run.shape.moe[0])
    return [table.position[table.request == number].tolist() for number in range(len(run.requests))]


def phase(run: Run, rows: zip[Any]) -> str:
    """What a step of rows (request, position) is: whether they are of prompts or of answers."""
    prompt = {position < len(run.requests[request]["prompt"]) for request, position in rows}
    return {(True,): "prefill", (False,): "decode"}.get(tuple(prompt), "mixed")


def test_calm(calm: Run):
    assert calm.said["preemptions"] == 0
    assert max(step["tokens"] for step in calm.steps) == CHUNK
    check_closed_form(calm.profile, calm.shape, calm.computed)
    assert counts(calm.profile) == calm.oracle("counts")
    check_rows(calm)


def test_cached_prefixes_are_not_counted(calm: Run):
    cached = [request["cached"] for request in calm.requests]
    assert cached[:5] == [0] * 5
    assert min(cached[5:]) >= 300 - 2 * BLOCK
    expected = [
        list(range(request["cached"], len(request["prompt"] + request["generated"]) - 1))
        for request in calm.requests
    ]
    assert positions_of(calm) == expected


def test_requests(calm: Run):
    table = calm.profile.requests()
    due = [
        len(request["prompt"]) - request["cached"] + len(request["generated"]) - 1
        for request in calm.requests
    ]
    assert table["request"].tolist() == [str(number) for number in range(len(due))]
    assert table["tokens"].tolist() == due
    parts = table[["prefill_tokens", "decode_tokens", "other_tokens"]]
    assert parts.sum(axis=1).tolist() == due
    alone = calm.requests[4]  # with nobody to be mixed with
    assert parts.iloc[4].tolist() == [len(alone["prompt"]), len(alone["generated"]) - 1, 0]


def test_phases(calm: Run):
    layer = calm.shape.moe[0]
    steps, table = calm.profile.step_counts(), calm.profile.tokens(layer)
    mine = steps.layer == layer
    for number, said in zip(steps.step[mine], steps.phase[mine], strict=True):
        own = table.step == number
        assert said == phase(calm, zip(table.request[own], table.position[own], strict=True))
    assert set(steps.phase) == {"prefill", "mixed", "decode"}


def test_crowded(crowded: Run):
    """What is computed again is counted again."""
    assert crowded.said["preemptions"] > 0
    computed = sum(step["tokens"] for step in crowded.steps)
    assert computed > crowded.computed
    check_closed_form(crowded.profile, crowded.shape, computed)
    assert counts(crowded.profile) == crowded.oracle("counts")
    check_rows(crowded)
    again = 0
    for request, positions in zip(crowded.requests, positions_of(crowded), strict=True):
        last = len(request["prompt"] + request["generated"]) - 2
        assert sorted(set(positions)) == list(range(last + 1))
        again += sum(after != before + 1 for before, after in pairwise(positions))
    assert again == crowded.said["preemptions"]
