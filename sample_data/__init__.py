"""A tiny mixture-of-experts model, the prompts that skew its routing, and their byte encoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HERE = Path(__file__).resolve().parent
MODEL_DIR: Path = _HERE / "model"
PROMPTS_DIR: Path = _HERE / "prompts"
RECORDINGS_DIR: Path = _HERE / "recordings"
PROMPT_KINDS: tuple[str, ...] = ("prose", "code", "json", "chinese")

VOCABULARY = 260
"""256 byte values, then padding, begin and end of text, and one spare id."""
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258


def load_prompts(kind: str) -> list[str]:
    """The prompts of one kind, or ``"mixed"``: all of them, one kind after the other in turn."""
    if kind == "mixed":
        rounds = zip(*map(load_prompts, PROMPT_KINDS), strict=True)
        return [prompt for prompts in rounds for prompt in prompts]
    if kind not in PROMPT_KINDS:
        raise ValueError(f"no prompts of kind {kind!r}; there are {', '.join(PROMPT_KINDS)}, mixed")
    text = (PROMPTS_DIR / f"{kind}.txt").read_text(encoding="utf-8")
    return [prompt.strip("\n") for prompt in text.split("\n%%\n")]


def encode(texts: Sequence[str], *, length: int | None = None) -> dict[str, torch.Tensor]:
    """Turn texts into one left-padded batch of byte ids with its attention mask.

    ``length`` fixes the width: longer texts keep their last bytes. By default the longest
    text sets it. No begin or end marks are added, as the model was trained without them.
    """
    import torch

    rows = [list(text.encode("utf-8")) for text in texts]
    width = max(map(len, rows), default=0) if length is None else length
    rows = [row[max(len(row) - width, 0) :] for row in rows]
    ids = [[PAD_ID] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, dtype=torch.long).reshape(len(rows), width),
        "attention_mask": torch.tensor(mask, dtype=torch.long).reshape(len(rows), width),
    }


def decode(ids: Sequence[int] | torch.Tensor) -> str:
    """The text of one row of ids; marks are dropped, cut characters shown as U+FFFD."""
    return bytes(i for i in map(int, ids) if i < PAD_ID).decode("utf-8", errors="replace")


def load_model(directory: Path = MODEL_DIR) -> Any:
    """The trained sample as a transformers model, in float32 and evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32
    )
    logging.enable_progress_bar()
    return model.eval()
