"""A small expert-parallel MoE layer on real processes: real all-to-all, real experts.

It shares nothing with routeprof but the layer's weights and a placement: every process routes the
tokens that it is given, sends each once to every process that holds a part of an expert it chose,
computes what it received, and sends the results back. It counts what it computed and sent.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True)
class Weights:
    """A gated MoE layer: router [E, h], gate and up [E, 2m, h], down [E, h, m]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int


@dataclass(frozen=True)
class Work:
    """What the processes are given.

    Attributes:
        steps: for each step and process the hidden states of its own tokens, ``[tokens, h]``.
        rows: their rows in the batch, ``[tokens]``.
        slots: the expert in every slot, dealt to expert-parallel ranks evenly.
        parts: processes that share every expert.
    """

    weights: Weights
    steps: list[list[Tensor]]
    rows: list[list[Tensor]]
    slots: np.ndarray
    parts: int


@dataclass(frozen=True)
class Done:
    """What one process saw.

    Attributes:
        assignments: that it computed, by step.
        received: bytes of hidden states that it held to compute from, by step, its own included.
        sent: bytes of hidden states that it sent to each process, ``[processes]``.
        returned: bytes of results that it sent back to each.
        seconds: processor time of its experts.
        outputs: of its own tokens, by step.
    """

    assignments: list[int]
    received: list[int]
    sent: list[int]
    returned: list[int]
    seconds: float
    outputs: list[Tensor]


def run(works: list[Work], processes: int) -> list[list[Done]]:
    """Do one work after another on so many processes; what each of them saw of each."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (processes, works, folder), nprocs=processes)
        seen = [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(processes)
        ]
    return [[Done(**one[number]) for one in seen] for number in range(len(works))]


def _process(rank: int, processes: int, works: list[Work], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=processes)
    with torch.inference_mode():
        seen = [_done(rank, processes, work) for work in works]
    dist.destroy_process_group()
    torch.save(seen, Path(folder, f"{rank}.pt"))


def _done(rank: int, processes: int, work: Work) -> dict[str, Any]:
    """The fields of `Done`."""
    seen: dict[str, Any] = {
        "assignments": [],
        "received": [],
        "sent": [0] * processes,
        "returned": [0] * processes,
        "seconds": 0.0,
        "outputs": [],
    }
    for tokens, rows in zip(work.steps, work.rows, strict=True):
        _step(rank, processes, work, tokens[rank], rows[rank], seen)
    return seen


def _step(
    rank: int, processes: int, work: Work, hidden: Tensor, row: Tensor, seen: dict[str, Any]
) -> None:
    weights, k = work.weights, work.weights.top_k
    scores = torch.softmax(hidden @ weights.router.T, dim=-1)
    score, chosen = torch.topk(scores, k)
    score = score / score.sum(dim=-1, keepdim=True)
    slot = _replica(processes, chosen, row, work.slots)

    per_rank = len(work.slots) // (processes // work.parts)
    outboxes, rows = [], []
    for other in range(processes):
        wanted = (slot // per_rank == other // work.parts).any(dim=1)
        rows.append(wanted.nonzero().flatten())
        outboxes.append(hidden[wanted])
    inbox = _exchange(outboxes)
    seen["received"].append(sum(box.nbytes for box in inbox))
    inbox_slots = _exchange([slot[own] for own in rows])
    inbox_scores = _exchange([score[own] for own in rows])
    for other, box in enumerate(outboxes):
        seen["sent"][other] += box.numel() * box.element_size() if other != rank else 0

    start = process_time()
    results, computed = [], 0
    for box, slots, shares in zip(inbox, inbox_slots, inbox_scores, strict=True):
        result = torch.zeros_like(box)
        for own in range(rank // work.parts * per_rank, (rank // work.parts + 1) * per_rank):
            token, choice = (slots == own).nonzero(as_tuple=True)
            computed += len(token)
            if len(token):
                expert = _expert(weights, int(work.slots[own]), rank % work.parts, work.parts)
                result[token] += _gated(box[token], *expert) * shares[token, choice, None]
        results.append(result)
    seen["seconds"] += process_time() - start
    seen["assignments"].append(computed)

    back = _exchange(results)
    for other, box in enumerate(results):
        seen["returned"][other] += box.numel() * box.element_size() if other != rank else 0
    output = torch.zeros_like(hidden)
    for own, part in zip(rows, back, strict=True):
        output[own] += part
    seen["outputs"].append(output)


def _replica(processes: int, chosen: Tensor, row: Tensor, slots: np.ndarray) -> Tensor:
    """Replicas take turns over all tokens of the step, in the order of the batch's rows."""
    everyone: list[Any] = [None] * processes
    dist.all_gather_object(everyone, list(zip(row.tolist(), chosen.tolist(), strict=True)))
    turn: dict[int, int] = {}
    picked: dict[int, list[int]] = {}
    for number, experts in sorted(pair for pairs in everyone for pair in pairs):
        picked[number] = []
        for expert in experts:
            replicas = np.flatnonzero(slots == expert)
            picked[number].append(int(replicas[turn.get(expert, 0) % len(replicas)]))
            turn[expert] = turn.get(expert, 0) + 1
    mine = [picked[number] for number in row.tolist()]
    return torch.tensor(mine, dtype=torch.int64).reshape(-1, chosen.shape[1])


def _exchange(outboxes: list[Tensor]) -> list[Tensor]:
    """All-to-all of tensors with any number of rows."""
    counts = torch.tensor([len(box) for box in outboxes])
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    shape = (int(theirs.sum()), *outboxes[0].shape[1:])
    received = torch.empty(shape, dtype=outboxes[0].dtype)
    dist.all_to_all_single(
        received, torch.cat(outboxes), theirs.tolist(), [len(box) for box in outboxes]
    )
    return list(received.split(theirs.tolist()))


def _expert(weights: Weights, expert: int, part: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = weights.gate_up[expert].chunk(2)
    return (
        gate.chunk(parts)[part],
        up.chunk(parts)[part],
        weights.down[expert].chunk(parts, dim=1)[part],
    )


def _gated(hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
