"""What vLLM's scheduler says of a step: phase, tokens, requests, and where each row belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Step:
    """One pass as the scheduler handed it out.

    Attributes:
        tokens: tokens to compute, of all requests.
        computed: for each request, tokens that need no computing any more.
        scheduled: for each request, tokens to compute in this pass.
    """

    tokens: int
    phase: str
    computed: dict[str, int]
    scheduled: dict[str, int]


@dataclass
class Requests:
    """Requests under way, followed from one scheduler output to the next.

    Attributes:
        cached_tokens: prompt tokens that the prefix cache had: nobody routed them.
        preempted: requests that had to start again.
    """

    cached_tokens: int = 0
    preempted: int = 0
    _prompts: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _seen: int = 0

    def read(self, output: Any) -> Step:
        """Follow one SchedulerOutput."""
        for finished in output.finished_req_ids:
            self._prompts.pop(finished, None)
            self._numbers.pop(finished, None)
        computed = self._new(output.scheduled_new_reqs)
        computed |= self._known(output.scheduled_cached_reqs)
        scheduled = dict(output.num_scheduled_tokens)
        drafts = {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        decoding = [
            computed.get(name, 0) >= self._prompts.get(name, 0) and count <= 1 + drafts.get(name, 0)
            for name, count in scheduled.items()
        ]
        phase = _phase(decoding, bool(drafts))
        return Step(output.total_num_scheduled_tokens, phase, computed, scheduled)

    def facts(self) -> dict[str, int]:
        """What happened to requests, for whoever reads the recording; names without cases left
        out."""
        facts = {"prefix_cached_tokens": self.cached_tokens, "preemptions": self.preempted}
        return {name: count for name, count in facts.items() if count}

    def _new(self, requests: Sequence[Any]) -> dict[str, int]:
        for request in requests:
            self.preempted += request.req_id in self._prompts
            known = getattr(request, "prefill_token_ids", None) or request.prompt_token_ids
            if known is None:
                known = () if request.prompt_embeds is None else request.prompt_embeds
            self._prompts[request.req_id] = len(known)
            self.cached_tokens += request.num_computed_tokens
            if request.req_id not in self._numbers:
                self._numbers[request.req_id] = self._seen
                self._seen += 1
        return {request.req_id: request.num_computed_tokens for request in requests}

    def _known(self, cached: Any) -> dict[str, int]:
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in cached.resumed_req_ids:
            self.preempted += 1
            self.cached_tokens += computed.get(name, 0)
        return computed

    def rows(self, step: Step, order: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Request number and position of each row, [tokens]; requests in the batch's order."""
        order = [name for name in order if name in step.scheduled]
        counts = np.array([step.scheduled[name] for name in order], dtype=np.int64)
        starts = np.array([step.computed.get(name, 0) for name in order], dtype=np.int64)
        numbers = np.array([self._numbers.get(name, -1) for name in order], dtype=np.int64)
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return np.repeat(numbers, counts), first + np.arange(counts.sum())


def _phase(decoding: Sequence[bool], drafts: bool) -> str:
    if not any(decoding):
        return "prefill"
    if not all(decoding):
        return "mixed"
    return "verify" if drafts else "decode"


def own_rows(
    tokens: int,
    across: Sequence[int],
    shards: Sequence[int] | None,
    dp_rank: int,
    tp_rank: int,
    tp_size: int,
    sequence_parallel: bool,
) -> tuple[int, int, int]:
    """Which rows of a routed batch are this rank's to count.

    Under data parallelism a router may see this rank's rows, those of all ranks one after the
    other, or one tensor-parallel rank's shard of them. vLLM's own capturer tells these apart by
    the number of rows, and so does this.

    Args:
        tokens: rows that the router sees.
        across: rows of each data-parallel rank, padding included.
        shards: sizes of the sequence-parallel shards that were gathered, if they were.
        sequence_parallel: whether the layer's rows are shared out among tensor-parallel ranks.

    Returns:
        start, stop, offset: count ``rows[start:stop]``, of which those from ``offset`` on are
        real, as many as the step has.

    Raises:
        ValueError: none of these layouts has so many rows.
    """
    own = across[dp_rank]
    shard = -(-own // tp_size)
    if shards is not None and sequence_parallel and tokens == sum(shards):
        per_rank = len(shards) // len(across)
        place = dp_rank * per_rank + tp_rank
        start = sum(shards[:place])
        before = sum(shards[dp_rank * per_rank : place])
        return start, start + shards[place], -before
    if sequence_parallel and tokens == shard:  # also where it is all of them, a single row
        return 0, tokens, -tp_rank * shard
    if tokens == sum(across):
        start = sum(across[:dp_rank])
        return start, start + own, 0
    if tokens == own:
        return 0, tokens, 0
    raise ValueError(f"{tokens} routed rows fit no data-parallel layout of {list(across)}")
