"""From a config.json, a model's directory or a well-known name to the model's shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError
from routeprof.plan import families, hybrids
from routeprof.plan.fields import Fields
from routeprof.plan.known import known_config, known_name, known_names, nearest_names
from routeprof.plan.shape import Shape

READERS: dict[str, Callable[[Fields], Shape]] = {
    "bamba": hybrids.bamba,
    "deepseek_v2": families.deepseek_v2,
    "deepseek_v3": families.deepseek_v3,
    "gpt_oss": families.gpt_oss,
    "granitemoehybrid": hybrids.granite,
    "jamba": hybrids.jamba,
    # Kimi-K2's own name for DeepSeek-V3's architecture.
    "kimi_k2": families.deepseek_v3,
    "llama": families.llama,
    "llama4_text": families.llama4,
    "minimax": hybrids.minimax,
    # As MiniMax's own files call it.
    "minimax_m1": hybrids.minimax,
    "minimax_text_01": hybrids.minimax,
    "mixtral": families.mixtral,
    "nemotron_h": hybrids.nemotron_h,
    "olmoe": families.olmoe,
    "qwen2_moe": families.qwen2_moe,
    "qwen3_moe": families.qwen3_moe,
    "qwen3_next": hybrids.qwen3_next,
    "zamba2": hybrids.zamba2,
}
LARGEST_FILE = 16 * 1024**2
TEXT_PARTS = ("text_config", "llm_config", "language_config")
VISION = "only the language model is counted, not what sees or hears"
STORED = "the checkpoint is quantised ({:.20}): --dtype and --expert-dtype say what is planned"
PREDICTION = "layers for multi-token prediction are not counted"


def read_config(source: str) -> tuple[dict[str, Any], str]:
    """The values of a config.json, and what to call it in a message.

    Args:
        source: a file, a directory that holds config.json, or the name of a known model.

    Raises:
        UsageError: there is none, it can't be read, or is no JSON object.
    """
    path = Path(source)
    try:
        if path.is_dir():
            return _read(path / "config.json"), str(path / "config.json")
        if path.is_file():
            return _read(path), str(path)
    except OSError as error:
        raise UsageError(
            f"{source}: {error.strerror}: pass a config.json that can be read"
        ) from None
    name, config = known_name(source), known_config(source)
    if name is None or config is None:
        raise UsageError(_unknown(source))
    return config, name


def _unknown(source: str) -> str:
    """What to say where a source is none; all names only where none is alike."""
    if source.endswith(".json") or source.startswith((".", "/", "~")):
        return f"{source} is no file and no directory: pass a config.json or a model's directory"
    says = f"{source} is no file, no directory and no known model: "
    near = nearest_names(source)
    if near:
        return f"{says}pass {' or '.join(near)} if you meant that; routeprof plan x lists all names"
    return f"{says}pass a config.json, a model's directory, or one of {', '.join(known_names())}"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path.parent} holds no config.json: pass a model's directory")
    if path.stat().st_size > LARGEST_FILE:
        raise UsageError(f"{path} is too large for a config.json: pass the model's own")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON: pass the model's config.json") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no JSON object: pass the model's config.json")
    return values


def text_part(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The language model's own values, and whether they were inside of others."""
    for name in TEXT_PARTS:
        inside = config.get(name)
        if isinstance(inside, dict):
            outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            return outer | inside, True
    return dict(config), False


def family_of(config: Mapping[str, Any], source: str = "config.json") -> str:
    """The model type of the language model.

    Raises:
        UsageError: it is not told.
    """
    family = text_part(config)[0].get("model_type")
    if not isinstance(family, str):
        raise UsageError(f"{source} lacks model_type: pass the model's own config.json")
    return family


def stored_as(config: Mapping[str, Any]) -> str:
    """How the checkpoint is quantised (its ``quant_method``); empty where it does not say."""
    values = text_part(config)[0]
    stored = config.get("quantization_config") or values.get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    return method if isinstance(method, str) else ""


def shape_of(config: Mapping[str, Any], source: str = "config.json") -> Shape:
    """The shape of a model of a family in `READERS`.

    Raises:
        UsageError: the family is not known, or a field is missing or wrong.
    """
    values, inside = text_part(config)
    family = family_of(config, source)
    reader = READERS.get(family)
    if reader is None:
        raise UsageError(f"{source}: model_type {family!r:.60} is not known")
    shape = reader(Fields(values, source))
    notes = [VISION] if inside else []
    if values.get("num_nextn_predict_layers"):
        notes.append(PREDICTION)
    method = stored_as(config)
    if method:
        notes.append(STORED.format(method))
    return replace(shape, notes=tuple(notes))
