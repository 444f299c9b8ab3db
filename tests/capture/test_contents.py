"""What a recording holds: nothing of the prompts, and what it cost."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import routeprof
from routeprof.recording.reader import open_recording


class Block(nn.Module):
    """A mixture-of-experts block in the manner of transformers 5."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, 2
        self.gate, self.experts = nn.Linear(hidden, experts, bias=False), Experts(experts, hidden)

    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.gate(rows).softmax(-1).topk(2)
        return self.experts(rows, ids, weights).reshape(hidden_states.shape)


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, hidden, hidden) / hidden)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen = self.weight[top_k_index]
        out = torch.einsum("rkij,rj->rki", chosen, hidden_states)
        return (out * top_k_weights[..., None]).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 16)
        self.layers = nn.ModuleList([Block(16, 8) for _ in range(2)])

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of every level, and the prompt that it was made from."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "recording"
    prompt = torch.randint(4000, 5000, (2, 48))
    model = Model()
    with torch.no_grad(), routeprof.record(model, path, level="tokens"):
        hidden = model(prompt)
    return path, prompt.numpy(), hidden.numpy()


def test_a_recording_holds_neither_prompts_nor_hidden_states(recorded):
    path, prompt, hidden = recorded
    numbers, words = set(), set()
    for file in path.rglob("*.parquet"):
        table = pq.read_table(file)
        for name in table.column_names:
            for value in table[name].to_pylist():
                values = value if isinstance(value, list) else [value]
                (words if isinstance(values[0], str) else numbers).update(values)
    assert words <= {"prefill", "unknown", "", "model@cpu", "@cpu", *map(str, range(2))}
    assert not numbers & set(prompt.ravel().tolist())
    assert not numbers & set(hidden.ravel().tolist())
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for dtype in (np.int16, np.int32, np.int64):
                assert prompt[0].astype(dtype).tobytes()[:32] not in data
            assert hidden.tobytes()[:32] not in data


def test_a_recording_says_what_it_cost(recorded):
    state = open_recording(recorded[0]).ranks[0].state
    assert 0 < state.cost_seconds < state.busy_seconds
    table = pq.read_table(next(recorded[0].rglob("part-*.parquet")))
    assert all(cost > 0 for cost in table["cost_seconds"].to_pylist())
    assert sum(table["cost_seconds"].to_pylist()) <= state.cost_seconds * (1 + 1e-9)
