"""Config facts of well-known models, which ship with the package."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

# They tell how a model was tuned, which leaves its sizes as they are.
TUNED = frozenset({"base", "chat", "hf", "instruct", "it", "thinking"})


def known_names() -> tuple[str, ...]:
    """Short names of the models that are known."""
    folder = files("routeprof.plan") / "known"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def known_name(name: str) -> str | None:
    """Short name of the model that is meant, or None.

    It may be written with its owner, in capitals, with other separators, by its full name, or as
    one that was tuned from it.

    >>> known_name("mistralai/Mixtral-8x7B-Instruct-v0.1"), known_name("DeepSeekV3")
    ('mixtral-8x7b', 'deepseek-v3')
    """
    return _spellings().get(_spelled(name))


def nearest_names(name: str, most: int = 3) -> tuple[str, ...]:
    """Short names of the models that are called most alike, the nearest first; may be none."""
    spellings = _spellings()
    near = get_close_matches(_spelled(name), spellings, n=2 * most)
    return tuple(dict.fromkeys(spellings[spelled] for spelled in near))[:most]


def known_facts(name: str) -> dict[str, Any] | None:
    """A model's ``config``, the ``source`` that it was read in, and its full ``name``."""
    short = known_name(name)
    return None if short is None else _facts(short)


def known_config(name: str) -> dict[str, Any] | None:
    """What of its config.json says how large the model is, or None."""
    facts = known_facts(name)
    return None if facts is None else dict(facts["config"])


def _facts(short: str) -> dict[str, Any]:
    text = (files("routeprof.plan") / "known" / f"{short}.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def _spelled(name: str) -> str:
    words = re.split(r"[-_\s]+", name.lower().rstrip("/").rsplit("/", 1)[-1])
    return "".join(word for word in words if word not in TUNED)


@cache
def _spellings() -> dict[str, str]:
    """Short names by the spelling of short and full names."""
    full = {_spelled(_facts(short)["name"]): short for short in known_names()}
    return full | {_spelled(short): short for short in known_names()}
