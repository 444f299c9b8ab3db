"""Config facts of well-known models, which ship with the package."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def known_names() -> tuple[str, ...]:
    """Short names of the models that are known."""
    folder = files("routeprof.plan") / "known"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def known_facts(name: str) -> dict[str, Any] | None:
    """A model's ``config``, the ``source`` that it was read in, and its full ``name``."""
    short = name.lower().rsplit("/", 1)[-1].replace("_", "-")
    if short not in known_names():
        return None
    text = (files("routeprof.plan") / "known" / f"{short}.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def known_config(name: str) -> dict[str, Any] | None:
    """What of its config.json says how large the model is, or None."""
    facts = known_facts(name)
    return None if facts is None else dict(facts["config"])
