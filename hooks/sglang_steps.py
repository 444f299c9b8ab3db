"""What an SGLang ForwardBatch says of a step: phase, rows, and where each row belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Request number and position of each row, both [rows]."""

MAX_REQUESTS = 65_536
"""So many requests are told apart at a time; nobody says here when one is over."""

_PHASES = {
    "EXTEND": "prefill",
    "DECODE": "decode",
    "MIXED": "mixed",
    "TARGET_VERIFY": "verify",
    "DRAFT_EXTEND_V2": "draft",
    "DLLM_EXTEND": "unknown",
}
_HEALTH_CHECK = "HEALTH_CHECK"
"""How the ids of requests begin that the server makes to see whether it is well."""


@dataclass(frozen=True)
class Step:
    """One pass that serves requests.

    Attributes:
        phase: None for a pass that runs only some of the layers: it cannot be a step.
    """

    rows: int
    phase: str | None
    requests: int


def read_step(batch: Any) -> Step | None:
    """The step that a ForwardBatch is, before it is padded.

    Returns:
        None for a pass that serves nobody: an idle rank's, a batch that SGLang made up, a health
        check, or rows that are computed a second time.
    """
    names = batch.rids or ()
    mode = batch.forward_mode.name
    if mode == "IDLE" or getattr(batch, "encoder_swa_replay", False):
        return None
    if all(str(name).startswith(_HEALTH_CHECK) for name in names):
        return None
    rows = getattr(batch, "global_num_token_non_padded_cpu", None)
    if rows is None:
        rows = 0 if batch.input_ids is None else len(batch.input_ids)
    return Step(int(rows), _PHASES.get(mode), len(names)) if rows else None


@dataclass
class Requests:
    """Numbers for request ids, in the order in which they are seen first."""

    _numbers: dict[str, int] = field(default_factory=dict)
    _seen: int = 0

    def follow(self, batch: Any) -> int:
        """Meet the requests of a prefill, also while nothing is counted.

        Returns:
            How many tokens of new requests the prefix cache had: nobody routes them. Later
            prefills of the same request follow on what it computed itself.
        """
        prefixes = batch.extend_prefix_lens_cpu
        if batch.forward_mode.name not in ("EXTEND", "MIXED") or prefixes is None:
            return 0
        cached = 0
        for name, prefix in zip(batch.rids, prefixes, strict=True):
            cached += 0 if name in self._numbers else int(prefix)
            self._number(name)
        return cached

    def rows(self, batch: Any, rows: int) -> Rows | None:
        """What each row belongs to; None where the host does not know.

        Nothing here looks at the device: positions follow from lengths that the scheduler has.
        """
        spans = _spans(batch)
        if spans is None:
            return None
        starts, counts = spans
        if len(counts) != len(batch.rids) or int(counts.sum()) != rows:
            return None
        numbers = np.array([self._number(name) for name in batch.rids], dtype=np.int64)
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return np.repeat(numbers, counts), first + np.arange(rows)

    def _number(self, name: str) -> int:
        number = self._numbers.pop(name, None)
        if number is None:
            number = self._seen
            self._seen += 1
        # Newest last, so that the one that has been quiet for longest is the first to go.
        self._numbers[name] = number
        if len(self._numbers) > MAX_REQUESTS:
            del self._numbers[next(iter(self._numbers))]
        return number


def _spans(batch: Any) -> Rows | None:
    """First position and number of rows of each request, both [requests]."""
    mode = batch.forward_mode.name
    if mode == "DECODE":
        lengths = batch.seq_lens_cpu
        if lengths is None or lengths.device.type != "cpu":
            return None
        ends = np.asarray(lengths, dtype=np.int64)
        return ends - 1, np.ones_like(ends)
    if mode not in ("EXTEND", "MIXED") or batch.extend_seq_lens_cpu is None:
        return None
    return _array(batch.extend_prefix_lens_cpu), _array(batch.extend_seq_lens_cpu)


def _array(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
