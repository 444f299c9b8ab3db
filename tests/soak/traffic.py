"""Forward passes whose routing is known beforehand, by an account that is not routeprof's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from routeprof.profile import Profile
from routeprof.sample_data import PROMPT_KINDS, encode, load_prompts

ROWS, LENGTH, DECODED = 6, 40, 3
Counts = NDArray[np.int64]
"""[layers, experts]"""


@dataclass(frozen=True)
class Scene:
    """A padded batch to prefill, and the tokens that are then decoded one by one."""

    batch: dict[str, Tensor]
    decoded: Tensor

    @classmethod
    def of(cls, kind: str) -> Scene:
        batch = encode(load_prompts(kind)[:ROWS], length=LENGTH)
        batch["attention_mask"][0, : LENGTH // 2] = 0
        return cls(batch, encode(load_prompts("mixed")[:ROWS], length=DECODED)["input_ids"])

    def passes(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Run them: what each pass's phase was, and which of its rows were real."""
        cache, mask = DynamicCache(config=model.config), self.batch["attention_mask"]
        model(self.batch["input_ids"], attention_mask=mask, cache=cache)
        yield "prefill", mask.bool().flatten()
        for token in self.decoded.split(1, dim=1):
            mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=mask.dtype)], dim=1)
            model(token, attention_mask=mask, cache=cache)
            yield "decode", torch.ones(ROWS, dtype=torch.bool)

    def run(self, model: Any) -> float:
        """Seconds that all its passes take."""
        start = perf_counter()
        for _ in self.passes(model):
            pass
        return perf_counter() - start


SCENES = {kind: Scene.of(kind) for kind in PROMPT_KINDS}


@contextmanager
def _routers(model: Any) -> Iterator[dict[int, Tensor]]:
    """Experts each router must choose, worked out anew from what goes into it."""
    chosen: dict[int, Tensor] = {}
    top_k = model.config.num_experts_per_tok

    def watch(layer: int, router: Any) -> Any:
        def before(module: Any, args: tuple[Tensor, ...]) -> None:
            logits = args[0].flatten(0, -2).float() @ router.weight.float().T
            chosen[layer] = logits.topk(top_k).indices

        return router.register_forward_pre_hook(before)

    handles = [watch(n, layer.mlp.gate) for n, layer in enumerate(model.model.layers)]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def truth(model: Any, scene: Scene) -> dict[str, Counts]:
    """What one run of a scene assigns, for each phase; the model must not be recorded."""
    experts, found = model.config.num_experts, {}
    with _routers(model) as chosen:
        for phase, real in scene.passes(model):
            counts = np.stack(
                [np.bincount(ids[real].flatten(), minlength=experts) for ids in chosen.values()]
            )
            found[phase] = found.get(phase, 0) + counts
    return found


@dataclass
class Ledger:
    """What a recording must hold: the truth of each scene times the runs that were counted."""

    truths: dict[str, dict[str, Counts]]
    due: dict[tuple[str, str | None], Counts] = field(default_factory=dict)

    def note(self, kind: str, tag: str | None) -> None:
        """A scene was run under a tag and counted."""
        for phase, counts in self.truths[kind].items():
            self.due[phase, tag] = self.due.get((phase, tag), 0) + counts

    def wrong(self, profile: Profile) -> list[str]:
        """One line for each phase and tag whose counts differ."""
        totals = profile.totals
        found = dict(zip(totals.keys, totals.lists["counts"], strict=True))
        lines = [f"parts unread: {len(totals.unread)}"] if totals.unread else []
        for phase, tag in sorted(found.keys() | self.due.keys(), key=str):
            own, due = found.get((phase, tag)), self.due.get((phase, tag))
            if own is None or due is None or not np.array_equal(own, due):
                sums = [0 if counts is None else int(counts.sum()) for counts in (own, due)]
                lines.append(f"{phase}, tag {tag}: {sums[0]} assignments instead of {sums[1]}")
        return lines
