"""Checkpoints for the audit, written by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


def gaussian(
    experts: int = 6,
    layers: int = 2,
    shape: tuple[int, int] = (150, 200),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    sigma: float = 0.02,
) -> Weights:
    """Weights of experts by their names in Qwen's models, normally distributed."""
    torch.manual_seed(seed)
    outputs, inputs = shape
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": (
            torch.randn((inputs, outputs) if name == "down_proj" else shape) * sigma
        ).to(dtype)
        for layer in range(layers)
        for expert in range(experts)
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def save(weights: Weights, directory: Path, config: dict | None = None) -> Path:
    """A checkpoint in one file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_sharded(weights: Weights, directory: Path, shards: int = 3) -> Path:
    """The same in several files with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = dict(sorted(weights.items())[number::shards])
        save_file(own, directory / file)
        places |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
