"""Requests whose routes are known, and their responses as engines write them.

Run in an engine's environment, it writes a file of data/responses with the engine's own code:

    python -m tests.formats.served vllm FILE      (vLLM 0.32.0: numpy2base64, CompletionResponse)
    python -m tests.formats.served sglang FILE    (SGLang 0.5.23: the detokenizer's encoder)
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data" / "responses"
LAYERS, EXPERTS, TOP_K = 4, 12, 3
DENSE = 0
MODEL = "tests/moe"


@dataclass(frozen=True)
class Served:
    """A request: ids uint8 [prompt + made - 1, layers, top_k], zeros in the dense layer.

    Attributes:
        start: position of the first row that was asked for.
        cached: tokens of the prompt that were not computed.
    """

    prompt: int
    made: int
    ids: np.ndarray
    start: int = 0
    cached: int = 0

    @property
    def rows(self) -> np.ndarray:
        return self.ids[self.start :]

    def counted(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Counts [layers, experts] of the computed rows at positions first to last, one by one."""
        counts = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
        for position, row in enumerate(self.ids):
            if position < max(self.start, self.cached, first) or position >= (last or 10**9):
                continue
            for layer in range(LAYERS):
                for expert in row[layer]:
                    counts[layer, expert] += layer != DENSE
        return counts


def served(prompt: int, made: int, seed: int, start: int = 0, cached: int = 0) -> Served:
    random = np.random.default_rng(seed)
    order = np.argsort(random.random((prompt + made - 1, LAYERS, EXPERTS)), axis=2)
    ids = order[:, :, :TOP_K].astype(np.uint8)
    ids[:, DENSE] = 0
    return Served(prompt, made, ids, start, cached)


REQUESTS = [served(9, 5, 1), served(4, 1, 2), served(12, 6, 3, start=5), served(7, 4, 4, cached=4)]


def vllm_responses() -> list[str]:
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionResponse,
        CompletionResponseChoice,
    )
    from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
    from vllm.utils.serial_utils import numpy2base64

    found = []
    for number, one in enumerate(REQUESTS):
        choice = CompletionResponseChoice(
            index=0, text="", finish_reason="length", routed_experts=numpy2base64(one.rows)
        )
        details = PromptTokenUsageInfo(cached_tokens=one.cached) if one.cached else None
        usage = UsageInfo(
            prompt_tokens=one.prompt,
            completion_tokens=one.made,
            total_tokens=one.prompt + one.made,
            prompt_tokens_details=details,
        )
        response = CompletionResponse(
            id=f"cmpl-{number}", created=1, model=MODEL, choices=[choice], usage=usage
        )
        found.append(response.model_dump_json())
    return found


def sglang_responses() -> list[str]:
    import torch
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    tensors = [torch.from_numpy(one.rows.astype(np.int32)) for one in REQUESTS]
    texts = DetokenizerManager._b64_encode_per_request(tensors)
    return [json.dumps(sglang_response(*pair)) for pair in zip(REQUESTS, texts, strict=True)]


def sglang_response(one: Served, text: str) -> dict[str, Any]:
    """What ``/generate`` answers, with the fields that are of interest here."""
    return {
        "text": "",
        "output_ids": [1] * one.made,
        "meta_info": {
            "id": "1",
            "finish_reason": {"type": "length", "length": one.made},
            "prompt_tokens": one.prompt,
            "weight_version": "default",
            "completion_tokens": one.made,
            "cached_tokens": one.cached,
            "routed_experts": text,
        },
    }


if __name__ == "__main__":
    lines = {"vllm": vllm_responses, "sglang": sglang_responses}[sys.argv[1]]()
    Path(sys.argv[2]).write_text("\n".join(lines) + "\n")
